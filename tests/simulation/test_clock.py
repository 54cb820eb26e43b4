"""Virtual time jumps, keeps the order of events, and reports when no event can come any more."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.errors import RunError
from rlsdk.simulation.clock import VirtualLoop, run_virtually


def now() -> float:
    return asyncio.get_running_loop().time()


def test_hours_pass_at_once() -> None:
    async def wait() -> float:
        await asyncio.sleep(3600)
        await asyncio.sleep(0)
        await asyncio.sleep(1800)
        return now()

    began = time.perf_counter()
    assert run_virtually(wait()) == pytest.approx(5400, abs=1e-6)
    assert time.perf_counter() - began < 5


@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=30))
def test_what_sleeps_wakes_in_order_and_at_its_time(naps: list[float]) -> None:
    woken: list[tuple[float, float]] = []

    async def nap(seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((seconds, now()))

    async def all_of_them() -> None:
        await asyncio.gather(*map(nap, naps))

    run_virtually(all_of_them())
    assert [seconds for seconds, _ in woken] == sorted(naps)
    assert all(at == pytest.approx(seconds, abs=1e-6) for seconds, at in woken)


def test_timeouts_events_and_cancelling_work_as_ever() -> None:
    async def wait() -> tuple[float, float]:
        event = asyncio.Event()
        asyncio.get_running_loop().call_later(5, event.set)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 2)
        first = now()
        await event.wait()
        return first, now()

    assert run_virtually(wait()) == pytest.approx((2, 5), abs=1e-6)


def test_very_late_times_still_move_on() -> None:
    async def wait() -> float:
        await asyncio.sleep(1e9)
        for _ in range(10):
            await asyncio.sleep(1e-9)
        return now()

    assert run_virtually(wait()) == pytest.approx(1e9)


def test_a_wait_for_what_cannot_come_is_an_error_and_no_hang() -> None:
    async def wait() -> None:
        await asyncio.sleep(3)
        await asyncio.Event().wait()

    with pytest.raises(RunError, match="deadlock at 3 s of virtual time: all tasks wait"):
        run_virtually(wait())


def test_turns_count_work_not_time() -> None:
    async def wait(seconds: float) -> int:
        for _ in range(10):
            await asyncio.sleep(seconds)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return loop.turns

    assert run_virtually(wait(1.0)) == run_virtually(wait(1000.0)) < 50
