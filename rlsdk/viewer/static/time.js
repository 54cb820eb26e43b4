// Time per step as a stacked area, and its breakdown over the last steps.

import { get } from "./api.js"
import { Chart } from "./chart.js"
import { color } from "./colors.js"
import { append, choice, h, replace, span, visible } from "./dom.js"

const PARTS = {
  "time/produce": ["sampling and scoring", "Engines sample, environments and rewards respond. If this dominates a step, add engines, or let rollouts run ahead."],
  "time/wait_for_rollouts": ["waiting for rollouts", "Rollouts run ahead, but the learner still waits: add engines, or lower the batch size."],
  "time/update": ["updating the weights", "Forward and backward passes. If this dominates a step, the learner is the bottleneck."],
  "time/logprobs": ["logprobs before the update", "old_logprobs: rollout avoids it if engine and learner agree."],
  "time/credit": ["filters and advantages", "Rarely more than one percent; a slow shaping, or one with a model, shows here."],
  "time/sync": ["sending the weights", "Once every rollout.sync_interval steps."],
}
const REST = "rest"

export function mount(element, first) {
  let context = first
  let order = 0
  let relative = false
  let runs = []
  const box = h("div", { class: "time-runs" })
  append(element, [h("div", { class: "bar" }, choice("Scale", [["seconds", "Seconds"], ["share", "Share of the step"]], "seconds", (value) => { relative = value === "share"; draw() })), box])

  async function refresh() {
    const mine = ++order
    const names = [...Object.keys(PARTS), "time/step", "time/engines_idle", "time/tokens_per_second", "time/overlap"]
    const found = await get("curves", { runs: context.chosen.map((run) => run.id).join(","), names: names.join(",") })
    if (mine !== order) return
    const ids = context.chosen.map((run) => run.id).join(",")
    if (box.dataset.runs !== ids) {
      box.dataset.runs = ids
      for (const each of runs) each.plot.destroy()
      runs = context.chosen.map((run) => panel(run))
      replace(box, runs.map((each) => each.element))
    }
    for (const each of runs) each.curves = found[each.run.id] ?? {}
    draw()
  }

  function panel(run) {
    const plot = new Chart({ title: visible(run.name), height: 300, format: (value) => relative ? `${Math.round(value * 100)} %` : span(value) })
    const parts = h("div", { class: "parts" })
    return { run, plot, parts, curves: {}, element: h("section", { class: "time-run" }, plot.element, parts) }
  }

  function draw() {
    for (const each of runs) drawRun(each)
  }

  function drawRun({ plot, parts, curves }) {
    const whole = curves["time/step"]
    if (!whole) {
      replace(parts, h("p", { class: "hint" }, "No step is finished yet."))
      return
    }
    const [steps, total] = whole
    const ahead = Boolean(curves["time/wait_for_rollouts"])
    const names = Object.keys(PARTS).filter((name) => curves[name] && !(ahead && name === "time/produce"))
    const at = names.map((name) => { const values = new Map(curves[name][0].map((step, i) => [step, curves[name][1][i]])); return steps.map((step) => values.get(step) ?? 0) })
    const rest = steps.map((_, i) => Math.max(total[i] - at.reduce((sum, column) => sum + column[i], 0), 0))
    const columns = [...at, rest]
    const labels = [...names.map((name) => PARTS[name][0]), REST]
    const scaled = columns.map((column) => column.map((value, i) => relative ? value / (total[i] || 1) : value))
    let below = steps.map(() => 0)
    const areas = scaled.map((column, n) => {
      below = below.map((value, i) => value + column[i])
      return { label: labels[n], color: color(n), x: steps, y: below, shown: column, area: true, width: 1 }
    })
    plot.set(areas.reverse())
    const recent = columns.map((column) => mean(column.slice(-20)))
    const all = recent.reduce((a, b) => a + b, 0) || 1
    const rows = labels.map((label, n) => [label, recent[n], PARTS[names[n]]?.[1], n]).sort((a, b) => b[1] - a[1])
    replace(parts, h("h3", {}, `Where the last ${Math.min(20, steps.length)} steps went`), rows.map(([label, seconds, hint, n]) => h("div", { class: "share" },
      h("span", { class: "share-label" }, h("i", { class: "swatch", style: { "--swatch": color(n) } }), label), h("b", {}, span(seconds)),
      h("span", { class: "meter" }, h("i", { style: { width: `${100 * seconds / all}%`, "--swatch": color(n) } })), h("span", {}, `${Math.round(100 * seconds / all)} %`),
      hint ? h("p", { class: "hint" }, hint) : null)), idle(curves))
  }

  refresh()
  return {
    refresh: (now) => { context = now; refresh() },
    navigate: (now) => { context = now; refresh(); return true },
    unmount: () => { order++; for (const each of runs) each.plot.destroy() },
    keys: {},
  }
}

function mean(values) {
  return values.reduce((a, b) => a + b, 0) / Math.max(values.length, 1)
}

function idle(curves) {
  const values = curves["time/engines_idle"]?.[1]
  if (!values?.length) return null
  return h("p", { class: "figures" }, h("span", {}, h("b", {}, `${Math.round(100 * mean(values.slice(-20)))} %`), " of that time, engines were idle"))
}
