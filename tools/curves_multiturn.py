"""Train the examples of several turns, and write `docs/curves_multiturn.md` with its table and picture.

    python tools/curves_multiturn.py                # the runs that have not been made yet, then the page
    python tools/curves_multiturn.py frozen_lake    # those of one example, anew

Each run is `rlsdk train examples/TASK_nano.yaml seed=SEED`, in `runs/curves`. FrozenLake needs its plugin:
`make gridworlds`.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

from curves import ROOT, RUNS, accuracies, git

SEEDS = (0, 1, 2)
TASKS = {
    "frozen_lake": "FrozenLake 4 × 4, by turns",
    "calculator": "arithmetic with a calculator",
    "dialogue": "Countdown, two answers",
}
"""Name of an example -> what its curves are called."""
PAGE = ROOT / "docs" / "curves_multiturn.md"
PICTURE = ROOT / "docs" / "assets" / "curves_multiturn.png"
HEAD = (ROOT / "tools" / "curves_multiturn_head.md").read_text(encoding="utf-8")
"""What had been taught before, and what chance does: the text above the table."""


def main(names: list[str]) -> int:
    """Train what is missing (or `names`), then write the page."""
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
    """Where a run leaves its files."""
    return RUNS / f"{task}-{seed}"


def train(task: str, seed: int) -> None:
    """Train an example with a seed."""
    command = [sys.executable, "-m", "rlsdk.cli", "train", f"examples/{task}_nano.yaml", f"seed={seed}"]
    command += [f"name={task}-{seed}", f"out={RUNS}", "checkpoint.export=never", "save_rollouts=0", "--overwrite"]
    about = {"commit": git("describe", "--always", "--dirty"), "date": datetime.date.today().isoformat()}
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (folder(task, seed) / "about.json").write_text(json.dumps(about), encoding="utf-8")


def write_page(runs: list[tuple[str, int]]) -> None:
    """The page and its picture."""
    columns = ["run", "seed", "sampled before", "sampled after", "greedy before", "greedy after"]
    columns += ["first answer right, before", "after", "steps", "whole run, s", "commit", "date"]
    rows = [columns, ["---", *("---:" for _ in columns[1:-2]), "---", "---"], *(row(*run) for run in runs)]
    table = "\n".join(f"| {' | '.join(each)} |" for each in rows)
    name = PICTURE.relative_to(PAGE.parent).as_posix()
    PAGE.write_text(f"{HEAD}\n{table}\n\n![Held-out success by step]({name})\n", encoding="utf-8")
    draw(runs)


def row(task: str, seed: int) -> list[str]:
    """The line of a run."""
    found = json.loads((folder(task, seed) / "summary.json").read_text(encoding="utf-8"))
    about = json.loads((folder(task, seed) / "about.json").read_text(encoding="utf-8"))
    before, after = found["accuracy_before"], found["accuracy_after"]
    points = accuracies(folder(task, seed))
    first = [points[step].get("eval/workflow/right_at_first") for step in (min(points), max(points))]
    shares = [before["sampled"], after["sampled"], before["greedy"], after["greedy"], *first]
    percent = ["" if share is None else f"{100 * share:.1f} %" for share in shares]
    times = [str(found["steps"]), f"{found['seconds']['whole']:.0f}"]
    return [f"`{task}`", str(seed), *percent, *times, f"`{about['commit']}`", about["date"]]


def draw(runs: list[tuple[str, int]]) -> None:
    """The picture: a panel for each example, a line for each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = figure.subplots(1, len(TASKS), sharey=True)
    for axes, (task, title) in zip(panels, TASKS.items(), strict=True):
        for seed in (s for t, s in runs if t == task):
            points = accuracies(folder(task, seed))
            shares = [point["eval/sampled"] for point in points.values()]
            axes.plot(list(points), shares, marker="o", ms=3, label=f"seed {seed}")
        axes.set(title=title, xlabel="step", ylim=(0, 1))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="lower right")
    panels[0].set_ylabel("held-out success, sampled")
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
