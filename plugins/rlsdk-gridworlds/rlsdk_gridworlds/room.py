"""Sokoban rooms with layout, positions and steps, and solvable levels created by playing backwards."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import attrs

from rlsdk.errors import ValueFault
from rlsdk_gridworlds.chance import draw, pick

WALL, EMPTY, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)
_ATTEMPTS = 400
_STATES = 400
"""Maximum number of states to explore per room."""
_LEAST_FLOOR = 0.55
"""Minimum share of floor inside the walls."""
_AWAY = 2
"""Minimum distance of each box from a target, in steps, in the first half of the attempts; later attempts accept 1."""
_PULLS = 0.7
"""Probability of pulling a box if one can be pulled; walking alone moves no box."""


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
        """Return the change of a place by a step: 1 up, 2 down, 3 left, 4 right."""
        return {1: -self.columns, 2: self.columns, 3: -1, 4: 1}[action]

    def distance(self, one: int, other: int) -> int:
        """Return the number of steps between two places, ignoring walls."""
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
    """Return the state after a step, which may push one box; unchanged if walls or boxes block it."""
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
    """Yield the states from which one step leads to this one, and whether that step pushes a box."""
    for action in (1, 2, 3, 4):
        offset = room.offset(action)
        behind, ahead = state.player - offset, state.player + offset
        if behind not in room.floor or behind in state.boxes:
            continue
        yield State(behind, state.boxes), False
        if ahead in state.boxes:
            yield State(behind, _moved(state.boxes, ahead, state.player)), True


def cells(room: Room, state: State) -> list[list[int]]:
    """Return the kind of each cell, row by row."""
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


def level(random: Random, rows: int, columns: int, boxes: int, search_depth: int) -> tuple[Room, State]:
    """Create a room and a state without a box on a target that at most `search_depth` steps can solve.

    Args:
        random: Random generator.
        rows: Rows of the room, walls included.
        columns: Columns of the room, walls included.
        boxes: Number of boxes, which is also the number of targets.
        search_depth: Maximum number of steps played backwards from the solved room.

    Raises:
        ValueFault: No such level was found.
    """
    for attempt in range(_ATTEMPTS):
        floor = _carve(random, rows, columns, boxes + 2)
        targets = draw(random, floor, boxes)
        room = Room(rows, columns, frozenset(floor), frozenset(targets))
        least = boxes * (_AWAY if attempt < _ATTEMPTS // 2 and search_depth > _AWAY * boxes else 1)
        state = _play_back(random, room, search_depth, least)
        if state is not None:
            return room, state
    raise ValueFault(
        f"{_ATTEMPTS} rooms of {rows} × {columns} with {boxes} boxes gave no level with search_depth {search_depth}; "
        "use a larger room, fewer boxes or a greater search_depth"
    )


def _carve(random: Random, rows: int, columns: int, least: int) -> list[int]:
    """Draw the places of the floor, which grows at random from one place and so is connected."""
    inside = [r * columns + c for r in range(1, rows - 1) for c in range(1, columns - 1)]
    free = set(inside)
    share = _LEAST_FLOOR + (1 - _LEAST_FLOOR) * random.random()
    size = max(least, round(share * len(inside)))
    floor: list[int] = []
    edge = [pick(random, inside)]
    free.remove(edge[0])
    while len(floor) < size:
        place = edge.pop(int(random.random() * len(edge)))
        floor.append(place)
        near = (place - columns, place + columns, place - 1, place + 1)
        edge += [n for n in near if n in free]
        free.difference_update(near)
    return sorted(floor)


def _play_back(random: Random, room: Room, search_depth: int, least: int) -> State | None:
    """Play backwards to the state with the boxes farthest from the targets; None if they are closer than `least`.

    A random tree of states grows from a solved state. Its branches have at most `search_depth` steps, and playing a
    state's branch forwards solves the level.
    """
    boxes = tuple(sorted(room.targets))
    starts = [place for place in sorted(room.floor) if place not in room.targets]
    root = State(pick(random, starts), boxes)
    depth, open_ends, at = {root: 0}, [root], 0
    best, farthest = None, (least, 0)
    while open_ends and len(depth) < _STATES:
        here = open_ends[at]
        before = _step_back(random, room, here, depth) if depth[here] < search_depth else None
        if before is None:
            open_ends[at] = open_ends[-1]
            open_ends.pop()
            at = int(random.random() * len(open_ends))
            continue
        depth[before] = depth[here] + 1
        open_ends.append(before)
        at = len(open_ends) - 1
        reached = (_away(room, before), depth[before])
        if reached > farthest:
            best, farthest = before, reached
    return best


def _step_back(random: Random, room: Room, state: State, known: dict[State, int]) -> State | None:
    """Draw an unknown state one step back, preferably one reached by pulling a box."""
    ways = [(before, pulled) for before, pulled in steps_back(room, state) if before not in known]
    pulls = [before for before, pulled in ways if pulled]
    if pulls and random.random() < _PULLS:
        return pick(random, pulls)
    return pick(random, ways)[0] if ways else None


def _away(room: Room, state: State) -> int:
    """Return the total distance of the boxes from their nearest targets; 0 if any box is on a target."""
    distances = [min(room.distance(box, target) for target in sorted(room.targets)) for box in state.boxes]
    return sum(distances) if all(distances) else 0
