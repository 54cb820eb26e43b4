"""Buffer policies, which order the groups that wait for the trainer, and the limit on groups dropped in a row."""

from __future__ import annotations

import math
from typing import Protocol

import attrs

from rlsdk.components import naming
from rlsdk.errors import RunError, ValueFault
from rlsdk.messages import number as plain_number
from rlsdk.plurals import counted
from rlsdk.types import Group


class BufferPolicy(Protocol):
    """A buffer policy: protocol of components of the kind `buffer`."""

    def __call__(self, group: Group, /, *, step: int, uses: int) -> float | None:
        """Return the priority of a group, highest first; None drops it."""
        ...


def first_come(group: Group, /, *, step: int, uses: int) -> float:
    """Give all groups equal priority, so that they are trained on in the order in which their tasks were issued."""
    return 0.0


def priority_of(policy: BufferPolicy, group: Group, *, step: int, uses: int) -> float | None:
    """Return the priority that a buffer policy gives a group; None drops it.

    Raises:
        RunError: The policy returned NaN, which cannot be ordered, or something other than a number.
    """
    with naming(policy):
        given = policy(group, step=step, uses=uses)
    what = f"the priority of task {group.task.id!r}"
    try:
        priority = None if given is None else plain_number(given, what)
        if priority is not None and math.isnan(priority):
            raise ValueFault(f"{what} is NaN; expected a number")
    except ValueFault as error:
        raise RunError(f"rollout.buffer: {error}, or None to drop its group") from error
    return priority


@attrs.define
class DropLimit:
    """Limit on consecutive groups that are dropped and that other groups must replace.

    Attributes:
        limit: Number of consecutive dropped groups after which the run ends; None for no limit.
        what: Setting and what drops groups, for the error message.
        remedy: Remedy or likely cause, for the error message.
        dropped: Number of consecutive dropped groups.
    """

    limit: int | None
    what: str
    remedy: str
    dropped: int = 0

    def note(self, *, kept: bool) -> None:
        """Count a group.

        Raises:
            RunError: The limit is reached.
        """
        self.dropped = 0 if kept else self.dropped + 1
        if self.limit is not None and self.dropped >= self.limit:
            raise RunError(
                f"{self.what} {counted(self.dropped, 'group')} in a row (as many as max_empty_steps batches have), so "
                f"no batch can be filled; {self.remedy}"
            )
