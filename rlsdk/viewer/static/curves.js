// The Curves page: small charts grouped by question, several runs in each, repetitions as bands, other metrics below.

import { get } from "./api.js"
import { color } from "./colors.js"
import { Chart, band, smoothed } from "./chart.js"
import { append, debounce, empty, h, number, redraw, replace, visible, withCode } from "./dom.js"
import { described } from "./findings.js"

const percent = (value) => `${number(value * 100, 3)} %`

const SECTIONS = [
  ["Does it learn?", [
    { title: "Reward", names: ["reward/mean"], hint: "Should rise. Flat at the bottom: tasks are too hard; flat at the top: too easy; flat in between: the reward does not tell answers apart." },
    { title: "Held-out accuracy", names: ["eval/greedy", "eval/sampled"], labels: ["greedy", "sampled"], format: percent, hint: "The measure that counts. If it falls while the reward rises, the policy games the reward." },
    { title: "Training accuracy", names: ["accuracy/mean"], format: percent, hint: "Share of right answers in the trained rollouts." },
    { title: "Parts of the reward", match: /^reward\/(?!mean$|std$|min$|max$)/, strip: "reward/", hint: "If only one part rises, such as the format, the policy learns only that part." },
  ]],
  ["Do the rollouts teach?", [
    { title: "Groups that teach", names: ["groups/trained"], format: percent, hint: "A group whose rollouts all have the same reward is dead: it has no better and no worse. Healthy: above 30 %." },
    { title: "Spread of rewards", names: ["reward/std"], hint: "Near 0, there is nothing to learn." },
    { title: "Length of answers", names: ["rollouts/length"], hint: "Tokens. Growth without more reward is length explosion." },
    { title: "Repetition", names: ["rollouts/repetition"], format: percent, hint: "Share of phrases that occurred earlier in the answer. Healthy: below 10 %." },
    { title: "Cut off", names: ["rollouts/truncated"], format: percent, hint: "Share of answers that hit the token limit. Healthy: a few percent." },
    { title: "Without a score", names: ["rollouts/invalid"], hint: "Rollouts whose reward failed; they are excluded from training. Healthy: none." },
    { title: "Entropy", names: ["actor/entropy", "rollouts/entropy"], labels: ["of the policy", "of the sampled tokens"], hint: "How uncertain the policy is. A slow fall is learning; a fall to nearly 0 is collapse." },
  ]],
  ["Is the update sound?", [
    { title: "KL to the policy before", names: ["actor/kl_to_old", "actor/kl_to_behaviour"], labels: ["before the step", "sampler"], hint: "How far a step moves the policy. Healthy: below 0.1, and steady." },
    { title: "KL to the reference", names: ["actor/ref_kl"], hint: "How far the policy has moved from its initial model." },
    { title: "Clipped tokens", names: ["actor/clip_share"], format: percent, hint: "Healthy: below 20 %." },
    { title: "Critic", names: ["critic/explained_variance"], format: percent, hint: "Share of the returns' variance that its values explain. It should rise towards 100 %; below 0, the critic does harm." },
    { title: "Gradient norm", names: ["actor/grad_norm"], hint: "Spikes or a steady rise precede a collapse." },
    { title: "Engine and learner", names: ["canary/gap", "actor/gap"], labels: ["after a sync", "in a batch"], hint: "Maximum difference of their logprobs for the same tokens. A jump means that their weights differ." },
  ]],
  ["By source", [
    { title: "Accuracy by source", match: /^source\/.+\/accuracy\/mean$/, strip: /^source\/|\/accuracy\/mean$/g, format: percent, hint: "A source that lags may need more weight or easier tasks." },
    { title: "Tokens by source", match: /^source\/.+\/rollouts\/tokens$/, strip: /^source\/|\/rollouts\/tokens$/g, key: "sources", hint: "A line that ends or falls to 0 is a starving source." },
  ]],
  ["How fresh, how fast?", [
    { title: "Staleness", names: ["staleness/max", "staleness/mean"], labels: ["oldest", "mean"], hint: "Steps between the weights that sampled a token and those that train on it. 0: on-policy." },
    { title: "Tokens by age", match: /^staleness\/share_/, strip: "staleness/share_", format: percent, hint: "Share of trained tokens by age, in steps." },
    { title: "Tokens per second", names: ["time/tokens_per_second"], hint: "While engines sample." },
    { title: "Idle engines", names: ["time/engines_idle"], format: percent, hint: "Share of a step in which engines are idle." },
    { title: "Engines", names: ["engines/alive"], hint: "Engines that accept requests. A step down means that one died." },
    { title: "Seconds per step", names: ["time/step"], hint: "The Times page shows where they go." },
  ]],
]

