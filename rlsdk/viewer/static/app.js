// The frame around the pages: runs, navigation, keys, and the timer that refreshes a page while its run trains.
//
// A page is a module that exports `mount(element, context)`, which returns an object with optional members: `refresh(context)`,
// called when a run has made progress; `keys`, a mapping of keys to [help, action]; `unmount()`.
// A context has: `runs`, all runs; `chosen`, those shown; `run`, the first of them; `parameters`, those of the URL;
// `go(parameters)`, which changes them. A page that is `alone` is shown even without a run.

import { get } from "./api.js"
import { color, dark } from "./colors.js"
import { debounce, empty, h, number, redraw, replace, span, update, visible, withCode } from "./dom.js"

const LOOK = 2000
const MANY = 12 // runs, from which on the list can be searched
const root = document.getElementById("app")
const state = { runs: [], pages: [], page: null, mounted: null, key: "", lost: false }

const WORDS = {
  running: ["running", "good"], starting: ["starting", "calm"], finished: ["finished", "calm"], interrupted: ["interrupted", "calm"],
  failed: ["failed", "bad"], killed: ["killed", "bad"], quiet: ["silent", "bad"],
}

function address() {
  const [name, query = ""] = location.hash.replace(/^#\/?/, "").split("?")
  const page = state.pages.find((each) => each.name === name) ?? state.pages[0]
  return { page: page?.name, parameters: Object.fromEntries(new URLSearchParams(query)) }
}

function go(page, parameters, { quietly = false } = {}) {
  const kept = Object.fromEntries(Object.entries(parameters).filter(([, value]) => value !== "" && value !== undefined && value !== null))
  const target = `#/${page}?${new URLSearchParams(kept)}`
  if (quietly) history.replaceState(null, "", target)
  else location.hash = target
}

function chosen(parameters) {
  const found = [...new Set((parameters.runs ?? "").split(","))].map((id) => state.runs.find((run) => run.id === id)).filter(Boolean)
  return found.length ? found : state.runs.slice(0, 1)
}

function context() {
  const { page, parameters } = address()
  const runs = chosen(parameters)
  return {
    page, parameters, runs: state.runs, chosen: runs, run: runs[0],
    color: (run) => color(runs.findIndex((each) => each.id === run.id)),
    go: (changes, how) => go(page, { ...address().parameters, ...changes }, how),
    open: (other, changes) => go(other, { runs: parameters.runs, ...changes }),
  }
}

// Frame

const navigation = h("nav", { class: "pages", "aria-label": "Pages" })
const runList = h("div", { class: "runs" })
const runSearch = h("input", { type: "search", placeholder: "Find runs", "aria-label": "Find runs", hidden: true, oninput: debounce(100, drawRuns) })
const runSelect = h("select", { class: "run-select", "aria-label": "Run", onchange: () => context().go({ runs: runSelect.value }) })
const about = h("div", { class: "head-about" })
const age = h("span", { class: "age" })
const main = h("main", { tabindex: "-1" })
const notice = h("p", { class: "notice", role: "status", hidden: true })

function frame() {
  replace(root,
    h("aside", { class: "side" },
      h("a", { class: "brand", href: "#/" }, h("img", { src: "static/icon.svg", alt: "" }), "rlsdk"), navigation,
      h("h2", { class: "side-title" }, "Runs"), runSearch, runList,
      h("button", { class: "link keys-button", onclick: help }, "Keys ", h("kbd", {}, "?"))),
    h("div", { class: "body" }, h("header", { class: "head" }, runSelect, about, age), notice, main))
}

function drawNavigation() {
  const { page, parameters } = address()
  replace(navigation, state.pages.map((each, i) => h("a", {
    href: `#/${each.name}?${new URLSearchParams(parameters.runs ? { runs: parameters.runs } : {})}`,
    "aria-current": each.name === page ? "page" : undefined, title: `key ${i + 1}`,
  }, each.title)))
  navigation.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" })
}

function status(run) {
  const [word, kind] = WORDS[run.status] ?? [run.status, "calm"]
  return h("span", { class: `status ${kind} ${run.status}` }, word)
}

const progress = (run) => run.steps ? `${number(run.step)} of ${number(run.steps)}` : number(run.step)

function drawRuns() {
  const { chosen: shown, color: colorOf } = context()
  const words = runSearch.value.toLowerCase().split(/\s+/).filter(Boolean)
  const found = state.runs.filter((run) => words.every((word) => `${run.name} ${run.status}`.toLowerCase().includes(word)))
  runSearch.hidden = state.runs.length < MANY
  redraw(runList,
    words.length && found.length > 1 ? h("button", { class: "link", onclick: () => context().go({ runs: found.map((run) => run.id).join(",") }) }, `Compare these ${found.length}`) : null,
    words.length && !found.length ? h("p", { class: "hint" }, "No run has this name.") : null,
    found.map((run) => {
      const on = shown.some((each) => each.id === run.id)
      return h("label", { class: `run ${on ? "on" : ""}`, title: visible(`${run.name}\n${run.path}`) },
        h("input", { type: "checkbox", checked: on, "data-key": run.id, onchange: (event) => toggle(run, event.target.checked), onkeydown: (event) => { if (event.key === "Enter") only(run) } }),
        h("i", { class: "swatch", style: { "--swatch": on ? colorOf(run) : "var(--line)" } }),
        h("span", { class: "run-name", onclick: (event) => { if (!event.metaKey && !event.ctrlKey) { event.preventDefault(); only(run) } } }, visible(run.name)),
        h("span", { class: "run-about" }, progress(run), status(run)))
    }))
  update(runSelect, state.runs.map((run) => h("option", { value: run.id, selected: run.id === shown[0]?.id }, visible(run.name))))
}

function toggle(run, on) {
  const ids = new Set(context().chosen.map((each) => each.id))
  if (on) ids.add(run.id)
  else ids.delete(run.id)
  context().go({ runs: [...ids].join(",") })
}

function only(run) {
  context().go({ runs: run.id })
}

function drawHeader() {
  const { chosen: shown, run } = context()
  runSelect.hidden = !run
  if (!run) return
  const title = shown.length === 1 ? visible(run.name) : `${shown.length} runs`
  const share = run.steps ? Math.min(run.step / run.steps, 1) : 0
  age.textContent = shown.length === 1 && run.age !== null ? `last step ${span(run.age)} ago` : ""
  update(about, h("h1", {}, title),
    shown.length === 1 ? [status(run),
      h("span", { class: "progress" }, h("progress", { value: share, max: 1, "aria-label": "Steps done" }), `step ${progress(run)}`),
      run.trouble ? h("p", { class: "trouble" }, withCode(run.trouble)) : null] : null)
  document.title = `${title} · rlsdk`
}

// Pages

async function show() {
  const { page } = address()
  const found = state.pages.find((each) => each.name === page) ?? state.pages[0]
  drawNavigation()
  drawRuns()
  drawHeader()
  if (!found) return
  const now = context()
  if (!now.run && !found.alone) {
    replace(main, empty("No runs yet", "Start a training run; it will appear here."))
    return
  }
  if (state.page === found.name && state.mounted?.navigate?.(now)) return
  state.mounted?.unmount?.()
  state.mounted = null
  state.page = found.name
  replace(main, h("p", { class: "loading" }, "Loading …"))
  main.className = `page-${found.name}`
  try {
    const module = await import(`./${found.script}`)
    if (state.page !== found.name) return
    replace(main)
    state.mounted = module.mount(main, now)
  } catch (error) {
    replace(main, empty("This page could not be shown", error.message))
  }
}

async function look() {
  try {
    const found = await get("state")
    state.runs = found.runs
    state.pages = found.pages
    say("")
  } catch (error) {
    say(error.name === "TypeError" ? "The server does not answer. If it was stopped, start `rlsdk view` again; the page reconnects by itself." : error.message)
    return
  }
  const key = JSON.stringify(state.runs.map((run) => [run.id, run.rows, run.generation, run.status, run.alerts, run.stored]))
  if (!navigation.childElementCount) {
    const alone = state.pages.find((each) => each.alone)
    if (alone && !state.runs.length && !location.hash) go(alone.name, {}, { quietly: true })
    state.key = key
    await show()
    return
  }
  drawHeader()
  if (key === state.key) return
  state.key = key
  drawRuns()
  if (state.mounted) state.mounted.refresh?.(context())
  else await show()
}

function say(text) {
  notice.hidden = !text
  notice.textContent = text
}

// Keys

const OWN = {
  "?": ["show or hide this list", help],
  "Escape": ["close", () => dialog.open && dialog.close()],
}
const dialog = h("dialog", { class: "keys", onclick: (event) => { if (event.target === dialog) dialog.close() } })

function help() {
  if (dialog.open) {
    dialog.close()
    return
  }
  const rows = [...Object.entries(state.mounted?.keys ?? {}), ["1 … 9", ["open a page"]], ...Object.entries(OWN)]
  replace(dialog, h("h2", {}, "Keys"), h("dl", {}, rows.map(([key, [text]]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)])),
    h("button", { class: "button", onclick: () => dialog.close() }, "Close"))
  dialog.showModal()
}

function pressed(event) {
  const writes = event.target.closest?.("input:not([type=checkbox]):not([type=range]), textarea, select")
  if (event.ctrlKey || event.metaKey || event.altKey) return
  if (writes) {
    if (event.key === "Escape") event.target.blur()
    return
  }
  const action = OWN[event.key]?.[1] ?? (dialog.open ? undefined : state.mounted?.keys?.[event.key]?.[1])
  if (action) {
    event.preventDefault()
    action()
  } else if (/^[1-9]$/.test(event.key) && state.pages[event.key - 1]) {
    context().open(state.pages[event.key - 1].name, {})
  }
}

frame()
document.body.append(dialog)
window.addEventListener("hashchange", show)
document.addEventListener("keydown", pressed)
dark.addEventListener("change", () => { state.page = null; show() })
await look()
let looking = false
async function lookAgain() {
  if (looking || document.hidden) return
  looking = true
  await look().finally(() => { looking = false })
}
setInterval(lookAgain, LOOK)
document.addEventListener("visibilitychange", lookAgain)
