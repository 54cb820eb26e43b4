"""Connects code that starts actors or enters stages with the run's watchdog, if it has one."""

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
        """Watch an event loop that a thread runs, and log that it stands still if `says`; returns what ends that."""
        ...

    def add_run(self, task: asyncio.Task[Any], finish: Callable[[], object]) -> Callable[[], None]:
        """Say how the run is ended: after its step by `finish`, at once by cancelling the task."""
        ...


CURRENT: ContextVar[Watch | None] = ContextVar("rlsdk_watchdog", default=None)
"""Watchdog of the run that this code belongs to."""


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Report what the run does during a block to the watchdog and the run's trace.

    Args:
        name: Stage as named in log lines, such as `update`.
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
    """Have the watchdog watch an actor.

    Args:
        name: Name of the actor in messages, such as `learner rank 0`.
        actor: Handle of an actor with a method `identity` that returns `isolation.vitals.identity(…)`.
        log: Path of the file that receives its output.
        replaced: True if another takes its place when it dies, so that the run need not end.
    """
    if (watch := CURRENT.get()) is not None:
        watch.add_actor(name, actor, str(log), replaced=replaced)


def forget_actor(actor: Any) -> None:
    """Have the watchdog stop watching an actor that is about to be ended."""
    if (watch := CURRENT.get()) is not None:
        watch.remove_actor(actor)


@contextmanager
def main_loop(finish: Callable[[], object] | None = None) -> Iterator[None]:
    """During a block, have the watchdog watch the running event loop and give it the means to end the run.

    Args:
        finish: Called in the loop; has the run finish and save its step, and end. Left out, its task is cancelled.
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
