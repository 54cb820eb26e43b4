"""The driver's calls of all learner ranks: their answers and failures, and calls that export weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlsdk.cluster.actors import cause_of, described, died
from rlsdk.contracts import SendsFromEachRank, StreamsWeights, WeightStream
from rlsdk.errors import LearnerError, RlsdkError
from rlsdk.isolation.watching import note
from rlsdk.plugins import ComponentRef, Plugins

GRACE_SECONDS = 5.0
"""Seconds to wait after a failure for other ranks to report that they failed first."""


def answers(name: str, what: str, refs: Sequence[Any], logs: Sequence[Path]) -> list[Any]:
    """Wait for the answers of all ranks.

    Args:
        name: Name of the ranks, in messages and in the record of process activity.
        what: Name of the call.
        refs: Ray references of the answers, by rank.
        logs: Log files of the ranks.

    Raises:
        RlsdkError: A rank failed; its own error if that is an `RlsdkError`, otherwise a `LearnerError`.
    """
    import ray

    pending, began = list(refs), time.time()
    while pending:
        done, pending = ray.wait(pending, num_returns=1)
        try:
            ray.get(done)
        except ray.exceptions.RayError as error:
            rank, first = _first_failure(refs, done[0], error)
            raise _in_words(f"{name} rank {rank} failed in {what}", first, logs[rank]) from error
        if what != "clock":
            note(f"{name} rank {refs.index(done[0])}", what, began)
    return list(ray.get(list(refs)))


def _first_failure(refs: Sequence[Any], failed: Any, error: Exception) -> tuple[int, Exception]:
    """Return rank and error, preferring a rank that died over one that lost its peer because of it."""
    import ray

    done, _ = ray.wait(list(refs), num_returns=len(refs), timeout=GRACE_SECONDS)
    for ref in done:
        try:
            ray.get(ref)
        except ray.exceptions.RayError as other:
            if died(other):
                return list(refs).index(ref), other
    return list(refs).index(failed), error


def _in_words(failed: str, error: Exception, log: Path) -> RlsdkError:
    cause = cause_of(error)
    said = str(cause) if isinstance(cause, RlsdkError) else described(error)
    # An error whose constructor takes only the message keeps its type.
    kind = type(cause) if isinstance(cause, RlsdkError) and "__init__" not in vars(type(cause)) else LearnerError
    return kind(f"{failed}: {said}; its log is {log}")


@attrs.define(eq=False)
class WeightCalls:
    """Call all learner ranks to export weights.

    Attributes:
        actors: Actor handles, by rank.
        wait: Waits for all ranks to answer a call; takes the call's name for error messages, and the references.
        transfer: Weight transfer to the engines; None for Ray's object store.
        version: Weight version: number of completed training steps.
        lock: Held while all ranks are called. Some calls are collective, so every rank must get them in the same order.
    """

    actors: Sequence[Any]
    wait: Callable[[str, Sequence[Any]], list[Any]]
    transfer: ComponentRef | None = None
    version: int = 0
    lock: threading.RLock = attrs.field(init=False, factory=threading.RLock)

    @cached_property
    def _sender(self) -> Any:
        return None if self.transfer is None else Plugins().resolve(self.transfer)

    @property
    def streams(self) -> bool:
        """True if the transfer never holds all weights at once."""
        return isinstance(self._sender, StreamsWeights)

    def whole(self, method: str, version: int) -> Any:
        """Wait until a learner's method has exported all weights, and return their `ObjectRef`."""
        stored = self.transfer is not None and not self.streams
        with self.lock:
            self.version = version
            refs = self._pairs("offer", method, version, 0) if stored else self._pairs("weights", method, version)
        self.wait(f"weights of version {version}", [done for done, _ in refs])
        return refs[0][1]

    def stream(self, method: str, engines: int, token_ids: np.ndarray, version: int | None) -> WeightStream:
        """Start sending the weights; see `StreamsToEngines.stream`. Returns once every rank is ready to send.

        The lock keeps other calls from running between the export of the weights and the canary's logprobs.
        """
        import ray

        with self.lock:
            self.version = version = self.version if version is None else version
            offers = self._pairs("offer", method, version, engines)
            sent = [actor.send.remote(version) for actor in self.actors]
            seen = [actor.call.remote("canary", token_ids) for actor in self.actors]
        what = f"weights of version {version}"
        self.wait(what, [done for done, _ in offers])
        offered = ray.get([offer for _, offer in offers])

        def finish() -> tuple[str, np.ndarray]:
            faults = [fault for fault in self.wait(what, sent) if fault]
            return "; ".join(faults), np.asarray(self.wait("canary", seen)[0])

        return WeightStream(version, offered if isinstance(self._sender, SendsFromEachRank) else offered[0], finish)

    def _pairs(self, method: str, *arguments: Any) -> list[Any]:
        """Call each rank for two objects: a "done" marker and the value.

        An error of a rank is raised while waiting for its marker. Otherwise, an engine that is passed the value
        would raise it and be taken for the process that failed.
        """
        return [getattr(actor, method).options(num_returns=2).remote(*arguments) for actor in self.actors]
