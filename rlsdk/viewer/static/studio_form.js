// The studio's form: foldable sections of keys with type, default and help. It shows a tree of values and reports edits.

import { h, redraw, replace, visible, withCode } from "./dom.js"

const NUMBER = /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i

export const key = (path) => path.join(".")

// A member of a value in short or long form: a name stands for a component, an item for a list of one.
export function member(value, name) {
  if (typeof name === "number") return items(value)[name]
  if (typeof value === "string") return name === "use" ? value : undefined
  return value?.[name]
}

export const items = (value) => Array.isArray(value) ? value : value === undefined || value === null ? [] : [value]

export const at = (tree, path) => path.reduce(member, tree)

// A copy of a tree with the value at a path set, or removed if undefined.
export function put(tree, [name, ...rest], value) {
  if (name === undefined) return value
  if (typeof name === "number") {
    const found = [...items(tree)]
    found[name] = put(found[name], rest, value)
    return found.filter((each) => each !== undefined)
  }
  const found = typeof tree === "string" ? { use: tree } : { ...tree }
  found[name] = put(found[name], rest, value)
  if (found[name] === undefined) delete found[name]
  return found
}

function written(value) {
  if (value === undefined) return ""
  if (typeof value === "string") return value === "" ? '""' : value
  if (value !== null && typeof value === "object") return flow(value)
  return String(value)
}

// YAML on one line.
function flow(value) {
  if (Array.isArray(value)) return `[${value.map(flow).join(", ")}]`
  if (value !== null && typeof value === "object") return `{${Object.entries(value).map(([name, each]) => `${name}: ${flow(each)}`).join(", ")}}`
  return typeof value === "string" && !/^[A-Za-z_][\w./-]*$/.test(value) ? JSON.stringify(value) : String(value)
}

// A single component may also be a list of them, which act as one.
const several = (field, value) => field.widget === "components" || (field.widget === "component" && Array.isArray(value))

const named = (value) => typeof value === "string" ? value : value?.use

export class Form {
  // `edit(path, change)` is called for each edit: a change has `value`, `yaml` (text of a value), or neither, to remove the key.
  constructor(element, edit) {
    this.element = element
    this.edit = edit
    this.open = new Set([""])
    this.controls = new Map()
    this.boxes = new Map()
    this.built = ""
  }

  show(form, tree, defaults) {
    this.form = form
    this.tree = tree
    this.defaults = defaults ?? {}
    const shape = JSON.stringify([form.fields.map((field) => this.shape(field, tree[field.name])), this.defaults, form.number])
    if (shape === this.built) {
      for (const control of this.controls.values()) control()
      return
    }
    this.built = shape
    this.controls.clear()
    this.boxes.clear()
    const plain = form.fields.filter((field) => !["section", "component", "components"].includes(field.widget))
    const others = form.fields.filter((field) => !plain.includes(field))
    redraw(this.element,
      this.fold([], "Run", "Name, length, batch sizes", () => plain.map((field) => this.field(field, [field.name])), plain.map((field) => [field.name])),
      others.map((field) => this.field(field, [field.name])))
  }

  // The chosen components and the lengths of lists, on which the controls depend.
  shape(field, value) {
    if (field.widget === "section") return [Boolean(value), field.fields.map((each) => this.shape(each, member(value, each.name)))]
    if (several(field, value)) return [value === undefined, items(value).map((each) => this.shape({ ...field, widget: "component" }, each))]
    if (field.widget !== "component") return 0
    const name = value === null ? null : named(value) ?? named(field.default)
    const found = this.form.components[field.kind]?.[name]
    return [name, (found?.fields ?? []).map((each) => this.shape(each, member(value, each.name)))]
  }

  fold(path, title, help, content, covers = [path]) {
    const name = key(path)
    const badge = h("span", { class: "badge" })
    const body = h("div", { class: "fold-body" })
    const box = h("details", { class: "fold", open: this.open.has(name) }, h("summary", { "data-key": `fold:${name}` }, h("b", {}, title), badge, h("small", {}, help)), body)
    const fill = () => { if (!body.childElementCount) replace(body, this.faultBox(path), content()) }
    box.addEventListener("toggle", () => {
      if (box.open) this.open.add(name)
      else this.open.delete(name)
    })
    fill()
    const count = () => {
      const set = covers.map((each) => at(this.tree, each)).reduce((sum, value) => sum + leaves(value), 0)
      badge.textContent = set ? `${set} set` : ""
    }
    this.controls.set(`fold:${name}`, count)
    count()
    return box
  }

  faultBox(path) {
    const box = h("p", { class: "fault", id: `fault-${key(path)}`, hidden: true })
    this.boxes.set(key(path), box)
    return box
  }

