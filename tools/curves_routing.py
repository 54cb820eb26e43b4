"""Train a small mixture of experts with and without routing replay, and write `docs/curves_routing.md`.

    make warm-start TASK=moe               # train its model once
    python tools/curves_routing.py         # all missing runs, then the page
    python tools/curves_routing.py tis     # these runs, again

Each run is `rlsdk train examples/countdown_moe.yaml` with a different correction, in `runs/curves`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

from curves import ROOT, RUNS, accuracies, origin, run, table

from rlsdk.runlog.metrics import read_metrics

CORRECTIONS = ("tis", "routing_replay")
EXAMPLE = "examples/countdown_moe.yaml"
PAGE = ROOT / "docs" / "curves_routing.md"
PICTURE = ROOT / "docs" / "assets" / "curves_routing.png"
HEAD = """# Curves of a mixture of experts

`make curves` trains `examples/countdown_moe.yaml` (GRPO, eight experts in each of two layers, bfloat16,
`engine=transformers`, one seed) with truncated importance sampling (`correction: tis`), and with [routing
replay](models.md#mixtures-of-experts) (`correction: routing_replay`, which truncates in the same way), and writes this
page. Its model (`make warm-start TASK=moe`) was trained on demonstrations for a minute: it mostly knows the answer
format, `<answer>…</answer>` with each number once, but has hardly any skill.

*Right* is the share of correct answers on 200 held-out tasks, sampled at temperature 1, after the given number of
steps; its standard error is at most 2.8 points. *Reward* is the mean over the rollouts of a step: half a point for an
answer in the right format, a point for a correct one. *Gap* is the k3 estimate of KL(engine ‖ learner) over the trained
tokens of a step, in nats, with the learner's logprobs before the update: mean and maximum over all steps. It shows the
numerical difference between engine and learner for the same weights. *Unknown* is the share of tokens whose experts the
engine did not report.

"""


def main(names: list[str]) -> int:
    """Train `names`, or all missing runs, then write the page."""
    if unknown := sorted(set(names) - set(CORRECTIONS)):
        print(f"unknown: {', '.join(unknown)}; known: {', '.join(CORRECTIONS)}", file=sys.stderr)
        return 2
    for name in names or [n for n in CORRECTIONS if not (folder(n) / "summary.json").is_file()]:
        print(f"{name} …", flush=True)
        run(folder(name), EXAMPLE, f"algorithm.correction={name}")
    write_page([name for name in CORRECTIONS if (folder(name) / "summary.json").is_file()])
    return 0


def folder(name: str) -> Path:
    """Return the folder of a run's files."""
    return RUNS / f"routing-{name}"


def write_page(names: list[str]) -> None:
    """Write the page and its picture."""
    steps = sorted(accuracies(folder(names[0])))
    right = [f"right, {step}" for step in steps]
    head = ["correction", *right, "reward, first", "reward, last", "gap, mean", "gap, greatest", "unknown"]
    rows = [[*head, "commit", "date"], ["---", *(["---:"] * (len(head) - 1)), "---", "---"]]
    for name in names:
        lines = [line for line in read_metrics(folder(name)) if "actor/k3" in line]
        right = [f"{100 * found['eval/sampled']:.1f}" for found in accuracies(folder(name)).values()]
        rewards = [f"{line['reward/mean']:.3f}" for line in (lines[0], lines[-1])]
        gaps = [line["actor/k3"] for line in lines]
        unknown = lines[-1].get("routing/unknown")
        share = "" if unknown is None else f"{100 * unknown:.1f} %"
        cells = [*right, *rewards, f"{fmean(gaps):.2e}", f"{max(gaps):.2e}", share]
        rows.append([f"`{name}`", *cells, *origin(folder(name))])
    picture = f"![Reward and gap by step](assets/{PICTURE.name})"
    PAGE.write_text(f"{HEAD}{table(rows)}\n\n{picture}\n", encoding="utf-8")
    draw(names)


def draw(names: list[str]) -> None:
    """Draw reward and gap by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in names:
        lines = [line for line in read_metrics(folder(name)) if "actor/k3" in line]
        steps = [line["step"] for line in lines]
        left.plot(steps, [line["reward/mean"] for line in lines], label=name)
        right.plot(steps, [line["actor/k3"] for line in lines], label=name)
    left.set(xlabel="step", ylabel="mean reward")
    right.set(xlabel="step", ylabel="gap between engine and learner (k3), nats", yscale="log")
    left.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
