"""Sokoban: levels that can be solved, episodes worked out by hand."""

from __future__ import annotations

from random import Random

import pytest
from rlsdk_gridworlds.room import Room, State, level
from rlsdk_gridworlds.sokoban import Sokoban

import rlsdk
from rlsdk.errors import OptionError, ValueFault

DIRECTIONS = ((-1, 0), (1, 0), (0, -1), (0, 1))
NAMES = ("Up", "Down", "Left", "Right")


def solution(grid: list[str]) -> list[str] | None:
    """The shortest one, by breadth first search over what the text shows: nothing of the package is used."""
    at = {(r, c): symbol for r, row in enumerate(grid) for c, symbol in enumerate(row)}
    targets = frozenset(place for place, symbol in at.items() if symbol in "O√S")
    player = next(place for place, symbol in at.items() if symbol in "PS")
    start = (player, frozenset(place for place, symbol in at.items() if symbol in "X√"))
    edge, seen = [(start, [])], {start}
    while edge:
        following = []
        for ((r, c), boxes), path in edge:
            if boxes == targets:
                return path
            for (a, b), name in zip(DIRECTIONS, NAMES, strict=True):
                ahead, beyond = (r + a, c + b), (r + 2 * a, c + 2 * b)
                if at[ahead] == "#" or (ahead in boxes and (at[beyond] == "#" or beyond in boxes)):
                    continue
                moved = (boxes - {ahead}) | {beyond} if ahead in boxes else boxes
                if (ahead, moved) not in seen:
                    seen.add((ahead, moved))
                    following.append(((ahead, moved), [*path, name]))
        edge = following
    return None


@pytest.mark.parametrize(
    ("options", "seeds"),
    [
        ({}, 150),
        ({"dim_x": 8, "dim_y": 8, "num_boxes": 2}, 30),
        ({"search_depth": 30}, 60),
        ({"search_depth": 300, "num_boxes": 2}, 15),
        ({"dim_x": 5, "dim_y": 7, "search_depth": 3}, 30),
        ({"dim_x": 3, "dim_y": 6}, 30),
    ],
)
def test_every_level_is_solved_by_an_independent_solver(options, seeds, answer):
    world = Sokoban(max_steps=100, **options)
    boxes = options.get("num_boxes", 1)
    for seed in range(seeds):
        world.reset(seed)
        grid = world.render().split("\n")
        symbols = "".join(grid)
        assert (len(grid), len(grid[0])) == (world.dim_x, world.dim_y)
        assert (symbols.count("X"), symbols.count("√")) == (boxes, 0)  # no box is where it belongs
        assert symbols.count("O") + symbols.count("S") == boxes
        assert set(grid[0] + grid[-1] + "".join(row[0] + row[-1] for row in grid)) == {"#"}
        path = solution(grid)
        assert path is not None, world.render()
        assert 1 <= len(path) <= world.search_depth
        steps = [world.step(answer(name)) for name in path]
        assert [step.terminated for step in steps] == [False] * (len(path) - 1) + [True]
        assert steps[-1].metrics["success"] == 1.0


def test_levels_are_neither_all_alike_nor_trivial():
    world = Sokoban()
    lengths, states = [], set()
    for seed in range(100):
        states.add(world.reset(seed).state)
        lengths.append(len(solution(world.render().split("\n"))))
    assert len(states) == 100
    assert len(set(lengths)) >= 5
    assert sum(lengths) / 100 > 4


ROWS = ("######", "#_OO_#", "#_XX_#", "#_P__#", "######")


@pytest.fixture
def room(monkeypatch):
    """A world whose level is ROWS, whatever the seed."""
    text = "".join(ROWS)
    places = {symbol: [i for i, s in enumerate(text) if s == symbol] for symbol in "#OXP"}
    floor = frozenset(i for i, symbol in enumerate(text) if symbol != "#")
    held = Room(5, 6, floor, frozenset(places["O"])), State(places["P"][0], tuple(places["X"]))
    monkeypatch.setattr("rlsdk_gridworlds.sokoban.level", lambda *_: held)
    return Sokoban(dim_x=5, num_boxes=2, max_steps=20)


def test_an_episode_until_all_is_solved(room, answer):
    first = room.reset(0)
    assert first.text.endswith("Actions left: 20.\n" + "\n".join(ROWS))
    assert first.state == "000000/012210/014410/015110/000000"
    step = room.step(answer("Up"))  # onto the target
    assert step.observation.text == (
        "You stepped up and pushed a box onto a target. Actions left: 19.\n######\n#_√O_#\n#_PX_#\n#____#\n######"
    )
    assert step.reward == pytest.approx(-0.1 + 1)
    step = room.step(answer("up"))  # against the wall
    assert step.observation.text.startswith("You did not move.")
    assert step.reward == pytest.approx(-0.1)
    rewards = [room.step(answer(name)).reward for name in ("Left", "Up")]  # around it
    assert rewards == pytest.approx([-0.1, -0.1])
    step = room.step(answer("Right"))  # from one target to the other
    assert step.observation.text.startswith("You stepped right and pushed a box. ")
    assert "\n#_S√_#\n" in step.observation.text
    assert step.reward == pytest.approx(-0.1)
    step = room.step(answer("Right"))  # off it
    assert step.observation.text.startswith("You stepped right and pushed a box off its target. ")
    assert step.reward == pytest.approx(-0.1 - 1)
    assert step.metrics == {"success": 0.0, "num_actions": 6.0, "valid_actions": 6.0, "effective_actions": 5.0}


def test_the_last_box_brings_the_reward_of_the_end(room, answer):
    room.reset(0)
    steps = [room.step(answer(name)) for name in ("Up", "Down", "Right", "Up")]
    assert [step.reward for step in steps] == pytest.approx([0.9, -0.1, -0.1, -0.1 + 1 + 10])
    assert steps[-1].observation.text == "All boxes are on targets: solved.\n######\n#_√√_#\n#__P_#\n#____#\n######"
    assert (steps[-1].terminated, steps[-1].truncated, steps[-1].metrics["success"]) == (True, False, 1.0)


def test_two_boxes_in_a_row_do_not_move(room, answer):
    room.reset(0)
    for name in ("Left", "Up"):
        room.step(answer(name))
    step = room.step(answer("Right"))
    assert step.observation.text == "You did not move. Actions left: 17.\n######\n#_OO_#\n#PXX_#\n#____#\n######"


def test_rewards_are_options(room, answer):
    room.penalty_for_step, room.reward_box_on_target, room.format_penalty = -0.5, 2.0, -3.0
    room.reset(0)
    assert room.step(answer("Up")).reward == pytest.approx(1.5)
    assert room.step("Up").reward == -3.0


def test_a_player_on_a_target_is_shown(room, answer):
    room.reset(0)
    for name in ("Right", "Right", "Up", "Up", "Left"):
        step = room.step(answer(name))
    assert "\n#_OS_#\n" in step.observation.text
    assert "6" in step.observation.state


def test_impossible_rooms_are_refused():
    with pytest.raises(OptionError, match="a room of 4 × 4 has 4 cells inside its walls; 3 boxes need 5"):
        rlsdk.load("environment", Sokoban, dim_x=4, dim_y=4, num_boxes=3)
    with pytest.raises(OptionError, match="dim_x: expected at least 3, got 2"):
        rlsdk.load("environment", Sokoban, dim_x=2)
    with pytest.raises(ValueFault, match="400 rooms of 4 × 4 with 2 boxes gave no level with search_depth 1; use a"):
        level(Random("0"), 4, 4, 2, 1)
