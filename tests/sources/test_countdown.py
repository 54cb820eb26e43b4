"""Countdown tasks: solvable, disjoint between splits, reproducible, formatted as requested."""

from __future__ import annotations

import hashlib
import pickle
import subprocess
import sys
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlsdk
from rlsdk.errors import DataError, OptionError
from rlsdk.sources.countdown import countdown

SMALL = {"numbers": 3, "number_range": (1, 20), "target_range": (1, 100), "operators": "+-", "template": "compact"}
REWARD = rlsdk.load("reward", "countdown")


def reachable(values, operators):
    """Every value that some expression over all the values has: written without a look at the generator."""
    if len(values) == 1:
        return {values[0]}
    found = set()
    for i, j in combinations(range(len(values)), 2):
        a, b = values[i], values[j]
        rest = [v for k, v in enumerate(values) if k not in (i, j)]
        joined = set()
        if "+" in operators:
            joined.add(a + b)
        if "*" in operators:
            joined.add(a * b)
        if "-" in operators:
            joined |= {a - b, b - a}
        if "/" in operators:
            joined |= {x / y for x, y in ((a, b), (b, a)) if y}
        for value in joined:
            found |= reachable([*rest, value], operators)
    return found


def problem(task):
    return tuple(sorted(task.answer["numbers"])), task.answer["target"]


def rolled(task):
    return rlsdk.Rollout.from_text(task, task.metadata["demonstration"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"operators": "+-", "numbers": 4},
        {"operators": "*", "target_range": (1, 5000), "numbers": 2},
        {"operators": "-", "target_range": (1, 99), "numbers": (2, 3)},
        {"natural": False, "number_range": (0, 12), "target_range": (-20, 20)},
        {"operators": "/", "numbers": 2, "number_range": (0, 60), "target_range": (0, 60)},
    ],
)
def test_every_task_has_a_solution(options):
    operators = options.get("operators", "+-*/")
    least, most = options.get("target_range", (10, 100))
    low, high = options.get("number_range", (1, 99))
    for task in countdown(size=60, **options):
        numbers, target = task.answer["numbers"], task.answer["target"]
        assert least <= target <= most
        assert all(low <= n <= high for n in numbers)
        assert target in reachable([Fraction(n) for n in numbers], operators)


def test_default_sizes_are_those_of_tinyzero():
    assert len(countdown()) == 327_680
    assert len(countdown(split="test")) == 1_024
    assert {len(task.answer["numbers"]) for task in countdown(size=200)} == {3, 4}


def test_train_and_test_share_no_problem_in_any_order_for_any_seed():
    train = {problem(task) for seed in range(3) for task in countdown(size=3_000, seed=seed, **SMALL)}
    test = {problem(task) for seed in range(3) for task in countdown(size=300, seed=seed, split="test", **SMALL)}
    assert len(train) > 1_000
    assert len(test) > 100
    assert not train & test


def test_the_split_is_a_tenth_of_all_problems():
    digests = [
        hashlib.md5(f"{list(n)}={t}".encode()).digest()[:8] for n, t in map(problem, countdown(split="test", size=50))
    ]
    assert {int.from_bytes(digest) % 10 for digest in digests} == {0}


