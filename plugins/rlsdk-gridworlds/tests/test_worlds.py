"""Tests of both worlds: ROLL's options, hostile texts, equal episodes in every process, metrics, pictures."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import rlsdk_gridworlds.frozen_lake
import rlsdk_gridworlds.levels
import rlsdk_gridworlds.sokoban
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from rlsdk_gridworlds.frozen_lake import FrozenLake, FrozenLakeThink
from rlsdk_gridworlds.picture import TILE, save_png
from rlsdk_gridworlds.sokoban import LargerSokoban, SimpleSokoban, Sokoban, SokobanDifferentGridVocab

import rlsdk
from rlsdk.errors import ValueFault
from rlsdk.kit import Component, component_of
from rlsdk.testing import HOSTILE, check_component

ROLL = OmegaConf.to_container(OmegaConf.load(Path(__file__).parent / "roll.yaml"), resolve=True)
VARIANTS = {
    "SimpleSokoban": SimpleSokoban,
    "LargerSokoban": LargerSokoban,
    "SokobanDifferentGridVocab": SokobanDifferentGridVocab,
    "FrozenLake": FrozenLake,
    "FrozenLakeThink": FrozenLakeThink,
}
OF_THE_ENVIRONMENT = ("max_tokens_per_step", "user_prompt_format", "added_text")
MODULES = (rlsdk_gridworlds.frozen_lake, rlsdk_gridworlds.sokoban, rlsdk_gridworlds.levels)
MARKED = {c.name: c for module in MODULES for c in map(component_of, vars(module).values()) if c}


def options_of(variant: str) -> dict:
    held = ROLL["custom_envs"][variant]
    return {**held["env_config"], **{name: held[name] for name in OF_THE_ENVIRONMENT}}


def test_these_are_all_variants():
    assert set(ROLL["custom_envs"]) == set(VARIANTS)
    names = {component.name for component in MARKED.values() if component.kind == "environment"}
    snake = {component_of(cls).name for cls in VARIANTS.values()}
    assert names == snake | {"sokoban"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_takes_its_values_from_the_configuration(variant):
    given_ = options_of(variant)
    world = rlsdk.load("environment", VARIANTS[variant], **given_)
    assert {name: getattr(world, name) for name in given_} == given_
    text = world.reset(3).text
    assert text.startswith(given_["env_instruction"])
    assert f"in the form {given_['user_prompt_format']} and nothing else, in at most 128 tokens." in text
    form = "<think>so</think> <answer>Up</answer>" if variant.endswith("Think") else "<answer>Up</answer>"
    assert world.step(form).metrics["valid_actions"] == 1
    assert world.step("Up").metrics["valid_actions"] == 1
    # What the workflow wrote for the model need not come back with the model's own words.
    assert world.step(form.removeprefix(given_["added_text"])).metrics["valid_actions"] == 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_s_defaults_are_its_values(variant):
    given_ = options_of(variant)
    world = VARIANTS[variant]()
    for name in ("max_steps", "max_tokens_per_step", "dim_x", "dim_y", "num_boxes", "search_depth", "is_slippery"):
        if name in given_:
            assert getattr(world, name) == given_[name]
    assert world.grid_lookup == given_.get("grid_lookup", world.grid_lookup)
    assert world.reset(4).state == rlsdk.load("environment", VARIANTS[variant], **given_).reset(4).state


def test_the_other_vocabulary_is_written_and_explained():
    text = SokobanDifferentGridVocab().reset(0).text
    meant = "W wall, . empty, G target, C box on target, B box, A player, @ player on target."
    assert f"\nSymbols: {meant}\n" in text
    assert set(text.rpartition("Actions left: 10.\n")[2]) <= set("W.GCBA@\n")
    given_ = rlsdk.load("environment", Sokoban, **options_of("SokobanDifferentGridVocab"))
    assert f"\nSymbols: {meant}\n" in given_.reset(0).text


def test_who_is_to_think_must():
    world = FrozenLakeThink()
    assert "in the form <think> [your thoughts] </think> <answer> [your answer] </answer>" in world.reset(0).text
    assert world.step("<answer>Up</answer>").reward == -0.15
    assert world.step("<think>\n…\n</think>\n<answer>Up</answer>").metrics["valid_actions"] == 1


def test_the_bare_grid_is_all_that_a_small_model_reads():
    world = FrozenLake(template="grid", grid_lookup=dict(enumerate("*-/+=:")), action_pattern="[0-3]",
                       action_lookup=dict(enumerate("0123")))  # fmt: skip
    first = world.reset(1)
    assert first.text == world.render()
    assert set(first.text) <= set("*-/+\n")
    step = world.step("I say 13")
    assert step.metrics["valid_actions"] == 1
    assert step.observation.text == world.render()


@pytest.mark.parametrize(("pattern", "text"), [("(?P<action>[A-Z]\\w+) .*(!)", "go Up now!"), ("Up", "go Up now")])
def test_where_a_pattern_holds_the_action(pattern, text):
    world = Sokoban(action_pattern=pattern)
    world.reset(0)
    assert world.step(text).metrics["valid_actions"] == 1


def assert_invalid(text: str) -> None:
    for world in (FrozenLake(format_penalty=-0.25), Sokoban(format_penalty=-0.25)):
        before = world.reset(0)
        step = world.step(text)
        assert (step.reward, step.observation.state, step.terminated) == (-0.25, before.state, False)
        assert step.metrics == {"success": 0, "num_actions": 1, "valid_actions": 0, "effective_actions": 0}
        assert "That was no valid answer" in step.observation.text
        assert len(step.observation.text) < 400  # nothing of it comes back


@pytest.mark.parametrize("text", [text for _, text in HOSTILE], ids=[title for title, _ in HOSTILE])
def test_hostile_texts_are_invalid_actions(text):
    assert_invalid(text)


PARTS = st.sampled_from(
    ["<answer>", "</answer>", "<think>", "</think>", "Up ", "left", "\n", "||", "\ud800", "\0", "İ"]
)


@given(st.one_of(st.text(), st.lists(st.one_of(PARTS, st.text(max_size=3)), max_size=12).map("".join)))
def test_any_text_is_an_action_or_invalid(text):
    held = text.partition("<answer>")[2].partition("</answer>")
    if held[1] and held[0].strip().casefold() in {"up", "down", "left", "right"}:
        world = Sokoban()
        world.reset(0)
        assert world.step(text).metrics["valid_actions"] == 1
    else:
        assert_invalid(text)


EPISODES = """
import json, sys
from rlsdk_gridworlds.frozen_lake import FrozenLake, FrozenLakeThink
from rlsdk_gridworlds.sokoban import LargerSokoban, Sokoban, SokobanDifferentGridVocab
played = []
worlds = [FrozenLake(), FrozenLake(is_slippery=True, size=6), FrozenLakeThink(), Sokoban(), LargerSokoban(),
          SokobanDifferentGridVocab(num_boxes=2)]
