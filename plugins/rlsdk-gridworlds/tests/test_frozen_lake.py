"""FrozenLake: maps with a way to the goal, episodes worked out by hand, slippery ice."""

from __future__ import annotations

import re
from collections import Counter
from random import Random

import numpy as np
import pytest
from rlsdk_gridworlds.frozen_lake import FrozenLake, Lake, frozen_map

import rlsdk
from rlsdk.errors import OptionError, ValueFault

MAP = ["SFH", "FFG", "HFF"]


@pytest.fixture
def lake(monkeypatch):
    """A world whose level is MAP, whatever the seed."""
    monkeypatch.setattr("rlsdk_gridworlds.frozen_lake.frozen_map", lambda random, size, p: MAP)
    return FrozenLake(size=3)


def shortest(rows: list[str]) -> int | None:
    """Steps from S to G by breadth first search."""
    where = {(r, c): letter for r, row in enumerate(rows) for c, letter in enumerate(row)}
    edge = seen = {place for place, letter in where.items() if letter == "S"}
    steps = 0
    while edge:
        if any(where[place] == "G" for place in edge):
            return steps
        around = {(r + a, c + b) for r, c in edge for a, b in ((0, 1), (1, 0), (0, -1), (-1, 0))}
        edge = {place for place in around if where.get(place, "H") != "H"} - seen
        seen = seen | edge
        steps += 1
    return None


@pytest.mark.parametrize(("size", "p"), [(4, 0.8), (8, 0.8), (5, 0.3), (2, 0.01)])
def test_every_map_has_one_start_one_goal_and_a_way(size, p):
    for seed in range(100):
        rows = frozen_map(Random(f"{seed}"), size, p)
        count = Counter("".join(rows))
        assert (len(rows), {len(row) for row in rows}) == (size, {size})
        assert (count["S"], count["G"], count["F"] + count["H"]) == (1, 1, size * size - 2)
        assert shortest(rows) is not None


def test_the_share_of_ice_is_p():
    letters = Counter("".join("".join(frozen_map(Random(f"{seed}"), 8, 0.8)) for seed in range(200)))
    assert letters["F"] / (letters["F"] + letters["H"]) == pytest.approx(0.8, abs=0.02)


def test_an_episode_to_the_goal(lake, answer):
    first = lake.reset(0)
    assert first.state == "012/113/211"
    assert first.text.endswith("\nActions left: 10.\nP_O\n__G\nO__")
    step = lake.step(answer("Up"))
    assert step.observation.text == "You did not move. Actions left: 9.\nP_O\n__G\nO__"
    assert (step.reward, step.terminated, step.truncated) == (0.0, False, False)
    assert step.observation.state == first.state
    step = lake.step("I go there: <answer>\n down </answer> <answer>Up</answer>")  # the first answer counts
    assert step.observation.text == "You stepped down. Actions left: 8.\n__O\nP_G\nO__"
    lake.step(answer("sideways"))
    assert lake.step(answer("RIGHT")).observation.text == "You stepped right. Actions left: 6.\n__O\n_PG\nO__"
    step = lake.step(answer("Right"))
    assert step.observation.text == "You reached the goal.\n__O\n__√\nO__"
    assert (step.reward, step.terminated, step.truncated) == (1.0, True, False)
    assert step.metrics == {"success": 1.0, "num_actions": 5.0, "valid_actions": 4.0, "effective_actions": 3.0}
    with pytest.raises(ValueFault, match="the episode is over"):
        lake.step(answer("Left"))


def test_an_episode_into_a_hole(lake, answer):
    lake.reset(0)
    assert lake.step(answer("Right")).observation.text.endswith("\n_PO\n__G\nO__")
    step = lake.step(answer("Right"))
    assert step.observation == rlsdk.Observation("You fell into a hole.\n__X\n__G\nO__", "114/113/211")
    assert (step.reward, step.terminated, step.metrics["success"]) == (0.0, True, 0.0)


def test_an_episode_that_runs_out_of_actions(lake, answer):
    lake.max_steps = 2
    lake.reset(0)
    first, second = lake.step("what?"), lake.step(answer("Left"))
    assert (first.reward, first.truncated) == (-0.15, False)
    assert (second.reward, second.terminated, second.truncated) == (0.0, False, True)
    assert second.metrics == {"success": 0.0, "num_actions": 2.0, "valid_actions": 1.0, "effective_actions": 0.0}
    lake.reset(0)
    assert lake.step(answer("Down")).metrics["num_actions"] == 1.0


def test_reaching_the_goal_with_the_last_action_is_not_a_truncation(lake, answer):
    lake.max_steps = 3
    lake.reset(0)
    steps = [lake.step(answer(name)) for name in ("Down", "Right", "Right")]
    assert (steps[-1].terminated, steps[-1].truncated) == (True, False)


def test_slippery_ice_takes_one_step_in_three_as_it_should():
    """In the middle of a lake without holes: Right goes right, down or up, each as often."""
    went = Counter()
    for seed in range(600):
        lake = Lake(["FFFF", "FSFF", "FFFF", "FFFG"], True, seed)
        note = lake.act(2).note
        went[note] += 1
    assert set(went) == {"You stepped right.", "You stepped down.", "You stepped up."}
    assert all(count == pytest.approx(200, abs=50) for count in went.values())


