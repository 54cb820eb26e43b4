"""The watchdog of a run: a thread that reports silent processes and event loops, and ends the run after a time limit.

A process is silent if it is stopped, or if it uses neither CPU nor disk and does not answer. A working process has much
longer limits: one for engines, which answer after each decode step, and one for each call of a learner.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from rlsdk.cluster.health import IDLE_SHARE, GcsAddress, Prober, Watched, WatchedLoop
from rlsdk.config.schema import WatchdogSection
from rlsdk.errors import RunError
from rlsdk.isolation.vitals import Identity, Vitals

log = logging.getLogger(__name__)
Report = Callable[[str, Sequence[tuple[Watched, Vitals]], float], None]
"""Called with the findings of a probe; see `Watchdog`."""
GRACE_SECONDS = 15.0
"""Seconds that a run has to end after it was told to; then its process exits."""
SAVE_SECONDS = 600.0
"""Seconds that a run has to finish its step and save after it lost Ray's GCS."""
LEAVE_SECONDS = 60.0
"""Seconds that a run has to close trackers and Ray after its task was ended."""
_STOPPED = "is stopped (by SIGSTOP, or a debugger)"
WRITE_SECONDS = 1.0
"""Seconds that processes have to write their stacks before one of them is killed."""


@attrs.define(eq=False)
class _Run:
    """Ways to end a run: its task, and a function that ends it after its step."""

    task: asyncio.Task[Any]
    finish: Callable[[], object]


