"""Why a call of an actor failed: tell a dead process or node from an error in the actor's code."""

from __future__ import annotations

import re

LONGEST = 240
"""Maximum characters of a reason; Ray's own texts fill a screen."""


def died(error: BaseException) -> bool:
    """Return True if the called actor is gone, rather than that its code raised.

    Args:
        error: Exception raised by a call of an actor.
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


def cause_of(error: BaseException) -> BaseException:
    """Return what the actor's own code raised; the error itself if it was something else that failed."""
    return getattr(error, "cause", None) or error


def described(error: BaseException) -> str:
    """Say in one line why a call of an actor failed: by a death, or by an exception of its code."""
    cause = cause_of(error)
    return f"its process died: {reason(cause)}" if died(cause) else f"{type(cause).__name__}: {cause}"


def reason(error: BaseException) -> str:
    """Return Ray's explanation of a death, in one line."""
    text = re.sub(r"Worker exit type: \w+ Worker exit detail: ", "", str(error)).split(" Some common causes")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    telling = next((line for line in reversed(lines) if "because" in line), lines[-1])
    return telling if len(telling) <= LONGEST else f"{telling[: LONGEST - 1]}…"