  field(field, path, own = field.default) {
    if (field.widget === "section") return this.section(field, path)
    if (several(field, at(this.tree, path))) return this.fold(path, field.name, field.help, () => this.list({ ...field, widget: "components" }, path))
    if (field.widget === "component") return this.fold(path, field.name, field.help, () => this.component(field, path, own))
    return this.row(field, path, this.control(field, path, own), own)
  }

  section(field, path) {
    return this.fold(path, field.name, field.help, () => [
      field.nullable ? h("label", { class: "check" }, h("input", {
        type: "checkbox", checked: Boolean(at(this.tree, path)),
        onchange: (event) => this.edit(path, event.target.checked ? { value: {} } : {}),
      }), `its own ${field.name}`) : null,
      field.nullable && !at(this.tree, path) ? null : field.fields.map((each) => this.field(each, [...path, each.name]))])
  }

  row(field, path, control, own) {
    const name = key(path)
    const given = this.defaults[name] !== undefined ? `${written(this.defaults[name])}, by the algorithm` : written(own) || '""'
    const about = [field.type, field.required ? "required" : `default ${given}`, field.unit].filter(Boolean).join(" · ")
    control.dataset.key = name
    control.id = `key-${name}`
    control.setAttribute("aria-describedby", `about-${name} fault-${name}`)
    return h("div", { class: "key", "data-words": `${name} ${field.help}`.toLowerCase() },
      h("label", { for: `key-${name}` }, visible(field.name)), control,
      h("p", { class: "hint", id: `about-${name}` }, h("code", {}, visible(about)), " ", withCode(field.help)), this.faultBox(path))
  }

  control(field, path, own) {
    const now = () => at(this.tree, path)
    if (field.widget === "flag") {
      return this.select(path, [["", `default: ${own}`], ["true", "true"], ["false", "false"], ...(field.nullable ? [["null", "null"]] : [])],
        () => now() === undefined ? "" : String(now()), (text) => text ? { value: JSON.parse(text) } : {})
    }
    if (field.widget === "choice") {
      const known = field.choices.map((each) => [String(each), String(each)])
      return this.select(path, [["", field.required ? "choose …" : `default: ${written(own)}`], ...known, ...(field.nullable ? [["null", "null"]] : [])],
        () => now() === undefined ? "" : String(now()),
        (text) => text === "" ? {} : text === "null" && field.nullable ? { value: null } : { value: field.choices.find((each) => String(each) === text) ?? text })
    }
    const input = h("input", {
      type: "text", value: written(now()), spellcheck: "false", autocomplete: "off", placeholder: field.required ? "" : written(own),
      inputmode: field.widget === "number" ? "decimal" : undefined,
      oninput: () => this.edit(path, change(field, input.value.trim() ? input.value : ""), { slowly: true }),
    })
    this.controls.set(key(path), () => { if (input !== document.activeElement) input.value = written(now()) })
    return input
  }

  select(path, options, now, change) {
    const select = h("select", { onchange: () => this.edit(path, change(select.value)) }, options.map(([value, text]) => h("option", { value }, visible(text))))
    const update = () => {
      const value = now()
      if (![...select.options].some((each) => each.value === value)) select.append(h("option", { value }, visible(value)))
      select.value = value
    }
    this.controls.set(key(path), update)
    update()
    return select
  }

  // A component: its name, and the options of the component with that name.
  component(field, path, own, remove = null) {
    const value = at(this.tree, path)
    const usual = named(own)
    const chosen = named(value) ?? usual
    const known = this.form.components[field.kind] ?? {}
    const select = h("select", { onchange: () => this.choose(field, path, select) },
      this.choices(field, known, usual).map(([name, text]) => h("option", { value: name }, visible(text))))
    const now = value === null ? "null" : named(value) ?? ""
    if (![...select.options].some((each) => each.value === now)) select.append(h("option", { value: now }, visible(now)))
    select.value = now
    const listed = field.widget === "components"
    const summary = known[chosen]?.summary ?? (chosen ? "Not in an installed plugin; the check reports whether it is found." : "")
    const use = { name: listed ? field.kind : "use", type: field.kind, help: summary, required: listed }
    const mine = chosen === usual && own && typeof own === "object" ? own : {}
    return h("div", { class: "component" },
      this.row(use, [...path, "use"], select, usual ?? "none"), remove,
      (field.fields ?? []).map((each) => this.field(each, [...path, each.name])),
      (known[chosen]?.fields ?? []).map((each) => this.field(each, [...path, each.name], mine[each.name] ?? each.default)))
  }