def test_on_slippery_ice_the_seed_says_where_steps_go(answer):
    def walk(seed):
        world = rlsdk.load("environment", FrozenLake, is_slippery=True, size=8, max_steps=30)
        shown = [world.reset(seed).state]
        for name in ["Right", "Down", "Left", "Up"] * 7:
            step = world.step(answer(name))
            shown.append(step.observation.state)
            if step.terminated:
                break
        return shown

    assert walk(3) == walk(3)
    assert "slippery" in FrozenLake(is_slippery=True).reset(3).text
    assert "slippery" not in FrozenLake().reset(3).text


def test_a_level_does_not_hang_on_texts():
    levels = [world.reset(5).state for world in (FrozenLake(), FrozenLake(think=True, template="grid", max_steps=3))]
    assert levels[0] == levels[1]
    assert len({FrozenLake().reset(seed).state for seed in range(-50, 50)}) > 90


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 1}, "size: expected at least 2, got 1"),
        ({"p": 0.0}, re.escape("p: expected a share above 0 and at most 1, got 0.0")),
        ({"max_steps": 0}, "max_steps: expected at least 1, got 0"),
        ({"max_tokens_per_step": 0}, "max_tokens_per_step: expected at least 1, got 0"),
        ({"grid_lookup": {0: "P"}}, "grid_lookup: expected different names for 0, 1, 2, 3, 4, 5"),
        ({"grid_lookup": dict(enumerate("PPOGX√"))}, "grid_lookup: expected different names for"),
        ({"action_lookup": {0: "a", 1: "A", 2: "b", 3: "c"}}, "action_lookup: expected different names for 0, 1, 2, 3"),
        ({"grid_vocab": {"P": "player"}}, "grid_vocab: the symbols '_', 'O', 'G', 'X', '√' of grid_lookup are missing"),
        ({"action_pattern": "(<answer>"}, "action_pattern '\\(<answer>' is not a regular expression"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(OptionError, match=message):
        rlsdk.load("environment", FrozenLake, **options)


def test_step_and_render_before_reset():
    for call in (lambda: FrozenLake().step("x"), lambda: FrozenLake().render()):
        with pytest.raises(ValueFault, match=re.escape("call reset(seed)")):
            call()


def test_the_expert_takes_a_shortest_way(lake):
    """(0, 0) to (1, 2) takes three steps; Down comes before Right in the order of actions."""
    lake.reset(0)
    assert lake.expert() == "<answer> Down </answer>"
    assert [lake.step(name).reward for name in [lake.expert()]] == [0.0]
    assert lake.expert() == "<answer> Right </answer>"
    lake.step("<answer>Up</answer>")
    walked = []
    while not walked or not walked[-1].terminated:
        walked.append(lake.step(lake.expert()))
    assert [step.reward for step in walked] == [0.0, 0.0, 1.0]


def test_the_expert_solves_every_level_in_as_few_steps_as_there_can_be():
    for size in (2, 4, 7):
        world = FrozenLake(size=size, p=0.7, max_steps=100)
        for seed in range(40):
            world.reset(seed)
            steps = 1
            while not (step := world.step(world.expert())).terminated:
                steps += 1
            assert step.reward == 1.0
            assert steps == shortest(frozen_map(Random(f"frozen_lake/{seed}"), size, 0.7))


def test_experts_answer_in_the_form_that_is_asked_for():
    thinking = FrozenLake(think=True)
    thinking.reset(0)
    assert thinking.expert() in thinking.answers()
    assert thinking.answers()[0] == "<think>  </think> <answer> Left </answer>"
    bare = {"action_pattern": "[0-3]", "action_lookup": {i: str(i) for i in range(4)}}
    assert FrozenLake(**bare, user_prompt_format="[your answer]").answers() == ["0", "1", "2", "3"]
    with pytest.raises(ValueFault, match="user_prompt_format must contain"):
        FrozenLake(user_prompt_format="one word").answers()


def test_a_lake_is_shown_as_a_picture():
    lake = FrozenLake(picture=True)
    first = lake.reset(3)
    assert lake.shows_images
    assert not FrozenLake().shows_images
    assert np.array_equal(np.asarray(first.image.open()), lake.render("rgb_array"))
    assert (
        "The picture shows the grid: player a blue disc, empty light, hole dark blue, goal a green square."
        in first.text
    )
    assert lake.render() not in first.text
    assert first.state == FrozenLake().reset(3).state
    then = lake.step("<answer>Down</answer>").observation
    assert then.content == (then.image, then.text)
    assert FrozenLake(picture=True, template="grid").reset(3).content == (first.image,)


def test_players_on_the_same_map_do_not_share_a_lake():
    lakes = [Lake(MAP, False, 0) for _ in range(2)]
    lakes[0].act(1)
    assert [each.cells()[0][0] for each in lakes] == [1, 0]
    slips = [[Lake(MAP, True, seed).act(2).note for _ in range(20)] for seed in (1, 2)]
    assert all(len(set(notes)) == 1 for notes in slips)  # a new player of the same seed slips the same way
