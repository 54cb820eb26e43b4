"""Tasks that are levels: their prompt, their seed, splits that share no level."""

from __future__ import annotations

import pickle

import pytest
from rlsdk_gridworlds.levels import levels

import rlsdk
from rlsdk import Message, nano
from rlsdk.errors import DataError, OptionError, ValueFault
from rlsdk.testing import ChatTokenizer, find_plugins_again, run_workflow

pytestmark = pytest.mark.usefixtures("installed")
CONSTANT = """
import rlsdk

@rlsdk.environment("constant")
class Constant:
    "Shows the same whatever its seed."

    def reset(self, seed): return rlsdk.Observation("nothing")
    def step(self, text): return rlsdk.Step(rlsdk.Observation("nothing"))
"""


def states(tasks) -> set[str]:
    made = {}
    for task in tasks:
        chosen = dict(task.metadata["environment"])
        world = made.setdefault(chosen["use"], rlsdk.load("environment", chosen.pop("use"), **chosen))
        shown = world.reset(task.metadata["seed"])
        assert shown.text == (task.prompt if isinstance(task.prompt, str) else task.prompt[0].content)
        made[shown.state] = None
    return {state for state, world in made.items() if world is None}


def load(**options):
    return rlsdk.load("tasks", "gridworlds/levels", **options)()


def test_prompt_seed_and_environment_belong_together():
    chosen = {"use": "gridworlds/sokoban", "num_boxes": 2, "dim_x": 7}
    tasks = load(environment=chosen, size=20)
    assert tasks[3].metadata["environment"] == chosen
    assert tasks[3].id == "gridworlds/sokoban/train/3"
    assert tasks[3].prompt.count("\n") >= 7
    assert len(states(tasks)) == 20


def test_no_level_of_the_tests_is_one_to_train_on():
    """3 × 3 cells have so few levels that both splits hold many of them."""
    small = {"use": "gridworlds/frozen_lake", "size": 3, "p": 0.9}
    train = load(environment=small, split="train", size=100)
    test = load(environment=small, split="test", size=40, seed=1)
    trained, tested = states(train), states(test)
    assert min(len(trained), len(tested)) > 10
    assert not trained & tested
    assert not {t.metadata["seed"] for t in train} & {t.metadata["seed"] for t in test}


def test_sizes_and_seeds():
    assert (len(load()), len(load(split="test"))) == (10_000, 200)
    assert load()[0].metadata["environment"] == {"use": "gridworlds/frozen_lake"}
    assert load(seed=1)[0].metadata["seed"] != load()[0].metadata["seed"]
    assert load(size=5)[4] == load(size=50)[4]


def test_tasks_travel():
    tasks = load(environment="gridworlds/frozen_lake_think", size=4)
    assert list(pickle.loads(pickle.dumps(tasks))) == list(tasks)


def test_a_chat_has_a_message():
    (message,) = load(chat=True)[0].prompt
    assert message == Message("user", load()[0].prompt)


def test_invalid_options_are_reported_at_once():
    with pytest.raises(OptionError, match="size: expected at least 1, got 0"):
        load(size=0)
    with pytest.raises(OptionError, match="environment: expected the name of an environment"):
        levels(environment=rlsdk.Use(levels))
    with pytest.raises(OptionError, match="unknown option 'slippery', did you mean 'is_slippery'"):
        load(environment={"use": "gridworlds/frozen_lake", "slippery": True})


def test_an_environment_that_ignores_its_seed_has_no_levels(installed, tmp_path):
    (installed / "constant_lab.py").write_text(CONSTANT)
    info = installed / "constant-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: constant\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rlsdk.v1]\nlab = constant_lab\n")
    find_plugins_again()
    found = 0
    for split in ("train", "test"):
        try:
            load(environment="lab/constant", split=split)
        except DataError as error:
            assert "its first observation must depend on the seed" in str(error)
            found += 1
    assert found == 1


GRID = {
    "use": "gridworlds/frozen_lake",
    "template": "grid",
    "action_pattern": "[0-3]",
    "action_lookup": {i: str(i) for i in range(4)},
    "user_prompt_format": "[your answer]",
    "max_steps": 8,
}


def test_demonstrations_leave_the_levels_as_they_are():
    without, with_ = load(environment=GRID, size=30), load(environment=GRID, size=30, demonstrations=0.5)
    for one, other in zip(without, with_, strict=True):
        assert (one.id, one.prompt, one.metadata["seed"]) == (other.id, other.prompt, other.metadata["seed"])
    assert "demonstration" not in without[0].metadata


def test_an_expert_reaches_the_goal_and_one_that_errs_less_often():
    def solved(share):
        tasks = load(environment=GRID, size=100, demonstrations=share)
        world = rlsdk.load("environment", GRID["use"], **{k: v for k, v in GRID.items() if k != "use"})
        return sum(replayed(world, task)[-1].metrics["success"] for task in tasks)

    assert solved(1.0) == 100
    assert 25 < solved(0.5) < 95
    assert 2 < solved(0.0) < 50


def replayed(world, task):
    """The steps of a demonstration, whose observations are those that it shows."""
    world.reset(task.metadata["seed"])
    messages = task.metadata["demonstration"]
    steps = [world.step(message["content"]) for message in messages[::2]]
    assert [s.observation.text for s in steps[:-1]] == [m["content"] for m in messages[1::2]]
    assert steps[-1].terminated or steps[-1].truncated
    return steps


def test_a_demonstration_is_what_the_workflow_would_have_been():
    codec = ChatTokenizer(nano.make_tokenizer(3))
    for task in load(environment=GRID, size=5, demonstrations=0.7):
        said = iter([m["content"] for m in task.metadata["demonstration"][::2]])
        workflow = rlsdk.load("workflow", "environment", environment=GRID)
        [played] = run_workflow(workflow, [task], codec, lambda _, said=said: next(said))
        [shown] = run_workflow(rlsdk.load("workflow", "demonstration"), [task], codec, lambda _: "")
        assert played.rollouts[0].token_ids.tolist() == shown.rollouts[0].token_ids.tolist()
        assert played.rollouts[0].loss_mask.tolist() == shown.rollouts[0].loss_mask.tolist()
        assert played.rollouts[0].messages[0].content == task.prompt  # the level is shown once


def test_who_has_no_expert_is_named():
    with pytest.raises(OptionError, match="demonstrations: expected a share from 0 to 1, got"):
        load(demonstrations=1.5)
    with pytest.raises(ValueFault, match="sokoban has no expert"):
        load(environment="gridworlds/sokoban", demonstrations=1.0)
