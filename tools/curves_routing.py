"""Train a small mixture of experts with and without routing replay, and write `docs/curves_routing.md`.

    make warm-start TASK=moe               # its model, once
    python tools/curves_routing.py         # the runs that have not been made yet, then the page
    python tools/curves_routing.py tis     # these, again

Each run is `rlsdk train examples/countdown_moe.yaml` with another correction, in `runs/curves`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

from curves import ROOT, RUNS, accuracies, origin, run

from rlsdk.runlog.metrics import read_metrics

CORRECTIONS = ("tis", "routing_replay")
EXAMPLE = "examples/countdown_moe.yaml"
PAGE = ROOT / "docs" / "curves_routing.md"
PICTURE = ROOT / "docs" / "assets" / "curves_routing.png"
HEAD = """# Curves of a mixture of experts

`python tools/curves_routing.py` trains `examples/countdown_moe.yaml` (GRPO, eight experts in each of two layers, bfloat16,
`engine=transformers`, one seed) with truncated importance sampling (`correction: tis`), and with
[routing replay](models.md#mixtures-of-experts) (`correction: routing_replay`, which truncates in the same way), and
writes this page. Its model (`make warm-start TASK=moe`) has seen demonstrations for two minutes: it knows the form of an
answer, `<answer>…</answer>` with each number once, though not always, and the skill hardly.

*Form* is the mean of the reward's format part, half a point for an answer of the right form and a point for a right
one, over all sampled rollouts. *Gap* is the mean of the estimator k3 of KL(engine ‖ learner) over all trained tokens,
before the update, in nats, over all steps; *chi2* the mean of ρ² - 1. Both are what the engine's and the learner's
arithmetic makes of the same weights.

"""


def main(names: list[str]) -> int:
    """Train what is missing (or `names`), then write the page."""
    if unknown := sorted(set(names) - set(CORRECTIONS)):
        print(f"unknown: {', '.join(unknown)}; known: {', '.join(CORRECTIONS)}", file=sys.stderr)
        return 2
    for name in names or [n for n in CORRECTIONS if not (folder(n) / "summary.json").is_file()]:
        print(f"{name} …", flush=True)
        run(folder(name), EXAMPLE, f"algorithm.correction={name}")
    write_page([name for name in CORRECTIONS if (folder(name) / "summary.json").is_file()])
    return 0


def folder(name: str) -> Path:
    """Folder of a run's files."""
    return RUNS / f"routing-{name}"


def write_page(names: list[str]) -> None:
    """The page and its picture."""
    steps = sorted(accuracies(folder(names[0])))
    head = ["correction", *(f"right, {s}" for s in steps), "form, first", "form, last", "gap", "chi2", "unknown"]
    rows = [[*head, "commit", "date"], ["---", *(["---:"] * (len(head) - 1)), "---", "---"]]
    for name in names:
        lines = [line for line in read_metrics(folder(name)) if "actor/k3" in line]
        right = [f"{100 * found['eval/sampled']:.1f}" for found in accuracies(folder(name)).values()]
        form = [f"{line['rollouts/reward']:.3f}" for line in (lines[0], lines[-1])]
        gap, chi2 = (fmean(line[f"actor/{key}"] for line in lines) for key in ("k3", "chi2"))
        unknown = lines[-1].get("routing/unknown")
        share = "" if unknown is None else f"{100 * unknown:.1f} %"
        rows.append([f"`{name}`", *right, *form, f"{gap:.2e}", f"{chi2:.2e}", share, *origin(folder(name))])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    picture = f"![Reward and gap by step](assets/{PICTURE.name})"
    PAGE.write_text(f"{HEAD}{table}\n\n{picture}\n", encoding="utf-8")
    draw(names)


def draw(names: list[str]) -> None:
    """Reward and gap by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in names:
        lines = [line for line in read_metrics(folder(name)) if "actor/k3" in line]
        steps = [line["step"] for line in lines]
        left.plot(steps, [line["rollouts/reward"] for line in lines], label=name)
        right.plot(steps, [line["actor/k3"] for line in lines], label=name)
    left.set(xlabel="step", ylabel="mean reward")
    right.set(xlabel="step", ylabel="gap between engine and learner (k3), nats", yscale="log")
    left.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
