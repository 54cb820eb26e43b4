// What the curves of a run say by themselves: rules that a newcomer would not know, each with what to do about it.

const WINDOW = 10

function ends(curve) {
  if (!curve) return null
  const [, values] = curve
  if (values.length < 4) return null
  const size = Math.min(WINDOW, Math.max(2, Math.floor(values.length / 3)))
  const mean = (part) => part.reduce((a, b) => a + b, 0) / part.length
  return { first: mean(values.slice(0, size)), last: mean(values.slice(-size)) }
}

const share = (value) => `${Math.round(value * 100)} %`

// Each rule gets the ends of curves by name, and returns a sentence where something is wrong.
const RULES = [
  {
    chart: "groups/trained", title: "Dead groups", page: "rollouts",
    reads: ["groups/trained", "accuracy/mean"],
    check: ({ "groups/trained": groups, "accuracy/mean": right }) => groups && groups.last < 0.2 &&
      `Only ${share(groups.last)} of the groups teach anything: in the others all rollouts earn the same. ` +
      (right && right.last > 0.8 ? "The model solves these tasks; take harder ones." : "Take easier tasks, sample more rollouts of each, or look whether the reward tells answers apart."),
  },
  {
    chart: "rollouts/length", title: "Lengths grow",
    reads: ["rollouts/length", "reward/mean"],
    check: ({ "rollouts/length": length, "reward/mean": reward }) => length && length.last > 1.8 * length.first &&
      !(reward && reward.last > reward.first + 0.1) &&
      `Answers are ${(length.last / length.first).toFixed(1)} times as long as at first, and earn no more. Read some of the longest; a penalty for length, or a smaller sampling.max_tokens, ends it.`,
  },
  {
    chart: "rollouts/truncated", title: "Answers are cut off",
    reads: ["rollouts/truncated"],
    check: ({ "rollouts/truncated": cut }) => cut && cut.last > 0.3 &&
      `${share(cut.last)} of the answers end at the limit of tokens. What is cut off cannot be right: raise sampling.max_tokens, or penalise length.`,
  },
  {
    chart: "eval/greedy", title: "Reward up, held-out down",
    reads: ["reward/mean", "eval/greedy"],
    check: ({ "reward/mean": reward, "eval/greedy": held }) => reward && held && reward.last > reward.first + 0.05 && held.last < held.first - 0.03 &&
      "The reward rises while held-out accuracy falls: the policy has found what the reward pays for without solving the task. Read the best-paid answers.",
  },
  {
    chart: "actor/entropy", title: "Entropy collapse",
    reads: ["actor/entropy", "accuracy/mean"],
    check: ({ "actor/entropy": entropy, "accuracy/mean": right }) => entropy && entropy.last < 0.1 * entropy.first && !(right && right.last > 0.8) &&
      "The policy has become almost certain before it solved the tasks, and explores no more. Lower the learning rate, or raise algorithm.entropy_coef.",
  },
  {
    chart: "actor/clip_share", title: "Updates are clipped",
    reads: ["actor/clip_share"],
    check: ({ "actor/clip_share": clip }) => clip && clip.last > 0.3 &&
      `${share(clip.last)} of the tokens are beyond the clip range: the steps are too large. Lower learner.lr, or take fewer minibatches.`,
  },
  {
    chart: "rollouts/invalid", title: "Answers without a score",
    reads: ["rollouts/invalid"],
    check: ({ "rollouts/invalid": invalid }) => invalid && invalid.last > 1 &&
      `About ${invalid.last.toFixed(0)} answers a step could not be scored. The rollout browser shows the reason of each: choose “no score” there.`,
  },
  {
    chart: "engines/alive", title: "An engine is missing", page: "processes",
    reads: ["engines/alive"],
    check: ({ "engines/alive": alive }) => alive && alive.last < alive.first - 0.2 &&
      `${alive.first.toFixed(0)} engines began, ${alive.last.toFixed(0)} are left. The page of processes shows their states and logs.`,
  },
  {
    chart: "time/engines_idle", title: "Engines wait",
    reads: ["time/engines_idle"],
    check: ({ "time/engines_idle": idle }) => idle && idle.last > 0.85 &&
      `Engines are idle ${share(idle.last)} of the time. If that is long on the page of times, let rollouts run ahead (rollout.ahead), or use fewer engines.`,
  },
]

function format(curves) {
  const right = ends(curves["accuracy/mean"])
  if (!right || right.last > 0.5 || right.last > right.first + 0.1) return null
  const part = Object.keys(curves).find((name) => /^reward\/.*(format|form|tag)/i.test(name) && ends(curves[name])?.last > 0.8 * Math.max(...curves[name][1]) && ends(curves[name]).last > ends(curves[name]).first + 0.1)
  return part ? {
    chart: part, title: "Format learned, task not",
    text: `${part} rises while accuracy stays at ${share(right.last)}: the policy earns the points for form and not those for the answer. Lower the weight of the form, or begin with a model that can do the task sometimes.`,
  } : null
}

function sources(curves) {
  const names = Object.keys(curves).map((name) => /^source\/(.+)\/rollouts\/tokens$/.exec(name)?.[1]).filter(Boolean)
  if (names.length < 2) return []
  const newest = Math.max(...names.map((name) => curves[`source/${name}/rollouts/tokens`][0].at(-1) ?? 0))
  return names.flatMap((name) => {
    const [steps] = curves[`source/${name}/rollouts/tokens`]
    const recent = steps.filter((step) => step > newest - WINDOW).length
    if (newest < WINDOW || recent > 0.3 * WINDOW) return []
    return [{
      chart: "sources", title: "A source starves",
      text: `${name} gave rollouts in ${recent} of the last ${WINDOW} steps. See its row under “What became of the tasks”: its weight, its filters, or its environment may hold it back.`,
    }]
  })
}

export const READS = [...new Set(RULES.flatMap((rule) => rule.reads))]

export function findings(curves) {
  const found = RULES.flatMap((rule) => {
    const text = rule.check(Object.fromEntries(rule.reads.map((name) => [name, ends(curves[name])])))
    return text ? [{ chart: rule.chart, title: rule.title, text, page: rule.page }] : []
  })
  return [...found, format(curves), ...sources(curves)].filter(Boolean)
}
