// What the curves of a run say by themselves, and what its alerts say: what a newcomer would not know, what to do about it, and
// where the page shows it.

const WINDOW = 10

const mean = (part) => part.reduce((a, b) => a + b, 0) / part.length

function ends(curve) {
  if (!curve) return null
  const [, values] = curve
  if (values.length < 4) return null
  const size = Math.min(WINDOW, Math.max(2, Math.floor(values.length / 3)))
  return { first: mean(values.slice(0, size)), last: mean(values.slice(-size)), all: mean(values) }
}

const share = (value) => `${Math.round(value * 100)} %`

const NEWEST = ["Read the newest answers", {}]
const LONGEST = ["Read the longest answers", { order: "longest" }]
const BEST_PAID = ["Read the best-paid answers", { order: "highest" }]

// What can be found, causes before what follows from them. `chart`: a metric whose chart shows it; `rollouts`: words and
// filters of a link to answers that show it; `setting`: the one that is the likely cause; `page`: another page that shows it.
// The names are those of rlsdk's diagnoses where there is one.
const KINDS = {
  no_score: { title: "Answers without a score", chart: "rollouts/invalid", rollouts: ["Read why they have no score", { invalid: "1" }] },
  engine_lost: { title: "An engine is missing", chart: "engines/alive", page: ["Open the processes and their logs", "processes"] },
  source_unsolved: { title: "A source is never solved" },
  starving_source: { title: "A source starves", chart: "sources" },
  kl_runaway: { title: "Updates go too far", chart: "actor/kl_to_old", setting: "learner.lr" },
  clip_share: { title: "Updates are clipped", chart: "actor/clip_share", setting: "learner.lr" },
  cut_off: { title: "Answers are cut off", chart: "rollouts/truncated", rollouts: ["Read answers that were cut off", { status: "truncated" }], setting: "sampling.max_tokens" },
  sampler_gap: { title: "Engine and learner disagree", chart: "actor/kl_to_behaviour" },
  format_only: { title: "Format learned, task not", chart: "reward/mean", rollouts: NEWEST },
  held_out_drop: { title: "Reward up, held-out down", chart: "eval/greedy", rollouts: BEST_PAID },
  repeated_phrases: { title: "Answers repeat themselves", chart: "rollouts/repetition", rollouts: LONGEST },
  length_explosion: { title: "Lengths grow", chart: "rollouts/length", rollouts: LONGEST },
  entropy_collapse: { title: "Entropy collapse", chart: "actor/entropy", rollouts: NEWEST },
  dead_groups: { title: "Dead groups", chart: "groups/trained", rollouts: NEWEST },
  idle_engines: { title: "Engines wait", chart: "time/engines_idle", page: ["Open the times of a step", "time"] },
  learner_bound: { title: "The learner is the bottleneck", chart: "time/step", page: ["Open the times of a step", "time"] },
}

// Each rule gets the ends of curves by name, and returns a sentence where something is wrong.
const RULES = [
  {
    kind: "no_score",
    reads: ["rollouts/invalid"],
    check: ({ "rollouts/invalid": invalid }) => invalid && invalid.last > 1 &&
      `About ${invalid.last.toFixed(0)} answers a step could not be scored, since the reward failed on them: they teach nothing. Each of them says why.`,
  },
  {
    kind: "cut_off",
    reads: ["rollouts/truncated"],
    check: ({ "rollouts/truncated": cut }) => cut && cut.last > 0.3 &&
      `${share(cut.last)} of the answers end at the limit of tokens. What is cut off cannot be right. ` + (cut.first > 0.5 * cut.last
        ? "Raise sampling.max_tokens, or penalise length."
        : `At first ${share(cut.first)} did. Read some: if they reason for longer, raise sampling.max_tokens; if they run on without sense, the policy is broken.`),
  },
  {
    kind: "engine_lost",
    reads: ["engines/alive"],
    check: ({ "engines/alive": alive }) => alive && alive.last < alive.first - 0.2 &&
      `${alive.first.toFixed(0)} engines began, ${alive.last.toFixed(0)} are left. The page of processes shows their states and logs.`,
  },
  {
    kind: "kl_runaway",
    reads: ["actor/kl_to_old"],
    check: ({ "actor/kl_to_old": kl }) => kl && kl.all > 0.1 &&
      `The updates on one batch change the policy by ${kl.all.toPrecision(2)} nats a token; below 0.1 is healthy. It forgets what it could do: lower learner.lr, or make fewer updates a batch (minibatches, passes).`,
  },
  {
    kind: "clip_share",
    reads: ["actor/clip_share"],
    check: ({ "actor/clip_share": clip }) => clip && clip.last > 0.3 &&
      `${share(clip.last)} of the tokens are beyond the clip range: the steps are too large. Lower learner.lr, or take fewer minibatches.`,
  },
  {
    kind: "held_out_drop",
    reads: ["reward/mean", "eval/greedy"],
    check: ({ "reward/mean": reward, "eval/greedy": held }) => reward && held && reward.last > reward.first + 0.05 && held.last < held.first - 0.03 &&
      "The reward rises while held-out accuracy falls: the policy has found what the reward pays for without solving the task. Read the best-paid answers.",
  },
  {
    kind: "length_explosion",
    reads: ["rollouts/length", "reward/mean"],
    check: ({ "rollouts/length": length, "reward/mean": reward }) => length && length.last > 1.8 * length.first &&
      !(reward && reward.last > reward.first + 0.1) &&
      `Answers are ${(length.last / length.first).toFixed(1)} times as long as at first, and earn no more. Read some of the longest; a penalty for length, or a smaller sampling.max_tokens, ends it.`,
  },
  {
    kind: "entropy_collapse",
    reads: ["actor/entropy", "accuracy/mean"],
    check: ({ "actor/entropy": entropy, "accuracy/mean": right }) => entropy && entropy.last < 0.1 * entropy.first && !(right && right.last > 0.8) &&
      "The policy has become almost certain before it solved the tasks, and explores no more. Lower the learning rate, or raise algorithm.entropy_coef.",
  },
  {
    kind: "dead_groups",
    reads: ["groups/trained", "accuracy/mean", "rollouts/truncated"],
    check: ({ "groups/trained": groups, "accuracy/mean": right, "rollouts/truncated": cut }) => groups && groups.last < 0.2 &&
      `Only ${share(groups.last)} of the groups teach anything: in the others all rollouts earn the same. ` +
      (right && right.last > 0.8 ? "The model solves these tasks; take harder ones."
        : right && right.first > 0.1 && right.last < 0.25 * right.first ? `The policy has lost what it could do: ${share(right.first)} of the answers were right at first. Lower learner.lr, and begin again from an earlier checkpoint.`
          : cut && cut.last > 0.5 ? "Most answers are cut off before they are complete: see to that first."
            : "Take easier tasks, sample more rollouts of each, or look whether the reward tells answers apart."),
  },
  {
    kind: "idle_engines",
    reads: ["time/engines_idle"],
    check: ({ "time/engines_idle": idle }) => idle && idle.last > 0.85 &&
      `Engines are idle ${share(idle.last)} of the time. If that is long on the page of times, let rollouts run ahead (rollout.max_staleness), or use fewer engines.`,
  },
]

