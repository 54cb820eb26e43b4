"""Ctrl-C, or a notebook's stop button, while an event loop runs in the main thread and the trainer in another."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from rlsdk.isolation.watching import CURRENT
from rlsdk.trainer import Trainer
from rlsdk.trainer.interactive import run_async
from tests.trainer.fakes import FakeLearner, ScriptedRollouts, make_plan


def in_notebook(work: Any) -> Any:
    """Call a function while an event loop runs in this thread, as a cell is."""

    async def cell() -> Any:
        return work()

    return asyncio.run(cell())


def test_ctrl_c_asks_the_work_to_end_and_returns_its_result() -> None:
    before, asked = signal.getsignal(signal.SIGINT), threading.Event()

    async def work() -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        heard = await asyncio.to_thread(asked.wait, 60)
        await asyncio.sleep(0.3)  # one Ctrl-C counts once, however long the work still takes
        return heard

    assert in_notebook(lambda: run_async(work(), asked.set))
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("interrupts", [1, 2])
def test_the_last_ctrl_c_cancels_the_work(interrupts: int) -> None:
    asked, cancelled = threading.Event(), threading.Event()

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            if interrupts == 2:
                await asyncio.to_thread(asked.wait, 60)
                os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(KeyboardInterrupt):
        in_notebook(lambda: run_async(work(), asked.set if interrupts == 2 else None))
    assert cancelled.is_set() and asked.is_set() == (interrupts == 2)


def test_the_watchdog_of_a_cell_watches_the_work_too() -> None:
    async def work() -> Any:
        return CURRENT.get()

    watch: Any = object()
    token = CURRENT.set(watch)
    try:
        assert in_notebook(lambda: run_async(work())) is watch
    finally:
        CURRENT.reset(token)


class Stopped(Trainer):
    """A trainer whose cell is interrupted in the second step."""

    async def step(self) -> dict[str, float]:
        if self.version == 1:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.to_thread(self.asked.wait, 60)
        return await super().step()  # type: ignore[no-any-return]

    def interrupt(self) -> None:
        super().interrupt()
        self.asked.set()

    asked = threading.Event()


def test_an_interrupted_cell_ends_after_its_step_and_the_next_one_trains_the_rest(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, steps=4)
    trainer = Stopped(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner())
    first = in_notebook(trainer.train)
    assert (first["status"], first["steps"]) == ("interrupted", 2)
    rest = in_notebook(trainer.train)
    assert (rest["status"], rest["steps"]) == ("finished", 4)
