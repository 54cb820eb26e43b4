"""Predictions of `rlsdk simulate` for three runs, with rates from a fourth, compared with their measurements.

The run that gives the rates trains in step, with both cores busy in each phase. The others have more rollouts, run
ahead on a core for each half, and interrupt their requests at each sync.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner

from rlsdk.cli.simulate import simulate
from tests.benchmarks.conftest import HERE, Steps, Work, rlsdk_steps

BENCHMARK = "Predictions"
SIZE = {"tasks": 16, "group": 16, "max_tokens": 256, "steps": 16}
ENGINE = "{use: vllm, max_num_seqs: 512}"
AHEAD = {
    "placement.engines": 1,
    "placement.learners": 1,
    "placement.colocate": "false",
    "rollout.max_staleness": 1,
    "engine": ENGINE,
}
CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "twice the tasks": ({"tasks": 32}, {"engine": ENGINE}),
    "ahead, a sync every 4 steps": ({}, {**AHEAD, "rollout.sync_interval": 4}),
    "ahead, interrupted at each sync": ({}, {**AHEAD, "rollout.in_flight": "false"}),
}
WITHIN = 0.15


@pytest.fixture(scope="module")
def rates(tmp_path_factory: pytest.TempPathFactory, model: Path, prompts: Path) -> tuple[Path, Work]:
    """Folder of the run that gives the rates, and its work."""
    folder, work = tmp_path_factory.mktemp("rates") / "runs", Work(model=model, prompts=prompts, **SIZE)
    rlsdk_steps(work, folder, {"engine": ENGINE})
    return folder / "run", work


@pytest.mark.parametrize("case", CASES)
def test_the_prediction_of_a_run_is_near_what_it_measures(
    case: str,
    rates: tuple[Path, Work],
    train: Callable[..., Steps],
    tmp_path: Path,
    show: Callable[..., None],
    check: Callable[..., None],
) -> None:
    measured_in, work = rates
    size, settings = CASES[case]
    found = train(attrs.evolve(work, **size), **settings)
    seconds = statistics.fmean(found.seconds)
    options = ["--plugin", str(HERE / "workload.py"), "--rates", str(measured_in), "--steps", str(work.steps), "--json"]
    config = str(tmp_path / "run-0" / "run" / "config.yaml")
    answer = CliRunner().invoke(simulate, [config, *options], catch_exceptions=False)
    predicted = json.loads(answer.stdout)["predictions"][0]["configured"]
    figures = {name: round(predicted[name], 3) for name in ("step", "staleness", "engines_idle", "learner_idle")}
    show(found.seconds, predicted=figures, measured=round(seconds, 3))
    check("predicted seconds over measured", predicted["step"] / seconds, at_least=1 - WITHIN, at_most=1 + WITHIN)
