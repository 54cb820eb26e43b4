"""Tasks that consist of a seed, for environments that generate their problems."""

from __future__ import annotations

from functools import partial
from typing import Literal

import rlsdk
from rlsdk.contracts import TaskList
from rlsdk.errors import OptionError
from rlsdk.types import Message, Task

_TEST = 1_000_000_000
"""Training seeds are below this number, test seeds start at it."""


@rlsdk.tasks("seeds")
def seeds(
    *,
    split: Literal["train", "test"] = "train",
    size: int = 100_000,
    start: int = 0,
    prompt: str = "",
    system: str | None = None,
    form: Literal["chat", "text"] = "chat",
) -> TaskList:
    """One task per seed, all with the same prompt, followed by the environment's first observation.

    The seed is `seed` in a task's metadata. Training and test seeds are disjoint.

    Args:
        split: `train`, or `test`.
        size: Number of tasks.
        start: First seed; test seeds are a billion higher.
        prompt: Text before the first observation.
        system: System message of a chat.
        form: Messages for a chat template, or text for a model without one.

    Raises:
        OptionError: A number is out of range.
    """
    faults = [
        (name, f"expected at least {least}, got {value}")
        for name, value, least in (("size", size, 1), ("start", start, 0))
        if value < least
    ]
    if start + size > _TEST:
        faults.append(
            ("size", f"expected start + size of at most {_TEST}, where the seeds of tests begin; got {start + size}")
        )
    if form == "text" and system:
        faults.append(("system", "form text has no system message; write it into the prompt"))
    if faults:
        raise OptionError("tasks 'seeds'", faults)
    before = (Message("system", system),) if system else ()
    whole = prompt if form == "text" else (*before, Message("user", prompt))
    first = start + (_TEST if split == "test" else 0)
    return TaskList(partial(_task, first, whole), size)


def _task(first: int, prompt: str | tuple[Message, ...], index: int) -> Task:
    return Task(id=f"seed-{first + index}", prompt=prompt, metadata={"seed": first + index}, source="seeds")
