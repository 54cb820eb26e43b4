"""Gymnasium's FrozenLake on random maps determined by a seed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property, lru_cache
from random import Random
from typing import Any, ClassVar

import attrs

import rlsdk
from rlsdk.errors import ValueFault
from rlsdk_gridworlds.chance import draw
from rlsdk_gridworlds.world import Cells, GridWorld, Outcome

_ATTEMPTS = 10_000
_CELLS = {0: "player", 1: "empty", 2: "hole", 3: "goal", 4: "player in hole", 5: "player on goal"}
_TILES = {"S": 1, "F": 1, "H": 2, "G": 3}
_WITH_PLAYER = {1: 0, 2: 4, 3: 5}
_DIRECTIONS = {0: "left", 1: "down", 2: "right", 3: "up"}
_MOVES = {0: (0, -1), 1: (1, 0), 2: (0, 1), 3: (-1, 0)}
"""Action -> rows down, columns to the right."""


@rlsdk.environment("frozen_lake")
@attrs.define(kw_only=True, eq=False)
class FrozenLake(GridWorld):
    """Walk over a frozen lake to the goal without falling into a hole; start, goal and holes depend on the seed.

    The rewards are gymnasium's: 1 for reaching the goal, else 0. An episode ends at the goal, or in a hole.

    Attributes:
        size: Side length in cells.
        p: Share of ice cells; the others are holes. Maps without a path to the goal are redrawn.
        is_slippery: Let only one step in three go as intended; the others slip to the left or right, at random.
    """

    NAME: ClassVar[str] = "frozen_lake"
    CELLS: ClassVar[Mapping[int, str]] = _CELLS
    ACTIONS: ClassVar[tuple[int, ...]] = tuple(_DIRECTIONS)

    grid_lookup: Mapping[int, str] = attrs.field(factory=lambda: dict(enumerate("P_OGX√")))
    action_lookup: Mapping[int, str] = attrs.field(factory=lambda: {0: "Left", 1: "Down", 2: "Right", 3: "Up"})
    size: int = 4
    p: float = 0.8
    is_slippery: bool = False

    def __attrs_post_init__(self) -> None:
        if self.size < 2:
            raise ValueFault(f"size: expected at least 2, got {self.size}")
        if not 0 < self.p <= 1:
            raise ValueFault(f"p: expected a share above 0 and at most 1, got {self.p}")
        super().__attrs_post_init__()

    def make(self, random: Random) -> Lake:
        """Create a lake with a path from start to goal."""
        return Lake(frozen_map(random, self.size, self.p), self.is_slippery, int(random.random() * 2**32))

    def rules(self) -> str:
        """Return the rules in a sentence or two."""
        ice = " The ice is slippery: a step may go to the left or the right of where it should." * self.is_slippery
        return f"You walk over a frozen lake. Reach the goal without falling into a hole.{ice}"


@rlsdk.environment("frozen_lake_think")
@attrs.define(kw_only=True, eq=False)
class FrozenLakeThink(FrozenLake):
    """`frozen_lake` for a model that thinks before it answers."""

    think: bool = True


class Lake:
    """A lake with a player on it.

    Args:
        rows: The map in gymnasium's letters: S start, F ice, H hole, G goal.
        is_slippery: True if steps may slip sideways.
        seed: Random seed of the slips.
    """

    def __init__(self, rows: list[str], is_slippery: bool, seed: int) -> None:
        self._tiles = [[_TILES[letter] for letter in row] for row in rows]
        self._rows, self._is_slippery, self._seed = tuple(rows), is_slippery, seed
        self._place = "".join(rows).index("S")

    @cached_property
    def _env(self) -> Any:
        """Gymnasium's environment, made at the first step: a source of levels only looks at their first observation."""
        env = copy(_lake(self._rows, self._is_slippery))
        env.reset(seed=self._seed)
        return env

    def act(self, action: int) -> Outcome:
        """Take a step; action numbers are gymnasium's."""
        before = self._place
        self._place, reward, over, _, _ = self._env.step(action)
        tile = self._tile(self._place)
        moved = self._place != before
        if tile != 1:
            note = "You reached the goal." if tile == 3 else "You fell into a hole."
        else:
            note = f"You stepped {self._way(before)}." if moved else "You did not move."
        return Outcome(float(reward), note, effective=moved, solved=tile == 3, over=bool(over))

    def cells(self) -> Cells:
        """Return the current grid."""
        grid = [list(row) for row in self._tiles]
        row, column = divmod(self._place, len(grid[0]))
        grid[row][column] = _WITH_PLAYER[grid[row][column]]
        return grid

    def best(self) -> int:
        """Return the first action of a shortest path to the goal, assuming that no step slips."""
        size = len(self._tiles)
        letters = ["FHG"[tile - 1] for row in self._tiles for tile in row]
        steps = ways(letters, size, letters.index("G"))
        row, column = divmod(self._place, size)
        after = {action: (row + down) * size + column + right for action, (down, right) in _MOVES.items()}
        near = _neighbours(self._place, size)
        return next(a for a, place in after.items() if place in near and steps.get(place) == steps[self._place] - 1)

    def _tile(self, place: int) -> int:
        row, column = divmod(place, len(self._tiles[0]))
        return self._tiles[row][column]

    def _way(self, before: int) -> str:
        """Return the direction in which the player actually moved, which on slippery ice may differ from the action."""
        steps = {-1: "left", 1: "right", len(self._tiles[0]): "down", -len(self._tiles[0]): "up"}
        return steps[self._place - before]


@lru_cache(maxsize=256)
def _lake(rows: tuple[str, ...], is_slippery: bool) -> Any:
    """Return gymnasium's environment, to be copied for each player, since its table of transitions is slow to make."""
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

    return FrozenLakeEnv(desc=list(rows), is_slippery=is_slippery)


def frozen_map(random: Random, size: int, p: float) -> list[str]:
    """Draw a map with a path from start to goal, in gymnasium's letters.

    Raises:
        ValueFault: No such map was found.
    """
    for _ in range(_ATTEMPTS):
        letters = ["F" if random.random() < p else "H" for _ in range(size * size)]
        start, goal = draw(random, range(size * size), 2)
        letters[start], letters[goal] = "S", "G"
        if start in ways(letters, size, goal):
            return ["".join(letters[row * size : (row + 1) * size]) for row in range(size)]
    raise ValueFault(f"{_ATTEMPTS:,} maps of size {size} with p={p} had no path to the goal; increase p")


def ways(letters: Sequence[str], size: int, goal: int) -> dict[int, int]:
    """Return the number of steps to the goal from each place that can reach it.

    Args:
        letters: Map in gymnasium's letters, row by row.
        size: Side length in cells.
        goal: Index of the goal in `letters`.
    """
    steps = {goal: 0}
    edge = deque([goal])
    while edge:
        place = edge.popleft()
        for near in _neighbours(place, size):
            if letters[near] != "H" and near not in steps:
                steps[near] = steps[place] + 1
                edge.append(near)
    return steps


def _neighbours(place: int, size: int) -> set[int]:
    row, column = divmod(place, size)
    around = ((row + down, column + right) for down, right in _MOVES.values())
    return {r * size + c for r, c in around if 0 <= r < size and 0 <= c < size}
