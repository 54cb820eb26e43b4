"""Train the multi-turn examples, and write `docs/curves_multiturn.md` with its table and picture.

    python tools/curves_multiturn.py                # all missing runs, then the page
    python tools/curves_multiturn.py frozen_lake    # the runs of one example, again

Each run is `rlsdk train examples/TASK_nano.yaml seed=SEED`, in `runs/curves`. FrozenLake needs its plugin:
`make gridworlds`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from curves import ROOT, RUNS, accuracies, origin, run, table

SEEDS = (0, 1, 2)
TASKS = {
    "frozen_lake": "FrozenLake 4 × 4, by turns",
    "calculator": "arithmetic with a calculator",
    "dialogue": "Countdown, two answers",
}
"""Name of an example -> label of its curves."""
PAGE = ROOT / "docs" / "curves_multiturn.md"
PICTURE = ROOT / "docs" / "assets" / "curves_multiturn.png"
HEAD = """# Curves of several turns

`make curves` trains the three examples below with GRPO, three seeds each, and writes this page's table and picture.
Before you quote its figures: **each model was first trained on its task**, then trained to show the skill rarely, like
the quickstart's ([what that means](quickstart.md)). The curves show that multi-turn training works, and brings out a
latent skill.

*Sampled* is one rollout per held-out task at temperature 1, *greedy* takes the most likely token each time. A rollout
counts if it ends well, however many turns it took.

## FrozenLake

`examples/frozen_lake_nano.yaml`: 4 × 4 cells, not slippery; start, goal and holes are drawn for each level. The model
(0.12 million parameters) sees the grid, answers with one of four moves, sees the grid again, for at most eight moves;
the reward is 1 at the goal. Evaluation uses 200 levels; a hash of the level assigns it to training or test, so the warm
start has seen none of them. The standard error of a figure is at most 3.5 points. Random moves reach the goal in 19 %
of these levels (counted, once per level).

The warm start (`make warm-start TASK=frozen_lake`) is 1,000 steps of supervised fine-tuning, 64 episodes each, on an
expert's shortest paths, then 150 steps on episodes in which four of five moves are random. Such episodes reach the goal
in 35 % of the test levels. Before this dilution the model reached it in 91 %, sampled (`258fce2`, 2026-11-22): training
brings back most of a latent skill, and finds nothing new.

## Calculator

`examples/calculator_nano.yaml`: the exact value of `(17*3)-4=`. The model (0.40 million parameters) may write
`>(17*3)-4`, which calls a calculator through the workflow `tools`, reads its result and answers `<answer>47</answer>`;
only the right number is rewarded. Evaluation uses 500 problems with numbers that do not occur in training. A guess
between 0 and 500 is right once in 500.

The warm start (`make warm-start TASK=calculator`) is 600 steps of supervised fine-tuning on conversations that call and
answer, then 100 steps in which four of five conversations guess a number without a call.

## Dialogue

`examples/dialogue_nano.yaml`: the quickstart's Countdown. After a wrong answer, the model is told so and may answer
once more; the last answer is rewarded. Evaluation uses 500 held-out problems. *First answer right* is the share that
needs no second answer. A random expression is right in 27 % of the problems, and one of two in 47 %.

The warm start (`make warm-start TASK=dialogue`) is the quickstart's model, with 120 steps of supervised fine-tuning on
dialogues in which each answer is right with probability 12 % and random otherwise: it adds the dialogue format, but no
skill.

## Figures

Two cores, no GPU, other programs running. The seed is the training seed; all runs of an example start from the same
model.
"""
"""Introduction of the page, with the warm starts and the chance levels."""


def main(names: list[str]) -> int:
    """Train `names`, or all missing runs, then write the page."""
    if unknown := sorted(set(names) - set(TASKS)):
        print(f"unknown: {', '.join(unknown)}; known: {', '.join(TASKS)}", file=sys.stderr)
        return 2
    for task in TASKS:
        for seed in SEEDS:
            if task in names or (not names and not (folder(task, seed) / "summary.json").is_file()):
                print(f"{task}, seed {seed} …", flush=True)
                train(task, seed)
    write_page([(t, s) for t in TASKS for s in SEEDS if (folder(t, s) / "about.json").is_file()])
    return 0


def folder(task: str, seed: int) -> Path:
    """Return the folder of a run's files."""
    return RUNS / f"{task}-{seed}"


def train(task: str, seed: int) -> None:
    """Train an example with a seed."""
    settings = [f"seed={seed}", "checkpoint.export=never", "save_rollouts=0"]
    run(folder(task, seed), f"examples/{task}_nano.yaml", *settings)


def write_page(runs: list[tuple[str, int]]) -> None:
    """Write the page and its picture."""
    columns = ["run", "seed", "sampled before", "sampled after", "greedy before", "greedy after"]
    columns += ["first answer right, before", "after", "steps", "whole run, s", "commit", "date"]
    rows = [columns, ["---", *("---:" for _ in columns[1:-2]), "---", "---"], *(row(*run) for run in runs)]
    name = PICTURE.relative_to(PAGE.parent).as_posix()
    PAGE.write_text(f"{HEAD}\n{table(rows)}\n\n![Held-out success by step]({name})\n", encoding="utf-8")
    draw(runs)


def row(task: str, seed: int) -> list[str]:
    """Return the table row of a run."""
    found = json.loads((folder(task, seed) / "summary.json").read_text(encoding="utf-8"))
    before, after = found["accuracy_before"], found["accuracy_after"]
    points = accuracies(folder(task, seed))
    first = [points[step].get("eval/workflow/right_at_first") for step in (min(points), max(points))]
    shares = [before["sampled"], after["sampled"], before["greedy"], after["greedy"], *first]
    percent = ["" if share is None else f"{100 * share:.1f} %" for share in shares]
    times = [str(found["steps"]), f"{found['seconds']['whole']:.0f}"]
    return [f"`{task}`", str(seed), *percent, *times, *origin(folder(task, seed))]


def draw(runs: list[tuple[str, int]]) -> None:
    """Draw the picture, with a panel for each example and a line for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, len(TASKS), sharey=True)
    for axes, (task, title) in zip(panels, TASKS.items(), strict=True):
        for seed in (s for t, s in runs if t == task):
            points = accuracies(folder(task, seed))
            shares = [point["eval/sampled"] for point in points.values()]
            axes.plot(list(points), shares, marker="o", ms=3, label=f"seed {seed}")
        axes.set(title=title, xlabel="step", ylim=(0, 1.04))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="lower right")
    panels[0].set_ylabel("held-out success, sampled")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
