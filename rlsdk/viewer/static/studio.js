// The studio: a configuration as a form and as YAML, checked while typing, and the runs started from it.
//
// The text is authoritative. The form sends edits to the server, which returns the edited text and its faults.

import { get, post } from "./api.js"
import { append, debounce, h, number, replace, said, visible } from "./dom.js"
import { Form, key, put } from "./studio_form.js"

const LOOK = 2000
const KEPT = "rlsdk-studio"
const draft = { text: "", file: "", version: "", saved: "", ...JSON.parse(sessionStorage.getItem(KEPT) ?? "{}") }
let form = null
let forms = 0

export function mount(element, first) {
  let context = first
  let alive = true
  let tree = {}
  let reply = null
  let edits = []
  let typed = 0
  let asked = false
  let again = false
  const shownOutput = new Set()
  const closedOutput = new Set() // of failed runs, whose output is shown at first: it says why

  const trouble = h("p", { class: "trouble", role: "alert", hidden: true })
  const table = h("section", { class: "started" })
  const chosen = h("select", { "aria-label": "Configuration files", onchange: () => { if (chosen.value) open(chosen.value); chosen.value = "" } })
  const name = h("input", { type: "text", "aria-label": "File", placeholder: "configs/first.yaml", value: draft.file, spellcheck: "false", oninput: () => { if (name.value !== draft.file) { draft.version = "" } draft.file = name.value.trim(); keep(); state() } })
  const unsaved = h("span", { class: "hint" })
  const bar = h("div", { class: "bar studio-bar" }, h("button", { class: "button", onclick: () => take("", "", "") }, "New"), chosen, name,
    h("button", { class: "button", onclick: save }, "Save"), unsaved)
  const search = h("input", { type: "search", placeholder: "Find a key", "aria-label": "Find a key", oninput: debounce(150, () => fields.find(search.value)) })
  const box = h("fieldset", { class: "keys-form", "aria-label": "Configuration" })
  const fields = new Form(box, edit)
  const yaml = h("textarea", { class: "yaml", "aria-label": "YAML", spellcheck: "false", wrap: "off", rows: 18, value: draft.text, oninput: debounce(350, () => wrote(yaml.value)) })
  const checked = h("div", { class: "checked", role: "status", "aria-live": "polite" }, h("p", { class: "hint" }, "Loading the plugins; the first time, this may take a minute …"))
  const begin = h("button", { class: "button primary", disabled: true, onclick: start }, "Start")
  const explained = h("div", { class: "explained" })
  append(element, [trouble, table, bar, h("div", { class: "studio" },
    h("div", { class: "studio-form" }, search, box),
    h("div", { class: "studio-side" }, h("div", { class: "launch" }, begin, checked), h("h2", {}, "YAML"), yaml, explained))])

  function keep() {
    sessionStorage.setItem(KEPT, JSON.stringify(draft))
    unsaved.textContent = draft.file ? (draft.text === draft.saved && draft.version ? "saved" : "not saved") : "no file; a copy is kept with the run"
  }

  // The file as it is on disk, next to which the paths of the configuration may lie.
  const saved = () => draft.version ? draft.file : ""

  function say(text) {
    trouble.hidden = !text
    trouble.textContent = visible(text)
  }

  const slowly = debounce(350, () => check())
  function edit(path, change, how = {}) {
    const found = "value" in change ? change.value : "yaml" in change ? change.yaml : undefined
    tree = put(tree, path, found)
    edits = [...edits.filter((each) => key(each.path) !== key(path)), { path, ...change }]
    begin.disabled = true
    if (how.slowly) slowly()
    else { draw(); check() }
  }

  function wrote(text) {
    if (text === draft.text) return
    draft.text = text
    typed++
    edits = []
    begin.disabled = true
    keep()
    check()
  }

  function take(text, file, version) {
    draft.saved = version ? text : ""
    draft.file = name.value = file
    draft.version = version
    yaml.value = text
    draft.text = null
    wrote(text)
  }

  // One check at a time; edits made meanwhile are checked next.
  async function check() {
    if (asked) { again = true; return }
    asked = true
    again = false
    const sent = edits
    const before = typed
    edits = []
    try {
      const found = await post("studio/check", { text: draft.text, edits: sent, file: saved() })
      if (!alive) return
      say("")
      if (before === typed) await adopt(found)
    } catch (error) {
      if (before === typed) edits = [...sent.filter((each) => !edits.some((other) => key(other.path) === key(each.path))), ...edits]
      say(error.message)
    } finally {
      asked = false
    }
    if (alive && (again || typed !== before)) check()
    else if (alive) state()
  }

  async function adopt(found) {
    const plugins = [found.tree?.plugins ?? []].flat()
    if (found.tree && JSON.stringify([plugins, saved()]) !== form?.plugins) await load(plugins)
    reply = found
    box.disabled = found.tree === null
    if (found.text !== draft.text) {
      draft.text = found.text
      yaml.value = found.text
      keep()
    }
    if (found.tree) tree = edits.reduce((now, each) => put(now, each.path, "value" in each ? each.value : each.yaml), found.tree)
    draw()
  }

  async function load(plugins) {
    const found = await post("studio/form", { files: plugins, file: saved() })
    form = { ...found, plugins: JSON.stringify([plugins, saved()]), number: ++forms }
  }

  function draw() {
    if (!form) return
    fields.show(form, tree, reply?.defaults)
    if (search.value) fields.find(search.value)
    state()
  }

  function state() {
    if (!reply) return
    const faults = [...reply.faults, ...reply.warnings]
    const places = faults.map((each) => [fields.place(each.path), each])
    const byPlace = new Map()
    for (const [place, each] of places) byPlace.set(place, [...(byPlace.get(place) ?? []), each.message])
    fields.fault(byPlace)
    const waits = edits.length > 0 || asked
    begin.disabled = faults.length > 0 || waits || !reply.tree
    begin.textContent = reply.exists ? "Resume" : "Start"
    const file = draft.file ? "saves the file" : "keeps a copy of the configuration"
    replace(checked, faults.length ? [h("p", {}, h("b", {}, faults.length === 1 ? "1 problem" : `${faults.length} problems`)), h("ol", { class: "problems" }, places.map(([place, each]) => h("li", {},
      h("button", { class: "link problem", onclick: () => fields.reveal(place) }, visible(each.path || "YAML")), " ", said(each.message))))]
      : h("p", { class: "hint" }, reply.exists ? `${reply.folder} holds a run. Resume continues it; to start another run, change the name.` : `No problems. Start ${file} and trains in ${reply.folder}.`),
    form?.broken.map((each) => h("p", { class: "trouble" }, visible(each))))
    replace(explained, Object.entries(reply.plan ?? {}).map(([section, content]) => h("details", { class: "fold", open: ["batch", "memory", "disk"].includes(section) },
      h("summary", {}, h("b", {}, section)), h("dl", {}, Object.entries(content).map(([what, value]) => [h("dt", {}, visible(what)), h("dd", {}, said(Array.isArray(value) ? value.join("; ") || "none" : String(value)))])))))
    keep()
  }

  async function list() {
    const found = await get("studio/files")
    replace(chosen, h("option", { value: "" }, `Open a file of ${visible(found.folder)}/ …`), found.files.map((each) => h("option", { value: each }, visible(each))))
  }

  async function open(file) {
    await tell(async () => {
      const found = await get("studio/file", { name: file })
      take(found.text, found.file, found.version)
    })
  }

  async function save() {
    await tell(async () => {
      const { text } = draft
      const found = await post("studio/save", { file: draft.file, text, version: draft.version })
      Object.assign(draft, { version: found.version, saved: text })
      keep()
      await list()
    })
  }

  async function start() {
    begin.disabled = true
    await tell(async () => {
      const { text } = draft
      const found = await post("studio/start", { text, file: draft.file, version: draft.version, resume: reply.exists })
      if (found.file) Object.assign(draft, { version: found.version, saved: text })
      await runs()
      table.scrollIntoView({ block: "nearest" })
    })
    check()
  }

  async function tell(action) {
    say("")
    try {
      await action()
    } catch (error) {
      say(error.message)
    }
  }

  let drawn = ""
  async function runs() {
    const found = (await get("studio/runs")).runs
    const now = JSON.stringify(found)
    if (now === drawn || !alive) return
    drawn = now
    replace(table, found.length ? [h("h2", {}, "Runs started here"), h("div", { class: "table-box" }, h("table", {},
      h("thead", {}, h("tr", {}, ["Run", "State", "Step", "Reward", "", ""].map((each) => h("th", {}, each)))),
      h("tbody", {}, found.map(row))))] : null)
  }

  function row(run) {
    const [word, kind] = word_of(run)
    const act = (what, path) => h("button", { class: "button small", onclick: () => tell(async () => { await post(`studio/${path}`, { name: run.name }); await runs(); check() }) }, what)
    const shows = shownOutput.has(run.name) || (word === "failed" && !closedOutput.has(run.name))
    const output = h("details", { class: "output", open: shows }, h("summary", {}, "Output"), h("pre", { class: "log", tabindex: "0" }, said(run.output)))
    output.addEventListener("toggle", () => { if (output.open) shownOutput.add(run.name); else { shownOutput.delete(run.name); closedOutput.add(run.name) } })
    return h("tr", { "data-run": run.name }, h("th", {}, visible(run.name), h("small", {}, ` process ${run.pid}`)), h("td", {}, h("span", { class: `status ${kind}` }, word)),
      h("td", { class: "figure" }, run.step === null || run.step === undefined ? "–" : run.steps ? `${run.step} of ${run.steps}` : String(run.step)), h("td", { class: "figure" }, number(run.reward)),
      h("td", { class: "acts" }, run.runs ? act(run.stops ? "Stop now" : "Stop", "stop") : run.status === "finished" ? null : act("Resume", "resume"),
        run.run ? ["curves", "rollouts", "processes"].map((page) => h("a", { class: "link", href: `#/${page}?runs=${run.run}` }, page)) : null,
        run.file.startsWith(".") ? null : h("button", { class: "link", onclick: () => open(run.file) }, "open")), h("td", {}, output))
  }

  async function begun() {
    if (!form) await load([])
    draw()
    await check()
  }
  keep()
  tell(async () => { await Promise.all([list(), runs(), begun()]) })
  const timer = setInterval(() => { if (!document.hidden) runs().catch(() => {}) }, LOOK)
  return {
    refresh: (now) => { context = now },
    navigate: (now) => { context = now; return true },
    unmount: () => { alive = false; clearInterval(timer) },
    keys: {
      "/": ["find a key", () => search.focus()], "y": ["the YAML", () => yaml.focus()], "s": ["save the file", save],
      "e": ["the first problem", () => box.ownerDocument.querySelector(".problem")?.click()],
    },
  }
}

function word_of(run) {
  if (run.runs) return run.stops ? ["stopping", "calm"] : [run.status === "running" ? "running" : "starting", "good"]
  if (run.code && run.code !== 130) return [run.code < 0 ? "killed" : "failed", "bad"]
  if (run.code === 130) return ["interrupted", "calm"]
  if (run.code === 0) return ["finished", "calm"]
  return [run.status ?? "ended", ["failed", "killed"].includes(run.status) ? "bad" : "calm"]
}