  choices(field, known, usual) {
    const none = field.widget === "components" ? "choose …" : usual ? `default: ${usual}` : "default"
    const names = Object.keys(known).map((name) => [name, name])
    const builtin = field.kind === "diagnosis" ? [["builtin", "builtin"]] : []
    return [["", none], ...(field.nullable && usual ? [["null", "none"]] : []), ...builtin, ...names, ["…", "another name …"]]
  }

  choose(field, path, select) {
    if (select.value === "…") {
      const input = h("input", { type: "text", "aria-label": `Name of the ${field.kind}`, placeholder: "PLUGIN/NAME",
        onchange: () => input.value.trim() && this.edit(path, { value: { use: input.value.trim() } }) })
      select.replaceWith(input)
      input.focus()
      return
    }
    const text = select.value
    if (text === "null") this.edit(path, { value: null })
    else if (text === "" && field.widget !== "components") this.edit(path, {})
    else this.edit(path, { value: { use: text, ...this.kept(field, path, text) } })
  }

  // When another component is chosen, keys next to the options stay, and so do options that both have.
  kept(field, path, name) {
    const value = at(this.tree, path)
    if (!value || typeof value !== "object") return {}
    const stays = new Set([...(field.fields ?? []), ...(this.form.components[field.kind]?.[name]?.fields ?? [])].map((each) => each.name))
    return Object.fromEntries(Object.entries(value).filter(([each]) => stays.has(each)))
  }

  list(field, path) {
    const given = at(this.tree, path)
    const found = items(given === undefined ? field.default : given)
    const without = (i) => {
      const rest = items(at(this.tree, path)).filter((_, n) => n !== i)
      return rest.length ? { value: rest } : {}
    }
    const add = () => this.edit(path, { value: [...items(at(this.tree, path) ?? field.default), { use: "" }] })
    return [
      found.map((each, i) => given === undefined ? h("p", { class: "hint" }, `default: ${visible(named(each))}`)
        : this.component(field, [...path, i], null, h("button", { type: "button", class: "link remove", onclick: () => this.edit(path, without(i)) }, "Remove"))),
      h("button", { type: "button", class: "button", "data-key": `add:${key(path)}`, onclick: add }, `Add: ${field.kind}`),
    ]
  }

  // Shows messages next to their keys: a Map of keys to lists.
  fault(found) {
    for (const [name, box] of this.boxes) {
      const said = found.get(name) ?? []
      box.hidden = !said.length
      box.textContent = said.map(visible).join(" ")
      this.element.querySelector(`[data-key="${CSS.escape(name)}"]`)?.setAttribute("aria-invalid", String(said.length > 0))
    }
    for (const fold of this.element.querySelectorAll("details.fold")) fold.classList.toggle("bad", Boolean(fold.querySelector(".fault:not([hidden])")))
  }

  // The form key at which a fault is shown: that of its path, or the nearest one above.
  place(path) {
    const parts = path.replace(/\[(\d+)\]/g, ".$1").split(".").filter(Boolean)
    for (let count = parts.length; count; count--) {
      const name = parts.slice(0, count).join(".")
      const single = name.replace(/^(reward|tasks\.train|tasks\.eval|trackers|diagnoses)(?=$|\.(?!\d))/, "$1.0")
      const found = [`${single}.use`, `${name}.use`, single, name]
      const place = (count === parts.length ? found : found.reverse()).find((each) => this.boxes.has(each))
      if (place) return place
    }
    return ""
  }

  reveal(name) {
    const box = this.boxes.get(name)
    if (!box) return
    for (let fold = box.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true
    const control = this.element.querySelector(`[data-key="${CSS.escape(name)}"]`) ?? box
    control.scrollIntoView({ block: "center" })
    control.focus?.()
  }

  // Shows only keys whose name or help contains these words.
  find(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean)
    for (const row of this.element.querySelectorAll(".key")) row.hidden = !words.every((word) => row.dataset.words.includes(word))
    for (const fold of [...this.element.querySelectorAll("details.fold")].reverse()) {
      const some = Boolean(fold.querySelector(".key:not([hidden])"))
      fold.hidden = words.length > 0 && !some
      if (words.length && some) fold.open = true
    }
  }
}

function leaves(value) {
  if (value === undefined) return 0
  if (value === null || typeof value !== "object") return 1
  return Object.values(value).reduce((sum, each) => sum + leaves(each), 0)
}

function change(field, text) {
  if (text === "") return {}
  const trimmed = text.trim()
  if (field.nullable && trimmed === "null") return { value: null }
  if (field.widget === "text") return trimmed === '""' ? { value: "" } : { value: text }
  if (field.widget === "number" && NUMBER.test(trimmed)) return { yaml: trimmed }
  return { yaml: trimmed }
}
