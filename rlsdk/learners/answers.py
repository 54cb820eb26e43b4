"""Collect the answers of all ranks to a call, or the error of the rank that failed first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlsdk.cluster.actors import cause_of, described, died
from rlsdk.errors import LearnerError, RlsdkError
from rlsdk.isolation.spans import note

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