export function mount(element, first) {
  let context = first
  let names = []
  let curves = {}
  let charts = []
  let order = 0
  let smoothing = Number(context.parameters.smooth ?? 0)
  let seeds = context.parameters.seeds !== "0"
  let more = context.parameters.metrics ?? ""

  const stands = h("section", { class: "stands", hidden: true })
  const ledger = h("section", { class: "ledger" })
  const grid = h("div", {}, h("p", { class: "loading" }, "Loading …"))
  const others = h("div", { class: "charts" })
  const strength = h("output", {}, smoothing ? String(smoothing) : "none")
  const search = h("input", {
    type: "search", id: "metric-search", placeholder: "Any metric: entropy, workflow/, time/ …", value: more, "aria-label": "Find metrics",
    oninput: debounce(250, (event) => { more = event.target.value.trim(); context.go({ metrics: more }, { quietly: true }); refresh() }),
  })
  const slider = h("input", {
    type: "range", min: 0, max: 0.98, step: 0.02, value: smoothing, "aria-label": "Smoothing",
    oninput: () => {
      smoothing = Number(slider.value)
      strength.textContent = smoothing || "none"
      context.go({ smooth: smoothing || "" }, { quietly: true })
      draw()
    },
  })
  const bar = h("div", { class: "bar" }, h("label", { class: "slider" }, "Smoothing", slider, strength),
    h("label", { class: "check" }, h("input", {
      type: "checkbox", checked: seeds, onchange: (event) => { seeds = event.target.checked; context.go({ seeds: seeds ? "" : "0" }, { quietly: true }); draw() },
    }), "Seeds of one experiment as a band"))
  append(element, [stands, bar, grid, ledger, h("section", {}, h("h2", {}, "All metrics"), search, others)])

  const experiments = () => new Set(context.chosen.map((run) => run.experiment)).size

  function series(chart, wanted) {
    const single = context.chosen.length === 1
    const short = shortened(context.chosen.map((run) => visible(run.name)))
    const groups = new Map()
    for (const run of context.chosen) {
      const key = seeds ? run.experiment : run.id
      groups.set(key, [...(groups.get(key) ?? []), run])
    }
    return wanted.flatMap((name, n) => [...groups.values()].flatMap((runs) => {
      const found = runs.map((run) => curves[run.id]?.[name]).filter((curve) => curve?.[0].length)
      if (!found.length) return []
      const label = [wanted.length > 1 ? label_of(chart, name, n) : "", single ? "" : short(runs[0].name) + (runs.length > 1 ? ` ×${runs.length}` : "")]
      const line = {
        label: label.filter(Boolean).join(" · "),
        color: single ? color(n) : context.color(runs[0]),
        dash: !single && n ? [5, 4] : undefined,
      }
      const raw = found.length > 1 ? band(found) : { x: found[0][0], y: found[0][1] }
      if (!smoothing) return [{ ...line, ...raw }]
      const smooth = { ...line, x: raw.x, y: smoothed(raw.y, smoothing) }
      if (raw.low) return [{ ...smooth, low: smoothed(raw.low, smoothing), high: smoothed(raw.high, smoothing) }]
      return [{ ...line, ...raw, label: `${line.label} raw`, color: `${line.color}44`, width: 1, quiet: true }, smooth]
    }))
  }

  function draw() {
    for (const { chart, wanted, plot } of charts) plot.set(series(chart, wanted))
    const found = described(standing)
    for (const { wanted, chart, plot } of charts) plot.warn(found.find((each) => shows(chart, wanted, each))?.title)
    stand(found)
  }

  const shows = (chart, wanted, finding) => wanted.includes(finding.chart) || (chart.key && chart.key === finding.chart)

  let standing = []
  function stand(found) {
    stands.hidden = !found.length
    const kinds = [...new Set(found.map((each) => each.title))]
    redraw(stands, h("h2", {}, "What stands out"), h("ul", {}, context.chosen.length > 1
      ? kinds.map((title) => h("li", {}, h("b", {}, visible(title)), h("p", { class: "leads" }, found.filter((each) => each.title === title).map(inRun))))
      : found.map(alone)))
  }

  const since = (finding) => h("small", {}, finding.lasts ? ` since step ${finding.step}` : ` at step ${finding.step}, no longer`)

  function alone(finding) {
    return h("li", { class: finding.level === "info" ? "calm" : "" }, h("b", {}, visible(finding.title)), since(finding), h("p", {}, withCode(finding.text)),
      h("p", { class: "leads" }, leads(finding).map(([words, open]) => h("button", { class: "link", "data-key": `${finding.name} ${words}`, onclick: open }, visible(words)))))
  }

  function inRun(finding) {
    const open = () => context.go({ runs: finding.run.id })
    return h("span", {}, h("button", { class: "link", "data-key": `${finding.name} ${finding.run.id}`, onclick: open }, visible(finding.run.name)), since(finding))
  }

  // Links from a finding: answers, the curve, the setting that is the likely cause.
  function leads({ rollouts, page, setting, ...finding }) {
    const drawn = charts.find(({ chart, wanted }) => shows(chart, wanted, finding))
    return [
      rollouts && context.run.stored ? [rollouts[0], () => context.open("rollouts", rollouts[1])] : null,
      page ? [page[0], () => context.open(page[1], {})] : null,
      drawn ? ["Show the curve", () => enlarge(drawn.chart, drawn.wanted)] : null,
      setting ? [`See ${setting}`, () => context.open("settings", { key: setting })] : null,
    ].filter(Boolean)
  }

  function layout() {
    for (const { plot } of charts) plot.destroy()
    charts = []
    const known = (chart) => chart.match ? names.filter((name) => chart.match.test(name)).slice(0, 8) : chart.names.filter((name) => names.includes(name))
    const make = (chart, wanted) => {
      const plot = new Chart({ title: chart.title, hint: chart.hint, format: chart.format, open: () => enlarge(chart, wanted) })
      charts.push({ chart, wanted, plot })
      return plot.element
    }
    if (!names.length) replace(grid, empty("No step is finished yet", "Curves appear with the first evaluation or step."))
    else replace(grid, SECTIONS.map(([title, list]) => {
      const found = list.map((chart) => [chart, known(chart)]).filter(([, wanted]) => wanted.length)
      return found.length ? h("section", {}, h("h2", {}, title), h("div", { class: "charts" }, found.map((each) => make(...each)))) : null
    }))
    const wanted = more ? names.filter((name) => more.split(/[\s,]+/).some((word) => name.includes(word))).slice(0, 24) : []
    replace(others, more
      ? wanted.length ? wanted.map((name) => make({ title: name }, [name])) : h("p", { class: "hint" }, `No metric name contains ${more}.`)
      : names.map((name) => h("button", { class: "tag", onclick: () => { search.value = more = name; context.go({ metrics: name }, { quietly: true }); refresh() } }, visible(name))))
  }

  function enlarge(chart, wanted) {
    const plot = new Chart({ title: chart.title, hint: chart.hint, format: chart.format, height: Math.min(520, innerHeight - 220) })
    const large = h("dialog", { class: "large", onclose: () => { plot.destroy(); large.remove() }, onclick: (event) => { if (event.target === large) large.close() } },
      plot.element, h("button", { class: "button", onclick: () => large.close() }, "Close"))
    document.body.append(large)
    large.showModal()
    plot.set(series(chart, wanted))
  }

  let drawn = ""
  async function refresh() {
    const mine = ++order
    const runs = context.chosen.map((run) => run.id).join(",")
    const found = await get("names", { runs })
    const shown = SECTIONS.flatMap(([, list]) => list.flatMap((chart) => chart.match ? found.names.filter((name) => chart.match.test(name)).slice(0, 8) : chart.names))
    const extra = more ? found.names.filter((name) => more.split(/[\s,]+/).some((word) => name.includes(word))).slice(0, 24) : []
    const [answer, told, counts] = await Promise.all([
      get("curves", { runs, names: [...new Set([...shown, ...extra])].join(",") }), get("findings", { runs }),
      context.chosen.length === 1 ? get(`ledger/${context.run.id}`) : null,
    ])
    if (mine !== order) return
    names = found.names
    curves = answer
    standing = context.chosen.flatMap((run) => (told[run.id] ?? []).map((each) => ({ ...each, run })))
    const structure = JSON.stringify([names, more, runs])
    if (structure !== drawn) layout()
    drawn = structure
    draw()
    tasks(ledger, counts)
  }
  refresh().catch((error) => replace(grid, h("p", { class: "trouble" }, error.message)))

  return {
    refresh: (now) => { context = now; refresh() },
    navigate: (now) => {
      context = now
      slider.value = smoothing = Number(now.parameters.smooth ?? 0)
      strength.textContent = smoothing || "none"
      refresh()
      return true
    },
    unmount: () => { order++; for (const { plot } of charts) plot.destroy() },
    keys: { "/": ["find a metric", () => search.focus()] },
  }
}

