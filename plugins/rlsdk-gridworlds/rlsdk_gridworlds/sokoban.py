"""Sokoban: push all boxes to targets, in random rooms determined by a seed."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import ClassVar

import attrs

import rlsdk
from rlsdk.errors import ValueFault
from rlsdk_gridworlds import room as board
from rlsdk_gridworlds.room import Room, State, level
from rlsdk_gridworlds.world import Cells, GridWorld, Outcome

_CELLS = {
    board.WALL: "wall",
    board.EMPTY: "empty",
    board.TARGET: "target",
    board.BOX_ON_TARGET: "box on target",
    board.BOX: "box",
    board.PLAYER: "player",
    board.PLAYER_ON_TARGET: "player on target",
}
_DIRECTIONS = {1: "up", 2: "down", 3: "left", 4: "right"}


@attrs.frozen(kw_only=True)
class Rewards:
    """Components of a step's reward, which is the sum of those that apply."""

    step: float
    on_target: float
    off_target: float
    finished: float


@rlsdk.environment("sokoban")
@attrs.define(kw_only=True, eq=False)
class Sokoban(GridWorld):
    """Push all boxes to targets; room, targets and boxes depend on the seed, and every level can be solved.

    The rewards are gym-sokoban 0.0.6's, as in ROLL. An episode ends when all boxes are on targets.

    Attributes:
        dim_x: Rows of the room, walls included, as in ROLL.
        dim_y: Columns of the room, walls included.
        num_boxes: Number of boxes, which is also the number of targets.
        search_depth: Maximum number of steps played backwards from the solved room, and so the maximum that a solution
            needs. If it is at most `max_steps`, every level can be solved within an episode.
        penalty_for_step: Reward of every valid action.
        reward_box_on_target: Reward added for pushing a box onto a target.
        penalty_box_off_target: Reward added for pushing a box off a target.
        reward_finished: Reward added for pushing the last box onto a target.
    """

    NAME: ClassVar[str] = "sokoban"
    CELLS: ClassVar[Mapping[int, str]] = _CELLS
    ACTIONS: ClassVar[tuple[int, ...]] = tuple(_DIRECTIONS)

    grid_lookup: Mapping[int, str] = attrs.field(factory=lambda: dict(enumerate("#_O√XPS")))
    action_lookup: Mapping[int, str] = attrs.field(factory=lambda: {1: "Up", 2: "Down", 3: "Left", 4: "Right"})
    dim_x: int = 6
    dim_y: int = 6
    num_boxes: int = 1
    search_depth: int = 10
    penalty_for_step: float = -0.1
    reward_box_on_target: float = 1.0
    penalty_box_off_target: float = -1.0
    reward_finished: float = 10.0

    def __attrs_post_init__(self) -> None:
        for name, least in (("dim_x", 3), ("dim_y", 3), ("num_boxes", 1), ("search_depth", 1)):
            if getattr(self, name) < least:
                raise ValueFault(f"{name}: expected at least {least}, got {getattr(self, name)}")
        inside = (self.dim_x - 2) * (self.dim_y - 2)
        if inside < self.num_boxes + 2:
            raise ValueFault(
                f"a room of {self.dim_x} × {self.dim_y} has {inside} cells inside its walls; {self.num_boxes} boxes "
                f"need {self.num_boxes + 2}"
            )
        super().__attrs_post_init__()

    def make(self, random: Random) -> Play:
        """Create a solvable level."""
        room, state = level(random, self.dim_x, self.dim_y, self.num_boxes, self.search_depth)
        rewards = Rewards(
            step=self.penalty_for_step,
            on_target=self.reward_box_on_target,
            off_target=self.penalty_box_off_target,
            finished=self.reward_finished,
        )
        return Play(room, state, rewards)

    def rules(self) -> str:
        """Return the rules in a sentence or two."""
        return (
            "You are the player in a Sokoban room. Push every box onto a target. You push the box next to you by "
            "moving towards it, one box at a time; boxes are not pulled, and neither you nor a box goes through a wall."
        )


@rlsdk.environment("simple_sokoban")
@attrs.define(kw_only=True, eq=False)
class SimpleSokoban(Sokoban):
    """`sokoban` with a room of 6 × 6 and one box."""


@rlsdk.environment("larger_sokoban")
@attrs.define(kw_only=True, eq=False)
class LargerSokoban(Sokoban):
    """`sokoban` with a room of 8 × 8 and two boxes."""

    dim_x: int = 8
    dim_y: int = 8
    num_boxes: int = 2


@rlsdk.environment("sokoban_different_grid_vocab")
@attrs.define(kw_only=True, eq=False)
class SokobanDifferentGridVocab(Sokoban):
    """`sokoban` with other symbols, for a model that knows the usual ones, and `search_depth` 30."""

    grid_lookup: Mapping[int, str] = attrs.field(factory=lambda: dict(enumerate("W.GCBA@")))
    search_depth: int = 30


class Play:
    """A game in progress.

    Args:
        room: The room.
        state: Initial positions of player and boxes.
        rewards: Rewards of steps.
    """

    def __init__(self, room: Room, state: State, rewards: Rewards) -> None:
        self._room, self._state, self._rewards = room, state, rewards

    def act(self, action: int) -> Outcome:
        """Take a step; 1 up, 2 down, 3 left, 4 right."""
        before = self._state
        self._state = after = board.step(self._room, before, action)
        gained = self._on_target(after) - self._on_target(before)
        solved = self._on_target(after) == len(after.boxes)
        rewards = self._rewards
        reward = rewards.step + {1: rewards.on_target, 0: 0.0, -1: rewards.off_target}[gained]
        note = self._note(before, after, action, gained, solved)
        return Outcome(reward + rewards.finished * solved, note, effective=after != before, solved=solved, over=solved)

    def cells(self) -> Cells:
        """Return the current grid."""
        return board.cells(self._room, self._state)

    def _on_target(self, state: State) -> int:
        return sum(box in self._room.targets for box in state.boxes)

    def _note(self, before: State, after: State, action: int, gained: int, solved: bool) -> str:
        if solved:
            return "All boxes are on targets: solved."
        if after == before:
            return "You did not move."
        where = {1: " onto a target", 0: "", -1: " off its target"}[gained]
        pushed = f" and pushed a box{where}" if after.boxes != before.boxes else ""
        return f"You stepped {_DIRECTIONS[action]}{pushed}."
