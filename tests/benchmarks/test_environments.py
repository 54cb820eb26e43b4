"""1,024 environments with long-tailed latencies and an engine of fixed throughput, compared with the optimum.

Ideal is the greater of two: what the engine takes for all tokens, and the longest sum of one environment's latencies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.environments.simulated import Load, in_lock_step, measure, side_by_side

BENCHMARK = "Environments"
pytestmark = pytest.mark.usefixtures("cluster")
LATENCY_BOUND = Load()
TOKEN_BOUND = Load(median=0.05, rate=4_096)
IN_THREADS = Load(environment="sleeps", workers=2, threads=512)
LEAST = {LATENCY_BOUND: 0.9, TOKEN_BOUND: 0.9, IN_THREADS: 0.7}
"""Share of the ideal; a thousand threads of Python take turns, and two cores change between them."""


@pytest.mark.parametrize(
    "load", [LATENCY_BOUND, TOKEN_BOUND, IN_THREADS], ids=["latency-bound", "token-bound", "in-threads"]
)
def test_throughput_is_close_to_the_ideal(load: Load, show: Callable[..., None], check: Callable[..., None]) -> None:
    took = asyncio.run(measure(load, side_by_side))
    share = load.ideal / took.seconds
    show(
        [took.seconds],
        ideal=round(load.ideal, 2),
        engine=round(load.engine_seconds, 2),
        chain=round(load.chain_seconds, 2),
        share=round(share, 3),
        threads=took.threads,
        megabytes=round(took.megabytes),
    )
    check("share of the ideal throughput", share, at_least=LEAST[load])
    assert took.threads < 200 + load.workers * load.threads
    check("memory, MB", took.megabytes, at_most=1000)


def test_a_loop_in_lock_step_takes_far_longer(show: Callable[..., None], check: Callable[..., None]) -> None:
    took = asyncio.run(measure(LATENCY_BOUND, in_lock_step))
    show([took.seconds], ideal=round(LATENCY_BOUND.ideal, 2), share=round(LATENCY_BOUND.ideal / took.seconds, 3))
    share = LATENCY_BOUND.ideal / took.seconds
    check("share of the ideal throughput", share, case="for comparison: in lock-step, latency-bound", at_most=0.5)
