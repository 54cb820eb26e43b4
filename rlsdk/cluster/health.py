"""Checks of processes and event loops for the watchdog; those of other nodes go through an actor there."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import attrs

from rlsdk.cluster.actors import spawn
from rlsdk.cluster.nodes import cluster_use
from rlsdk.isolation import vitals
from rlsdk.isolation.vitals import Identity, Vitals
from rlsdk.isolation.watching import CURRENT
from rlsdk.loops.watch import BLOCKED_SECONDS, culprit, stack

log = logging.getLogger(__name__)
T = TypeVar("T")
EVERY_SECONDS = 5.0
"""Seconds between two checks of another node, or of a GCS's address."""
SILENT_SECONDS = 30.0
"""Seconds without an answer after which the state of another node's processes counts as unknown."""
CONNECT_SECONDS = 3.0
"""Time limit of a connection."""
IDLE_SHARE = 0.02
"""Share of a core below which a process or thread counts as idle: Ray's own threads use a little all the time."""
NETWORK_SECONDS = 60.0
"""Seconds for which the network may not reach the machine of the GCS: a switch that restarts should not end a run."""


@attrs.define(eq=False)
class Watched:
    """A watched process.

    Attributes:
        name: Name in messages.
        log: File with its output.
        actor: Its Ray handle; None if it is not an actor.
        identity: The process, once known.
        replaced: True if the run continues without it.
        responsive: True if it answers within `watchdog.busy`, whatever it works on; otherwise, its calls may take
            `watchdog.learner_busy`.
        vital: True if its end ends the run at once.
        asked: Time of an unanswered request to identify itself, or of the last work seen since; None without one.
        answer: Pending answer to that request.
        busy: Time of that request, whatever was seen since.
        busy_warned: True once it has been reported as busy for too long.
        base: Time, CPU seconds and bytes when it was last seen working.
        silent: Start of its silence and the reason; None while it works.
        warned: True once its silence has been reported.
        wrote: True if it was made to write its stacks, and has not been measured since.
    """

    name: str
    log: str
    actor: Any = None
    identity: Identity | None = None
    replaced: bool = False
    responsive: bool = False
    vital: bool = False
    asked: float | None = None
    answer: Any = None
    busy: float = float("-inf")
    busy_warned: bool = False
    base: tuple[float, float, int] | None = None
    silent: tuple[float, str] | None = None
    warned: bool = False
    wrote: bool = False

    def __str__(self) -> str:
        if self.identity is None:
            return self.name
        node = f", node {self.identity.node[:8]}" if self.identity.node else ""
        return f"{self.name} (pid {self.identity.pid} on {self.identity.host}{node})"


