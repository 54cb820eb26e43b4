// The rollout browser: filters, a list that loads while scrolling, and one rollout or its whole group next to it.

import { get } from "./api.js"
import { between } from "./colors.js"
import { append, choice, debounce, empty, h, number, redraw, replace, said, visible } from "./dom.js"
import { tokens } from "./tokens.js"
import { conversation } from "./turns.js"

const FIELDS = ["kind", "text", "source", "task", "step_from", "step_to", "reward_from", "reward_to", "status", "state", "invalid", "order"]
const ORDERS = [["newest", "newest first"], ["oldest", "oldest first"], ["lowest", "lowest reward"], ["highest", "highest reward"], ["longest", "longest"], ["shortest", "shortest"]]
const STATUSES = ["finished", "truncated", "aborted", "failed"]
const MOST = 1500

export function rewardMark(row) {
  if (!row.valid) return h("span", { class: "reward none", title: row.reason ?? "" }, "no score")
  return h("span", { class: "reward", style: { "background-color": between(row.reward, { diverging: true }) } }, number(row.reward, 3))
}

export function mount(element, first) {
  let context = first
  let facets = {}
  let rows = []
  let next = null
  let done = false
  let passed = 0
  let loading = false
  let order = 0
  let at = -1
  let view = "turns"
  let detailOrder = 0
  let unfolded = false

  const filters = h("form", { class: "filters", onsubmit: (event) => event.preventDefault() })
  const list = h("ol", { class: "list", "aria-label": "Rollouts", tabindex: "0" })
  const foot = h("p", { class: "list-foot" })
  const detail = h("section", { class: "detail", "aria-label": "Rollout" })
  const fresh = h("button", { class: "fresh", hidden: true, onclick: () => load(true) }, "Show newer rollouts")
  const pane = h("div", { class: "list-pane" }, fresh, list, foot)
  const box = h("div", { class: "browser" }, pane, detail)
  append(element, [filters, box])

  const wanted = () => Object.fromEntries(FIELDS.map((name) => [name, context.parameters[name]]).filter(([, value]) => value))

  function drawFilters() {
    const given = context.parameters
    const change = (changes) => { context.go({ ...changes, at: "" }, { quietly: true }); context.parameters = { ...context.parameters, ...changes }; drawChips(); load(true) }
    const slow = debounce(250, change)
    const field = (name, label, props) => h("label", {}, h("span", {}, label), h("input", { name, value: given[name] ?? "", ...props, oninput: (event) => slow({ [name]: event.target.value.trim() }) }))
    const select = (name, label, options) => h("label", {}, h("span", {}, label), h("select", { name, onchange: (event) => change({ [name]: event.target.value }) },
      options.map(([value, text]) => h("option", { value, selected: (given[name] ?? "") === value }, text))))
    const any = (values) => [["", "any"], ...values.map((value) => [value, visible(value)])]
    const rest = ["state", "task", "invalid", "kind"]
    const folded = h("span", { class: "folded", hidden: !unfolded && !rest.some((name) => given[name]) },
      select("kind", "From", [["", "training"], ["eval", "evaluations"]]),
      select("state", "Group", any(facets.states ?? [])),
      field("task", "Task", { placeholder: "id", class: "middle" }),
      select("invalid", "Score", [["", "any"], ["1", "no score"]]))
    const more = h("button", { type: "button", class: "button more", "aria-expanded": String(!folded.hidden), onclick: () => {
      unfolded = folded.hidden
      folded.hidden = !unfolded
      more.setAttribute("aria-expanded", String(unfolded))
    } }, "More")
    replace(filters,
      field("text", "Text", { type: "search", placeholder: "in prompt or answer", id: "text-search", class: "wide" }),
      select("order", "Order", ORDERS.map(([value, text]) => [value === "newest" ? "" : value, text])),
      h("span", { class: "pair" }, field("reward_from", "Reward from", { inputmode: "decimal" }), field("reward_to", "to", { inputmode: "decimal" })),
      h("span", { class: "pair" }, field("step_from", "Step from", { inputmode: "numeric" }), field("step_to", "to", { inputmode: "numeric" })),
      select("source", "Source", any(facets.sources ?? [])),
      select("status", "Ended", any(STATUSES)),
      more, folded)
    drawChips()
  }

  const chips = h("p", { class: "chips" })
  function drawChips() {
    const given = Object.entries(wanted())
    if (!chips.isConnected) filters.after(chips)
    replace(chips, given.length ? [given.map(([name, value]) => h("button", { class: "tag on", title: "remove", onclick: () => clear([name]) }, name === "invalid" ? "no score ×" : `${name.replace("_", " ")}: ${visible(value)} ×`)),
      given.length > 1 ? h("button", { class: "link", onclick: () => clear(FIELDS) }, "clear all") : null] : null)
  }

  function clear(names) {
    const changes = Object.fromEntries(names.map((name) => [name, ""]))
    context.parameters = { ...context.parameters, ...changes }
    context.go(changes, { quietly: true })
    drawFilters()
    load(true)
  }

  async function load(again) {
    if (loading && !again) return
    const mine = again ? ++order : order
    loading = true
    if (again) {
      next = null
      done = false
      passed = 0
      fresh.hidden = true
    }
    let more = false
    replace(foot, "Loading …")
    try {
      const page = await get(`rollouts/${context.run.id}`, { ...wanted(), cursor: again || !next ? "" : JSON.stringify(next) })
      if (mine !== order) return
      if (again) {
        rows = []
        at = -1
        replace(list)
      }
      rows.push(...page.rows)
      next = page.next
      done = page.done
      append(list, page.rows.map((row, i) => item(row, rows.length - page.rows.length + i)))
      foots(page)
      // The server may stop before it has found any rollout: the search continues automatically.
      more = !done && (rows.length < 20 || !page.rows.length)
      if (at < 0 && rows.length) select(found(context.parameters.at), { quietly: true })
      box.classList.toggle("nothing", !rows.length && done)
      if (!rows.length) replace(detail, done ? none() : h("p", { class: "loading" }, "Searching …"))
    } catch (error) {
      if (mine !== order) return
      done = true
      box.classList.add("nothing")
      replace(list)
      replace(foot)
      replace(detail, empty("Nothing to show", error.message))
    } finally {
      if (mine === order) loading = false
    }
    if (mine === order && more) load(false)
  }

  function found(place) {
    const i = rows.findIndex((row) => `${row.number}.${row.rollout}` === place)
    return Math.max(i, 0)
  }

  const none = () => passed ? empty("End of the list", `No more rollouts match these filters, after the previous ${passed.toLocaleString("en")}.`)
    : empty("No rollout matches these filters", "Remove one of them above.")

  function foots(page) {
    const shown = rows.length.toLocaleString("en")
    if (done) replace(foot, rows.length ? `${passed ? "the last" : "all"} ${shown} shown` : "")
    else if (rows.length >= MOST) replace(foot, h("button", { class: "button", onclick: further }, `${shown} shown; continue from here`))
    else replace(foot, page.at_step === null ? `${shown} shown` : `${shown} shown, searched to step ${page.at_step}`)
  }

  // An endless list would exhaust the browser: the next rollouts replace the previous ones.
  function further() {
    const cursor = next
    passed += rows.length
    rows = []
    at = -1
    replace(list)
    next = cursor
    load(false)
  }

  function item(row, i) {
    const together = i > 0 && rows[i - 1].number === row.number
    return h("li", { class: `item ${together ? "same" : ""}`, "data-i": i, onclick: () => { select(i); box.classList.add("opened") } },
      rewardMark(row),
      h("div", { class: "item-text" }, h("p", { class: "item-answer" }, said(row.response || "(nothing)")),
        h("p", { class: "item-about" }, together ? null : [`step ${row.step ?? "–"} · `, said(row.task), " · "], `#${row.rollout} · ${number(row.tokens)} tokens`,
          row.status === "finished" ? null : h("b", {}, ` · ${visible(row.status)}`), row.reason ? h(row.valid ? "span" : "b", {}, ` · ${visible(row.reason).slice(0, 60)}`) : null)))
  }

  function select(i, { quietly = false } = {}) {
    if (!rows[i]) return
    list.children[at]?.classList.remove("chosen")
    at = i
    const row = rows[at]
    const chosen = list.children[at]
    chosen?.classList.add("chosen")
    if (!quietly) chosen?.scrollIntoView({ block: "nearest" })
    context.parameters.at = `${row.number}.${row.rollout}`
    context.go({ at: context.parameters.at }, { quietly: true })
    show()
    if (at > rows.length - 15 && !done && rows.length < MOST) load(false)
  }

  let group = null
  async function show() {
    const row = rows[at]
    const mine = ++detailOrder
    if (!row) return
    if (group?.number !== row.number || group?.run !== context.run.id) {
      try {
        const answer = await get(`rollouts/${context.run.id}/groups/${row.number}`)
        if (mine !== detailOrder) return
        group = { ...answer, run: context.run.id }
      } catch (error) {
        if (mine === detailOrder) replace(detail, empty("This rollout cannot be shown", error.message))
        return
      }
    }
    drawDetail(mine)
  }

  async function drawDetail(mine) {
    const i = rows[at].rollout
    const rollout = group.rollouts[i]
    const body = h("div", { class: "detail-body" })
    redraw(detail, head(group, rollout, i), choice("View", [["turns", "Conversation"], ["tokens", "Tokens"], ["group", `Group of ${group.rollouts.length}`]], view, (value) => { view = value; drawDetail(++detailOrder) }), body)
    if (view === "turns") append(body, [conversation(rollout), score(rollout), about(group, rollout)])
    else if (view === "group") append(body, sideBySide())
    else {
      replace(body, h("p", { class: "loading" }, "Loading the tokens …"))
      try {
        const made = await tokens(context.run.id, group.number, i)
        if (mine === detailOrder) replace(body, made)
      } catch (error) {
        if (mine === detailOrder) replace(body, empty("The tokens cannot be shown", error.message))
      }
    }
  }

  function head(given, rollout, i) {
    return h("header", { class: "detail-head" },
      h("button", { class: "button back", onclick: () => box.classList.remove("opened") }, "‹ List"),
      rewardMark(rollout),
      h("h2", {}, said(given.task), h("small", {}, ` #${i} of ${given.rollouts.length}`)),
      h("p", { class: "item-about" }, `step ${given.step ?? "–"} · `, said(given.source), ` · ${visible(given.state)} · ${visible(rollout.status)} · ${number(rollout.tokens)} sampled tokens`,
        rollout.versions ? ` · weights ${rollout.versions[0] === rollout.versions[1] ? rollout.versions[0] : rollout.versions.join(" to ")}` : ""),
      h("p", { class: "group-strip", "aria-label": "Rewards of the group" }, given.rollouts.map((each, n) => h("button", {
        class: `dot ${n === i ? "on" : ""} ${each.valid ? "" : "none"}`, title: each.valid ? `#${n}: ${number(each.reward)}` : `#${n}: no score`,
        style: each.valid ? { "background-color": between(each.reward, { diverging: true }) } : {}, onclick: () => jump(n),
      }, each.valid ? number(each.reward, 2) : "–"))),
      rollout.valid ? null : h("p", { class: "trouble" }, h("b", {}, "No score: "), said(rollout.reason || "the scorer gave no reason")))
  }

  // Show another rollout of the group, wherever it is in the list.
  function jump(n) {
    const i = rows.findIndex((row) => row.number === group.number && row.rollout === n)
    if (i >= 0) select(i)
    else {
      rows.splice(at + 1, 0, { ...rows[at], ...group.rollouts[n], task: group.task, number: group.number, rollout: n, step: group.step, response: "" })
      replace(list, rows.map(item))
      select(at + 1)
    }
  }

  function score(rollout) {
    const parts = Object.entries(rollout.parts)
    const rewards = parts.filter(([name]) => name.startsWith("reward/"))
    const most = Math.max(1, ...rewards.map(([, value]) => Math.abs(value ?? 0)))
    const bar = (value) => h("div", { class: "stack" }, h("i", { class: `part ${value < 0 ? "failed" : "trained"}`, style: { width: `${100 * Math.abs(value ?? 0) / most}%` } }))
    return h("section", { class: "score" }, h("h3", {}, "Score"),
      h("table", {}, h("tbody", {},
        h("tr", {}, h("th", {}, "reward"), h("td", {}, rollout.valid ? number(rollout.reward) : "none"), h("td", {})),
        parts.map(([name, value]) => h("tr", {}, h("th", {}, visible(name)), h("td", {}, number(value)),
          h("td", { class: "bars" }, name.startsWith("reward/") ? bar(value) : null))))),
      rollout.valid && rollout.reason ? h("p", { class: "hint" }, "Reason: ", said(rollout.reason)) : null)
  }

  function about(given, rollout) {
    const rest = Object.entries(rollout.metrics).filter(([name]) => !(name in rollout.parts))
    return h("details", { class: "about" }, h("summary", {}, "Task, answer and metrics"),
      h("dl", {}, [["answer", given.answer], ["metadata", given.metadata], ["trajectory", rollout.trajectory], ["group", given.uid], ...rest]
        .filter(([, value]) => value !== null && value !== "" && JSON.stringify(value) !== "{}")
        .map(([name, value]) => [h("dt", {}, visible(name)), h("dd", {}, said(typeof value === "object" ? JSON.stringify(value) : value))])))
  }

  function sideBySide() {
    return [h("div", { class: "shared" }, conversation({ messages: opening(group.rollouts[0].messages) })),
      h("div", { class: "columns" }, group.rollouts.map((rollout, n) => h("article", { class: `column ${n === rows[at].rollout ? "on" : ""}` },
        h("header", {}, rewardMark(rollout), h("b", {}, `#${n}`), h("small", {}, `${number(rollout.tokens)} tokens${rollout.status === "finished" ? "" : ` · ${rollout.status}`}`)),
        rollout.valid ? null : h("p", { class: "trouble" }, said(rollout.reason)),
        conversation({ messages: rollout.messages.slice(opening(rollout.messages).length) }))))]
  }

  list.addEventListener("keydown", (event) => {
    const change = { ArrowDown: 1, ArrowUp: -1 }[event.key]
    if (!change) return
    event.preventDefault()
    move(change)
  })
  pane.addEventListener("scroll", () => {
    if (pane.scrollTop + pane.clientHeight > pane.scrollHeight - 600 && !done && rows.length && rows.length < MOST) load(false)
  })

  async function begin() {
    drawFilters()
    load(true)
    try {
      facets = await get(`rollouts/${context.run.id}/facets`)
      drawFilters()
    } catch { /* the list shows the reason */ }
  }
  begin()

  const move = (change) => select(Math.min(Math.max(at + change, 0), rows.length - 1))
  const toggle = (name) => { view = view === name ? "turns" : name; if (group) drawDetail(++detailOrder) }
  return {
    refresh: (now) => {
      const step = now.run.step
      if (context.run.id === now.run.id && now.run.stored) {
        if (rows.length) fresh.hidden = step === context.run.step && fresh.hidden
        else if (done && step !== context.run.step) {
          if (!facets.sources) begin()
          else load(true)  // leave the filters alone: the user may be typing
        }
      }
      context = { ...now, parameters: { ...now.parameters } }
    },
    navigate: (now) => {
      const same = now.run.id === context.run.id
      const before = JSON.stringify(wanted())
      context = { ...now, parameters: { ...now.parameters } }
      if (!same) { group = null; begin() }
      else if (JSON.stringify(wanted()) !== before) { drawFilters(); load(true) }
      return true
    },
    unmount: () => { order++; detailOrder++ },
    keys: {
      "j": ["next rollout", () => move(1)], "k": ["previous rollout", () => move(-1)],
      "t": ["show tokens or the conversation", () => toggle("tokens")], "g": ["show the group side by side or the conversation", () => toggle("group")],
      "]": ["next rollout of the group", () => group && jump((rows[at].rollout + 1) % group.rollouts.length)],
      "[": ["previous rollout of the group", () => group && jump((rows[at].rollout + group.rollouts.length - 1) % group.rollouts.length)],
      "/": ["search in texts", () => document.getElementById("text-search").focus()],
      "Enter": ["open it (on a phone)", () => box.classList.add("opened")],
      "u": ["back to the list (on a phone)", () => box.classList.remove("opened")],
    },
  }
}

// The prompt, before the policy wrote anything.
export function opening(messages) {
  const first = messages.findIndex((message) => message.role === "assistant" && !message.prompt)
  return messages.slice(0, first < 0 ? messages.length : first)
}
