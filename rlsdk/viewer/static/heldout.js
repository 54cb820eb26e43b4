// One held-out task over the course of training: its answer in each evaluation.

import { get } from "./api.js"
import { between } from "./colors.js"
import { append, choice, empty, h, number, redraw, replace, said, visible } from "./dom.js"
import { rewardMark } from "./rollouts.js"
import { conversation } from "./turns.js"

export function mount(element, first) {
  let context = first
  let tasks = []
  let history = []
  let at = 0
  let task = context.parameters.task ?? ""
  let sampled = context.parameters.sampled ?? "" // "": greedy answers or, if there are none, sampled ones
  let order = 0

  let lowest = false

  const list = h("ol", { class: "list", "aria-label": "Held-out tasks", tabindex: "0" })
  const search = h("input", { type: "search", id: "task-search", placeholder: "Find a task", "aria-label": "Find a task", oninput: () => drawTasks() })
  const sorted = choice("Order", [["", "In order"], ["lowest", "Lowest reward first"]], "", (value) => { lowest = Boolean(value); drawTasks() })
  const foot = h("p", { class: "list-foot" })
  const detail = h("section", { class: "detail" })
  const box = h("div", { class: "browser" }, h("div", { class: "list-pane" }, search, sorted, list, foot), detail)
  const bar = h("div", { class: "bar" })
  append(element, [bar, box])

  function drawKinds(found) {
    const options = [["0", "Greedy", "eval greedy"], ["1", "Sampled", "eval sampled"]].filter(([, , kind]) => !found.kinds.length || found.kinds.includes(kind))
    redraw(bar, choice("Answers", options, found.sampled ? "1" : "0", (value) => { sampled = value; context.go({ sampled: value }, { quietly: true }); load() }))
  }

  async function load() {
    const mine = ++order
    try {
      const found = await get(`held-out/${context.run.id}`, { sampled })
      if (mine !== order) return
      drawKinds(found)
      tasks = found.rows
      foot.textContent = found.cut ? `The first ${number(tasks.length)} tasks; the page Rollouts has all, under More, From: evaluations.` : ""
      box.classList.toggle("nothing", !tasks.length)
      if (!tasks.length) {
        replace(list)
        replace(detail, empty("No evaluation is stored", "Evaluations are stored with a run's rollouts (save_rollouts), from the first evaluation on (eval.every); greedy answers unless eval.greedy is false."))
        return
      }
      drawTasks()
      await open(tasks.some((row) => row.task === task) ? task : tasks[0].task)
    } catch (error) {
      if (mine !== order) return
      box.classList.add("nothing")
      replace(detail, empty("Nothing to show", error.message))
    }
  }

  function shownTasks() {
    const text = search.value.toLowerCase()
    const found = tasks.filter((row) => !text || `${row.task} ${row.prompt}`.toLowerCase().includes(text))
    return lowest ? found.sort((a, b) => (a.valid ? a.reward : -Infinity) - (b.valid ? b.reward : -Infinity)) : found
  }

  function drawTasks() {
    replace(list, shownTasks().map((row) => h("li", { class: `item ${row.task === task ? "chosen" : ""}`, onclick: () => { box.classList.add("opened"); open(row.task) } },
      rewardMark(row), h("div", { class: "item-text" }, h("p", { class: "item-answer" }, said(row.prompt)), h("p", { class: "item-about" }, said(row.task))))))
  }

  async function open(chosen) {
    const mine = ++order
    const end = at >= history.length - 1 || task !== chosen
    task = chosen
    context.go({ task }, { quietly: true })
    drawTasks()
    const found = await get(`held-out/${context.run.id}`, { task, sampled })
    if (mine !== order) return
    history = found.rows
    if (end) at = history.length - 1
    await show()
  }

  async function show() {
    const mine = ++order
    const row = history[at]
    if (!row) return
    const group = await get(`rollouts/${context.run.id}/groups/${row.number}`)
    if (mine !== order) return
    const changed = at && history[at - 1].response !== row.response
    replace(detail, h("header", { class: "detail-head" },
      h("button", { class: "button back", onclick: () => box.classList.remove("opened") }, "‹ Tasks"),
      h("h2", {}, said(task)),
      h("p", { class: "item-about" }, `evaluation after step ${row.step}, ${at + 1} of ${history.length}`, at ? changed ? " · changed since the previous one" : " · same as in the previous one" : ""),
      h("div", { class: "timeline", role: "group", "aria-label": "Evaluations" }, history.map((each, i) => h("button", {
        class: `moment ${i === at ? "on" : ""} ${each.valid ? "" : "none"}`, title: `step ${each.step}: ${each.valid ? number(each.reward) : "no score"}`, onclick: () => { at = i; show() },
        style: each.valid ? { "background-color": between(each.reward, { diverging: true }) } : {},
      }, each.step)))),
    h("div", { class: "columns" }, group.rollouts.map((rollout, n) => h("article", { class: "column" },
      h("header", {}, rewardMark(rollout), group.rollouts.length > 1 ? h("b", {}, `#${n}`) : null, rollout.reason ? h("small", {}, said(rollout.reason)) : null), conversation(rollout)))))
  }

  const move = (change) => { at = Math.min(Math.max(at + change, 0), history.length - 1); show() }
  const other = (change) => {
    const shown = shownTasks()
    const i = shown.findIndex((row) => row.task === task)
    const row = shown[Math.min(Math.max(i + change, 0), shown.length - 1)]
    if (row) open(row.task).then(() => list.querySelector(".chosen")?.scrollIntoView({ block: "nearest" }))
  }
  list.addEventListener("keydown", (event) => {
    const change = { ArrowDown: 1, ArrowUp: -1 }[event.key]
    if (!change) return
    event.preventDefault()
    other(change)
  })
  load()
  return {
    refresh: (now) => { const rows = context.run.rows; context = now; if (now.run.rows !== rows) load() },
    navigate: (now) => { const same = now.run.id === context.run.id; context = now; if (!same) { history = []; load() } return true },
    unmount: () => { order++ },
    keys: {
      "ArrowRight": ["next evaluation", () => move(1)], "ArrowLeft": ["previous evaluation", () => move(-1)],
      "j": ["next task", () => other(1)], "k": ["previous task", () => other(-1)], "/": ["find a task", () => search.focus()],
    },
  }
}
