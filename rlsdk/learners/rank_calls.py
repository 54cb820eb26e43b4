"""The driver's calls of all learner ranks: their order, results and failures, and calls that export weights."""

from __future__ import annotations

import math
import reprlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlsdk.cluster.actors import cause_of, described, died
from rlsdk.contracts import (
    GivesPrimitives,
    Roles,
    SendsFromEachRank,
    SetsLearningRate,
    StreamsWeights,
    WeightStream,
)
from rlsdk.errors import LearnerError, RlsdkError
from rlsdk.isolation.watching import note, now
from rlsdk.plugins import ComponentRef, Plugins

GRACE_SECONDS = 5.0
"""Seconds to wait after a failure for other ranks to report that they failed first."""
LEAST_LOGPROB = -1000.0
"""Replacement for a logprob of -inf, so that sums stay finite."""


def answers(name: str, what: str, refs: Sequence[Any], logs: Sequence[Path]) -> list[Any]:
    """Wait for the answers of all ranks.

    Raises:
        RlsdkError: A rank failed; its own error if that is an `RlsdkError`, otherwise a `LearnerError`.
    """
    import ray

    pending, began = list(refs), now()
    while pending:
        done, pending = ray.wait(pending, num_returns=1)
        try:
            ray.get(done)
        except ray.exceptions.RayError as error:
            rank, first = _first_failure(refs, done[0], error)
            cause = cause_of(first)
            said = str(cause) if isinstance(cause, RlsdkError) else described(first)
            told = f"{name} rank {rank} failed in {what}: {said}; its log is {logs[rank]}"
            if isinstance(cause, RlsdkError) and "__init__" not in vars(type(cause)):
                raise type(cause)(told) from error  # its constructor takes only the message
            raise LearnerError(told) from error
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


@attrs.define
class OpenSteps:
    """Optimiser steps that `forward_backward` has started and `optimizer_step` has not taken yet.

    A failing rank ends the learner. A call in the wrong order must not: in a notebook it can be corrected and repeated.
    So it is refused here, before any rank is called.

    Attributes:
        name: Name of the learner.
        learner: The learner, as resolved in the driver.
        roles: Models that it holds.
        complete: Role -> True once the last batch of its optimiser step has been added.
    """

    name: str
    learner: Any
    roles: Roles
    complete: dict[str, bool] = attrs.field(factory=dict)

    def add(self, role: str, *, last: bool) -> None:
        """Record a call of `forward_backward`.

        Raises:
            LearnerError: The learner does not support it, or `optimizer_step` is due.
        """
        if not isinstance(self.learner, GivesPrimitives):
            raise LearnerError(
                f"forward_backward: the learner {self.name!r} has only update; a custom loop needs a learner with "
                "the methods of rlsdk.contracts.GivesPrimitives, such as deepspeed"
            )
        self._check_role("forward_backward", role)
        if self.complete.get(role):
            raise LearnerError(
                f"forward_backward: the last batch of the {role}'s optimiser step was added; call "
                f"optimizer_step({role!r}) first, or give last=False with all batches but the last"
            )
        self.complete[role] = last

    def take(self, role: str) -> None:
        """Record a call of `optimizer_step`.

        Raises:
            LearnerError: No gradient was computed, or only part of it.
        """
        self._check_role("optimizer_step", role)
        if role not in self.complete:
            raise LearnerError(f"optimizer_step: the {role} has no gradient; call forward_backward first")
        if not self.complete[role]:
            raise LearnerError(
                f"optimizer_step: the {role}'s last batch is missing; call forward_backward with last=True for it"
            )
        del self.complete[role]

    def check_none(self, what: str) -> None:
        """Refuse an action that would lose an accumulated gradient.

        Raises:
            LearnerError: An optimiser step was started and not taken.
        """
        if self.complete:
            raise LearnerError(
                f"{what}: the gradient of {' and '.join(self.complete)} would be lost; call optimizer_step first"
            )

    def check_rate(self, lr: float, role: str) -> None:
        """Check a call of `set_learning_rate`.

        Raises:
            LearnerError: The learner does not support it, or the learning rate is negative or not finite.
        """
        if not isinstance(self.learner, SetsLearningRate):
            raise LearnerError(
                f"set_learning_rate: the learner {self.name!r} has no such method (rlsdk.contracts.SetsLearningRate); "
                "deepspeed has one"
            )
        self._check_role("set_learning_rate", role)
        rate: Any = lr
        if not (isinstance(rate, Real) and math.isfinite(rate) and float(rate) >= 0):
            raise LearnerError(f"set_learning_rate: got {lr!r} for the {role}; expected a finite number of at least 0")

    def _check_role(self, what: str, role: str) -> None:
        trained = [name for name in ("actor", "critic") if getattr(self.roles, name) is not None]
        if role not in trained:
            raise LearnerError(f"{what}: got role {role!r}; this learner trains {' and '.join(trained) or 'nothing'}")


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


def tokens_fault(result: Any, fields: Sequence[str], tokens: int) -> str:
    """Return what is wrong with fields that a learner computed, with what was expected; empty if nothing is.

    Args:
        result: What the method returned for the rollouts of one rank.
        fields: Names of the requested fields.
        tokens: Number of response tokens of these rollouts.
    """
    if not isinstance(result, Mapping):
        return f"{reprlib.repr(result)}; expected a mapping with {', '.join(fields)}"
    for name in fields:
        if name not in result:
            return f"a mapping with {', '.join(map(str, result)) or 'nothing'}; expected {', '.join(fields)}"
        if fault := array_fault(result[name], tokens):
            return f"{name} as {fault}"
        # With logprobs that are NaN, the update is skipped (`skip_limit`), and a single bad batch ends no run.
        if name == "values" and (missing := int(np.isnan(result[name]).sum())):
            return f"{name} with NaN for {missing} of {tokens} tokens; weights or activations are not finite"
    return ""


def bounded_below(logprobs: np.ndarray) -> np.ndarray:
    """Clamp logprobs to at least `LEAST_LOGPROB`; NaN stays, since it is a fault that must show."""
    return np.asarray(np.maximum(logprobs, np.float32(LEAST_LOGPROB)))


def array_fault(values: Any, length: int) -> str:
    """Return what a value is instead of an array of `length` floats; empty if it is one."""
    if isinstance(values, np.ndarray) and values.shape == (length,) and values.dtype.kind == "f":
        return ""
    is_array = isinstance(values, np.ndarray)
    told = f"an array of {values.dtype} {list(values.shape)}" if is_array else f"a {type(values).__name__}"
    return f"{told}; expected an array of float32 [{length}]"


def metrics_fault(metrics: Any) -> str:
    """Return what is wrong with the metrics of an update; empty if nothing is."""
    if not isinstance(metrics, Mapping):
        return f"{reprlib.repr(metrics)}; expected a mapping from names of metrics to numbers"
    for name, value in metrics.items():
        if not isinstance(name, str) or not name.isprintable():
            return f"a metric named {reprlib.repr(name)}; expected printable text, such as 'actor/grad_norm'"
        if not isinstance(value, Real):
            return f"{reprlib.repr(value)} as metric {name!r}; expected a number"
    return ""
