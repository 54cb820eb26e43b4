"""Ways over a grid, written in one answer: `0,1>2,0:` asks for `ddl`, two rows down and one column to the left."""

from __future__ import annotations

import hashlib
from functools import partial
from random import Random
from typing import Literal

import rlsdk
from rlsdk.kit import TaskList, pick

SIDE = 5
MOVES = {"u": (-1, 0), "d": (1, 0), "l": (0, -1), "r": (0, 1)}
Cell = tuple[int, int]


@rlsdk.tasks("grid")
def grid(
    *,
    split: Literal["train", "test"] = "train",
    size: int = 20_000,
    steps: tuple[int, int] = (1, 8),
    seed: int = 0,
    demonstrations: Literal["right", "random"] | None = None,
) -> TaskList:
    """Start and goal on a grid of 5 x 5 cells; a hash of both decides whether they are for training or for tests.

    Args:
        split: `train`, or `test` (a fifth of all).
        size: Number of tasks.
        steps: Least and greatest number of steps of a shortest way.
        seed: Random seed of the tasks.
        demonstrations: Give each task an answer to imitate: a shortest way, rows first, or as many moves at random.
    """
    return TaskList(partial(_task, split, steps, seed, demonstrations), size)


def _task(split: str, steps: tuple[int, int], seed: int, demonstrations: str | None, index: int) -> rlsdk.Task:
    random = Random(f"{seed}/{split}/{index}")
    start = goal = (0, 0)
    while not steps[0] <= distance(start, goal) <= steps[1] or is_test(start, goal) != (split == "test"):
        start, goal = _cell(random), _cell(random)
    down, right = goal[0] - start[0], goal[1] - start[1]
    way = ("d" if down > 0 else "u") * abs(down) + ("r" if right > 0 else "l") * abs(right)
    shown = {"right": way, "random": "".join("udlr"[pick(random, 4)] for _ in way)}
    metadata: dict[str, object] = {"start": list(start), "goal": list(goal)}
    if demonstrations:
        metadata["demonstration"] = shown[demonstrations]
    prompt = f"{start[0]},{start[1]}>{goal[0]},{goal[1]}:"
    return rlsdk.Task(id=f"ways/{split}/{index}", prompt=prompt, answer=way, metadata=metadata)


def _cell(random: Random) -> Cell:
    return pick(random, SIDE), pick(random, SIDE)


def distance(first: Cell, second: Cell) -> int:
    """Steps from a cell to another."""
    return abs(first[0] - second[0]) + abs(first[1] - second[1])


def is_test(start: Cell, goal: Cell) -> bool:
    """Return True if a start and a goal are held out for tests."""
    return hashlib.md5(f"{start}{goal}".encode(), usedforsecurity=False).digest()[0] % 5 == 0


@rlsdk.reward("arrival", cache=True)
def arrival(rollout: rlsdk.Rollout) -> rlsdk.Score:
    """1 for any shortest way; else half of the share of the distance that was covered, less what was walked in vain."""
    start: Cell = tuple(rollout.task.metadata["start"])
    goal: Cell = tuple(rollout.task.metadata["goal"])
    row, column = start
    moves = rollout.response[:20]
    for letter in moves:
        if letter not in MOVES:
            return rlsdk.Score(0.0, metrics={"correct": 0.0}, reason="not a way")
        down, across = MOVES[letter]
        row, column = row + down, column + across
        if not (0 <= row < SIDE and 0 <= column < SIDE):
            return rlsdk.Score(0.0, metrics={"correct": 0.0}, reason="off the grid")
    whole, left = distance(start, goal), distance((row, column), goal)
    arrived = left == 0 and len(moves) == whole
    spare = abs(len(moves) - whole)
    value = 1.0 if arrived else 0.5 * max(0.0, 1 - (left + spare) / whole)
    return rlsdk.Score(value, metrics={"correct": float(arrived)})
