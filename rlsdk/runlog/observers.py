"""Call trackers and plugin hooks, each in its own thread, so that none of them can end or delay a run."""

from __future__ import annotations

import inspect
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from rlsdk.contracts import Run, Tracker
from rlsdk.errors import described

if TYPE_CHECKING:
    from rlsdk.plugins import Plugins

log = logging.getLogger(__name__)
WAITING_CALLS = 10_000
"""Maximum number of calls in the queue of one observer; further ones are dropped and counted."""
SLOW_SECONDS = 60.0
"""Seconds after which a running call is reported."""
CLOSE_SECONDS = 30.0
"""Seconds to wait for all observers together at the end of a run."""


class ObserverThread:
    """Makes the calls of one observer, in order, in a daemon thread.

    Calls that raise are counted, and the first one is logged. A call that hangs blocks all later ones. The thread
    starts with the first call, and again with the first one after `close`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls: queue.Queue[tuple[str, Callable[[], object], bool] | None] = queue.Queue(WAITING_CALLS)
        self._made = self._failed = self._dropped = 0
        self._first_failure = ""
        self._broken = False
        self._running: tuple[str, float] | None = None
        self._reported_slow = False
        self._thread = self._new_thread()

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._work, name=self.name, daemon=True)

    def submit(self, what: str, call: Callable[[], object], *, essential: bool = False) -> None:
        """Queue a call and return at once.

        Args:
            what: Name of the call in warnings, such as `log of step 3`.
            call: Function without arguments.
            essential: True if later calls make no sense unless this one succeeds.
        """
        try:
            self._calls.put_nowait((what, call, essential))
        except queue.Full:
            self._dropped += 1
        if not self._thread.is_alive():
            self._thread = self._new_thread()
            self._thread.start()
        running = self._running
        if running and not self._reported_slow and time.monotonic() - running[1] > SLOW_SECONDS:
            self._reported_slow = True
            log.warning("%s: %s has not returned for %.0f s; the run continues", self.name, running[0], SLOW_SECONDS)

    def close(self, seconds: float) -> str:
        """Wait for the queued calls and summarise their results.

        Returns:
            `ok`, or a sentence that names what failed.
        """
        deadline = time.monotonic() + seconds
        if self._thread.is_alive():
            with suppress(queue.Full):  # the thread is still alive then, which is reported below
                self._calls.put(None, timeout=seconds)
                self._thread.join(max(0.0, deadline - time.monotonic()))
        running = self._running
        if self._thread.is_alive() and running:
            waiting = max(0, self._calls.qsize() - 1)
            return f"{running[0]} did not return; {waiting + self._dropped} calls after it were not made"
        if self._broken:
            return self._first_failure
        if self._failed or self._dropped:
            dropped = f"; {self._dropped} were dropped because it was too slow" if self._dropped else ""
            return f"{self._failed} of {self._made} calls failed{dropped}; the first: {self._first_failure or 'none'}"
        return "ok"

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            what, call, essential = item
            if self._broken:
                continue
            self._running = (what, time.monotonic())
            self._made += 1
            try:
                if inspect.iscoroutine(result := call()):  # the method did nothing
                    result.close()
                    raise TypeError(f"{result.__qualname__} is async def, but is called without await; write def")
            except BaseException as error:  # an observer must never end the run
                self._failed += 1
                self._broken = essential
                if self._failed == 1:
                    self._first_failure = f"{what}: {described(error)}"
                    log.warning("%s: %s; the run continues", self.name, self._first_failure, exc_info=error)
            self._running = None


class Observers:
    """The trackers of a run and the plugins that implement hooks."""

    def __init__(self, plugins: Plugins) -> None:
        """Find the plugins that implement a hook."""
        self._hooks: dict[str, list[tuple[ObserverThread, Callable[..., object]]]] = {}
        self._threads: list[ObserverThread] = []
        self._trackers: dict[str, tuple[ObserverThread, Tracker]] = {}
        registered = plugins.get_plugins()
        for plugin in registered:
            callers = plugins.get_hookcallers(plugin) or ()
            if not callers:
                continue
            name = str(plugins.get_name(plugin)).partition(":")[0]  # plugins of several modules have NAME:MODULE
            thread = ObserverThread(f"plugin {name}")
            self._threads.append(thread)
            for caller in callers:
                hook = plugins.subset_hook_caller(caller.name, [other for other in registered if other is not plugin])
                self._hooks.setdefault(caller.name, []).append((thread, hook))

    def observes(self, hook: str) -> bool:
        """Return True if any plugin implements a hook."""
        return hook in self._hooks

    def tell(self, hook: str, **arguments: Any) -> None:
        """Call a hook of every plugin that implements it, without waiting.

        Args:
            hook: Name of the hook.
            **arguments: Arguments of the hook, which must not be changed afterwards.
        """
        for thread, call in self._hooks.get(hook, ()):
            thread.submit(hook, partial(call, **arguments))

    def open(self, trackers: Mapping[str, Tracker], run: Run) -> None:
        """Start each tracker in its own thread."""
        for name, tracker in trackers.items():
            thread = ObserverThread(f"tracker {name}")
            self._trackers[name] = thread, tracker
            thread.submit("open", partial(tracker.open, run), essential=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand the metrics of a step to every tracker."""
        for thread, tracker in self._trackers.values():
            thread.submit(f"log of step {step}", partial(tracker.log, step, dict(metrics)))

    def close_trackers(self, seconds: float = CLOSE_SECONDS) -> dict[str, str]:
        """Close every tracker within a time for all together; return name -> `ok`, or what went wrong."""
        for thread, tracker in self._trackers.values():
            thread.submit("close", tracker.close)
        deadline = time.monotonic() + seconds
        outcomes = {
            name: thread.close(max(0.0, deadline - time.monotonic())) for name, (thread, _) in self._trackers.items()
        }
        self._trackers = {}
        return outcomes

    def close(self, seconds: float = CLOSE_SECONDS) -> dict[str, str]:
        """Wait for the hooks of all plugins; later ones are called, too, as those of a second training are.

        Returns:
            Name -> what went wrong; plugins without a failure are left out.
        """
        deadline = time.monotonic() + seconds
        outcomes = {thread.name: thread.close(max(0.0, deadline - time.monotonic())) for thread in self._threads}
        return {name: outcome for name, outcome in outcomes.items() if outcome != "ok"}
