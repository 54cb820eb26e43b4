"""Connect code that starts actors or enters stages with the run's watchdog, if there is one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from rlsdk.isolation.spans import span

__all__ = ["CURRENT", "Watch", "forget_actor", "main_loop", "stage", "watch_actor"]


class Watch(Protocol):
    """Interface of the watchdog for code that needs watching."""

    def enter(self, stage: str) -> object:
        """Begin a stage; returns its key."""
        ...

    def leave(self, key: object) -> None:
        """End a stage."""
        ...

    def add_actor(self, name: str, actor: Any, log: str, *, replaced: bool) -> None:
        """Watch a Ray actor that answers `identity`."""
        ...

    def remove_actor(self, actor: Any) -> None:
        """Stop watching an actor."""
        ...

    def add_loop(
        self, loop: asyncio.AbstractEventLoop, thread: threading.Thread, name: str, *, says: bool = True
    ) -> Callable[[], None]:
        """Watch a thread's event loop, and log stalls if `says`; return a function that stops watching."""
        ...

    def add_run(self, task: asyncio.Task[Any], finish: Callable[[], object]) -> Callable[[], None]:
        """Register how to end the run: after its step by `finish`, at once by cancelling the task."""
        ...


CURRENT: ContextVar[Watch | None] = ContextVar("rlsdk_watchdog", default=None)
"""Watchdog of the run that this code belongs to."""


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Report a stage of the run to the watchdog and the trace, for the duration of a block.

    Args:
        name: Name of the stage in log lines, such as `update`.
    """
    watch = CURRENT.get()
    with span("driver", name):
        if watch is None:
            yield
            return
        key = watch.enter(name)
        try:
            yield
        finally:
            watch.leave(key)


def watch_actor(name: str, actor: Any, log: object, *, replaced: bool = False) -> None:
    """Let the watchdog watch an actor.

    Args:
        name: Name of the actor in messages, such as `learner rank 0`.
        actor: Handle of an actor with a method `identity` that returns `isolation.vitals.identity(…)`.
        log: Path of the file that receives its output.
        replaced: True if a dead actor is replaced, so that the run continues.
    """
    if (watch := CURRENT.get()) is not None:
        watch.add_actor(name, actor, str(log), replaced=replaced)


def forget_actor(actor: Any) -> None:
    """Stop watching an actor that is about to be ended."""
    if (watch := CURRENT.get()) is not None:
        watch.remove_actor(actor)


@contextmanager
def main_loop(finish: Callable[[], object] | None = None) -> Iterator[None]:
    """Let the watchdog watch the running event loop, and end the run if necessary, for the duration of a block.

    Args:
        finish: Called in the loop to end the run after its step, with a checkpoint; by default, the task is cancelled.
    """
    watch, task = CURRENT.get(), asyncio.current_task()
    if watch is None or task is None:
        yield
        return
    forget_run = watch.add_run(task, finish or task.cancel)
    forget_loop = watch.add_loop(asyncio.get_running_loop(), threading.current_thread(), "the run")
    try:
        yield
    finally:
        forget_loop()
        forget_run()
