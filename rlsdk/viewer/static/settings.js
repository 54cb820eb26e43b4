// Settings of one run, or the differences between several; and how a run ended.

import { get } from "./api.js"
import { append, h, replace, said, visible } from "./dom.js"

export function mount(element, first) {
  let context = first
  let order = 0
  const box = h("div", {})
  append(element, [box])

  async function refresh() {
    const mine = ++order
    const found = await Promise.all(context.chosen.map((run) => get(`settings/${run.id}`)))
    if (mine !== order) return
    const flat = found.map((each) => flatten(each.config))
    const keys = [...new Set(flat.flatMap((each) => [...each.keys()]))]
    const differ = (key) => flat.some((each) => each.get(key) !== flat[0].get(key))
    const shown = context.chosen.length > 1 ? keys.filter((key) => key !== "name" && differ(key)) : keys
    const { warnings = [], error } = found[0].summary
    replace(box,
      context.chosen.length === 1 ? [error ? h("p", { class: "trouble" }, said(error)) : null, warnings.map((each) => h("p", { class: "trouble mild" }, said(each)))] : null,
      h("h2", {}, context.chosen.length > 1 ? `Where ${context.chosen.length} runs differ` : "Settings"),
      h("p", { class: "hint" }, context.chosen.length === 1 ? h("span", {}, visible(context.run.path)) : null),
      h("div", { class: "table-box" }, h("table", { class: "settings" },
        context.chosen.length > 1 ? h("thead", {}, h("tr", {}, h("th", {}), context.chosen.map((run) => h("th", {}, visible(run.name))))) : null,
        h("tbody", {}, shown.map((key) => h("tr", { class: key === context.parameters.key ? "sought" : "" }, h("th", {}, visible(key)), flat.map((each) => h("td", {}, said(each.get(key) ?? "–")))))))))
    box.querySelector(".sought")?.scrollIntoView({ block: "center" })
  }
  refresh().catch((error) => replace(box, h("p", { class: "trouble" }, error.message)))
  return {
    navigate: (now) => { context = now; refresh(); return true },
    unmount: () => { order++ },
    keys: {},
  }
}

function flatten(value, path = "", found = new Map()) {
  const holds = value !== null && typeof value === "object" ? Object.values(value) : []
  if (Array.isArray(value) ? holds.some((each) => typeof each === "object") : holds.length) {
    for (const [key, each] of Object.entries(value)) flatten(each, path ? `${path}.${key}` : key, found)
  } else {
    found.set(path, Array.isArray(value) ? `[${value.join(", ")}]` : typeof value === "object" ? JSON.stringify(value) : String(value))
  }
  return found
}
