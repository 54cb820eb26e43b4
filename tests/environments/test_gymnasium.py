"""Gymnasium environments, played as text."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlsdk
from rlsdk.environments.gymnasium import LONGEST, ActionPattern, action_of, described, parsed, written
from rlsdk.errors import OptionError, ValueFault
from rlsdk.testing import check_component
from rlsdk.testing.samples import HOSTILE

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces
MAP = ["SFH", "FFG", "HFF"]
LAKE = {
    "id": "FrozenLake-v1",
    "kwargs": {"desc": MAP, "is_slippery": False},
    "actions": {"Left": 0, "Down": 1, "Right": 2, "Up": 3},
}


def load(**options):
    return rlsdk.load("environment", "gymnasium", **options)


def test_an_episode_by_names():
    world = load(**LAKE, template="You stand on {observation}; {actions_left} left.", max_steps=9, format_penalty=-0.5)
    first = world.reset(0)
    assert first.text == (
        "You act in the environment FrozenLake-v1. An action is one of Left, Down, Right, Up. Answer in the form "
        "<answer> [your action] </answer>.\nYou stand on 0; 9 left."
    )
    step = world.step("<answer>DOWN</answer>")
    assert step.observation.text == "You stand on 3; 8 left."
    assert (step.reward, step.terminated, step.truncated) == (0.0, False, False)
    step = world.step("<answer>2</answer>")  # names alone count where there are some
    assert step.observation.text.startswith("That was no valid action, and nothing happened. An action is one of Left")
    assert step.observation.text.endswith("\nYou stand on 3; 7 left.")
    assert step.reward == -0.5
    world.step("<answer>right</answer>")
    step = world.step("<answer>right</answer>")
    assert (step.reward, step.terminated, step.truncated) == (1.0, True, False)
    assert step.metrics == {"num_actions": 4.0, "valid_actions": 3.0, "return": 1.0}
    with pytest.raises(ValueFault, match="no episode is in progress"):
        world.step("<answer>right</answer>")


def test_equal_observations_have_equal_states():
    world = load(**LAKE)
    first = world.reset(0)
    assert world.step("<answer>Up</answer>").observation.state == first.state
    assert world.step("<answer>Down</answer>").observation.state != first.state


def test_the_limit_of_actions_counts_invalid_ones():
    world = load(**LAKE, max_steps=2)
    world.reset(0)
    assert not world.step("?").truncated
    assert world.step("?").truncated


def test_the_environment_s_own_limit_holds():
    world = load(id="MountainCar-v0", kwargs={"max_episode_steps": 3})
    world.reset(0)
    steps = [world.step("<answer>1</answer>") for _ in range(3)]
    assert [step.truncated for step in steps] == [False, False, True]
    assert steps[-1].metrics["return"] == -3.0


def test_numbers_are_read_by_the_action_space():
    cart = load(id="CartPole-v1", precision=2)
    assert re.search(r"An action is a whole number from 0 to 1\..*\n\[(-?0\.0\d?, ){3}-?0\.0\d?\]$", cart.reset(3).text)
    assert cart.step("<answer>1</answer>").metrics["valid_actions"] == 1
    assert cart.step("<answer>2</answer>").metrics["valid_actions"] == 1
    pendulum = load(id="Pendulum-v1", instruction="")
    assert pendulum.reset(3).text.startswith("[")
    assert pendulum.step("<answer>-1.5</answer>").metrics["valid_actions"] == 1
    assert pendulum.step("<answer>[2.5]</answer>").metrics["valid_actions"] == 1  # beyond the torque of 2


def test_seeds_say_what_happens():
    def play(world, seed):
        shown = [world.reset(seed).text]
        for action in "0110101":
            step = world.step(f"<answer>{action}</answer>")
            shown.append((step.observation.text, step.reward))
        return shown

    world = load(id="CartPole-v1")
    first = play(world, 5)
    assert play(world, 5) == first == play(load(id="CartPole-v1"), 5)
    assert play(world, 6) != first
    assert play(world, -1) == play(world, -1)


def test_it_conforms():
    component = rlsdk.Plugins().find("environment", "gymnasium")[1]
    for finding in check_component(component, LAKE):
        assert finding.outcome == "passed", str(finding.fault or finding.reason)


@pytest.mark.parametrize("text", [text for _, text in HOSTILE], ids=[title for title, _ in HOSTILE])
def test_hostile_texts_do_not_reach_it(text):
    for name in ("CartPole-v1", "Pendulum-v1"):
        world = load(id=name)
        world.reset(0)
        assert world.step(text).metrics["valid_actions"] == 0


BOX = spaces.Box(np.float32([-1, 0]), np.float32([0.7, 5]))
MULTI = spaces.MultiDiscrete([2, 3], start=[0, 5])


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (spaces.Discrete(3), "2", 2),
        (spaces.Discrete(3), "2.0", 2),
        (spaces.Discrete(3), "3", None),
        (spaces.Discrete(3), "-1", None),
        (spaces.Discrete(3, start=-1), "-1", -1),
        (spaces.Discrete(3), "1.5", None),
        (spaces.Discrete(3), "1 2", None),
        (spaces.Discrete(3), "", None),
        (spaces.Discrete(3), "1_0", None),
        (spaces.Discrete(3), "２", None),
        (spaces.Discrete(3), "nan", None),
        (BOX, "0.7, 5", [0.7, 5]),
        (BOX, "[ -1 , 2e0 ]", [-1, 2]),
        (BOX, "0.71, 5", None),
        (BOX, "0.7", None),
        (BOX, "inf, 5", None),
        (spaces.Box(-np.inf, np.inf, (1,)), "1e300", None),
        (spaces.Box(0, 255, (2,), np.uint8), "256, 0", None),
        (spaces.Box(0, 255, (2,), np.uint8), "255 0", [255, 0]),
        (spaces.Box(0, 255, (2,), np.uint8), "0.5 0", None),
        (MULTI, "1, 7", [1, 7]),
        (MULTI, "1, 4", None),
        (spaces.MultiBinary(2), "1 0", [1, 0]),
        (spaces.MultiBinary(2), "1 2", None),
        (spaces.Text(3, charset="ab"), "aba", "aba"),
        (spaces.Text(3, charset="ab"), "abc", None),
    ],
)
def test_what_a_space_reads(space, text, action):
    found, value = parsed(space, text)
    assert found == (action is not None)
    if found:
        assert space.contains(value)
        assert np.asarray(value).tolist() == (action if space is not BOX else np.float32(action).tolist())


@given(st.text(alphabet="0123456789.,-+e []infa", max_size=30))
def test_what_is_read_is_in_the_space(text):
    for space in (spaces.Discrete(3), BOX, MULTI, spaces.MultiBinary(2), spaces.Box(0, 255, (1,), np.uint8)):
        found, value = parsed(space, text)
        assert not found or space.contains(value)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        (spaces.Discrete(3, start=2), "a whole number from 2 to 4"),
        (spaces.Box(-2, 2, (1,)), "a number from -2.0 to 2.0"),
        (BOX, "2 numbers separated by commas"),
        (MULTI, "2 whole numbers separated by commas, from 0 to 1, 5 to 7"),
        (spaces.MultiBinary(2), "2 numbers separated by commas, each 0 or 1"),
        (spaces.Text(9), "a text of 1 to 9 characters"),
    ],
)
def test_actions_in_words(space, words):
    assert described(space) == words


def test_values_of_a_config_become_actions():
    assert action_of(spaces.Discrete(2), True) == (False, None)
    assert action_of(spaces.Discrete(2), "1") == (False, None)
    assert action_of(BOX, "left") == (False, None)
    assert action_of(BOX, [[1, 2], [3]]) == (False, None)
    assert action_of(BOX, [0, 1])[0]


def test_observations_in_words():
    value = {"position": np.float32([0.123456, -1e-9]), "hand": (np.int64(3), 1.5), "mission": "go"}
    assert written(value, 4) == "position: [0.1235, 0.0]\nhand: 3, 1.5\nmission: go"


def test_a_module_that_registers_the_environment_is_imported(tmp_path, monkeypatch):
    (tmp_path / "my_lakes.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('MyLake-v0', 'gymnasium.envs.toy_text:FrozenLakeEnv', kwargs={'desc': ['SG']})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load(id="my_lakes:MyLake-v0").reset(0).text.startswith("You act in the environment my_lakes:MyLake-v0.")
    with pytest.raises(OptionError, match=r"gymnasium has no environment 'my_lakes:MyLak-v0': .*MyLake"):
        load(id="my_lakes:MyLak-v0")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"id": "FrozenLak-v1"}, "gymnasium has no environment 'FrozenLak-v1': .*FrozenLake"),
        ({"id": "no_such_module:Cart-v0"}, "gymnasium has no environment 'no_such_module:Cart-v0'.* named MODULE:ID"),
        ({**LAKE, "max_steps": 0}, "max_steps: expected at least 1, got 0"),
        ({**LAKE, "actions": {"a": 0, "A": 1}}, "actions: expected names that differ in more than case"),
        ({**LAKE, "actions": {}}, "actions: expected names that differ in more than case"),
        ({}, "id: is required"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(OptionError, match=message):
        load(**options)


def test_actions_that_are_none_of_the_environment_s():
    with pytest.raises(
        ValueFault, match=r"actions: 'Jump' is 4, which is not in FrozenLake-v1's action space Discrete"
    ):
        load(**{**LAKE, "actions": {"Jump": 4}}).reset(0)


def test_a_space_that_cannot_be_read_asks_for_names():
    with pytest.raises(ValueFault, match=r"cannot be read from text; give them names: actions: \{NAME: ACTION, …\}"):
        described(spaces.Tuple([spaces.Discrete(2)]))


def test_it_closes_and_starts_again():
    world = load(**LAKE)
    assert world.render() is None
    first = world.reset(0)
    world.close()
    with pytest.raises(ValueFault, match="no episode is in progress"):
        world.step("<answer>Up</answer>")
    assert world.reset(0) == first


def test_without_gymnasium_it_says_what_to_install():
    code = (
        "import sys; sys.modules['gymnasium'] = None\n"
        "import rlsdk\n"
        "assert 'gymnasium' in rlsdk.names('environment')\n"
        "rlsdk.load('environment', 'gymnasium', id='CartPole-v1')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "EnvironmentFault: environment 'gymnasium' needs the package gymnasium" in ran.stderr
    assert ran.stderr.strip().endswith("pip install gymnasium")


THINK = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        ("<answer>(.*?)</answer>", "so <answer> Up\n</answer> <answer>Down</answer>", "Up"),
        ("<answer>(.*?)</answer>", "<answer>Up", None),
        ("<answer>(.*?)</answer>", "<answer></answer>", ""),
        (THINK, "<think>a\nb</think>\n<answer>Up</answer>", "Up"),
        (THINK, "<answer>Up</answer>", None),
        ("(?P<action>[a-z]+)=(.*)", "go=1", "go"),
        ("[a-z]+", "1 go", "go"),
        ("(a)|(b)", "a", None),
    ],
)
def test_what_is_found(pattern, text, found):
    assert ActionPattern(pattern).find(text) == found


def test_the_text_may_lack_what_was_written_for_the_model():
    pattern = ActionPattern(opening="<answer>")
    assert pattern.find("Up</answer>") == "Up"
    assert pattern.find("<answer>Up</answer>") == "Up"
    assert pattern.find("I go <answer>Up</answer>") == "Up"
    assert pattern.find("Up") is None


def test_a_search_ends():
    start = time.process_time()
    assert ActionPattern("(a+)+$").find("a" * 5_000 + "b") is None
    assert ActionPattern().find("<answer>" * (LONGEST // 8)) is None
    assert time.process_time() - start < 5
    assert ActionPattern().find("<answer>Up</answer>" + "a" * LONGEST) is None


def test_no_pattern():
    with pytest.raises(ValueFault, match=r"action_pattern '\(' is not a regular expression: missing \)"):
        ActionPattern("(")
