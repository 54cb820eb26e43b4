// Tokens of a rollout, coloured by one of their numbers; hovering over a token shows all its numbers.

import { get } from "./api.js"
import { between, color } from "./colors.js"
import { choice, h, number, replace, visible } from "./dom.js"

const VIEWS = {
  mask: ["Mask", "Coloured: sampled by the policy and trained on. Not coloured: prompt, tools, environment."],
  logprob: ["Logprob", "How certain the policy was when it sampled the token. Dark: surprising; light: expected."],
  ratio: ["Ratio", "Learner probability divided by engine probability, before the update. Red: below 1; green: above 1."],
  advantage: ["Advantage", "What the update does to the token. Green: more likely; red: less likely; not coloured: no change."],
  entropy: ["Entropy", "How uncertain the policy was before the token. Dark: uncertain."],
  version: ["Policy version", "Weights that sampled the token, one colour per version."],
}
const NAMES = { logprob: "logprob, engine", learner_logprob: "logprob, learner", ratio: "ratio", advantage: "advantage", entropy: "entropy" }
let last = "logprob"

export async function tokens(run, group, index) {
  const found = await get(`rollouts/${run}/groups/${group}/${index}/tokens`)
  const views = Object.keys(VIEWS).filter((name) => name === "mask" || name === "version" || found.columns[name])
  const missing = Object.keys(VIEWS).filter((name) => !views.includes(name))
  const text = h("div", { class: "tokens", tabindex: "0" })
  const legend = h("p", { class: "hint" })
  const detail = h("dl", { class: "token-detail", "aria-live": "polite" })
  const spans = found.texts.map((each, i) => h("span", { "data-i": i, class: found.mask[i] ? "sampled" : "given" }, shown(each)))
  text.append(...spans)

  function paint(view) {
    last = view
    const backgrounds = colours(view, found)
    spans.forEach((each, i) => { each.style.backgroundColor = backgrounds[i] })
    replace(legend, VIEWS[view][1], ends(view, found))
  }

  function point(i) {
    for (const each of text.querySelectorAll(".pointed")) each.classList.remove("pointed")
    spans[i].classList.add("pointed")
    const reward = found.rewards.filter(([at]) => at === i).reduce((sum, [, value]) => sum + value, 0)
    const rows = [["token", shown(found.texts[i])], ["id", found.ids[i]], ["position", i], ["sampled", found.mask[i] ? "yes" : "no"]]
    if (found.mask[i]) {
      rows.push(["version", found.versions[i]])
      for (const [name, values] of Object.entries(found.columns)) rows.push([NAMES[name] ?? name, number(values[i], 5)])
      rows.push(["probability", `${number(100 * Math.exp(found.columns.logprob[i]), 3)} %`])
    }
    if (reward) rows.push(["reward here", number(reward)])
    replace(detail, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))))
  }

  let pointed = -1
  text.addEventListener("pointerover", (event) => {
    const i = event.target.dataset?.i
    if (i !== undefined) point(pointed = Number(i))
  })
  text.addEventListener("keydown", (event) => {
    const change = { ArrowRight: 1, ArrowLeft: -1 }[event.key]
    if (!change) return
    event.preventDefault()
    event.stopPropagation()
    point(pointed = Math.min(Math.max(pointed + change, 0), spans.length - 1))
  })

  const start = views.includes(last) ? last : "logprob"
  const result = h("div", { class: "token-view" },
    choice("Colour by", views.map((name) => [name, VIEWS[name][0]]), start, paint), legend,
    found.known ? null : h("p", { class: "hint" }, "The model's tokenizer was not found, so tokens are shown as ids."),
    text, detail,
    found.left_out ? h("p", { class: "hint" }, `${number(found.left_out)} more tokens are not shown.`) : null,
    missing.length ? h("p", { class: "hint" }, `Not stored for this rollout: ${missing.map((name) => VIEWS[name][0].toLowerCase()).join(", ")}. ${why(missing)}`) : null)
  paint(start)
  if (spans.length) point(pointed = Math.max(found.mask.indexOf(1), 0))
  return result
}

function why(missing) {
  if (missing.includes("advantage")) return "Advantages are stored only for trained groups."
  if (missing.includes("ratio")) return "With old_logprobs: rollout the learner uses the engine's logprobs; entropy is stored if the algorithm reads it."
  return "It is stored if the algorithm reads it."
}

function shown(text) {
  return visible(text).replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t")
}

function finite(values) {
  return values.filter((value) => value !== null)
}

function colours(view, found) {
  if (view === "mask") return found.mask.map((sampled) => sampled ? between(0.25) : "transparent")
  if (view === "version") {
    const known = [...new Set(found.versions.filter((version) => version >= 0))].sort((a, b) => a - b)
    return found.versions.map((version, i) => found.mask[i] ? `${color(known.indexOf(version))}55` : "transparent")
  }
  const values = found.columns[view]
  const share = scale(view, finite(values))
  const diverging = view === "ratio" || view === "advantage"
  return values.map((value) => value === null ? "transparent" : between(share(value), { diverging }))
}

// Position of a value from 0 to 1; for signed values, the middle is the neutral value.
function scale(view, values) {
  if (view === "advantage") {
    const most = Math.max(...values.map(Math.abs), 1e-9)
    return (value) => 0.5 + value / most / 2
  }
  if (view === "ratio") {
    const most = Math.max(...values.map((value) => Math.abs(Math.log(value))), 0.02)
    return (value) => 0.5 + Math.log(value) / most / 2
  }
  if (view === "logprob") return (value) => Math.min(-value / 5, 1)
  const most = Math.max(...values, 1e-9)
  return (value) => value / most
}

function ends(view, found) {
  if (view === "version") {
    const known = [...new Set(found.versions.filter((version) => version >= 0))].sort((a, b) => a - b)
    return h("span", { class: "ends" }, known.map((version, n) => h("span", {}, h("i", { class: "swatch", style: { "--swatch": color(n) } }), version)))
  }
  const values = finite(found.columns[view] ?? [])
  if (!values.length) return null
  return h("span", { class: "ends" }, ` From ${number(Math.min(...values), 3)} to ${number(Math.max(...values), 3)}.`)
}
