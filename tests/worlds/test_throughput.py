"""Environments that take their time: nobody waits for another. The figures: `tests/benchmarks/test_environments.py`."""

from __future__ import annotations

import asyncio

import pytest

from tests.worlds.simulated import Load, in_lock_step, measure, side_by_side

pytestmark = [pytest.mark.stack, pytest.mark.slow]


def test_a_thousand_environments_run_on_few_threads_and_far_ahead_of_a_loop_in_lock_step(cluster: None) -> None:
    load = Load(median=0.07, turns=3)
    took = asyncio.run(measure(load, side_by_side))
    barrier = asyncio.run(measure(load, in_lock_step))
    assert took.seconds < 0.7 * barrier.seconds
    # Ray has about forty threads in each process; none is an environment's.
    assert took.threads < 200
    assert took.megabytes < 1000
