// A conversation by turn: speaker, thoughts, tool calls, and the responses of tools and environment.

import { h, longText, said, visible } from "./dom.js"

const WHO = { system: "System", user: "User", assistant: "Policy", tool: "Tool" }
const PICTURE = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=\s]+$/

export function conversation(rollout) {
  let answered = false
  return h("ol", { class: "turns" }, rollout.messages.map((message) => {
    const policy = message.role === "assistant" && !message.prompt
    const world = message.role === "user" && answered
    answered = answered || policy
    return turn(message, policy, world)
  }))
}

function turn(message, policy, world) {
  const who = world ? "Environment" : message.role === "assistant" && message.prompt ? "Given answer" : WHO[message.role] ?? visible(message.role)
  return h("li", { class: `turn ${policy ? "policy" : world ? "world" : message.role}` },
    h("div", { class: "who" }, who, message.name ? h("small", {}, visible(message.name)) : null),
    h("div", { class: "what" },
      message.reasoning ? h("details", { class: "thought" }, h("summary", {}, "Thought"), longText(message.reasoning)) : null,
      content(message.content),
      message.cut ? h("p", { class: "hint" }, `The message has ${message.cut.toLocaleString("en")} characters; only the first are shown.`) : null,
      (message.tool_calls ?? []).map(call)))
}

function content(value) {
  if (typeof value === "string") return value ? h("div", { class: "content" }, longText(value)) : null
  if (!Array.isArray(value)) return value ? h("div", { class: "content" }, longText(JSON.stringify(value, null, 2))) : null
  return value.map((part) => {
    const source = picture(part)
    if (source) return h("img", { class: "picture", src: source, alt: "picture in the conversation", loading: "lazy" })
    return h("div", { class: "content" }, longText(part?.text ?? JSON.stringify(part, null, 2)))
  })
}

// The source of an image embedded in a message; nothing is loaded from elsewhere.
function picture(part) {
  const found = part?.image_url?.url ?? part?.image_url ?? part?.image ?? part?.url
  return typeof found === "string" && PICTURE.test(found) ? found : null
}

function call(made) {
  const { name, arguments: given } = made.function ?? made
  const shown = typeof given === "string" ? given : JSON.stringify(given, null, 2)
  return h("div", { class: "call" }, h("b", {}, said(name)), h("pre", {}, longText(shown)))
}
