"""Replay buffer: trained groups that may be trained on again, within limits on their uses and staleness."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from rlsdk.rollout.production import BufferPolicy, priority_of
from rlsdk.types import Group


@attrs.define(kw_only=True, eq=False)
class ReplayedGroup:
    """A group that was trained on.

    Attributes:
        number: Number of its task record.
        source: Name of the source of its task.
        position: Position of its task in the stream of the source.
        step: Step that trained on it first.
        uses: Number of steps that trained on it.
        baseline: Reward of the greedy answer; None if no component reads it.
        group: The group as it was sampled, before filters.
    """

    number: int
    source: str
    position: int
    step: int
    group: Group
    uses: int = 1
    baseline: float | None = None


class ReplayBuffer:
    """Groups that may be trained on again, kept in memory, since none outlives the staleness limit."""

    def __init__(
        self, policy: BufferPolicy, *, count: int, most_uses: int, young: Callable[[Group, int], Group | None]
    ) -> None:
        """Create an empty buffer.

        Args:
            policy: Returns the priority of a group; None drops it.
            count: Number of groups that a step trains on again; 0 disables the buffer.
            most_uses: Maximum number of steps that train on a group.
            young: Returns the part of a group that is fresh enough for a step; None if there is none.
        """
        self._policy, self._count, self._most_uses, self._young = policy, count, most_uses, young
        self._held: list[ReplayedGroup] = []

    def draw(self, step: int) -> list[ReplayedGroup]:
        """Return the groups that a step trains on again, with this use counted; `add` counts it once the step is done.

        Args:
            step: Number of steps done.
        """
        self._held = [u for u in self._held if u.uses < self._most_uses and self._young(u.group, step) is not None]
        asked = [(priority_of(self._policy, u.group, step=step, uses=u.uses), u.number, u) for u in self._held]
        ranked = sorted((-priority, number, used) for priority, number, used in asked if priority is not None)
        return [
            attrs.evolve(used, group=self._young(used.group, step) or used.group, uses=used.uses + 1)
            for *_, used in ranked[: self._count]
        ]

    def add(self, trained: Sequence[ReplayedGroup], again: Sequence[ReplayedGroup] = ()) -> None:
        """Add groups that were trained on for the first time, and count the use of those that were drawn."""
        uses = {used.number: used.uses for used in again}
        for used in self._held:
            used.uses = uses.get(used.number, used.uses)
        if self._count:
            self._held += trained

    @property
    def held(self) -> Sequence[ReplayedGroup]:
        """All groups in the buffer."""
        return self._held

    def state(self) -> list[dict[str, Any]]:
        """Return the buffer without the groups themselves, as plain JSON."""
        return [{k: v for k, v in attrs.asdict(u, recurse=False).items() if k != "group"} for u in self._held]

    def places(self, state: Sequence[Mapping[str, Any]]) -> dict[int, tuple[str, int]]:
        """Map numbers to source and position of the tasks whose groups `restore` needs."""
        return {each["number"]: (each["source"], each["position"]) for each in state} if self._count else {}

    def restore(self, state: Sequence[Mapping[str, Any]], groups: Mapping[int, Group]) -> None:
        """Restore the buffer from `state()`.

        Args:
            state: From `state`.
            groups: Groups that are available, by number; those missing are not trained on again.
        """
        known = {each["number"]: each for each in state if each["number"] in groups and self._count}
        self._held = [ReplayedGroup(**known[n], group=groups[n]) for n in sorted(known)]
