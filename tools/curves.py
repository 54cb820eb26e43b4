"""Train the quickstart's task with many algorithms, and write `docs/curves.md` with its table and picture.

    python tools/curves.py             # all that have not been trained yet, then the page
    python tools/curves.py grpo dapo   # these, again

Each run is `rlsdk train examples/quickstart.yaml` with the settings below, in `runs/curves`.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "curves"
STEPS = 60
EVERY = 15
COMMON = [
    f"steps={STEPS}",
    f"eval.every={EVERY}",
    "engine=transformers",
    "batch_size=64",
    "learner.lr=4.0e-4",
    "checkpoint.every=0",
    "checkpoint.export=never",
    "save_rollouts=0",
]
"""Settings on top of the quickstart's config: the same batches, learning rate and schedule for all algorithms."""
ALGORITHMS: dict[str, list[str]] = {
    "grpo": ["kl_coef: 0.0"],
    "dr_grpo": ["norm: 14.0"],
    "dapo": ["shaping: [{use: overlong, max_length: 14, buffer: 2, penalty: 1.0}]"],
    "gspo": [],
    "cispo": [],
    "sapo": [],
    "gmpo": [],
    "rloo": ["shaping: []"],
    "reinforce_plus_plus": ["shaping: []"],
    "reinforce_plus_plus_baseline": ["kl_coef: 0.0"],
    "remax": ["shaping: []"],
    "opo": [],
    "gpg": [],
    "opmd": [],
    "topr": [],
    "raft": [],
    "pass_at_k": [],
    "decoupled_ppo": [],
    "ppo": ["shaping: []"],
}
"""Name -> changes of the named algorithm for the task's lengths and for training without KL, as in the quickstart."""
SETTINGS: dict[str, list[str]] = {"decoupled_ppo": ["old_logprobs=learner"]}
"""Name -> settings outside the algorithm that it requires."""
HEAD = f"""# Curves

`make curves` trains the quickstart's task ({STEPS} steps of 64 tasks in place of 150 of 32, a learning rate of 4e-4,
all else as in `examples/quickstart.yaml`) with many of the named algorithms, one seed each, and writes this page.
Batches, learning rate and schedule are tuned for GRPO, and KL terms are off, as in the quickstart: **the table shows
that each algorithm learns, not which one is best**. Accuracy is measured on 1,000 held-out tasks; its standard error is
at most 1.6 points, and chance level is 27 % ([what the figures mean](quickstart.md)).

`pass_at_k` trains the best of a group rather than its mean, so its accuracy per answer rises slowly; `raft` learns only
from the best answer of each group.

"""


def main(names: list[str]) -> int:
    """Train `names`, or all missing algorithms, then write the page."""
    if unknown := sorted(set(names) - set(ALGORITHMS)):
        print(f"unknown: {', '.join(unknown)}; known: {', '.join(ALGORITHMS)}", file=sys.stderr)
        return 2
    for name in names or [n for n in ALGORITHMS if not summary(n).is_file()]:
        print(f"{name} …", flush=True)
        train(name)
    write_page({name: summary(name).parent for name in ALGORITHMS if summary(name).is_file()})
    return 0


def summary(name: str) -> Path:
    """Return the path of a finished run's summary."""
    return RUNS / name / "summary.json"


def train(name: str) -> None:
    """Train with one algorithm."""
    algorithm = "{" + ", ".join([f"use: {name}", *ALGORITHMS[name]]) + "}"
    run(RUNS / name, "examples/quickstart.yaml", *COMMON, *SETTINGS.get(name, []), f"algorithm={algorithm}")


def run(folder: Path, example: str, *settings: str) -> None:
    """Train an example in a folder from scratch, and record commit and date there."""
    about = about_now()
    command = [sys.executable, "-m", "rlsdk.cli", "train", example, f"name={folder.name}", f"out={folder.parent}"]
    subprocess.run([*command, *settings, "--overwrite"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")


def origin(folder: Path) -> list[str]:
    """Return the table cells with commit and date of a run."""
    about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
    return [f"`{about['commit']}`", about["date"]]


def about_now() -> dict[str, str]:
    """Return the commit and the date of a run that starts now."""
    return {"commit": git("describe", "--always", "--dirty"), "date": datetime.date.today().isoformat()}


def table(rows: Iterable[Iterable[str]]) -> str:
    """Return rows of cells as a Markdown table; the second one aligns the columns."""
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def git(*arguments: str) -> str:
    """Run git and return its output."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def write_page(runs: dict[str, Path]) -> None:
    """Write `docs/curves.md` and its picture."""
    curves = {name: accuracies(folder) for name, folder in runs.items()}
    steps = range(0, STEPS + 1, EVERY)
    rows = [["algorithm", "changes", *(f"{s}" for s in steps), "greedy", "commit", "date"]]
    rows.append(["---", "---", *("---:" for _ in steps), "---:", "---", "---"])
    for name, folder in runs.items():
        found = [f"{100 * curves[name][s]['eval/sampled']:.1f}" for s in steps]
        changes = "; ".join(f"`{c}`" for c in [*ALGORITHMS[name], *SETTINGS.get(name, [])]) or "none"
        greedy = f"{100 * curves[name][STEPS]['eval/greedy']:.1f}"
        rows.append([f"`{name}`", changes, *found, greedy, *origin(folder)])
    about = "Held-out accuracy in percent, sampled at temperature 1, after so many steps; greedy after the last.\n\n"
    page = f"{HEAD}{about}{table(rows)}\n\n![Held-out accuracy by step](assets/curves.png)\n"
    (ROOT / "docs" / "curves.md").write_text(page, encoding="utf-8")
    draw(curves)


def accuracies(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the lines of a run's metrics that contain an evaluation, by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {line["step"]: line for line in lines if "eval/sampled" in line}


def draw(curves: dict[str, dict[int, dict[str, Any]]]) -> None:
    """Draw `docs/assets/curves.png`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.add_subplot()
    for i, (name, points) in enumerate(curves.items()):
        style = ["-", "--", ":", "-."][i // 10 % 4]
        axes.plot(list(points), [p["eval/sampled"] for p in points.values()], style, marker="o", ms=3, label=name)
    axes.set(xlabel="step", ylabel="held-out accuracy, sampled", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    (ROOT / "docs" / "assets").mkdir(exist_ok=True)
    figure.savefig(ROOT / "docs" / "assets" / "curves.png", dpi=110)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