def test_the_same_seed_gives_the_same_tasks_in_every_process():
    code = (
        "import rlsdk; tasks = rlsdk.load('tasks', 'countdown', size=40, seed=3, demonstrations=0.5)();"
        "print([(t.id, t.prompt, t.answer, dict(t.metadata)) for t in tasks])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    here = [(t.id, t.prompt, t.answer, dict(t.metadata)) for t in countdown(size=40, seed=3, demonstrations=0.5)]
    assert outputs == {f"{here}\n"}


def test_tasks_depend_on_seed_and_index_alone():
    assert countdown(size=100, seed=1)[7] == countdown(size=8, seed=1)[7]
    assert [problem(t) for t in countdown(size=20, seed=1)] != [problem(t) for t in countdown(size=20, seed=2)]
    # Written down once: a change here changes every run that is to be repeated.
    assert countdown(size=1, **SMALL)[0].prompt == "14,3,5>12:"


def test_demonstrations_leave_the_tasks_as_they_are():
    without, with_ = countdown(size=50, **SMALL), countdown(size=50, demonstrations=0.3, **SMALL)
    assert [(t.id, t.prompt, t.answer) for t in without] == [(t.id, t.prompt, t.answer) for t in with_]
    assert "demonstration" not in without[0].metadata


@pytest.mark.parametrize("template", ["base", "qwen-instruct", "chat", "compact"])
def test_demonstrations_answer_in_the_form_of_the_template(template):
    right = countdown(size=100, demonstrations=1, template=template)
    assert {REWARD(rolled(task)).value for task in right} == {1.0}
    others = countdown(size=300, demonstrations=0, template=template)
    scores = [REWARD(rolled(task)) for task in others]
    assert all("exactly once" not in score.reason for score in scores)  # the form and the numbers are always right
    assert 0 < sum(score.value == 1.0 for score in scores) < 150  # by chance
    if template != "compact":
        form = rlsdk.load("reward", "format")
        assert {form(rolled(task)).value for task in others} == {1.0}


def test_the_share_of_demonstrations_that_are_made_to_be_right():
    chance = sum(REWARD(rolled(t)).value == 1.0 for t in countdown(size=3_000, demonstrations=0, **SMALL)) / 3_000
    mixed = sum(REWARD(rolled(t)).value == 1.0 for t in countdown(size=3_000, demonstrations=0.5, **SMALL)) / 3_000
    assert 0.2 < chance < 0.33
    assert mixed == pytest.approx(0.5 + 0.5 * chance, abs=0.04)


def test_templates():
    base = countdown(size=1)[0].prompt
    assert base.endswith("\nAssistant: Let me solve this step by step.\n<think>")
    assert "<answer> (1 + 2) / 3 </answer>" in base
    qwen = countdown(size=1, template="qwen-instruct")[0].prompt
    assert qwen.startswith("<|im_start|>system\n")
    assert qwen.endswith("<|im_end|>\n<|im_start|>assistant\nLet me solve this step by step.\n<think>")
    assert [m.role for m in countdown(size=1, template="chat")[0].prompt] == ["user"]
    prefilled = countdown(size=1, template="chat", system="Be brief.", prefill="<think>", demonstrations=1)[0]
    assert [(m.role, m.content) for m in prefilled.prompt][::2] == [("system", "Be brief."), ("assistant", "<think>")]
    assert not prefilled.metadata["demonstration"].startswith("<think>")
    numbers, target = countdown(size=1)[0].answer["numbers"], countdown(size=1)[0].answer["target"]
    assert f"[{', '.join(map(str, numbers))}]" in base
    assert f" {target}." in base


def test_a_list_of_tasks_is_a_sequence_that_can_be_pickled():
    tasks = countdown(size=10)
    assert tasks[-1] == tasks[9]
    assert tasks[2:4] == [tasks[2], tasks[3]]
    assert list(tasks) == [tasks[i] for i in range(10)]
    assert pickle.loads(pickle.dumps(tasks))[5] == tasks[5]
    for index in (10, -11):
        with pytest.raises(IndexError, match="of 10"):
            tasks[index]
    assert len({task.id for task in tasks}) == 10


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"numbers": 1}, "numbers"),
        ({"numbers": [4, 3]}, "numbers"),
        ({"number_range": [5, 1]}, "number_range"),
        ({"number_range": [-5, 1]}, "number_range"),
        ({"target_range": [5, 1]}, "target_range"),
        ({"operators": "+^"}, "operators"),
        ({"operators": ""}, "operators"),
        ({"operators": "++"}, "operators"),
        ({"demonstrations": 1.5}, "demonstrations"),
        ({"size": 0}, "size"),
        ({"prefill": "<think>"}, "prefill.*chat"),
        ({"split": "dev"}, "split"),
        ({"template": "qwen"}, "qwen-instruct"),
        ({"numbers": "3"}, "numbers"),
    ],
)
def test_options_without_sense_are_named(options, named):
    with pytest.raises(OptionError, match=named):
        rlsdk.load("tasks", "countdown", **options)()


def test_options_under_which_nothing_can_be_found_fail_before_the_run():
    with pytest.raises(DataError, match="widen"):
        countdown(numbers=2, number_range=(1, 3), target_range=(50, 60))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 6),
    st.sampled_from(["+", "+-", "+*", "+-*/", "-+/"]),
    st.integers(0, 10_000),
    st.booleans(),
)
def test_the_solution_of_any_task_is_right(count, operators, seed, natural):
    tasks = countdown(
        size=3,
        numbers=count,
        operators=operators,
        seed=seed,
        natural=natural,
        target_range=(-100, 600),
        demonstrations=1,
    )
    assert {REWARD(rolled(task)).value for task in tasks} == {1.0}
