"""A Sokoban room: its walls and targets, where player and boxes are, and what a step does."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

WALL, EMPTY, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)


@attrs.frozen
class Room:
    """Fixed layout of a level. A place is `row * columns + column`; the border is wall, so no step leaves the room.

    Attributes:
        rows: Number of rows, walls included.
        columns: Number of columns, walls included.
        floor: Places that are not wall.
        targets: Places where boxes belong.
    """

    rows: int
    columns: int
    floor: frozenset[int]
    targets: frozenset[int]

    def offset(self, action: int) -> int:
        """Difference that a step makes to a place: 1 up, 2 down, 3 left, 4 right."""
        return {1: -self.columns, 2: self.columns, 3: -1, 4: 1}[action]

    def distance(self, one: int, other: int) -> int:
        """Steps between two places if there were no walls."""
        (r, c), (s, d) = divmod(one, self.columns), divmod(other, self.columns)
        return abs(r - s) + abs(c - d)


@attrs.frozen
class State:
    """Positions of player and boxes.

    Attributes:
        player: Place of the player.
        boxes: Places of the boxes, in ascending order.
    """

    player: int
    boxes: tuple[int, ...]


def step(room: Room, state: State, action: int) -> State:
    """The state after a step, in which one box may be pushed; the same state where wall or boxes are in the way."""
    offset = room.offset(action)
    ahead = state.player + offset
    if ahead not in room.floor:
        return state
    if ahead not in state.boxes:
        return State(ahead, state.boxes)
    beyond = ahead + offset
    if beyond not in room.floor or beyond in state.boxes:
        return state
    return State(ahead, _moved(state.boxes, ahead, beyond))


def steps_back(room: Room, state: State) -> Iterator[tuple[State, bool]]:
    """The states from which one step leads here, and whether that step pushed a box."""
    for action in (1, 2, 3, 4):
        offset = room.offset(action)
        behind, ahead = state.player - offset, state.player + offset
        if behind not in room.floor or behind in state.boxes:
            continue
        yield State(behind, state.boxes), False
        if ahead in state.boxes:
            yield State(behind, _moved(state.boxes, ahead, state.player)), True


def cells(room: Room, state: State) -> list[list[int]]:
    """The grid, row by row."""
    return [[_cell(room, state, row * room.columns + c) for c in range(room.columns)] for row in range(room.rows)]


def _cell(room: Room, state: State, place: int) -> int:
    if place not in room.floor:
        return WALL
    on_target = place in room.targets
    if place == state.player:
        return PLAYER_ON_TARGET if on_target else PLAYER
    if place in state.boxes:
        return BOX_ON_TARGET if on_target else BOX
    return TARGET if on_target else EMPTY


def _moved(boxes: tuple[int, ...], here: int, there: int) -> tuple[int, ...]:
    return tuple(sorted(there if box == here else box for box in boxes))
