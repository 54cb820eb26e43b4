"""Overhead of a step beyond generation, forward and backward passes, and optimiser steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.conftest import Steps, Work

BENCHMARK = "Overhead"
LIMIT = 0.10
"""Share of a step's wall time that may lie outside the intervals measured inside the actors."""


def test_a_tenth_of_a_step_at_most_is_overhead(
    endless_model: Path,
    prompts: Path,
    train: Callable[..., Steps],
    show: Callable[..., None],
    check: Callable[..., None],
) -> None:
    work = Work(model=endless_model, prompts=prompts, tasks=16, group=16, max_tokens=64, steps=40)
    steps = train(work)
    assert steps.length == 64
    times = {key: [m[key] for m in steps.metrics] for key in steps.metrics[0] if key.startswith("time/")}
    median = {key: round(statistics.median(values), 4) for key, values in times.items()}
    show(steps.seconds, **median)
    check("share of a step outside the work", median["time/outside_share"], case="256 × 64", at_most=LIMIT)
