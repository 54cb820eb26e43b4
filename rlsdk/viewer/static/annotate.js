// The Annotate page: a queue of rollouts to compare, score or correct, with one key per judgement.

import { get, post } from "./api.js"
import { append, choice, debounce, empty, h, redraw, replace, said, visible } from "./dom.js"
import { opening, rewardMark } from "./rollouts.js"
import { conversation } from "./turns.js"

const FILTERS = ["kind", "source", "task", "step_from", "step_to", "reward_from", "reward_to", "status", "text", "order"]
const ASK = [["pair", "Compare two"], ["score", "Score"], ["edit", "Correct"]]
const FEW = 4
const MOST_BUTTONS = 9
const NAME = "rlsdk-annotator"

export function mount(element, first) {
  let context = first
  let facets = {}
  let buffer = []
  let next = null
  let done = false
  let counted = false
  let left = 0
  let made = 0
  let order = 0
  let group = null
  let revealed = false
  let busy = false
  let chosen = -1
  let failed = false
  let by = remembered()

  const bar = h("div", { class: "bar annotate-bar" })
  const filters = h("form", { class: "filters", onsubmit: (event) => event.preventDefault() })
  const progress = h("div", { class: "annotate-progress", role: "status" })
  const trouble = h("p", { class: "trouble", hidden: true, role: "alert" })
  const question = h("section", { class: "question", "aria-label": "Question" })
  const verdict = h("div", { class: "verdict", role: "group", "aria-label": "Answer" })
  append(element, [bar, filters, progress, trouble, question, verdict])

  const given = () => context.parameters
  const asked = () => ASK.some(([name]) => name === given().ask) ? given().ask : "pair"
  const wanted = () => Object.fromEntries([...FILTERS, "disagree"].map((name) => [name, given()[name]]).filter(([, value]) => value))
  const address = () => `annotate/${context.run.id}`

  function change(changes) {
    context.go(changes, { quietly: true })
    context.parameters = { ...context.parameters, ...changes }
    begin()
  }

  // Kind of question, person, and filter of the rollouts

  function drawBar() {
    const slow = debounce(300, begin)
    // After the first keystroke, no answer is stored under the previous name.
    const rename = (value) => {
      by = value.trim()
      remember(by)
      order++
      group = null
      replace(question, h("p", { class: "loading" }, "Loading …"))
      replace(verdict)
      replace(progress)
      slow()
    }
    const text = (name, label, props) => h("label", {}, `${label} `, h("input", { name, value: given()[name] ?? "", ...props, onchange: (event) => change({ [name]: event.target.value.trim() }) }))
    redraw(bar, choice("What to do", ASK, asked(), (value) => { change({ ask: value === "pair" ? "" : value }); drawBar() }),
      h("label", {}, "Your name ", h("input", { name: "by", value: by, maxlength: 80, oninput: (event) => rename(event.target.value) })),
      asked() === "score" ? [text("low", "Scores from", { inputmode: "decimal", placeholder: "1", class: "short" }), text("high", "to", { inputmode: "decimal", placeholder: "5", class: "short" }),
        text("labels", "or labels", { placeholder: "wrong, partly, right" })] : null)
  }

  function drawFilters() {
    const slow = debounce(300, change)
    const field = (name, label, props) => h("label", {}, h("span", {}, label), h("input", { name, value: given()[name] ?? "", ...props, oninput: (event) => slow({ [name]: event.target.value.trim() }) }))
    const select = (name, label, options) => h("label", {}, h("span", {}, label), h("select", { name, onchange: (event) => change({ [name]: event.target.value }) },
      options.map(([value, words]) => h("option", { value, selected: (given()[name] ?? "") === value }, words))))
    replace(filters,
      select("order", "Order", [["", "newest first"], ["oldest", "oldest first"]]),
      select("kind", "From", [["", "training"], ["eval", "evaluations"]]),
      select("source", "Source", [["", "any"], ...(facets.sources ?? []).map((name) => [name, visible(name)])]),
      h("span", { class: "pair" }, field("step_from", "Step from", { inputmode: "numeric" }), field("step_to", "to", { inputmode: "numeric" })),
      h("span", { class: "pair" }, field("reward_from", "Reward from", { inputmode: "decimal" }), field("reward_to", "to", { inputmode: "decimal" })),
      select("disagree", "Groups", [["", "all"], ["1", "rewards differ"]]))
  }

  // The queue

  async function begin() {
    order++
    buffer = []
    next = null
    done = false
    left = 0
    group = null
    busy = false
    replace(question, h("p", { class: "loading" }, "Loading …"))
    replace(verdict)
    if (!by) {
      replace(question, empty("Who are you?", "Enter your name above; annotations are stored under it."))
      return
    }
    await more()
    await show()
    drawProgress()
  }

  async function more() {
    const mine = order
    try {
      do {
        const found = await get(address(), { ...wanted(), ask: asked() === "pair" ? "" : asked(), by, cursor: next ? JSON.stringify(next) : "" })
        if (mine !== order) return
        left = buffer.length + found.left
        buffer.push(...found.items)
        next = found.next
        done = found.done
        counted = found.counted
        made = found.made
      } while (!buffer.length && !done)
      failed = false
      say("")
    } catch (error) {
      if (mine !== order) return
      done = true
      failed = true
      say(error.message)
    }
  }

  function drawProgress() {
    if (failed) { replace(progress); return }
    const all = made + left
    const rest = counted ? `${left.toLocaleString("en")} left` : `more than ${left.toLocaleString("en")} left`
    replace(progress, h("progress", { value: all ? made / all : 0, max: 1, "aria-label": "Annotated" }), `${made.toLocaleString("en")} done, ${rest}`)
  }

  async function show() {
    const mine = order
    chosen = -1
    revealed = false
    group = null
    if (!buffer.length) {
      replace(verdict)
      if (failed) replace(question) // the message above says why
      else replace(question, empty("Nothing left to annotate", made ? "You have seen all rollouts that match these filters. New ones appear here while the run trains." : "No rollout matches these filters."))
      return
    }
    try {
      const [[number]] = buffer[0]
      const found = await get(`rollouts/${context.run.id}/groups/${number}`)
      if (mine !== order) return
      group = found
      draw()
    } catch (error) {
      if (mine !== order) return
      say(error.message)
      buffer.shift()  // a resumed run may have dropped it
      if (!buffer.length && !done) await more()
      await show()
    }
  }

  function draw() {
    const rollouts = buffer[0].map(([, index]) => group.rollouts[index])
    replace(question, h("p", { class: "item-about" }, `step ${group.step ?? "–"} · `, said(group.task), " · ", said(group.source)),
      h("div", { class: "shared" }, conversation({ messages: opening(rollouts[0].messages) })),
      h("div", { class: "columns" }, rollouts.map((rollout, i) => h("article", { class: "column" },
        h("header", {}, rollouts.length > 1 ? h("b", {}, "AB"[i]) : null, h("small", {}, `${rollout.tokens} tokens${rollout.status === "finished" ? "" : ` · ${rollout.status}`}`), revealed ? rewardMark(rollout) : null),
        conversation({ messages: rollout.messages.slice(opening(rollout.messages).length) })))),
      revealed ? h("p", { class: "hint" }, "Reference answer: ", said(JSON.stringify(group.answer))) : h("button", { class: "link", onclick: reveal }, "Show rewards and the reference answer"))
    replace(verdict, ...{ pair: forPair, score: forScore, edit: forEdit }[asked()](rollouts),
      h("span", { class: "rest" }, button("Skip", "s", skip), button("Undo", "z", undo)))
  }

  const button = (text, key, action, props = {}) => h("button", { class: "button", ...props, onclick: action }, text, " ", h("kbd", {}, key))

  function forPair() {
    return [button("A is better", "1", () => answer("first")), button("B is better", "2", () => answer("second")), button("They are the same", "3", () => answer("same"))]
  }

  // Buttons for scores: labels, or the integers of a short range; otherwise a field.
  function scale() {
    const labels = (given().labels ?? "").split(",").map((text) => text.trim()).filter(Boolean)
    if (labels.length) return labels.slice(0, MOST_BUTTONS)
    const { low, high } = range()
    const whole = Number.isInteger(low) && Number.isInteger(high) && high >= low && high - low < MOST_BUTTONS
    return whole ? Array.from({ length: high - low + 1 }, (_, i) => low + i) : []
  }

  const range = () => ({ low: Number(given().low || 1), high: Number(given().high || 5) })

  function forScore() {
    const values = scale()
    if (!values.length && !(range().low < range().high)) return [h("p", { class: "trouble" }, visible(`Scores from ${given().low || 1} to ${given().high || 5}: expected two numbers, the lower one first.`))]
    if (values.length) return values.map((value, i) => button(visible(value), i + 1, () => answer(value), { class: `button ${i === chosen ? "on" : ""}` }))
    const { low, high } = range()
    const field = h("input", { type: "number", id: "score-field", step: "any", min: low, max: high, "aria-label": "Score", onkeydown: (event) => {
      const value = Number(field.value)
      if (event.key !== "Enter" || field.value === "") return
      if (value >= low && value <= high) answer(value)
      else say(`Expected a score from ${low} to ${high}, not ${value}.`)
    } })
    return [h("label", {}, `Score from ${low} to ${high} `, field, h("kbd", {}, "Enter"))]
  }

  function forEdit([rollout]) {
    const last = rollout.messages.filter((message) => message.role === "assistant" && !message.prompt).at(-1)
    const written = typeof last?.content === "string" && !last.cut ? last.content : null
    if (written === null) return [h("p", { class: "hint" }, "This answer cannot be corrected here: it is too long, or not text.")]
    const field = h("textarea", { id: "edit-field", rows: 6, "aria-label": "Corrected answer", value: written, onkeydown: (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); answer(field.value) }
    } })
    return [h("label", { class: "wide-field" }, "The last answer, corrected ", h("small", {}, h("kbd", {}, "e"), " to write, ", h("kbd", {}, "Esc"), " to leave the field"), field),
      button("Save", "Ctrl+Enter", () => answer(field.value)), button("It is right as it is", "1", () => answer(written))]
  }

  // Answers

  async function answer(value, kind = asked()) {
    if (!group || busy) return
    busy = true
    const mine = order
    try {
      await post(address(), { kind, value, by, places: buffer[0] })
      if (mine !== order) return
      say("")
      buffer.shift()
      left = Math.max(left - 1, 0)
      if (kind !== "skip") made++
      if (buffer.length < FEW && !done) await more()
      await show()
      drawProgress()
    } catch (error) {
      if (mine === order) say(error.message)
    } finally {
      if (mine === order) busy = false
    }
  }

  const skip = () => answer(asked(), "skip")

  // An answer given before its question is shown is dropped; an undo waits for its turn.
  let turn = Promise.resolve()
  const undo = () => { turn = turn.then(takeBack) }

  async function takeBack() {
    while (busy) await new Promise((resume) => { setTimeout(resume, 20) })
    if (!by) return
    busy = true
    const mine = order
    try {
      const found = await post(`${address()}/undo`, { by })
      if (mine !== order) return
      if (!found.item) {
        say("There is nothing to undo.")
        return
      }
      if (found.ask !== asked()) {
        busy = false
        change({ ask: found.ask === "pair" ? "" : found.ask })
        drawBar()
        return
      }
      say("")
      buffer.unshift(found.item)
      left++
      if (found.kind !== "skip") made = Math.max(made - 1, 0)
      await show()
      drawProgress()
    } catch (error) {
      if (mine === order) say(error.message)
    } finally {
      if (mine === order) busy = false
    }
  }

  function reveal() {
    if (!group) return
    const written = document.getElementById("edit-field")?.value
    revealed = !revealed
    draw()
    const field = document.getElementById("edit-field")
    if (field && written !== undefined) field.value = written
  }

  function press(i) {
    if (asked() === "pair") { if (i < 3) answer(["first", "second", "same"][i]) }
    else if (asked() === "score") { const values = scale(); if (i < values.length) answer(values[i]) }
    else if (i === 0) verdict.querySelectorAll("button")[1]?.click()
  }

  function arrow(by) {
    if (asked() === "pair") answer(by < 0 ? "first" : "second")
    else if (asked() === "score" && group && scale().length) {
      chosen = Math.min(Math.max(chosen + by, 0), scale().length - 1)
      draw()
    }
  }

  function enter() {
    if (document.activeElement instanceof HTMLButtonElement) document.activeElement.click()
    else if (asked() === "score" && chosen >= 0) answer(scale()[chosen])
  }

  function say(text) {
    trouble.hidden = !text
    trouble.textContent = visible(text)
  }

  async function start() {
    drawBar()
    drawFilters()
    try {
      const found = await get(`${address()}/who`)
      if (!by) { by = found.by; drawBar() }
    } catch (error) {
      replace(question, empty("This run cannot be annotated here", error.message))
      return
    }
    begin()
    try {
      facets = await get(`rollouts/${context.run.id}/facets`)
      drawFilters()
    } catch { /* the queue shows the reason */ }
  }
  start()

  const digits = Object.fromEntries(Array.from({ length: MOST_BUTTONS }, (_, i) => [String(i + 1), [["A is better, or the first score", "B is better, or the second score", "they are the same, or the third score"][i] ?? `score ${i + 1}`, () => press(i)]]))
  return {
    refresh: (now) => {
      const grown = now.run.rows !== context.run.rows || now.run.stored !== context.run.stored
      context = { ...now, parameters: { ...now.parameters } }
      if (grown && done && !buffer.length && by) begin()
    },
    navigate: (now) => {
      const same = now.run.id === context.run.id
      const before = JSON.stringify([asked(), wanted()])
      context = { ...now, parameters: { ...now.parameters } }
      if (!same) start()
      else if (JSON.stringify([asked(), wanted()]) !== before) { drawBar(); drawFilters(); begin() }
      return true
    },
    unmount: () => { order++ },
    keys: {
      ...digits,
      "ArrowLeft": ["A is better, or a lower score", () => arrow(-1)], "ArrowRight": ["B is better, or a higher score", () => arrow(1)],
      "ArrowDown": ["they are the same", () => asked() === "pair" && answer("same")],
      "Enter": ["save the score chosen with the arrows", enter],
      "e": ["write a correction; Ctrl+Enter saves it", () => document.getElementById("edit-field")?.focus()],
      "s": ["skip", skip], "z": ["undo", undo], "r": ["show or hide rewards and the reference answer", reveal],
    },
  }
}

function remembered() {
  try { return localStorage.getItem(NAME) ?? "" } catch { return "" }
}

function remember(name) {
  try { localStorage.setItem(NAME, name) } catch { /* the browser stores nothing */ }
}
