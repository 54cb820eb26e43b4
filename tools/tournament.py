"""Compare the named algorithms on the suite `nano`, and write `docs/tournament.md`.

    python tools/tournament.py                        # train all missing runs, then write the page
    python tools/tournament.py --seeds 1 --tasks countdown
    python tools/tournament.py --page                 # only the page, from existing runs

The runs are in `runs/tournament-nano`; interrupted ones are resumed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from curves import ROOT, about_now, table

from rlsdk.reporting.estimates import Estimate
from rlsdk.sweeps.running import EVALUATED, Interrupted, RunOutcome, train_all
from rlsdk.sweeps.runs import SweepRun
from rlsdk.sweeps.tournament import Standing, standings, suite_tasks, tournament_of

RUNS = ROOT / "runs" / "tournament-nano"
PAGE = ROOT / "docs" / "tournament.md"
ALGORITHMS = (
    *("grpo", "rloo", "ppo", "reinforce_plus_plus", "dapo", "gspo", "cispo", "dr_grpo", "remax", "opo", "gpg", "sapo"),
    *("gmpo", "topr", "raft", "opmd", "pass_at_k", "decoupled_ppo", "reinforce_plus_plus_baseline", "dpo", "kto"),
    *("gigpo", "mix", "sft"),
)
"""All named algorithms except `opd`, which needs a teacher."""
HEAD = """# Tournament

`make tournament` trains every named algorithm on the tasks of the suite `nano`, with the algorithm's own defaults and
everything else equal (`examples/suites/nano`: a few steps of a small model on two CPU cores), and writes this page. To
compare your own algorithm:

```sh
rlsdk tournament grpo mylab/msoft --seeds 3
```

A score is the accuracy on 250 held-out tasks after training, with four answers each at temperature 1. Algorithms are
ranked by the interquartile mean over tasks and seeds, with a 95 % confidence interval by a bootstrap that draws seeds
within each task ([arXiv:2108.13264](https://arxiv.org/abs/2108.13264)). **A few steps at one learning rate show how
fast an algorithm begins to learn, not which one is best in the end.** Unlike the others, `mix` and `sft` are shown
right answers: `sft` only imitates these, and is evaluated with each task's workflow (`eval.workflow`). `opd` needs a
teacher, which the suite does not have.

"""


def main(arguments: Sequence[str]) -> int:
    """Train the missing runs, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", default="", help="comma-separated; all")
    parser.add_argument("--page", action="store_true", help="train nothing")
    given = parser.parse_args(arguments)
    known = suite_tasks(str(ROOT / "examples" / "suites" / "nano"))
    tasks = {name: file for name, file in known.items() if not given.tasks or name in given.tasks.split(",")}
    runs, plans = tournament_of(ALGORITHMS, tasks, RUNS, seeds=given.seeds)
    status = 0
    if not given.page:
        try:
            outcomes = train_all(runs, plans, lambda event, each: tell(event, each.run))
            status = int(any(each.status for each in outcomes))
        except Interrupted:
            status = 130
    done = {run.name for run in runs if run.finished(plans[run.name])}
    write([RunOutcome(run, int(run.name not in done)) for run in runs], list(tasks), given.seeds)
    return status


def tell(event: str, run: SweepRun) -> None:
    """Print a line, and record the commit of a starting run."""
    print(f"{datetime.datetime.now():%H:%M:%S} {run.name} {event}", flush=True)
    if event == "begins":
        (RUNS / "logs").mkdir(parents=True, exist_ok=True)
        (RUNS / "logs" / f"{run.name}.json").write_text(json.dumps(about_now()), encoding="utf-8")


def write(outcomes: Sequence[RunOutcome], tasks: Sequence[str], seeds: int) -> None:
    """Write the page of the finished runs."""
    measured = [each for each in outcomes if each.status == 0]
    algorithms = {each.run.group["algorithm"] for each in measured}
    selected = [each for each in outcomes if each.run.group["algorithm"] in algorithms]
    missing = [name for name in ALGORITHMS if name not in algorithms]
    rows = [["", "algorithm", "all tasks", *tasks, "runs"], ["---:", "---", "---:", *("---:" for _ in tasks), "---:"]]
    for place, each in enumerate(standings(selected, EVALUATED), 1):
        cells = [percent(each.whole), *(percent(each.task(task)) for task in tasks)]
        rows.append([str(place), f"`{each.algorithm}`", *cells, str(runs_of(each))])
    about = (
        f"{seeds} seed{'s' if seeds > 1 else ''} of each task: {len(measured)} of {len(outcomes)} runs are finished.\n"
    )
    if seeds == 1:
        about = f"**This page is from a reduced tournament: one seed gives no interval.** {about}"
    origin = sorted({tuple(json.loads(path.read_text()).values()) for path in map(noted, measured) if path.is_file()})
    commits = ", ".join(f"`{commit}` ({date})" for commit, date in origin)
    left = f"\nNot measured yet: {', '.join(f'`{name}`' for name in missing)}.\n" if missing else ""
    PAGE.write_text(
        f"{HEAD}{about}Accuracy in percent; commit and date: {commits}.\n\n{table(rows)}\n{left}", encoding="utf-8"
    )


def noted(outcome: RunOutcome) -> Path:
    """Return the file with the commit and the date of a run's start."""
    return RUNS / "logs" / f"{outcome.run.name}.json"


def runs_of(standing: Standing) -> int:
    """Return the number of an algorithm's runs that have a score."""
    return sum(len(values) for values in standing.scores.values())


def percent(estimate: Estimate | None) -> str:
    """Return a share with its interval, in percent."""
    if estimate is None:
        return "–"
    value = f"{100 * estimate.value:.1f}"
    if estimate.low is None or estimate.high is None:
        return value
    # The interval of a single task is Student's, which has no bounds, unlike an accuracy.
    return f"{value} [{100 * max(estimate.low, 0.0):.1f}, {100 * min(estimate.high, 1.0):.1f}]"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
