// How the page shows findings of rlsdk's diagnoses: a title, and where to look next.

const NEWEST = ["Read the newest answers", {}]
const LONGEST = ["Read the longest answers", { order: "longest" }]
const BEST_PAID = ["Read the answers with the highest reward", { order: "highest" }]

// The built-in diagnoses, causes before consequences. `chart`: the chart that shows it, if not that of the finding's metric;
// `rollouts`: text and filters of a link to answers that show it; `setting`: the likely cause; `page`: another page
// that shows it.
const KINDS = {
  no_score: { title: "Answers without a score", rollouts: ["Read why they have no score", { invalid: "1" }] },
  engine_lost: { title: "An engine is missing", page: ["Open the processes and their logs", "processes"] },
  unsolved_source: { title: "A source is never solved" },
  starving_source: { title: "A source starves", chart: "sources" },
  kl_runaway: { title: "Updates go too far", setting: "learner.lr" },
  skipped_updates: { title: "Updates are skipped", rollouts: NEWEST },
  clip_share: { title: "Updates are clipped", setting: "learner.lr" },
  cut_off: { title: "Answers are cut off", rollouts: ["Read answers that were cut off", { status: "truncated" }], setting: "sampling.max_tokens" },
  sampler_gap: { title: "Engine and learner disagree" },
  format_only: { title: "Format learned, task not", rollouts: NEWEST },
  held_out_drop: { title: "Reward up, held-out down", rollouts: BEST_PAID },
  repeated_phrases: { title: "Answers repeat themselves", rollouts: LONGEST },
  length_explosion: { title: "Lengths grow", rollouts: LONGEST },
  entropy_collapse: { title: "Entropy collapse", rollouts: NEWEST },
  dead_groups: { title: "Dead groups", chart: "groups/trained", rollouts: NEWEST },
  idle_engines: { title: "Engines wait", page: ["Open the times of a step", "time"] },
  learner_bound: { title: "The learner is the bottleneck", chart: "time/step", page: ["Open the times of a step", "time"] },
}

// Metric names stay in lower case.
function sentence(text) {
  const begun = /^[a-z_]+\//.test(text) ? text : text.slice(0, 1).toUpperCase() + text.slice(1)
  return text && !/[.!?]$/.test(text) ? `${begun}.` : begun
}

// Add what the page needs to each finding; findings that only cost time come last.
export function described(standing) {
  const order = Object.keys(KINDS)
  const place = ({ name, level }) => (level === "info" ? order.length : 0) + (order.indexOf(name) + 1 || order.length)
  return standing.map(({ alert, lasts, run }) => {
    const source = /^source\/(.+?)\/(share|accuracy\/mean)$/.exec(alert.metric)?.[1]
    return {
      title: alert.name, chart: alert.metric,
      ...(source ? { rollouts: [`Read answers of ${source}`, { source }] } : {}),
      ...KINDS[alert.name], ...alert, lasts, run,
      text: [alert.message, alert.advice].map((each) => sentence(each ?? "")).filter(Boolean).join(" "),
    }
  }).sort((a, b) => place(a) - place(b))
}