function format(curves) {
  const right = ends(curves["accuracy/mean"])
  if (!right || right.last > 0.5 || right.last > right.first + 0.1) return null
  const part = Object.keys(curves).find((name) => /^reward\/.*(format|form|tag)/i.test(name) && ends(curves[name])?.last > 0.8 * Math.max(...curves[name][1]) && ends(curves[name]).last > ends(curves[name]).first + 0.1)
  return part ? {
    kind: "format_only", chart: part,
    text: `${part} rises while accuracy stays at ${share(right.last)}: the policy earns the points for form and not those for the answer. Lower the weight of the form, or begin with a model that can do the task sometimes.`,
  } : null
}

const named = (curves, pattern) => Object.keys(curves).map((name) => pattern.exec(name)?.[1]).filter(Boolean)
const of_source = (name) => [`Read answers of ${name}`, { source: name }]

// A source that no answer solves beside one that is solved: its data or its reward may be broken.
function unsolved(curves) {
  const found = named(curves, /^source\/(.+)\/accuracy\/mean$/).flatMap((name) => {
    const last = ends(curves[`source/${name}/accuracy/mean`])?.last
    return last === undefined ? [] : [{ name, last }]
  })
  const best = found.reduce((a, b) => (b.last > (a?.last ?? 0) ? b : a), null)
  if (!best || best.last < 0.25) return []
  return found.filter(({ last }) => last < 0.05).map(({ name, last }) => ({
    kind: "source_unsolved", chart: `source/${name}/accuracy/mean`, rollouts: of_source(name),
    text: `${name}: ${share(last)} of the answers are right, of ${best.name} ${share(best.last)}. Compare some of its answers with the answers that its tasks expect: if right ones count as wrong, its data or its reward is broken; else its tasks are too hard.`,
  }))
}

function starving(curves) {
  const names = named(curves, /^source\/(.+)\/rollouts\/tokens$/)
  if (names.length < 2) return []
  const newest = Math.max(...names.map((name) => curves[`source/${name}/rollouts/tokens`][0].at(-1) ?? 0))
  return names.flatMap((name) => {
    const [steps] = curves[`source/${name}/rollouts/tokens`]
    const recent = steps.filter((step) => step > newest - WINDOW).length
    if (newest < WINDOW || recent > 0.3 * WINDOW) return []
    return [{
      kind: "starving_source", rollouts: of_source(name),
      text: `${name} gave rollouts in ${recent} of the last ${WINDOW} steps. See its row under “What became of the tasks”: its weight, its filters, or its environment may hold it back.`,
    }]
  })
}

export const READS = [...new Set(RULES.flatMap((rule) => rule.reads))]

function judged(curves) {
  const found = RULES.flatMap((rule) => {
    const text = rule.check(Object.fromEntries(rule.reads.map((name) => [name, ends(curves[name])])))
    return text ? [{ kind: rule.kind, text }] : []
  })
  return [...found, format(curves), ...unsolved(curves), ...starving(curves)].filter(Boolean)
}

const sentence = (text) => text && `${text[0].toUpperCase()}${text.slice(1)}${/[.!?]$/.test(text) ? "" : "."}`

// All that stands out: a finding of the curves in its words, with step and level of the alert that says the same.
export function findings(curves, alerts) {
  const told = new Map(alerts.map((alert) => [alert.name, alert]).reverse())
  const own = judged(curves).map((each) => ({ ...each, step: told.get(each.kind)?.step, level: told.get(each.kind)?.level }))
  const rest = [...told.values()].filter((alert) => !own.some((each) => each.kind === alert.name)).map((alert) => ({
    kind: alert.name, step: alert.step, level: alert.level,
    text: [alert.message, alert.advice].map((each) => sentence(each ?? "")).filter(Boolean).join(" "),
  }))
  const order = Object.keys(KINDS)
  const place = ({ kind, level }) => (level === "info" ? order.length : 0) + (order.indexOf(kind) + 1 || order.length)
  return [...own, ...rest].map((each) => ({ title: each.kind ?? "alert", ...KINDS[each.kind], ...each })).sort((a, b) => place(a) - place(b))
}
