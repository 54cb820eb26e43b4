// Building blocks of the pages. Text becomes text nodes, never markup, so text written by a model is harmless.

export function h(tag, props, ...children) {
  const element = document.createElement(tag)
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value)
    else if (name === "class") element.className = value
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each)
    else if (name === "value" || name === "checked") element[name] = value
    else element.setAttribute(name, value === true ? "" : value)
  }
  append(element, children)
  return element
}

export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === undefined || child === null || child === false) continue
    element.append(child instanceof Node ? child : document.createTextNode(String(child)))
  }
}

export function replace(element, ...children) {
  element.replaceChildren()
  append(element, children)
  return element
}

// Like `replace`, for parts that are drawn again while in use: the focus stays on the element with the same `data-key`.
export function redraw(element, ...children) {
  const focus = element.contains(document.activeElement) ? document.activeElement.dataset.key : undefined
  replace(element, ...children)
  if (focus) element.querySelector(`[data-key="${CSS.escape(focus)}"]`)?.focus({ preventScroll: true })
}

// Like `replace`, for content without actions: left alone while it is the same, so that an open list or a selection stays.
export function update(element, ...children) {
  const made = replace(element.cloneNode(false), ...children)
  if (!made.isEqualNode(element)) element.replaceChildren(...made.childNodes)
}

// Invisible characters with an effect: terminal and text-direction controls, and unpaired surrogates.
const ACTING = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|\p{Cs}/gu

function visibleCharacter(character) {
  const code = character.codePointAt(0)
  if (code === 0x1b) return "␛"
  if (code < 0x20) return String.fromCodePoint(0x2400 + code)
  if (code >= 0xd800 && code <= 0xdfff) return "\ufffd"
  return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`
}

export function visible(text) {
  return String(text ?? "").replace(ACTING, visibleCharacter)
}

// Text of a model: control characters are made visible, and its text direction ends with it.
export function said(text, props = {}) {
  return h("span", { ...props, class: `said ${props.class ?? ""}`, dir: "auto" }, visible(text))
}

// Sentences of rlsdk, whose `code` is shown as such.
export function withCode(text) {
  return String(text ?? "").split("`").map((part, i) => i % 2 ? h("code", {}, visible(part)) : visible(part))
}

const LONG = 6000

// A long text, folded, since a megabyte would block the page.
export function longText(text, props = {}) {
  const whole = String(text ?? "")
  if (whole.length <= LONG) return said(whole, props)
  const body = said(whole.slice(0, LONG), props)
  const more = h("button", { class: "link", onclick: () => { body.textContent = visible(whole); more.remove() } },
    `show all ${whole.length.toLocaleString("en")} characters`)
  return h("span", {}, body, " ", more)
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–"
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return (value || 0).toLocaleString("en") // not -0
  const size = Math.abs(value)
  if (size >= 1e7 || (size > 0 && size < 1e-3)) return value.toExponential(2)
  return value.toLocaleString("en", { maximumSignificantDigits: digits })
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–"
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`
  if (seconds < 120) return `${number(seconds, 3)} s`
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`
  return seconds < 172800 ? `${number(seconds / 3600, 2)} h` : `${Math.round(seconds / 86400)} d`
}

export function bytes(count) {
  if (!count) return "–"
  const units = ["B", "KB", "MB", "GB", "TB"]
  const power = Math.min(Math.floor(Math.log(count) / Math.log(1024)), units.length - 1)
  return `${number(count / 1024 ** power, 3)} ${units[power]}`
}

// A row of buttons, one of them selected.
export function choice(label, options, chosen, change) {
  const group = h("div", { class: "choice", role: "radiogroup", "aria-label": label, onkeydown: arrows },
    options.map(([value, text]) => h("button", {
      role: "radio", "data-key": `${label}:${value}`, "data-value": value, onclick: () => { select(group, value); change(value) },
    }, text)))
  select(group, chosen)
  return group
}

// Selects a button of a radio group or a list of tabs: the one of them that the Tab key stops at.
export function select(group, value) {
  const state = group.getAttribute("role") === "tablist" ? "aria-selected" : "aria-checked"
  for (const each of group.children) {
    const chosen = each.dataset.value === String(value)
    each.setAttribute(state, String(chosen))
    each.tabIndex = chosen ? 0 : -1
  }
  if (group.firstElementChild && !group.querySelector("[tabindex='0']")) group.firstElementChild.tabIndex = 0
}

// Keys of a radio group or a list of tabs: they choose the next or previous button, and from each end the other one.
export function arrows(event) {
  const buttons = [...event.currentTarget.children]
  const at = buttons.indexOf(document.activeElement)
  const vertical = event.currentTarget.getAttribute("role") === "radiogroup" ? { ArrowDown: at + 1, ArrowUp: at - 1 } : {}
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: -1, ...vertical }[event.key]
  if (at < 0 || to === undefined || event.ctrlKey || event.metaKey || event.altKey) return
  event.preventDefault()
  event.stopPropagation() // a page has keys of its own
  const chosen = buttons.at(to % buttons.length)
  chosen.focus()
  chosen.click()
}

export function empty(title, text) {
  return h("div", { class: "empty" }, h("h2", {}, title), h("p", {}, text))
}

export function debounce(wait, action) {
  let timer
  return (...given) => { clearTimeout(timer); timer = setTimeout(() => action(...given), wait) }
}
