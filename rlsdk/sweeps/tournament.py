"""Compare algorithms over tasks and seeds."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

import rlsdk
from rlsdk.config import Plan
from rlsdk.errors import ArgumentError, ConfigError
from rlsdk.reporting.estimates import Estimate, interquartile_mean, mean
from rlsdk.sweeps.running import Failure, RunOutcome
from rlsdk.sweeps.runs import SweepRun, check_all, refuse_equal, require_few, run_name

SUITES = Path("examples") / "suites"
SETTING = re.compile(r"[\w.\[\]]+=")


@attrs.frozen
class Standing:
    """Scores of an algorithm by `metric`: task -> seed -> score; `missing` names the runs without a score."""

    algorithm: str
    scores: Mapping[str, Mapping[int, float]]
    missing: tuple[str, ...]
    metric: str

    @property
    def whole(self) -> Estimate | None:
        """Interquartile mean over tasks and seeds; None if a task has no score."""
        if not all(self.scores.values()):
            return None
        return interquartile_mean({task: [*each.values()] for task, each in self.scores.items()})

    def task(self, name: str) -> Estimate | None:
        """Mean over a task's seeds; None without a score."""
        return mean([*self.scores[name].values()], self.metric) if self.scores[name] else None


def parted(entries: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split command-line arguments into algorithms and settings.

    Raises:
        ConfigError: There is no algorithm, or one is given twice.
    """
    settings = [entry for entry in entries if SETTING.match(entry)]
    algorithms = [entry for entry in entries if not SETTING.match(entry)]
    if not algorithms:
        raise ConfigError(["ALGORITHM: give at least one; `rlsdk plugins algorithm` lists them"])
    if twice := sorted({each for each in algorithms if algorithms.count(each) > 1}):
        raise ConfigError([f"ALGORITHM: {', '.join(twice)} is given twice; --seeds N repeats every run"])
    return algorithms, settings


def tournament_of(
    algorithms: Sequence[str],
    tasks: Mapping[str, Path],
    folder: Path,
    *,
    settings: Sequence[str] = (),
    plugins: Sequence[str] = (),
    seeds: int,
) -> tuple[list[SweepRun], Mapping[str, Plan]]:
    """Return the runs of a tournament and their checked plans, one seed after another.

    An algorithm that only imitates demonstrations trains without the task's workflow, which is still used to evaluate.

    Args:
        algorithms: Names, or YAML mappings with `use`.
        tasks: Name -> configuration.
        folder: Folder of all runs.
        settings: Settings of all runs.
        plugins: Files of plugins.
        seeds: Number of runs per algorithm and task.

    Raises:
        ConfigError: Lists all faults of all runs, or names two equal algorithms; or the runs are too many.
    """
    require_few({"algorithms": len(algorithms), "tasks": len(tasks), "--seeds": seeds})
    runs = []
    for seed in range(seeds):
        for algorithm in algorithms:
            for task, config in tasks.items():
                group = {"algorithm": algorithm, "task": task}
                runs.append(
                    SweepRun(
                        name=run_name(group, seed),
                        folder=folder,
                        config=config,
                        settings=(f"algorithm={algorithm}", *settings),
                        seed=seed,
                        plugins=tuple(plugins),
                        group=group,
                    )
                )
    plans = check_all(runs)
    for task in tasks:
        refuse_equal([run for run in runs if run.group["task"] == task], plans)
    changed = {}
    for run in runs:
        plan = plans[run.name]
        if not plan.sampled and (workflow := plan.config.workflow) is not None:
            evaluated = json.dumps({"use": workflow.name, **workflow.options})
            kept = [each for each in run.settings if re.match(r"workflow\b", each) is None]
            settings_of_run = (*kept, "workflow=null", f"eval.workflow={evaluated}")
            changed[run.name] = attrs.evolve(run, settings=settings_of_run)
    return [changed.get(run.name, run) for run in runs], plans | check_all([*changed.values()])


def standings(outcomes: Sequence[RunOutcome], metric: str) -> list[Standing]:
    """Collect the scores of each algorithm, best first, those without a score on some task last."""
    scores: dict[str, dict[str, dict[int, float]]] = {}
    missing: dict[str, list[str]] = {}
    for outcome in outcomes:
        run = outcome.run
        seeds = scores.setdefault(run.group["algorithm"], {}).setdefault(run.group["task"], {})
        value = run.result(metric) if outcome.status == 0 else None
        if value is None:
            missing.setdefault(run.group["algorithm"], []).append(run.name)
        else:
            seeds[run.seed] = value
    found = [Standing(name, each, tuple(missing.get(name, ())), metric) for name, each in scores.items()]
    return sorted(found, key=lambda each: (each.whole is None, -each.whole.value if each.whole else 0.0))


def as_json(
    suite: str, metric: str, seeds: int, found: Sequence[Standing], failures: Sequence[Failure]
) -> dict[str, Any]:
    """Return the results as plain values."""
    return {
        "suite": suite,
        "metric": metric,
        "seeds": seeds,
        "algorithms": [
            {
                "algorithm": each.algorithm,
                "interquartile_mean": _plain(each.whole),
                "tasks": {
                    task: {**(_plain(each.task(task)) or {}), "values": {str(s): v for s, v in values.items()}}
                    for task, values in each.scores.items()
                },
                "missing": list(each.missing),
            }
            for each in found
        ],
        "failed": [each.as_json() for each in failures],
    }


def _plain(estimate: Estimate | None) -> dict[str, Any] | None:
    return None if estimate is None else attrs.asdict(estimate)


def suite_tasks(suite: str) -> dict[str, Path]:
    """Return the tasks of a suite, a name in the repository or a folder of configurations: name -> configuration.

    Raises:
        ConfigError: There is no such suite.
    """
    roots = [Path.cwd() / SUITES, Path(rlsdk.__file__).parents[1] / SUITES]
    folder = next((each for each in (Path(suite), *(root / suite for root in roots)) if each.is_dir()), None)
    if folder is None:
        there = sorted({each.name for root in roots if root.is_dir() for each in root.iterdir() if each.is_dir()})
        raise ArgumentError([f"--suite: {_missing(suite, there)}"])
    tasks = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    if not tasks:
        raise ArgumentError(
            [f"--suite: {folder} has no configuration; a suite is a folder with one YAML file per task"]
        )
    return tasks


def _missing(suite: str, there: list[str]) -> str:
    if there:
        return f"unknown suite {suite!r}; available: {', '.join(there)}; or give a folder of configurations"
    return (
        f"{suite!r} was not found: the suites and their models are part of the repository, not of the installed "
        "package; clone it and run this in its folder, or give a folder of your own configurations"
    )
