"""Tasks: options are checked, splits stay apart, the same in every process."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
from rlsdk_reasoning_gym import datasets as gym
from rlsdk_reasoning_gym.tasks import INSTRUCTION, is_test
from rlsdk_reasoning_gym.tasks import tasks as source

import rlsdk
from rlsdk.errors import DataError, OptionError


def load(**options):
    return rlsdk.load("tasks", source, **options)()


def test_a_task_holds_question_answer_and_origin():
    tasks = load(datasets="chain_sum", size=4, config={"min_terms": 2, "max_terms": 3})
    assert len(tasks) == 4
    task = tasks[2]
    assert (task.id, task.source) == ("chain_sum/train/2", "chain_sum")
    question = task.metadata["question"]
    assert task.prompt == f"{question}\n\n{INSTRUCTION}"
    assert task.answer == str(eval(question.partition(":")[2].partition("=")[0]))  # made by the library, not by a model
    assert task.metadata["dataset"] == "chain_sum"
    assert task.metadata["made"]["config"] == {"min_terms": 2, "max_terms": 3}
    assert task.metadata["metadata"]["source_dataset"] == "chain_sum"
    assert json.loads(json.dumps(dict(task.metadata))) == dict(task.metadata)


def test_prompts_are_text_or_messages():
    assert (
        load(datasets="gcd", size=1, instruction="")[0].prompt == load(datasets="gcd", size=1)[0].metadata["question"]
    )
    chat = load(datasets="gcd", size=1, chat=True, system="Be brief.", prefill="<think>")[0].prompt
    assert [m.role for m in chat] == ["system", "user", "assistant"]
    assert chat[1].content.endswith(INSTRUCTION)


def test_a_configuration_reaches_the_dataset():
    (task,) = load(datasets="chain_sum", size=1, config={"min_terms": 6, "max_terms": 6})
    assert task.metadata["metadata"]["num_terms"] == 6


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"datasets": "chain_sun"}, r"datasets: unknown dataset 'chain_sun'; did you mean 'chain_sum'\?"),
        ({"datasets": "qqqq"}, r"datasets: unknown dataset 'qqqq'; there are \d+, such as ab"),
        ({"datasets": "composite"}, "datasets: unknown dataset 'composite'"),
        (
            {"datasets": "chain_sum", "config": {"min_term": 2}},
            "config: .*no option 'min_term'; did you mean 'min_terms'",
        ),
        ({"datasets": "chain_sum", "config": {"min_terms": 0}}, "config: chain_sum: min_terms must be positive"),
        ({"datasets": "chain_sum", "config": {"seed": 3}}, "config: chain_sum: seed is set by the task source"),
        ({"datasets": "chain_sum", "size": 0}, "size: expected 1 to"),
        ({"datasets": {}}, "datasets: names no dataset"),
        ({"datasets": {"gcd": {"wieght": 2}}}, "datasets.gcd.wieght: unknown key 'wieght', did you mean 'weight'"),
        ({"datasets": {"gcd": {"weight": 0}}}, "datasets.gcd.weight: expected more than 0, got 0"),
        ({"datasets": {"gdc": {}, "lcm": None}}, r"datasets.gdc: unknown dataset 'gdc'; did you mean 'gcd'\?"),
        ({"datasets": {"gcd": {"config": {"min_value": "a"}}}}, "datasets.gcd: gcd: .*"),
        ({"datasets": {"gcd": {}}, "config": {"min_value": 2}}, "config: belongs to one dataset"),
    ],
)
def test_wrong_options_are_faults_before_a_run(options, cause):
    with pytest.raises(OptionError, match=cause):
        load(**options)


def test_a_mixture_has_its_shares():
    tasks = load(datasets={"gcd": {"weight": 3}, "lcm": {"config": {"max_value": 20}}}, size=400)
    sources = [task.source for task in tasks]
    assert 250 < sources.count("gcd") < 350
    assert sources.count("gcd") + sources.count("lcm") == 400
    assert all(task.metadata["made"]["config"] == {"max_value": 20} for task in tasks if task.source == "lcm")
    assert len({task.id for task in tasks}) == 400
    assert [task.source for task in load(datasets={"gcd": {"weight": 3}, "lcm": {}}, size=400)] == sources


def test_the_splits_use_different_seeds_and_so_do_other_seeds():
    questions = {
        (split, seed): {t.metadata["question"] for t in load(datasets="chain_sum", size=200, split=split, seed=seed)}
        for split in ("train", "test")
        for seed in (0, 1)
    }
    assert questions["train", 0] != questions["train", 1]
    for one in questions:
        for other in questions:
            assert one == other or len(questions[one] & questions[other]) < 5
    for seed in range(200):
        for size in (1, 10_000, 4_000_000):
            assert 0 <= gym.first_seed("train", seed, size) <= gym.SEEDS // 2 - size
            assert gym.SEEDS // 2 <= gym.first_seed("test", seed, size) <= gym.SEEDS - size


def test_held_out_questions_are_never_asked_in_training():
    """A dataset with few questions: by seeds they leak, by questions they do not."""

    def asked(split, hold_out):
        found = load(datasets="count_bits", config={"min_n": 1, "max_n": 60}, size=120, split=split, hold_out=hold_out)
        return {task.metadata["question"] for task in found}

    assert asked("train", "seeds") & asked("test", "seeds")
    train, test = asked("train", "questions"), asked("test", "questions")
    assert train
    assert test
    assert not train & test
    assert {is_test(question) for question in test} == {True}


def test_a_question_that_cannot_be_held_out_is_a_fault():
    with pytest.raises(DataError, match=r"500 draws of count_bits found no question for (train|test): it has too few"):
        for split in ("train", "test"):
            load(datasets="count_bits", config={"min_n": 5, "max_n": 5}, size=2, split=split, hold_out="questions")


def test_tasks_travel_and_leave_the_generators_of_the_process_alone():
    tasks = load(datasets={"pool_matrix": {}, "list_functions": {}}, size=20)
    random.seed(5)
    np.random.seed(5)
    before = (random.getstate(), np.random.get_state()[1].tolist())
    first = list(tasks)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    random.seed(6)
    assert list(pickle.loads(pickle.dumps(tasks))) == first
    assert tasks[3] == first[3]


def test_datasets_that_hang_on_the_order_of_sets_say_so(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    for name in gym.BY_HASH:
        with pytest.raises(OptionError, match=f"datasets: {name} draws from sets of strings.*PYTHONHASHSEED=0"):
            load(datasets=name)
    with pytest.raises(OptionError, match=r"datasets\.word_ladder: word_ladder draws from sets"):
        load(datasets={"gcd": {}, "word_ladder": {}})
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert len(load(datasets="ransom_note", size=3)) == 3


def test_the_same_tasks_in_another_process(tmp_path):
    """Regardless of set order and earlier draws, for all datasets not listed as exceptions."""
    names = sorted(set(gym.names()) - gym.BY_HASH - {"knight_swap"})  # which takes seconds
    code = (
        "import json, random, rlsdk; random.random()\n"
        f"for name in {names!r}:\n"
        "    t = rlsdk.load('tasks', 'reasoning_gym/tasks', datasets=name, size=12, split='test')()[7]\n"
        "    print(json.dumps([t.id, t.prompt, t.answer, dict(t.metadata)]))\n"
    )
    info = tmp_path / "rlsdk_reasoning_gym-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlsdk-reasoning-gym\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[rlsdk.v1]\nreasoning_gym = rlsdk_reasoning_gym\n")
    other = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "PYTHONHASHSEED": other},
    )
    there = [json.loads(line) for line in ran.stdout.splitlines()]
    here = [
        [t.id, t.prompt, t.answer, dict(t.metadata)]
        for t in (load(datasets=n, size=12, split="test")[7] for n in names)
    ]
    assert [task[0] for task in there] == [f"{name}/test/7" for name in names]
    assert [one[0] for one, another in zip(here, there, strict=True) if one != another] == []