class Watchdog:
    """Watch the processes and event loops of one run; `rlsdk.isolation.watching` registers them.

    Attributes:
        verdict: Reason why the run is being ended; empty otherwise.
    """

    def __init__(
        self,
        section: WatchdogSection,
        *,
        prober: Prober | None = None,
        now: Callable[[], float] = time.monotonic,
        abandon: Callable[[str], None] = lambda verdict: None,
        report: Report | None = None,
    ) -> None:
        """Prepare a watchdog; `start` starts watching.

        Args:
            section: Limits.
            prober: Checks processes; default: those of this machine and of Ray's nodes.
            now: Clock, in seconds.
            abandon: Called with the verdict if the run did not end within `GRACE_SECONDS`; records how the run ended
                and exits.
            report: Called after each check with the current stage, the findings for each process, and the time.
        """
        self._report = report
        self._warn = section.warn
        self._end = section.end if section.end is not None else float("inf")
        self._busy = {True: ("watchdog.busy", section.busy), False: ("watchdog.learner_busy", section.learner_busy)}
        self._prober, self._now, self._abandon = prober or Prober(), now, abandon
        self._lock, self._looking = threading.RLock(), threading.Lock()
        self._keys = itertools.count()
        self._stages: dict[object, tuple[str, float]] = {}
        self._watched: list[Watched] = []
        self._loops: list[WatchedLoop] = []
        self._run: _Run | None = None
        self._gcs: GcsAddress | None = None
        self._checks: list[Callable[[], str]] = []
        self.verdict = ""
        self._deadlines: list[tuple[float, Callable[[], object]]] = []
        self._measured = float("-inf")
        self._closed = threading.Event()

    def start(self) -> None:
        """Start watching, in a thread."""
        threading.Thread(target=self._watch, name="rlsdk-watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    # What is watched

    def enter(self, stage: str) -> object:
        """Start a stage; return its key."""
        with self._lock:
            self._stages[key := next(self._keys)] = stage, self._now()
        return key

    def leave(self, key: object) -> None:
        """End a stage."""
        with self._lock:
            self._stages.pop(key, None)

    def add_actor(self, name: str, actor: Any, log: str, *, replaced: bool, responsive: bool = False) -> None:
        """Watch a Ray actor; see `isolation.watching.watch_actor`."""
        watched = Watched(name, log, actor, replaced=replaced, responsive=responsive)
        # Asked before the caller asks it to load a model, it answers first, and is known if it never ends loading.
        watched.answer, watched.asked = self._prober.ask(actor), self._now()
        watched.busy = watched.asked
        self._add(watched)

    def remove_actor(self, actor: Any) -> None:
        """Stop watching an actor."""
        with self._lock:
            self._watched = [each for each in self._watched if each.actor is not actor]

    def add_process(self, name: str, identity: Identity, log: str) -> None:
        """Watch a process of this machine without which the run cannot continue."""
        self._add(Watched(name, log, identity=identity, vital=True))

    def add_gcs(self, address: str) -> None:
        """Watch the address of a cluster's GCS, which runs elsewhere."""
        self._gcs = GcsAddress(address)

    def add_check(self, check: Callable[[], str]) -> None:
        """Call a function at each look; a sentence from it ends the run at once, and nothing more is reported."""
        self._checks.append(check)

    def release_ray(self) -> None:
        """Check once more that Ray is alive, then stop watching all processes, since Ray is being shut down."""
        with self._lock:
            vital = [each for each in self._watched if each.vital]
            self._watched, self._gcs = [], None
        if self._looking.acquire(timeout=GRACE_SECONDS):  # a check that runs now may be about to call Ray
            self._looking.release()
        identities = [each.identity for each in vital if each.identity is not None]
        for each, vitals in zip(vital, self._prober.look(identities, measured=False), strict=True):
            if vitals.state in ("gone", "zombie"):
                self._lose(each)

    def add_loop(
        self, loop: asyncio.AbstractEventLoop, thread: threading.Thread, name: str, *, says: bool = True
    ) -> Callable[[], None]:
        """Watch a thread's event loop, and log stalls if `says`; return a function that stops watching."""
        watch = WatchedLoop(loop, thread, name, self._warn if says else float("inf"), self._now)
        with self._lock:
            self._loops.append(watch)

        def stop() -> None:
            with self._lock, suppress(ValueError):
                self._loops.remove(watch)

        return stop

    def add_run(self, task: asyncio.Task[Any], finish: Callable[[], object]) -> Callable[[], None]:
        """Register how to end the run: after its step by `finish`, at once by cancelling its task."""
        self._run = _Run(task, finish)

        def stop() -> None:
            self._run = None
            if self.verdict:
                self._deadlines.append((self._now() + LEAVE_SECONDS, self._give_up))

        return stop

    def _add(self, watched: Watched) -> None:
        with self._lock:
            self._watched.append(watched)

    @property
    def stage(self) -> str:
        """Current stage of the run and its duration so far."""
        with self._lock:
            if not self._stages:
                return "between two stages"
            name, began = list(self._stages.values())[-1]
        return f"in {name} for {self._now() - began:.0f} s"

    # How it is watched

    def _watch(self) -> None:
        pause = min(1.0, max(self._warn / 4, 0.05))
        while not self._closed.wait(pause):
            try:
                with self._looking:
                    self.look()
            except Exception:  # a failing watchdog must not end a run
                log.exception("the watchdog failed, and tries again")

    def look(self) -> None:
        """Check everything that is watched once."""
        now = self._now()
        with self._lock:
            watched, loops = list(self._watched), list(self._loops)
        for each in watched:
            self._ask(each, now)
        measured = self._is_long(now) and now - self._measured >= max(self._warn / 10, 0.5)
        if measured:
            self._measured = now
        known = [each for each in watched if each.identity is not None]
        identities = [each.identity for each in known if each.identity is not None]
        seen = list(zip(known, self._prober.look(identities, measured=measured), strict=True))
        for each, vitals in seen:
            self._judge(each, vitals, now, measured=measured)
        failed = list(filter(None, [check() for check in self._checks]))
        if self._report is not None and not failed:
            begun = [each for each in watched if each.identity is None]
            self._report(self.stage, [*((each, Vitals("unknown")) for each in begun), *seen], now)
        for loop in loops:
            self._judge_loop(loop, now)
        for said in failed:
            self.condemn(said)
        if self._gcs is not None and (lost := self._gcs.lost(now)):
            self._lose_gcs(lost)
        for deadline in [d for d in self._deadlines if d[0] <= now]:
            self._deadlines.remove(deadline)
            deadline[1]()

    def _ask(self, watched: Watched, now: float) -> None:
        """Collect an actor's answer, or ask it."""
        if watched.actor is None:
            return
        if watched.asked is None:
            if watched.identity is None or self._is_long(now) or self._is_due(watched, now):
                watched.answer, watched.asked, watched.busy = self._prober.ask(watched.actor), now, now
            return
        ended, found = self._prober.answer(watched.answer)
        if ended and found is None:
            if watched.identity is None:  # it never started, which Ray reports to its creator
                self.remove_actor(watched.actor)
            watched.asked = None
            return
        if found is None:
            if watched.identity is None and now - watched.asked >= self._warn and not watched.warned:
                watched.warned, use = True, self._prober.cluster_use()
                log.warning(
                    "%s is not working yet, %.0f s after its start; Ray may lack resources for it%s; its log is %s",
                    *(watched, now - watched.asked, f" ({use})" if use else "", watched.log),
                )
            return
        if watched.identity is None and watched.warned:
            log.warning("%s is working now", watched)
            watched.warned = False
        if watched.busy_warned:
            log.warning("%s is responding again, after %.0f s of work", watched, now - watched.busy)
            watched.busy_warned = False
        watched.identity, watched.asked = found, None

    def _is_long(self, now: float) -> bool:
        """True if the current stage takes so long that actors are asked to identify themselves."""
        with self._lock:
            if any(now - began >= self._warn / 2 for _, began in self._stages.values()):
                return True
            return any(each.asked is not None and self._is_due(each, now) for each in self._watched)

    def _is_due(self, watched: Watched, now: float) -> bool:
        """True if an actor was asked so long ago that it should have answered, or is to be asked again."""
        return now - watched.busy >= self._warn / 2

    def _judge(self, watched: Watched, vitals: Vitals, now: float, *, measured: bool) -> None:
        """Record the state of a process, report a long silence, and end the process once it is too long."""
        if vitals.state in ("gone", "zombie"):
            if watched.vital:
                self._lose(watched)
            else:  # Ray reports it to its callers
                self.remove_actor(watched.actor)
            return
        found = self._silence(watched, vitals, now, measured=measured)
        if found is None:
            if watched.silent is not None:
                watched.busy = now  # it did not work while it was silent
            if watched.asked is not None and watched.identity is not None:
                self._judge_busy(watched, watched.identity, now - watched.busy)
            if watched.warned:
                log.warning(
                    "%s is responding again, after %.0f s of silence", watched, now - (watched.silent or (now, ""))[0]
                )
            watched.silent, watched.warned = None, False
            return
        if watched.silent is None or watched.silent[1] != found[1]:
            watched.silent = found
        seconds = now - watched.silent[0]
        if seconds >= self._warn and not watched.warned:
            watched.warned = True
            watched.wrote = watched.identity is not None and self._prober.write_stacks(watched.identity)
            if watched.wrote:
                stacks = "which now ends with the Python stacks of the process"
            else:
                stacks = "and the Python stacks of the process cannot be read now"
            log.warning("%s, %s", self._said(watched, seconds), stacks)
        if seconds >= self._end and not self.verdict:
            why = f"{watched.silent[1]}, for {seconds:.0f} s"
            self._end_process(watched, self._said(watched, seconds), why, f"watchdog.end={self._end:g} s")

    def _silence(self, watched: Watched, vitals: Vitals, now: float, *, measured: bool) -> tuple[float, str] | None:
        """Return the start of a process's silence, and a predicate that describes it; None if it works."""
        if vitals.state == "stopped":
            return now, _STOPPED
        if vitals.state == "unknown":
            return now, "cannot be inspected, because its node does not answer"
        if watched.vital:  # child processes of Ray's are watched separately
            return None
        if not measured:
            return watched.silent if watched.silent and watched.silent[1] != _STOPPED else None
        if vitals.stopped:
            return now, f"waits for its child process {vitals.stopped}, which {_STOPPED}"
        then, cpu, moved = watched.base or (now, vitals.cpu, vitals.moved)
        is_active = vitals.state == "disk" or vitals.moved != moved
        if watched.base is None or is_active or vitals.cpu - cpu >= IDLE_SHARE * max(now - then, 0.5):
            watched.base = now, vitals.cpu, vitals.moved
            if not watched.wrote:
                watched.asked = None if watched.asked is None else now  # it answers only after its current work
                return None
        watched.wrote = False  # from now on, the CPU and the disk are not used for its stacks
        if watched.asked is None or now - watched.asked < self._warn:
            return None
        return watched.asked, "uses neither CPU nor a disk and does not answer"

    def _said(self, watched: Watched, seconds: float) -> str:
        why = watched.silent[1] if watched.silent else ""
        with self._lock:
            at_work = [
                f"{each}, which works without responding (its log is {each.log})"
                for each in self._watched
                if each.asked is not None and each.identity and each.silent is None and self._is_due(each, self._now())
            ]
        cause = f"; it may be waiting for {' and '.join(at_work)}" if at_work else ""
        return f"{watched} {why}, for {seconds:.0f} s; the run is {self.stage}; its log is {watched.log}{cause}"

    def _judge_busy(self, watched: Watched, identity: Identity, seconds: float) -> None:
        """Report a working process that should have answered, and end it once it is too long."""
        name, limit = self._busy[watched.responsive]
        if limit is None or seconds < limit / 2 or self.verdict:
            return
        why = "works, but has not responded"
        said = f"{watched} {why}, for {seconds:.0f} s; the run is {self.stage}; its log is {watched.log}"
        if not watched.busy_warned:
            watched.busy_warned, watched.wrote = True, self._prober.write_stacks(identity)
            stacks = ", which now ends with the Python stacks of the process" if watched.wrote else ""
            log.warning("%s%s; %s=%g s is the limit", said, stacks, name, limit)
        if seconds >= limit:
            self._end_process(watched, said, f"{why}, for {seconds:.0f} s", f"{name}={limit:g} s")

    def _end_process(self, watched: Watched, said: str, why: str, limit: str) -> None:
        """Kill a process, and end the run unless the process is replaced."""
        if watched.replaced:
            log.error("%s; it will be killed and replaced", said)
            with (
                suppress(OSError),
                Path(watched.log).open("a", encoding="utf-8") as words,
            ):  # quoted as the cause of death
                words.write(f"\nkilled by the watchdog: it {why}; {limit} is the limit\n")
            self.remove_actor(watched.actor)
        else:
            self.condemn(f"{said}; {limit} is the limit")
        assert watched.identity is not None
        self._prober.kill(watched.identity)

    def _judge_loop(self, loop: WatchedLoop, now: float) -> None:
        found = loop.look()
        if found:
            said, _, stack = found.partition("\n")
            log.warning("%s; the run is %s%s", said.rstrip(":"), self.stage, f":\n{stack}" if stack else "")
        name, limit = self._busy[True]
        if loop.blocked_for >= self._end and loop.idle_for(now) >= self._end:
            self.condemn(f"{loop.describe()}; watchdog.end={self._end:g} s is the limit")
        elif limit is not None and loop.blocked_for >= limit:
            self.condemn(f"{loop.describe()}; {name}={limit:g} s is the limit")

    # How a run is ended

    def _lose(self, watched: Watched) -> None:
        """Handle the death of a process without which the run cannot continue."""
        with self._lock:
            self._watched = [each for each in self._watched if each is not watched]
        if "GCS" in watched.name:
            self._lose_gcs(f"{watched} has died; its log is {watched.log}")
        else:
            self.condemn(f"{watched} has died, and with it all actors on its node; its log is {watched.log}")

    def _lose_gcs(self, what: str) -> None:
        """Handle the loss of Ray's head: actors still answer for a while, so the run can finish its step and save."""
        self._gcs = None
        if self.verdict:
            return
        self.verdict = f"{what}; the run was {self.stage}"
        log.error("%s: the run will finish and save this step if possible, then end", self.verdict)
        run = self._run
        if run is None:
            self._schedule_end(0.0)
            return
        run.task.get_loop().call_soon_threadsafe(run.finish)
        self._schedule_end(SAVE_SECONDS)

    def condemn(self, verdict: str) -> None:
        """End the run at once.

        Args:
            verdict: Reason, as a sentence that names the culprit.
        """
        if self.verdict:
            return
        self.verdict = verdict
        log.error("%s; the run ends", verdict)
        self._schedule_end(WRITE_SECONDS)

    def _schedule_end(self, seconds: float) -> None:
        """Cancel the run after some seconds, and abandon it if it has not ended `GRACE_SECONDS` later."""
        now = self._now()
        self._deadlines += [(now + seconds, self._cancel), (now + seconds + GRACE_SECONDS, self._give_up)]

    def _cancel(self) -> None:
        if (run := self._run) is not None:
            with suppress(RuntimeError):  # its loop has ended
                run.task.get_loop().call_soon_threadsafe(run.task.cancel)

    def _give_up(self) -> None:
        if not self._closed.is_set():
            self._abandon(self.verdict)

    def explain(self, error: BaseException, kept: str) -> BaseException:
        """Return the cause of a run's failure: the watchdog's verdict if there is one, else the given error.

        Args:
            error: Exception that ended the run.
            kept: State that a resumed run can continue from, as the end of a sentence.
        """
        return RunError(f"{self.verdict}; {kept}") if self.verdict else error

    def check(self) -> None:
        """Raise if the run was told to end.

        Raises:
            RunError: The run was told to end.
        """
        if self.verdict:
            raise RunError(self.verdict)
