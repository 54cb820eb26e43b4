// A line chart over training steps, with bands, areas, and the values at the pointer below its title.

import uPlot from "./vendor/uPlot.esm.js"
import { faded, mixed, variable } from "./colors.js"
import { h, number, replace } from "./dom.js"

const together = uPlot.sync("steps")

// Exponential moving average with bias correction.
export function smoothed(values, strength) {
  if (!strength) return values
  let sum = 0
  let weight = 0
  return values.map((value) => {
    if (value === null) return null
    sum = sum * strength + value * (1 - strength)
    weight = weight * strength + (1 - strength)
    return sum / weight
  })
}

// Mean, minimum and maximum at each step, over runs that repeat one experiment.
export function band(curves) {
  const at = new Map()
  for (const [steps, values] of curves) {
    steps.forEach((step, i) => (at.get(step) ?? at.set(step, []).get(step)).push(values[i]))
  }
  const steps = [...at.keys()].sort((a, b) => a - b)
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length
  return {
    x: steps,
    y: steps.map((step) => mean(at.get(step))),
    low: steps.map((step) => Math.min(...at.get(step))),
    high: steps.map((step) => Math.max(...at.get(step))),
  }
}

// Columns over the union of all steps, in uPlot's format.
function aligned(curves) {
  const steps = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b)
  const place = new Map(steps.map((step, i) => [step, i]))
  return [steps, ...curves.map((curve) => {
    const column = new Array(steps.length).fill(null)
    curve.x.forEach((step, i) => { column[place.get(step)] = curve.y[i] })
    return column
  })]
}

export class Chart {
  // `title` and `hint` are plain text; `open` is called when the title is clicked.
  constructor({ title, hint = "", height = 170, open = undefined, format = number }) {
    this.format = format
    this.height = height
    this.values = h("div", { class: "chart-values" })
    this.box = h("div", { class: "chart-box" })
    this.warning = h("p", { class: "chart-warning", hidden: true })
    const name = open ? h("button", { class: "chart-title", onclick: open }, title) : h("span", { class: "chart-title" }, title)
    this.element = h("figure", { class: "chart" },
      h("figcaption", {}, h("h3", {}, name), this.values), this.box, this.warning, hint ? h("p", { class: "hint" }, hint) : null)
    this.resized = new ResizeObserver(() => this.fit())
    this.resized.observe(this.box)
  }

  destroy() {
    this.resized.disconnect()
    this.plot?.destroy()
  }

  warn(text) {
    this.warning.hidden = !text
    this.warning.textContent = text ?? ""
  }

  fit() {
    const width = this.box.clientWidth
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.height })
  }

  // Curves: {label, color, x, y, dash, width, low, high, area, shown}. `low` and `high` make a band, `area` fills to 0.
  set(curves) {
    this.curves = curves
    this.near = undefined
    const lines = curves.flatMap((curve) => {
      const line = { ...curve, curve }
      return curve.low ? [line, { ...line, y: curve.low, part: "low" }, { ...line, y: curve.high, part: "high" }] : [line]
    })
    this.lines = lines
    const structure = JSON.stringify(lines.map((line) => [line.label, line.color, line.part, line.dash]))
    const data = aligned(lines)
    this.last(curves)
    if (this.plot && structure === this.structure) {
      this.plot.setData(data)
      return
    }
    this.structure = structure
    this.plot?.destroy()
    replace(this.box)
    this.plot = new uPlot(this.options(lines), data, this.box)
    this.fit()
  }

  options(lines) {
    const text = variable("--muted")
    const grid = { stroke: variable("--line"), width: 1 }
    const font = "11px system-ui, sans-serif"
    const points = (plot, index) => plot.data[0].length < 26
    const series = lines.map((line) => ({
      label: line.label,
      stroke: line.part ? "transparent" : line.color,
      width: line.part ? 0 : line.width ?? 1.75,
      dash: line.dash,
      fill: line.area ? mixed(line.color, variable("--panel"), 0.62) : undefined,
      spanGaps: true,
      points: { show: line.part || line.area || line.quiet ? false : points, size: 4 },
    }))
    const bands = []
    lines.forEach((line, i) => {
      if (line.part === "high") bands.push({ series: [i + 1, i], fill: faded(line.color, 0.16) })
    })
    return {
      width: this.box.clientWidth || 300,
      height: this.height,
      legend: { show: false },
      padding: [8, 18, 0, 0],
      cursor: {
        sync: { key: together.key, setSeries: false }, points: { size: 6 }, drag: { x: true, y: false, setScale: true },
        focus: { prox: this.curves.length > 3 ? 24 : -1 },
      },
      focus: { alpha: 0.25 },
      scales: { x: { time: false }, y: { range: reach } },
      series: [{}, ...series],
      bands,
      axes: [
        { stroke: text, grid: { show: false }, ticks: { show: false }, font, size: 24, space: 34, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5] },
        { stroke: text, grid, ticks: { show: false }, font, size: 46, values: (_, ticks) => ticks.map((tick) => this.format(tick, 3)) },
      ],
      hooks: {
        setCursor: [(plot) => this.pointed(plot)],
        setSeries: [(plot, index) => { this.near = this.lines[index - 1]?.curve; this.pointed(plot) }],
      },
    }
  }

  pointed(plot) {
    const row = plot.cursor.idx
    if (row === null || row === undefined) {
      this.last(this.curves)
      return
    }
    const step = plot.data[0][row]
    const found = this.curves.filter((curve) => !curve.quiet && (!this.near || curve === this.near)).map((curve) => [curve, valueAt(curve, step)])
    replace(this.values, h("span", { class: "step" }, `step ${number(step)}`), found.map((each) => this.value(...each)))
  }

  last(curves) {
    const shown = curves.filter((curve) => !curve.quiet)
    replace(this.values, shown.map((curve) => this.value(curve, (curve.shown ?? curve.y).findLast((v) => v !== null))))
  }

  value(curve, value) {
    const alone = this.curves.length === 1 && !curve.label
    return h("span", { class: "value" }, alone ? null : h("i", { class: curve.dash ? "swatch dashed" : "swatch", style: { "--swatch": curve.color } }),
      curve.label ? h("span", { class: "label" }, curve.label) : null, h("b", {}, value === undefined ? "–" : this.format(value)))
  }
}

function valueAt(curve, step) {
  const values = curve.shown ?? curve.y
  let found
  for (let i = 0; i < curve.x.length && curve.x[i] <= step; i++) if (values[i] !== null) found = values[i]
  return found
}

// Range of the y axis: with margins, and not blown up by noise around a constant.
function reach(_, low, high) {
  if (low === null || high === null || (low === 0 && high === 0)) return [0, 1]
  const size = Math.max(Math.abs(low), Math.abs(high))
  const room = Math.max((high - low) * 0.08, size * 0.06, 1e-9)
  const bottom = low >= 0 && low < 0.35 * high ? 0 : low - room
  return [bottom, high + room]
}
