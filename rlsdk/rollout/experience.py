"""Groups that were trained and may be trained again: which, how often, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from rlsdk.rollout.production import Policy
from rlsdk.types import Group


@attrs.define(kw_only=True, eq=False)
class Used:
    """A group that was trained.

    Attributes:
        number: Of its ticket.
        source: Name of the source of its task.
        position: In the source's stream.
        step: That it was first trained in.
        uses: Times that it was trained.
        baseline: Reward of the greedy answer; None where nobody reads it.
        group: As it was produced, before filters. Its task is an object of its own: the same task may be drawn again,
            and what a batch holds is told apart by its task.
    """

    number: int
    source: str
    position: int
    step: int
    group: Group
    uses: int = 1
    baseline: float | None = None


class Experience:
    """What may be trained again. In memory, since none outlives the limit of staleness."""

    def __init__(
        self, policy: Policy, *, count: int, most_uses: int, young: Callable[[Group, int], Group | None]
    ) -> None:
        """Make one.

        Args:
            policy: Which come first, and which never.
            count: Groups that a step trains again; 0 keeps none.
            most_uses: Times that a group is trained in all.
            young: What of a group may be trained at a step; None for nothing.
        """
        self._policy, self._count, self._most_uses, self._young = policy, count, most_uses, young
        self._held: list[Used] = []

    def draw(self, step: int) -> list[Used]:
        """What a step trains again; each counts as used once more.

        Args:
            step: Steps that are done.
        """
        self._held = [u for u in self._held if u.uses < self._most_uses and self._young(u.group, step) is not None]
        asked = [(self._policy(u.group, step=step, uses=u.uses), u.number, u) for u in self._held]
        ranked = sorted((-priority, number, used) for priority, number, used in asked if priority is not None)
        drawn = [used for *_, used in ranked[: self._count]]
        for used in drawn:
            used.uses += 1
        return [attrs.evolve(used, group=self._young(used.group, step) or used.group) for used in drawn]

    def add(self, trained: Sequence[Used]) -> None:
        """Keep groups that were trained for the first time."""
        if self._count:
            self._held += [attrs.evolve(used, group=_apart(used.group)) for used in trained]

    @property
    def held(self) -> Sequence[Used]:
        """All that is kept."""
        return self._held

    def state(self) -> list[dict[str, Any]]:
        """What is kept, without the groups, as plain JSON."""
        return [{k: v for k, v in attrs.asdict(u, recurse=False).items() if k != "group"} for u in self._held]

    def places(self, state: Sequence[Mapping[str, Any]]) -> dict[int, tuple[str, int]]:
        """Number -> source and position of the tasks that `restore` wants the groups of."""
        return {each["number"]: (each["source"], each["position"]) for each in state} if self._count else {}

    def restore(self, state: Sequence[Mapping[str, Any]], groups: Mapping[int, Group]) -> None:
        """Go on from `state()`.

        Args:
            state: From `state`.
            groups: By number, those that are there; what is lacking is not trained again.
        """
        known = {each["number"]: each for each in state if each["number"] in groups and self._count}
        self._held = [Used(**known[n], group=_apart(groups[n])) for n in sorted(known)]


def _apart(group: Group) -> Group:
    """The group with a task object of its own."""
    task = attrs.evolve(group.task)
    return attrs.evolve(group, task=task, rollouts=[attrs.evolve(r, task=task) for r in group.rollouts])
