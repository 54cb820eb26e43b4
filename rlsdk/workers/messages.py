"""Messages between the driver and a rollout worker: commands one way, and what comes of them the other way."""

from __future__ import annotations

from typing import Any

import attrs

from rlsdk.types import Rollout, Score
from rlsdk.workers.orders import GroupOrder, MadeGroup, MakerCounters


@attrs.frozen(eq=False)
class Make:
    """Make a group; answered by `Made`, or by an exception."""

    number: int
    order: GroupOrder


@attrs.frozen
class Cancel:
    """End the making of a group; there is no answer."""

    number: int


@attrs.frozen(eq=False)
class Admit:
    """Send requests to an engine; `incarnation` tells its actor from those that had its rank before."""

    rank: int
    incarnation: int
    actor: Any


@attrs.frozen
class Dismiss:
    """Send no further requests to an engine."""

    rank: int


@attrs.frozen
class Drain:
    """Send no further requests to an engine; answered by None once those that it has are answered."""

    number: int
    rank: int


@attrs.frozen
class Hold:
    """Interrupt what is being sampled; answered by None once it is, and resumed by `Resume`."""

    number: int


@attrs.frozen
class Resume:
    """End a `Hold`."""


@attrs.frozen
class Interrupt:
    """End what is being sampled with partial answers, until `Release`."""


@attrs.frozen
class Release:
    """End an `Interrupt`."""


Command = Make | Cancel | Admit | Dismiss | Drain | Hold | Resume | Interrupt | Release


@attrs.frozen(eq=False)
class Made:
    """A group that was made.

    Attributes:
        made: The group.
        unfinished: True if it was interrupted.
        seen: New rollouts, with score and step, in the order in which an observer would have seen them.
    """

    made: MadeGroup
    unfinished: bool = False
    seen: tuple[tuple[Rollout, Score, int], ...] = ()


@attrs.frozen
class EngineDied:
    """An engine was found dead."""

    rank: int
    incarnation: int
    reason: str


@attrs.frozen
class Logged:
    """A line of the worker's log that the run's log shall have, too."""

    logger: str
    level: int
    text: str


@attrs.frozen
class Spent:
    """A span of the run's trace; see `isolation.spans.SpanRecorder.add`."""

    actor: str
    name: str
    begin: float
    end: float
    counts: dict[str, float]


Notice = EngineDied | Logged | Spent


@attrs.frozen(eq=False)
class WorkerReport:
    """A message to the driver.

    Attributes:
        counters: Counts of the worker so far.
        answers: Number of a command, and its answer.
        notices: What nobody has asked for.
    """

    counters: MakerCounters
    answers: list[tuple[int, Any]]
    notices: list[Notice]
