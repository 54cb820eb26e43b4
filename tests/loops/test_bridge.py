"""Calls between event loops: results, cancellation both ways, context, order, and blocking."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from rlsdk.loops import LoopBridge, LoopWatch, UserLoop, bridge, culprit, watch

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("NAME", default="nobody")
SECONDS = 60.0
"""Longest wait for another thread: never reached unless something is broken."""


@pytest.fixture
def user_loop() -> Iterator[UserLoop]:
    with UserLoop() as made:
        yield made


def test_outcomes_and_errors_cross(user_loop: UserLoop) -> None:
    async def thread() -> int:
        await asyncio.sleep(0)
        return threading.get_ident()

    async def wrong() -> None:
        raise KeyError("x")

    async def drive() -> None:
        assert await user_loop.run(thread) != threading.get_ident()
        with pytest.raises(KeyError, match="x"):
            await user_loop.run(wrong)

    asyncio.run(drive())


def test_context_variables_cross(user_loop: UserLoop) -> None:
    async def named() -> str:
        return NAME.get()

    async def drive(name: str) -> str:
        NAME.set(name)
        return await user_loop.run(named)

    async def both() -> list[str]:
        return await asyncio.gather(drive("a"), drive("b"))

    assert asyncio.run(both()) == ["a", "b"]


def test_a_call_back_runs_on_the_loop_that_called(user_loop: UserLoop) -> None:
    async def drive() -> None:
        here, back = threading.get_ident(), user_loop.way_back()

        async def thread() -> int:
            return threading.get_ident()

        async def there() -> tuple[int, int]:
            return threading.get_ident(), await back.run(thread)

        user_thread, driver_thread = await user_loop.run(there)
        assert user_thread != here == driver_thread

    asyncio.run(drive())


def test_calls_of_one_turn_begin_in_one_turn_and_in_order(user_loop: UserLoop) -> None:
    begun: list[list[int]] = []

    async def note(number: int) -> None:
        if not begun or begun[-1] is closed:
            begun.append([])
            asyncio.get_running_loop().call_soon(close)
        begun[-1].append(number)

    closed: list[int] = []

    def close() -> None:
        begun.append(closed)

    async def drive() -> None:
        await asyncio.gather(*(user_loop.run(lambda i=i: note(i)) for i in range(50)))  # type: ignore[misc]

    asyncio.run(drive())
    assert begun[0] == list(range(50))


def test_cancelling_reaches_the_other_loop_and_waits_for_its_end(user_loop: UserLoop) -> None:
    events: list[str] = []

    async def drive() -> None:
        begun = asyncio.Event()
        back = user_loop.way_back()

        async def note() -> None:
            begun.set()

        async def long() -> None:
            try:
                await back.run(note)
                await asyncio.sleep(SECONDS)
            except asyncio.CancelledError:
                await asyncio.sleep(0)
                events.append("cleaned up")
                raise

        running = asyncio.create_task(user_loop.run(long))
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        events.append("over")

    asyncio.run(drive())
    assert events == ["cleaned up", "over"]


def test_cancelling_there_cancels_what_was_asked_for_here(user_loop: UserLoop) -> None:
    events: list[str] = []

    async def drive() -> None:
        back = user_loop.way_back()

        async def answer() -> None:
            try:
                await asyncio.sleep(SECONDS)
            except asyncio.CancelledError:
                events.append("the request is cancelled")
                raise

        async def impatient() -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await back.run(answer)
            events.append("given up")

        await user_loop.run(impatient)

    asyncio.run(drive())
    assert events == ["the request is cancelled", "given up"]


def test_code_that_blocks_holds_up_neither_the_caller_nor_its_cancelling(
    user_loop: UserLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "CANCEL_SECONDS", 0.05)
    blocked, release = threading.Event(), threading.Event()

    async def block() -> None:
        blocked.set()
        assert release.wait(SECONDS)

    async def drive() -> None:
        running = asyncio.create_task(user_loop.run(block))
        assert await asyncio.to_thread(blocked.wait, SECONDS)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        release.set()

    asyncio.run(drive())


def test_a_system_exit_in_user_code_is_an_error_and_the_loop_continues(
    user_loop: UserLoop, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def leave_behind_the_back() -> None:
        asyncio.get_running_loop().call_soon(leave_now)
        await asyncio.sleep(0.01)

    def leave_now() -> None:
        raise SystemExit(4)

    async def drive() -> None:
        with pytest.raises(RuntimeError, match="SystemExit: 3"):
            await user_loop.run(leave)
        await user_loop.run(leave_behind_the_back)
        await user_loop.run(lambda: asyncio.sleep(0))

    asyncio.run(drive())
    assert "it is running again" in caplog.text


def test_a_leaked_cancellation_is_the_callees_own(user_loop: UserLoop) -> None:
    async def leak() -> None:
        raise asyncio.CancelledError

    async def drive() -> None:
        with pytest.raises(asyncio.CancelledError):
            await user_loop.run(leak)
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()

    asyncio.run(drive())


def test_closing_cancels_what_runs_and_refuses_what_comes() -> None:
    ended: list[str] = []

    async def long() -> None:
        try:
            await asyncio.sleep(SECONDS)
        finally:
            ended.append("long")

    async def drive() -> None:
        user_loop = UserLoop()
        running = asyncio.create_task(user_loop.run(long))
        await user_loop.run(lambda: asyncio.sleep(0))
        user_loop.close()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(RuntimeError, match="closed"):
            await user_loop.run(long)

    asyncio.run(drive())
    assert ended == ["long"]


RELEASE = threading.Event()


def waits() -> None:
    assert RELEASE.wait(SECONDS)


async def stubborn() -> None:
    while not RELEASE.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)


async def asks_a_thread() -> None:
    await asyncio.to_thread(waits)


async def blocks() -> None:
    waits()


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (stubborn, r"stubborn in {file}, line \d+ \(await asyncio.sleep\(0.01\)\), although it was cancelled"),
        (asks_a_thread, r"asyncio.to_thread: waits in {file}, line \d+ \(assert RELEASE.wait\(SECONDS\)\)"),
        (blocks, r"waits in {file}, line \d+ \(assert RELEASE.wait\(SECONDS\)\)"),
    ],
)
def test_closing_names_the_user_code_that_does_not_end(
    work: Callable[[], Coroutine[Any, Any, None]],
    expected: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bridge, "CLOSE_SECONDS", 0.3)
    monkeypatch.setattr(bridge, "CANCEL_SECONDS", 0.05)
    RELEASE.clear()

    async def drive() -> None:
        with UserLoop() as user_loop:
            running = asyncio.create_task(user_loop.run(work))
            await asyncio.sleep(0.1)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(drive())
    RELEASE.set()
    said = r"user code did not end within 0 s of the end of the run, and is abandoned: "
    assert re.fullmatch(said + expected.format(file=re.escape(__file__)), caplog.messages[-1])


def test_a_loop_that_is_closed_is_an_error() -> None:
    async def drive() -> None:
        gone = asyncio.new_event_loop()
        gone.close()
        with pytest.raises(RuntimeError, match="is closed"):
            await LoopBridge(asyncio.get_running_loop(), gone).run(lambda: asyncio.sleep(0))

    asyncio.run(drive())


def test_the_watch_names_function_file_and_line_of_what_blocks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    warned, release = threading.Event(), threading.Event()

    class Notify(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "has been blocked" in record.getMessage():
                warned.set()
            if "is running again, after" in record.getMessage():
                over.set()

    over, handler = threading.Event(), Notify()
    logging.getLogger("rlsdk.loops.watch").addHandler(handler)

    async def tool_that_blocks() -> None:
        assert release.wait(SECONDS)

    async def drive(user_loop: UserLoop) -> None:
        running = asyncio.create_task(user_loop.run(tool_that_blocks))
        assert await asyncio.to_thread(warned.wait, SECONDS)
        release.set()
        await running
        assert await asyncio.to_thread(over.wait, SECONDS)

    try:
        with UserLoop(blocked_seconds=0.05) as user_loop:
            asyncio.run(drive(user_loop))
    finally:
        logging.getLogger("rlsdk.loops.watch").removeHandler(handler)
    said = caplog.text
    assert "the event loop of users' code has been blocked for" in said
    assert f"tool_that_blocks in {__file__}, line" in said
    assert "(assert release.wait(SECONDS))" in said
    assert "File " in said and "threading.py" in said  # the stack goes down to what waits


def test_the_culprit_is_users_code_though_a_library_waits_for_it() -> None:
    release = threading.Event()
    thread = threading.Thread(target=lambda: release.wait(SECONDS), daemon=True)
    thread.start()
    while "<lambda>" not in culprit(thread):
        pass
    assert __file__ in culprit(thread)
    release.set()
    thread.join()
    assert "has ended" in culprit(thread)


def test_short_stalls_that_add_up_are_reported_with_the_code_that_causes_most(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "WINDOW_SECONDS", 1.0)

    async def doze() -> None:
        end = time.monotonic() + SECONDS
        while "was blocked for" not in caplog.text and time.monotonic() < end:
            time.sleep(0.4)  # noqa: ASYNC251
            await asyncio.sleep(0)

    with UserLoop() as user_loop:
        asyncio.run(user_loop.run(doze))
    [said] = caplog.messages
    assert re.match(r"the event loop of users' code was blocked for \d+ of the last \d+ s, \d+ s of them by ", said)
    assert f"doze in {__file__}, line" in said and "(time.sleep(0.4)" in said
    assert "asyncio.to_thread" in said


def test_a_loop_that_turns_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def drive() -> None:
        seen = LoopWatch(asyncio.get_running_loop(), threading.current_thread(), "the test", 20.0)
        await asyncio.sleep(0.01)
        seen.close()

    asyncio.run(drive())
    assert not caplog.records