class WatchedLoop:
    """A watched event loop: `look` makes it tick, and reports when it stops; the watchdog calls it regularly."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: threading.Thread,
        name: str,
        warn: float = BLOCKED_SECONDS,
        now: Callable[[], float] = time.monotonic,
        spent: Callable[[int], float] | None = None,
    ) -> None:
        """Watch a loop.

        Args:
            loop: Event loop.
            thread: Thread that runs the loop; asking the loop could fail, since code may block its first iteration.
            name: Name in messages.
            warn: Seconds without a tick after which it counts as blocked, up to `BLOCKED_SECONDS`; infinite for never.
            now: Clock, in seconds.
            spent: CPU seconds of the thread with a native id; default: those of the operating system.
        """
        self._loop, self._thread, self._name, self._now = loop, thread, name, now
        self._limit = warn if warn == float("inf") else min(warn, BLOCKED_SECONDS)
        self._spent = spent or thread_seconds
        self._idle, self._stood = now(), 0.0
        self._asked: float | None = None
        self._cpu = 0.0
        self._said: float | None = None

    @property
    def blocked_for(self) -> float:
        """Seconds since the overdue tick; 0 if none is due."""
        asked = self._asked  # the loop's own thread clears it
        return 0.0 if asked is None else self._now() - asked

    def look(self) -> str:
        """Request a tick; return a message, or an empty string if nothing is new."""
        now = self._now()
        if self._asked is None:
            said, stood, self._said = self._said, self._stood, None
            self._asked = self._idle = now
            try:
                self._loop.call_soon_threadsafe(self._tick)
            except RuntimeError:  # it has ended
                self._asked = None
            return "" if said is None else f"the event loop of {self._name} runs again, after {stood:.0f} s"
        if self.blocked_for < (self._limit if self._said is None else 2 * self._said):
            return ""
        self._said = self.blocked_for
        return f"{self.describe()}, and everything on it waits:\n{stack(self._thread).rstrip()}"

    def idle_for(self, now: float) -> float:
        """Seconds for which the loop has been blocked while its thread used no CPU."""
        asked = self._asked  # the loop's own thread clears it
        if asked is None or self._thread.native_id is None:
            return 0.0
        cpu = self._spent(self._thread.native_id)
        if cpu - self._cpu >= IDLE_SHARE * max(now - self._idle, 0.5):
            self._cpu, self._idle = cpu, now
        return min(now - self._idle, now - asked)

    def describe(self) -> str:
        """Describe for how long the loop has been blocked, and by which code."""
        return (
            f"the event loop of {self._name} has been blocked for {self.blocked_for:.0f} s in {culprit(self._thread)}"
        )

    def _tick(self) -> None:
        self._cpu = self._spent(threading.get_native_id())
        self._stood, self._asked = self.blocked_for, None


def thread_seconds(native: int) -> float:
    """Return the CPU seconds of a thread of this process."""
    import psutil

    found = next((t for t in psutil.Process().threads() if t.id == native), None)
    return 0.0 if found is None else float(found.user_time + found.system_time)


class NodeProbe:
    """Ray actor that checks the processes on its node."""

    def look(self, processes: Sequence[Identity]) -> list[Vitals]:
        """Return the vitals of processes, in order."""
        return vitals.look(processes)

    def write_stacks(self, process: Identity) -> bool:
        """Make a process write its stacks."""
        return vitals.write_stacks(process)

    def kill(self, process: Identity) -> None:
        """Kill a process."""
        vitals.kill(process)


@attrs.define
class _WatchedNode:
    """A node other than the driver's, with its probe, pending request and last answer."""

    probe: Any
    heard: float
    processes: tuple[Identity, ...] = ()
    pending: Any = None
    asked: float = float("-inf")
    found: dict[Identity, Vitals] = attrs.field(factory=dict)


class Prober:
    """Check processes on any node of a run."""

    def __init__(self) -> None:
        self._nodes: dict[str, _WatchedNode] = {}

    def ask(self, actor: Any) -> Any:
        """Ask an actor to identify its process; return the argument for `answer`."""
        import ray

        return actor.identity.remote() if ray.is_initialized() else None  # otherwise the call would start another Ray

    def answer(self, asked: Any) -> tuple[bool, Identity | None]:
        """Return whether an `ask` has finished, and its answer; None if the actor cannot be reached."""
        return _ready(asked)

    def cluster_use(self) -> str:
        """See `rlsdk.cluster.nodes.cluster_use`."""
        return cluster_use()

    def look(self, processes: Sequence[Identity], *, measured: bool = True) -> list[Vitals]:
        """Return the vitals of processes, in order; those of other nodes are a few seconds old."""
        here = vitals.machine()
        local = iter(vitals.look([each for each in processes if each.machine == here], measured=measured))
        for machine in {each.machine for each in processes} - {here}:
            self._look_at_node(machine, tuple(each for each in processes if each.machine == machine))
        return [next(local) if each.machine == here else self._found(each) for each in processes]

    def write_stacks(self, process: Identity) -> bool:
        """Make a process write its Python stacks to its log; return False if it cannot."""
        if process.machine == vitals.machine():
            return vitals.write_stacks(process)
        node = self._nodes.get(process.machine)
        if node is None or not process.stacks or self._found(process).state != "running":
            return False
        node.probe.write_stacks.remote(process)
        return True

    def kill(self, process: Identity) -> None:
        """Kill a process, even a stopped one."""
        if process.machine == vitals.machine():
            vitals.kill(process)
        elif process.machine in self._nodes:
            self._nodes[process.machine].probe.kill.remote(process)

    def _found(self, process: Identity) -> Vitals:
        node = self._nodes[process.machine]
        if time.monotonic() - node.heard >= SILENT_SECONDS:
            return Vitals("unknown")
        return node.found.get(process, Vitals("disk"))  # not checked yet: assume nothing is wrong

    def _look_at_node(self, machine: str, processes: tuple[Identity, ...]) -> None:
        now = time.monotonic()
        node = self._nodes.get(machine)
        if node is None:
            node = self._nodes[machine] = _WatchedNode(spawn(NodeProbe, node=processes[0].node), now)
        if node.pending is not None:
            ended, found = _ready(node.pending)
            if not ended:
                return
            node.pending = None
            if found is None:  # the probe has died, which does not mean that its node has
                node.probe = spawn(NodeProbe, node=processes[0].node)
            else:
                node.found, node.heard = dict(zip(node.processes, found, strict=True)), now
        if now - node.asked >= EVERY_SECONDS:
            node.processes, node.asked = processes, now
            node.pending = node.probe.look.remote(list(processes))


