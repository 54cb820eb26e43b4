// Processes of a run: state, memory, and the end of each log.

import { get } from "./api.js"
import { append, arrows, bytes, h, number, redraw, replace, said, select, span, visible } from "./dom.js"

const STATES = {
  running: ["working", "good"], disk: ["waiting for a disk", "calm"], starting: ["starting", "calm"], stopped: ["stopped", "bad"],
  zombie: ["ended", "bad"], gone: ["gone", "bad"], unknown: ["no answer", "bad"],
}
const LOOK = 3000
const MOST = 200_000

export function mount(element, first) {
  let context = first
  let log = context.parameters.log ?? ""
  let end = null
  let order = 0
  const table = h("section", {})
  const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Logs", onkeydown: arrows })
  const text = h("pre", { class: "log", role: "tabpanel", tabindex: "0", "aria-label": "Log" })
  append(element, [table, h("section", {}, h("h2", {}, "Logs"), tabs, text)])

  async function refresh() {
    const mine = ++order
    const found = await get(`processes/${context.run.id}`)
    if (mine !== order) return
    draw(found)
    if (!found.logs.some((each) => each.name === log)) log = found.logs.find((each) => each.name === "driver")?.name ?? found.logs[0]?.name ?? ""
    redraw(tabs, found.logs.map((each) => h("button", { role: "tab", "data-key": each.name, "data-value": each.name, class: "tab", onclick: () => open(each.name) },
      visible(each.name), h("small", {}, each.size ? bytes(each.size) : "empty"))))
    select(tabs, log)
    await follow()
  }

  function draw(found) {
    const over = !["running", "starting", "quiet"].includes(context.run.status)
    const engines = found.engines
    const most = Math.max(...found.actors.map((each) => each.memory), 1)
    const stale = found.written !== null && found.written > 30 && !over
    replace(table, h("h2", {}, "Processes"),
      h("p", { class: "figures" },
        engines ? h("span", {}, h("b", {}, `${engines.alive.length} of ${engines.wanted}`), " engines accept requests", engines.lost ? `, ${engines.lost} lost so far` : "") : null,
        found.stage && !over ? h("span", {}, "the run is ", h("b", {}, visible(found.stage))) : null,
        found.written === null ? null : h("span", {}, `checked ${span(found.written)} ago`)),
      stale ? h("p", { class: "trouble" }, `The processes have not been checked for ${span(found.written)}: the run's driver hangs, or its machine is unreachable.`) : null,
      over ? h("p", { class: "hint" }, `The run has ended (${visible(context.run.status)}); these are its processes as last seen.`) : null,
      found.actors.length ? h("div", { class: "table-box" }, h("table", {}, h("thead", {}, h("tr", {}, ["Process", "State", "Memory", "", "Where"].map((each) => h("th", {}, each)))),
        h("tbody", {}, found.actors.map((each) => row(each, most, over))))) : h("p", { class: "hint" }, "This run has no list of its processes: it was trained by an earlier rlsdk, or its watchdog is off."))
  }

  function row(actor, most, over) {
    const [word, kind] = actor.silent ? ["silent", "bad"] : STATES[actor.state] ?? [actor.state, "calm"]
    return h("tr", { onclick: () => open(actor.log.replace(/\.log$/, "")) },
      h("th", {}, visible(actor.name)),
      h("td", {}, h("span", { class: `status ${over ? "calm" : kind}` }, over ? "ended" : word), actor.silent && !over ? h("p", { class: "trouble" }, `${visible(actor.silent)}, for ${span(actor.silent_for)}`) : null),
      h("td", { class: "figure" }, bytes(actor.memory)),
      h("td", { class: "bars" }, h("div", { class: "stack" }, h("i", { class: "part available", style: { width: `${100 * actor.memory / most}%` } }))),
      h("td", {}, actor.pid ? `${actor.pid} on ${visible(actor.host)}` : "–"))
  }

  function open(name) {
    log = name
    end = null
    replace(text)
    context.go({ log }, { quietly: true })
    select(tabs, name)
    follow()
  }

  async function follow() {
    if (!log) return
    const mine = log
    const part = await get(`processes/${context.run.id}/logs/${encodeURIComponent(log)}`, { after: end })
    if (mine !== log) return
    const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 40
    if (end === null || part.start !== end) replace(text)
    if (part.text) append(text, [lines(part.text)])
    if (!text.textContent) replace(text, h("span", { class: "hint" }, "Nothing has been written yet."))
    while (text.textContent.length > MOST && text.childElementCount > 1) text.firstElementChild.remove()
    const began = end === null
    end = part.end
    if (atEnd || began) text.scrollTop = text.scrollHeight
  }

  let waits = false
  async function quietly() {
    waits = true
    try {
      await refresh()
    } catch (error) {
      replace(table, h("p", { class: "trouble" }, error.message))
    } finally {
      waits = false
    }
  }
  quietly()
  const timer = setInterval(() => { if (!document.hidden && !waits) quietly() }, LOOK)
  return {
    refresh: (now) => { context = now },
    navigate: (now) => { const same = now.run.id === context.run.id; context = now; if (!same) { end = null; replace(text); quietly() } return true },
    unmount: () => { order++; clearInterval(timer) },
    keys: { "G": ["end of the log", () => { text.scrollTop = text.scrollHeight }] },
  }
}

// Lines of a log; warnings and errors are highlighted, and colour codes removed.
function lines(written) {
  const plain = written.replace(/\u001b\[[0-9;]*m/g, "")
  return h("span", {}, plain.split(/(?<=\n)/).map((line) => h("span", { class: /\b(ERROR|CRITICAL|Traceback)\b/.test(line) ? "line bad" : /\bWARNING\b/.test(line) ? "line warn" : "line" }, said(line))))
}
