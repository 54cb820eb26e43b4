"""What became of the groups of a step, and what of them is kept: for a person, a checkpoint, or another training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlsdk.rollout.experience import Used
from rlsdk.rollout.lifecycle import State, Ticket
from rlsdk.runlog.tables import Entry

if TYPE_CHECKING:
    from rlsdk.trainer.pack import Packed


def ends_of(tickets: Sequence[Ticket], packed: Packed | None) -> list[State]:
    """What became of the groups of a batch: trained, if a rollout of it reached the learner."""
    trained = set() if packed is None else {id(rollout.task) for rollout in packed.rollouts[: packed.sampled]}

    def end(ticket: Ticket) -> State:
        if id(ticket.task) in trained:
            return State.TRAINED
        scored = ticket.group is not None and any(score.valid for score in ticket.group.scores)
        return State.FILTERED if scored else State.FAILED

    return [end(ticket) for ticket in tickets]


def used_of(tickets: Sequence[Ticket], ends: Sequence[State], step: int, baselines: Mapping[int, float]) -> list[Used]:
    """The groups of a batch that were trained in a step, for the first time."""
    return [
        Used(
            number=t.number,
            source=t.source,
            position=t.position,
            step=step,
            group=t.group,
            baseline=baselines.get(t.number),
        )
        for t, end in zip(tickets, ends, strict=True)
        if end is State.TRAINED and t.group is not None
    ]


def entries_of(tickets: Sequence[Ticket], ends: Sequence[State], step: int) -> list[Entry]:
    """As the store keeps the groups of a batch of which a step made something."""
    return [
        Entry(number=t.number, source=t.source, state=end, step=step, uses=int(end is State.TRAINED), group=t.group)
        for t, end in zip(tickets, ends, strict=True)
        if t.group is not None
    ]


def used_entry(used: Used, kept_at: int | None = None) -> Entry:
    """As the store keeps a group that may be trained again; `kept_at`: for the checkpoint of that step."""
    told = {name: getattr(used, name) for name in ("number", "source", "step", "uses", "group")}
    return Entry(state=State.TRAINED, kept_at=kept_at, **told)


def waiting_entry(ticket: Ticket, kept_at: int) -> Entry:
    """As the store keeps a group that waits, for the checkpoint of a step."""
    assert ticket.group is not None
    return Entry(
        number=ticket.number,
        source=ticket.source,
        state=ticket.state,
        step=None,
        uses=0,
        group=ticket.group,
        kept_at=kept_at,
    )
