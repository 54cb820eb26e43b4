"""Slow environments do not delay each other. For measurements, see `tests/benchmarks/test_environments.py`."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from tests.environments.simulated import Load, measure, side_by_side

pytestmark = [pytest.mark.stack, pytest.mark.slow]


def test_a_thousand_environments_run_on_few_threads_without_waiting_for_the_slowest(cluster: None) -> None:
    load, imported = Load(median=0.07, turns=3), psutil.Process().memory_info().rss / 2**20
    took = asyncio.run(measure(load, side_by_side))
    played = took.asked[-load.count * load.turns :]
    of_turn = [[at for at, length in enumerate(played) if length == each] for each in sorted(set(played))]
    assert [len(each) for each in of_turn] == [load.count] * load.turns
    slowest = of_turn[1][-1]  # a loop in lock step asks nothing of the third turn before it; a busy machine, less
    assert sum(at < slowest for at in of_turn[2]) > load.count / 10
    # Ray has about forty threads in each process; none is an environment's.
    assert took.threads < 200
    assert took.megabytes - imported < 800  # not what other tests imported