// A function that leaves out how all names begin, up to the end of a word: it would fill the labels.
function shortened(names) {
  const [first, ...others] = names
  let same = 0
  while (same < first.length && others.every((name) => name[same] === first[same])) same++
  const begin = Math.max(...["-", "_", " ", "/"].map((end) => first.slice(0, same).lastIndexOf(end))) + 1
  return others.length && begin > 8 ? (name) => `…${visible(name).slice(begin)}` : visible
}

function label_of(chart, name, n) {
  if (chart.labels) return chart.labels[n]
  return visible(chart.strip ? name.replaceAll(chart.strip, "") : name)
}

const COUNTS = [["trained", "trained on"], ["filtered", "left out by a filter"], ["failed", "without a score"], ["available", "ready"], ["scheduled", "being sampled"], ["waiting", "to be started"]]

// Outcomes of the tasks, per source.
function tasks(element, counts) {
  const last = counts?.steps.at(-1)
  const rows = last ? Object.entries(last.sources) : []
  const total = counts?.tasks ?? {}
  if (!rows.length) {
    replace(element, Object.keys(total).length ? [h("h2", {}, "Outcomes of the tasks"), h("p", { class: "figures" },
      Object.entries(total).map(([name, count]) => h("span", {}, h("b", {}, number(count)), ` ${name}`)))] : null)
    return
  }
  const greatest = Math.max(...rows.map(([, row]) => COUNTS.reduce((sum, [name]) => sum + (row[name] ?? 0), 0)), 1)
  replace(element, h("h2", {}, "Outcomes of the tasks"),
    h("p", { class: "hint" }, "Groups of each source so far. A source with a short bar starves; one that is mostly filtered out teaches little."),
    h("div", { class: "table-box" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "Source"), h("th", {}), COUNTS.map(([, title]) => h("th", { class: "figure" }, title)))),
      h("tbody", {}, rows.map(([source, row]) => h("tr", {}, h("th", {}, visible(source)),
        h("td", { class: "bars" }, h("div", { class: "stack" }, COUNTS.map(([name]) => h("i", { class: `part ${name}`, title: name, style: { width: `${100 * (row[name] ?? 0) / greatest}%` } })))),
        COUNTS.map(([name]) => h("td", { class: "figure" }, number(row[name] ?? 0)))))))))
}