for world in worlds:
    for seed in (0, 7, 2**40, -3):
        first = world.reset(seed)
        played.append([first.text, first.state])
        for name in ("Right", "Down", "Left", "Up", "Down", "x", "Right"):
            step = world.step(f"<think>.</think> <answer>{name}</answer>")
            played.append([step.observation.text, step.observation.state, step.reward, dict(step.metrics)])
            if step.terminated or step.truncated:
                break
print(json.dumps(played))
"""


TRAJECTORIES = """
import json
import rlsdk
from rlsdk import nano
from rlsdk.testing import ChatTokenizer
from rlsdk.testing import run_workflow
from rlsdk_gridworlds.frozen_lake import FrozenLake
from rlsdk_gridworlds.sokoban import Sokoban
codec, played = ChatTokenizer(nano.make_tokenizer(100)), []
for world in (FrozenLake, Sokoban):
    options = {"template": "grid", "max_steps": 6, "action_pattern": "[1-4]",
               "action_lookup": {n: str(1 + i) for i, n in enumerate(world.ACTIONS)}}
    workflow = rlsdk.load("workflow", "environment", environment=rlsdk.Use(world, options))
    tasks = rlsdk.load("tasks", "seeds", size=6, form="text")()
    groups = run_workflow(workflow, list(tasks), codec, lambda text: str(1 + len(text) * 7 % 4), group_size=2)
    for rollout in (r for g in groups for r in g.rollouts):
        played.append([rollout.token_ids.tolist(), rollout.loss_mask.tolist(), list(rollout.rewards), rollout.status,
                       [m.content for m in rollout.messages], dict(rollout.metrics)])
