"""Whether a failed call means that a process or a node is gone, or that what ran there failed."""

from __future__ import annotations

import re

LONGEST = 240
"""Characters of a reason; Ray's own texts fill a screen."""


def died(error: BaseException) -> bool:
    """Whether the actor that was called is gone, rather than that its code raised.

    Args:
        error: What a call of an actor raised.
    """
    from ray import exceptions

    if isinstance(error, exceptions.RayTaskError):  # its code raised, be it for the death of another
        return False
    if isinstance(error, exceptions.RayActorError):
        return not error.actor_init_failed
    gone = (
        exceptions.NodeDiedError,
        exceptions.ObjectLostError,  # an answer was lost with the node that held it
        exceptions.OutOfMemoryError,
        exceptions.WorkerCrashedError,
    )
    return isinstance(error, gone)


def reason(error: BaseException) -> str:
    """What Ray says of a death, in one line."""
    text = re.sub(r"Worker exit type: \w+ Worker exit detail: ", "", str(error)).split(" Some common causes")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    telling = next((line for line in reversed(lines) if "because" in line), lines[-1])
    return telling if len(telling) <= LONGEST else f"{telling[: LONGEST - 1]}…"
