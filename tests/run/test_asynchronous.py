"""Trainings in which answers are being sampled when weights change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]
LAB = Path(__file__).parent / "slow_lab.py"
NO_EVAL = ("eval.before=false", "eval.after=false")


def seen(runner: Any) -> list[tuple[str, list[int]]]:
    """Status and versions of every rollout that was scored."""
    return [tuple(json.loads(line)) for line in (runner.path() / "versions.jsonl").read_text().splitlines()]


def test_answers_that_are_ended_at_a_sync_go_on_with_the_new_weights(runner: Any) -> None:
    section = "{max_staleness: 2, in_flight: false, stop: enough}"
    runner.train(f"plugins=[{LAB}]", "engine=slow_lab/slow", f"rollout={section}", "steps=4", *NO_EVAL)
    rollouts = seen(runner)
    mixed = [versions for _, versions in rollouts if len(set(versions)) > 1]
    assert mixed
    assert all(versions == sorted(versions) for versions in mixed)
    assert all(1 <= len(versions) <= 10 for _, versions in rollouts)
    assert {status for status, _ in rollouts} <= {"finished", "truncated"}  # half an answer is never scored
    lines = runner.metrics()
    assert len(lines) == 4
    assert all(line["canary/gap"] < 1e-4 for line in lines)
    tasks = runner.summary()["tasks"]
    assert tasks["issued"] == tasks["trained"] + tasks["filtered"] + tasks["failed"] + tasks["returned"]
    assert tasks["returned"] > 0