print(json.dumps(played))
"""


def episodes(hash_seed: str, program: str = EPISODES) -> list:
    path = os.pathsep.join(filter(None, [*map(str, sys.path)]))
    variables = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8"}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, env=variables)
    return json.loads(ran.stdout)


def test_the_same_seed_and_actions_give_the_same_in_every_process():
    first = episodes("1")
    assert len(first) > 100
    assert episodes("2") == first


@pytest.mark.slow
def test_a_scripted_policy_has_the_same_trajectories_in_every_process():
    first = episodes("1", TRAJECTORIES)
    assert len(first) == 24
    assert any(len(rollout[4]) > 4 for rollout in first)  # several turns
    assert first[0] == first[1] != first[2]  # a group begins in one state, another group in another
    assert episodes("2", TRAJECTORIES) == first


def test_levels_are_those_that_they_have_always_been():
    """Whoever changes this changes every level of every user's evaluation."""
    assert FrozenLake().reset(0).state == FROZEN_LAKE_0
    assert Sokoban().reset(0).state == SOKOBAN_0
    assert LargerSokoban().reset(0).state == LARGER_SOKOBAN_0


FROZEN_LAKE_0 = "1111/1231/1111/0211"
SOKOBAN_0 = "000000/015110/014100/021100/000100/000000"
LARGER_SOKOBAN_0 = "00000000/00001110/00112110/00114110/01211450/01110010/01011100/00000000"


def test_pictures(tmp_path):
    world = Sokoban(dim_x=5, dim_y=7)
    world.reset(0)
    picture = world.render("rgb_array")
    assert (picture.shape, picture.dtype) == ((5 * TILE, 7 * TILE, 3), np.uint8)
    grid = world.render("text").split("\n")
    alike = {}
    for r, row in enumerate(grid):
        for c, symbol in enumerate(row):
            alike.setdefault(symbol, set()).add(picture[r * TILE :, c * TILE :][:TILE, :TILE].tobytes())
    assert all(len(tiles) == 1 for tiles in alike.values())
    assert len(set.union(*alike.values())) == len(alike)  # what differs looks different
    path = tmp_path / "room.png"
    save_png(picture, path)
    held = path.read_bytes()
    start = held.index(b"IDAT") + 4
    rows = np.frombuffer(zlib.decompress(held[start : held.index(b"IEND") - 8]), np.uint8).reshape(5 * TILE, -1)
    assert (rows[:, 1:].reshape(picture.shape) == picture).all()
    with pytest.raises(ValueFault, match=r"a picture must be uint8 \[height, width, 3\]; got float64"):
        save_png(picture / 255, path)


def test_a_picture_is_what_others_read(tmp_path):
    image = pytest.importorskip("PIL.Image")
    world = FrozenLake()
    world.reset(0)
    save_png(world.render("rgb_array"), tmp_path / "lake.png")
    with image.open(tmp_path / "lake.png") as read:
        assert (np.asarray(read) == world.render("rgb_array")).all()


def test_every_kind_of_cell_looks_its_own():
    from rlsdk_gridworlds.picture import draw

    for cls in (FrozenLake, Sokoban):
        assert len({draw([[kind]]).tobytes() for kind in cls.CELLS.values()}) == len(cls.CELLS)


def test_unknown_render_modes_are_refused():
    world = FrozenLake()
    world.reset(0)
    with pytest.raises(ValueFault, match="render mode 'human'; expected 'text' or 'rgb_array'"):
        world.render("human")


@pytest.mark.parametrize("component", MARKED.values(), ids=MARKED)
def test_it_conforms(component: Component, installed):
    for finding in check_component(component):
        assert finding.outcome == "passed", str(finding.fault or finding.reason)


@pytest.mark.usefixtures("installed")
def test_the_example_of_the_readme_runs():
    text = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    defined = {}
    exec(code, defined)
    assert defined["step"].metrics["num_actions"] == 1
