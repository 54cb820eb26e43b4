"""Tasks that are seeds: for environments, which make their problems themselves."""

from __future__ import annotations

from functools import partial
from typing import Literal

import rlsdk
from rlsdk.contracts import TaskList
from rlsdk.errors import OptionError
from rlsdk.types import Message, Task

_TEST = 1_000_000_000
"""First seed of the tests; training stays below."""


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
    """One task for each seed, all with one prompt, which an environment's first observation joins.

    The seeds of training and of tests are apart. The seed is `seed` of a task's metadata.

    Args:
        split: `train`, or `test`.
        size: How many tasks.
        start: The first seed; tests begin a billion above it.
        prompt: What stands before the first observation.
        system: System message of a chat.
        form: Messages for a chat template, or text for a model without one.

    Raises:
        OptionError: A number is out of range.
    """
    faults = [
        (name, f"at least {least}, got {value}")
        for name, value, least in (("size", size, 1), ("start", start, 0))
        if value < least
    ]
    if start + size > _TEST:
        faults.append(
            ("size", f"start + size at most {_TEST}, so that training and tests stay apart; got {start + size}")
        )
    if form == "text" and system:
        faults.append(("system", "a text has no system message; write it into the prompt"))
    if faults:
        raise OptionError("tasks 'seeds'", faults)
    before = (Message("system", system),) if system else ()
    whole = prompt if form == "text" else (*before, Message("user", prompt))
    first = start + (_TEST if split == "test" else 0)
    return TaskList(partial(_task, first, whole), size)


def _task(first: int, prompt: str | tuple[Message, ...], index: int) -> Task:
    return Task(id=f"seed-{first + index}", prompt=prompt, metadata={"seed": first + index}, source="seeds")
