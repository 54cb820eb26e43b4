"""Train the quickstart's task with rollouts ahead of the learner, and write `docs/curves_staleness.md`.

    python tools/curves_staleness.py        # all missing runs, then the page
    python tools/curves_staleness.py 4-tis  # these runs, again

Each run is `rlsdk train examples/quickstart.yaml` with the settings below, in `runs/curves`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

from curves import COMMON, EVERY, ROOT, RUNS, STEPS, accuracies, origin, run, table

from rlsdk.runlog.metrics import read_metrics

CORRECTIONS = {"plain": "", "tis": ", correction: tis"}
VARIANTS = {f"{ahead}-{name}": (ahead, name) for ahead in (0, 1, 4) for name in CORRECTIONS}
PAGE = ROOT / "docs" / "curves_staleness.md"
PICTURE = ROOT / "docs" / "assets" / "curves_staleness.png"
HEAD = f"""# Curves by staleness

`make curves` trains the quickstart's task with GRPO ({STEPS} steps of 64 tasks, a learning rate of 4e-4, one seed)
while rollouts run ahead of the learner by `rollout.max_staleness` syncs, without an importance correction and with
truncated importance sampling (`correction: tis`), and writes this page. In all runs the learner computes the old
logprobs itself (`old_logprobs: learner`), so that without a correction the loss ignores that the rollouts were sampled
by older weights. Everything else is as in `examples/quickstart.yaml`; the schedule is tuned for synchronous training.

Accuracy is measured on 1,000 held-out tasks, sampled at temperature 1; its standard error is at most 1.6 points, and
chance level is 27 % ([what the figures mean](quickstart.md)). *Staleness* is the mean over all trained tokens, in
steps; *wasted* is the share of sampled tokens that were never trained on, because they were too stale or from groups
with equal rewards, which become more frequent as more answers are right.

Four batches ahead, the plain loss learns more slowly, and TIS makes up for it; one batch ahead is too little to tell.

"""


def main(names: list[str]) -> int:
    """Train `names`, or all missing variants, then write the page."""
    if unknown := sorted(set(names) - set(VARIANTS)):
        print(f"unknown: {', '.join(unknown)}; known: {', '.join(VARIANTS)}", file=sys.stderr)
        return 2
    for name in names or [n for n in VARIANTS if not (folder(n) / "summary.json").is_file()]:
        print(f"staleness {name} …", flush=True)
        train(name)
    write_page([name for name in VARIANTS if (folder(name) / "summary.json").is_file()])
    return 0


def folder(name: str) -> Path:
    """Return the folder of a run's files."""
    return RUNS / f"staleness-{name}"


def train(name: str) -> None:
    """Train one variant."""
    ahead, correction = VARIANTS[name]
    fixed = "use: grpo, kl_coef: 0.0, aggregate: token-mean, filters: [nonzero_variance]"
    algorithm = f"algorithm={{{fixed}{CORRECTIONS[correction]}}}"
    settings = [f"rollout.max_staleness={ahead}", "old_logprobs=learner", algorithm]
    run(folder(name), "examples/quickstart.yaml", *COMMON, *settings)


def write_page(names: list[str]) -> None:
    """Write `docs/curves_staleness.md` and its picture."""
    steps = range(0, STEPS + 1, EVERY)
    curves = {name: accuracies(folder(name)) for name in names}
    head = ["max_staleness", "correction", *map(str, steps), "greedy", "staleness", "wasted", "commit", "date"]
    rows = [head, ["---:", "---", *("---:" for _ in range(len(steps) + 3)), "---", "---"]]
    for name in names:
        ahead, correction = VARIANTS[name]
        trained = [line for line in read_metrics(folder(name)) if "time/step" in line]
        sampled = sum(line["rollouts/tokens"] + line["rollouts/tokens_wasted"] for line in trained)
        wasted = sum(line["rollouts/tokens_wasted"] for line in trained) / sampled
        old = fmean(line.get("staleness/mean", line.get("staleness/max", 0.0)) for line in trained)
        cells = [f"{100 * curves[name][s]['eval/sampled']:.1f}" for s in steps]
        cells += [f"{100 * curves[name][STEPS]['eval/greedy']:.1f}", f"{old:.2f}", f"{100 * wasted:.0f} %"]
        shown = {"plain": "none"}.get(correction, f"`{correction}`")
        rows.append([str(ahead), shown, *cells, *origin(folder(name))])
    page = f"{HEAD}{table(rows)}\n\n![Held-out accuracy by step](assets/{PICTURE.name})\n"
    PAGE.write_text(page, encoding="utf-8")
    draw({name: {step: 100 * found["eval/sampled"] for step, found in curves[name].items()} for name in names})


def draw(curves: dict[str, dict[int, float]]) -> None:
    """Draw the page's picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, points in curves.items():
        ahead, correction = VARIANTS[name]
        color, style = {0: "C0", 1: "C1", 4: "C2"}[ahead], "-" if correction == "plain" else "--"
        axes.plot(
            list(points), list(points.values()), style, color=color, marker="o", ms=3, label=f"{ahead}, {correction}"
        )
    axes.set(xlabel="step", ylabel="held-out accuracy, sampled, percent", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(title="max_staleness, correction", fontsize=8)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
