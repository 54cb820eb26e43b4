"""The chunked head and the naive one: 2,048 tokens, hidden 896, vocabulary 151,936, with entropy, float32."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.benchmarks.conftest import HERE, call

BENCHMARK = "The chunked head"
ROUNDS = 3


def measure(what: str, backward: bool, method: str = "") -> Any:
    """In a process of its own."""
    options = {"what": what, "method": method, "backward": backward, "rounds": ROUNDS}
    return json.loads(call([sys.executable, str(HERE / "head_cost.py"), json.dumps(options)]).splitlines()[-1])


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
def test_an_eighth_of_the_memory(backward: bool, show: Callable[..., None], check: Callable[..., None]) -> None:
    begin = time.perf_counter()
    peaks = {method: measure("memory", backward, method) for method in ("naive", "chunked")}
    ratio = peaks["naive"] / peaks["chunked"]
    show(
        [time.perf_counter() - begin],
        ratio=round(ratio, 1),
        **{f"{method}_mib": peak >> 20 for method, peak in peaks.items()},
    )
    check("peak memory, naive over chunked", ratio, at_least=8)


@pytest.mark.parametrize(("backward", "most"), [(False, 1.1), (True, 1.35)], ids=["forward", "forward and backward"])
def test_about_the_time_of_the_naive_one(
    backward: bool, most: float, show: Callable[..., None], check: Callable[..., None]
) -> None:
    found = measure("time", backward)
    ratio = statistics.median(found["chunked"]) / statistics.median(found["naive"])
    show(found["chunked"], ratio=round(ratio, 3), naive=[round(s, 2) for s in found["naive"]])
    case = "forward and backward" if backward else "forward"
    check("seconds, chunked over naive", ratio, case=case, at_most=most)