def _ready(asked: Any) -> tuple[bool, Any]:
    """Return whether a call has ended, and its result; None if it failed."""
    import ray

    if asked is None or not ray.is_initialized():
        return True, None
    try:
        done, _ = ray.wait([asked], timeout=0)
        return (True, ray.get(done[0])) if done else (False, None)
    except ray.exceptions.RayError:
        return True, None


class GcsAddress:
    """Address at which a cluster's GCS (its control service) accepts connections."""

    def __init__(self, address: str) -> None:
        self._address, self._looked = address, float("-inf")
        self._failing: tuple[bool, float] | None = None  # whether connections are refused, and since when they fail

    def lost(self, now: float) -> str:
        """Return why the GCS is lost; empty if it is not, or if the address was checked recently.

        If its machine refuses connections, it has died, and two checks suffice. If the network does not reach its
        machine, both may be working.
        """
        if now - self._looked < EVERY_SECONDS:
            return ""
        self._looked = now
        why = unreachable(self._address, CONNECT_SECONDS)
        refused = why == os.strerror(errno.ECONNREFUSED)
        before, since = self._failing or (None, now)
        if not why:
            self._failing = None
            if before is not None:
                log.warning("Ray's GCS at %s answers again, after %.0f s", self._address, now - since)
            return ""
        limit = EVERY_SECONDS if refused else NETWORK_SECONDS
        if before is not refused:
            self._failing, since = (refused, now), now
            log.warning("Ray's GCS at %s: %s; the run ends if this lasts %.0f s", self._address, why, limit)
        return f"Ray's GCS at {self._address} is lost: {why}" if now - since >= limit else ""


def unreachable(address: str, seconds: float) -> str:
    """Return why nothing accepts connections at `HOST:PORT`; empty if something does."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=seconds):
            return ""
    except OSError as error:
        return str(error.strerror or error)


class _TakesRay(Protocol):
    def add_process(self, name: str, identity: Identity, log: str) -> None: ...

    def add_gcs(self, address: str) -> None: ...

    def release_ray(self) -> None: ...


@contextmanager
def ray_watched(*, started: bool) -> Iterator[None]:
    """Make the run's watchdog watch Ray itself during a block.

    Args:
        started: True if this process started Ray, whose processes are then its children.
    """
    import psutil
    import ray

    watch: _TakesRay | None = CURRENT.get()  # type: ignore[assignment]
    if watch is None or not hasattr(watch, "add_process"):
        yield
        return
    names = {"raylet": "Ray's raylet", "gcs_server": "Ray's GCS"}
    if started:
        for child in psutil.Process().children():
            if (name := names.get(child.name())) is not None:
                options = [a.partition("=") for a in child.cmdline() if a.startswith(("--log_dir=", "--log-dir="))]
                folder = options[0][2] if options else "/tmp/ray/session_latest/logs"
                watch.add_process(name, vitals.identify(child.pid), f"{folder}/{child.name()}.out")
    else:
        watch.add_gcs(ray.get_runtime_context().gcs_address)
    try:
        yield
    finally:
        watch.release_ray()
