"""Sokoban levels that can be solved: a solved room, played backwards."""

from __future__ import annotations

from random import Random

from rlsdk.errors import ValueFault
from rlsdk_gridworlds.chance import draw, pick
from rlsdk_gridworlds.room import Room, State, steps_back

_ATTEMPTS = 400
_STATES = 400
"""Most states of one room that are explored."""
_LEAST_FLOOR = 0.55
"""Share of the inside that is floor at the least."""
_AWAY = 2
"""Steps from a target, for each box: rooms that give no more are passed over while there may be others."""
_PULLS = 0.7
"""Probability of pulling a box where one can be pulled: walks alone lead nowhere."""


def level(random: Random, rows: int, columns: int, boxes: int, search_depth: int) -> tuple[Room, State]:
    """Make a room and a state that at most `search_depth` steps can solve, with no box on a target.

    Args:
        random: Random generator.
        rows: Rows of the room, walls included.
        columns: Columns of the room, walls included.
        boxes: Number of boxes, and of targets.
        search_depth: Most steps that are played backwards from the solved room.

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
        "give a larger room, fewer boxes or a greater search_depth"
    )


def _carve(random: Random, rows: int, columns: int, least: int) -> list[int]:
    """Places of floor, all connected: from one place it grows where chance has it."""
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
    """Play backwards to the state with the boxes farthest from the targets; None if closer than `least`.

    A random tree of states grows from a solved one. Its branches are at most `search_depth` long, and each state's
    branch, played forwards, solves the level from there.
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
    """Total distance of the boxes from their nearest targets; 0 if any box is on a target."""
    distances = [min(room.distance(box, target) for target in sorted(room.targets)) for box in state.boxes]
    return sum(distances) if all(distances) else 0
