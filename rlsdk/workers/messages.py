"""Messages between the driver and a rollout worker: commands to the worker, and reports back."""

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
    """Cancel a group; there is no answer."""

    number: int


@attrs.frozen(eq=False)
class Admit:
    """Send requests to an engine; `incarnation` distinguishes its actor from earlier ones of the same rank."""

    rank: int
    incarnation: int
    actor: Any


@attrs.frozen
class Dismiss:
    """Send no further requests to an engine."""

    rank: int


@attrs.frozen
class Drain:
    """Send no further requests to an engine; answered by None once its current requests are answered."""

    number: int
    rank: int


@attrs.frozen
class Hold:
    """Interrupt sampling; answered by None once it has stopped. `Resume` resumes it."""

    number: int


@attrs.frozen
class Resume:
    """End a `Hold`."""


@attrs.frozen
class Interrupt:
    """Stop sampling with partial answers until `Release`."""


@attrs.frozen
class Release:
    """End an `Interrupt`."""


Command = Make | Cancel | Admit | Dismiss | Drain | Hold | Resume | Interrupt | Release


@attrs.frozen(eq=False)
class Made:
    """A finished group.

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
    """A line of the worker's log, to be copied to the run's log."""

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
        counters: Counters of the worker so far.
        answers: Number of a command, and its answer.
        notices: Unsolicited notices.
    """

    counters: MakerCounters
    answers: list[tuple[int, Any]]
    notices: list[Notice]
