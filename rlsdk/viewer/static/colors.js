// Colours of runs and values, for light and dark pages.

const LIGHT = ["#4457c9", "#d9730d", "#0f8a6b", "#c0397b", "#8a5cd1", "#a58300", "#2a8fbf", "#b3483c"]
const DARK = ["#8c9cff", "#f0a35e", "#4cc9a4", "#f07fb4", "#b99aef", "#d8bb4a", "#6cc3ea", "#ec8b80"]

export const dark = window.matchMedia("(prefers-color-scheme: dark)")

export function color(index) {
  const colors = dark.matches ? DARK : LIGHT
  return colors[index % colors.length]
}

export function faded(hex, share) {
  return `${hex}${Math.round(share * 255).toString(16).padStart(2, "0")}`
}

// A colour laid over another, made opaque, so that overlapping areas keep their colours.
export function mixed(hex, ground, share) {
  const parts = (value) => [1, 3, 5].map((at) => parseInt(value.slice(at, at + 2), 16))
  const over = parts(hex)
  return `rgb(${parts(ground).map((value, i) => Math.round(over[i] * share + value * (1 - share))).join(" ")})`
}

export function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim()
}

// Background of a value between two ends: `low` and `high` are hues, the middle is the page's colour.
export function between(share, { diverging = false } = {}) {
  const s = Math.min(Math.max(share, 0), 1)
  const light = dark.matches ? 38 : 60
  if (diverging) {
    const size = Math.abs(s - 0.5) * 2
    return `hsl(${s < 0.5 ? 10 : 158} 55% ${light}% / ${(size * 0.62).toFixed(3)})`
  }
  return `hsl(${(235 - 205 * s).toFixed(0)} 75% ${light}% / ${(0.12 + 0.5 * s).toFixed(3)})`
}
