"""Calls in threads: quick ones share a thread, slow ones run side by side, and those that hang are left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator

import pytest

from rlsdk.isolation.threads import Threads, run_to_end


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    """An event that hanging calls wait for, set at the end."""
    event = threading.Event()
    yield event
    event.set()


def test_quick_calls_share_a_thread() -> None:
    async def go() -> list[int]:
        threads = Threads(64)
        calls = (threads.call(threading.get_ident) for _ in range(200))
        return await asyncio.gather(*calls)

    # On a busy machine, a thread may get no time for so long that others are started.
    assert min(len(set(asyncio.run(go()))) for _ in range(10)) < 20


def test_slow_calls_run_at_the_same_time() -> None:
    barrier = threading.Barrier(12)  # each call ends only once all have begun

    async def go() -> list[int]:
        threads = Threads(12)
        return await asyncio.gather(*(threads.call(barrier.wait, 10.0) for _ in range(12)))

    assert sorted(asyncio.run(go())) == list(range(12))


def test_a_result_does_not_wait_for_a_call_that_hangs(stop: threading.Event) -> None:
    async def go() -> None:
        threads = Threads(1)
        calls = [asyncio.ensure_future(threads.call(work)) for work in (int, stop.wait, str)]
        assert await asyncio.wait_for(calls[0], 5) == 0
        assert not calls[1].done() and not calls[2].done()
        stop.set()
        assert await asyncio.gather(*calls) == [0, True, ""]

    asyncio.run(go())


def test_the_time_limit_starts_when_the_call_begins(stop: threading.Event) -> None:
    async def go() -> None:
        threads = Threads(1)
        first = asyncio.ensure_future(threads.call(stop.wait))
        second = asyncio.ensure_future(threads.call(int, seconds=0.5))
        await asyncio.sleep(0.6)
        assert not second.done()
        stop.set()
        assert await asyncio.gather(first, second) == [True, 0]

    asyncio.run(go())


def test_a_call_that_hangs_is_left_and_its_thread_replaced(stop: threading.Event) -> None:
    async def go() -> None:
        threads = Threads(1)
        with pytest.raises(TimeoutError, match=r"longer than 0.05 s"):
            await threads.call(stop.wait, seconds=0.05)
        assert threads.stuck == 1
        assert await threads.call(int, seconds=5.0) == 0
        stop.set()
        for _ in range(500):
            if not threads.stuck:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the thread of a call that has returned does not end")

    asyncio.run(go())


def test_a_cancelled_call_that_still_waits_never_runs(stop: threading.Event) -> None:
    ran: list[int] = []

    async def go() -> None:
        threads = Threads(1)
        first = asyncio.ensure_future(threads.call(stop.wait))
        second = asyncio.ensure_future(threads.call(ran.append, 2))
        await asyncio.sleep(0.05)
        second.cancel()
        await asyncio.wait({second})
        stop.set()
        await first
        assert await threads.call(len, ran) == 0
        assert threads.stuck == 0

    asyncio.run(go())


def test_errors_reach_the_caller() -> None:
    async def go() -> None:
        threads = Threads(2)
        with pytest.raises(ZeroDivisionError):
            await threads.call(lambda: 1 // 0)
        with pytest.raises(RuntimeError, match="SystemExit: 3"):
            await threads.call(exit, 3)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await threads.call(next, iter(()))

    asyncio.run(go())


def test_threads_end_with_their_loop_and_with_the_pool() -> None:
    def alive() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name == "rlsdk-call"} - before

    before = {each for each in threading.enumerate() if each.name == "rlsdk-call"}
    threads = Threads(4)
    for _ in range(3):  # one event loop after another
        assert asyncio.run(threads.call(int)) == 0
    gc.collect()
    del threads
    end = time.monotonic() + 5
    while alive() and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive()


async def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def test_each_thread_has_one_event_loop_which_ends_with_it() -> None:
    async def both() -> list[asyncio.AbstractEventLoop]:
        threads = Threads(1)
        return [await threads.call(run_to_end, _loop()) for _ in range(2)]

    first, second = asyncio.run(both())
    assert first is second is not run_to_end(_loop())
    for _ in range(1000):
        gc.collect()
        if first.is_closed():
            break
        time.sleep(0.01)
    assert first.is_closed() and not run_to_end(_loop()).is_closed()


def test_an_interrupted_call_leaves_nothing_that_runs_with_the_next() -> None:
    class Interrupted(BaseException): ...

    cancelled = []

    async def background() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.append(True)

    async def interrupted() -> None:
        cancelled.append(False)
        task = asyncio.create_task(background())
        await asyncio.sleep(0)
        raise Interrupted from KeyError(task)

    with pytest.raises(Interrupted):
        run_to_end(interrupted())
    assert cancelled == [False, True]
    assert run_to_end(asyncio.sleep(0, "next")) == "next"
