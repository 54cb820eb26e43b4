"""The tool example and its tasks: exact values, splits without common numbers, calls."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlsdk.errors import OptionError
from rlsdk.plugins.discovery import find

FILE = Path(__file__).resolve().parents[2] / "examples" / "calculator.py"
calculate, read_call, problems = (find(f"{FILE}:{name}") for name in ("calculate", "read_call", "problems"))


@pytest.mark.parametrize(
    ("expression", "value"), [("(17*3)-4", "47"), ("2-5", "-3"), ("1/3+1/6", "1/2"), ("12*12*2", "288")]
)
def test_values_are_exact(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize("expression", ["", "1/0", "2**9", "__import__", "(" * 60, "9" * 101])
def test_an_invalid_expression_is_an_error_that_the_model_reads(expression: str) -> None:
    with pytest.raises(ValueError, match=r"character|number|zero|operator|bracket"):
        calculate(expression)


def test_a_call_begins_with_an_arrow() -> None:
    assert read_call(">(17*3)-4") == [("calculate", {"expression": "(17*3)-4"})]
    assert read_call("<answer>47</answer>") == read_call("") == []


def test_problems_are_right_and_their_numbers_apart() -> None:
    numbers = {}
    for split, size in (("train", 2_000), ("test", 300)):
        tasks = problems(split=split, size=size)
        assert all(calculate(t.prompt.removesuffix("=")) == t.answer and int(t.answer) <= 500 for t in tasks)
        numbers[split] = {tuple(sorted(re.findall(r"\d+", t.prompt), key=int)) for t in tasks}
    assert not numbers["train"] & numbers["test"]
    assert problems(size=5)[4] == problems(size=50)[4]


def test_the_share_of_demonstrations_that_call() -> None:
    calls = [len(t.metadata["demonstration"]) == 3 for t in problems(size=1_000, demonstrations=0.2)]
    assert sum(calls) / 1_000 == pytest.approx(0.2, abs=0.04)
    with pytest.raises(OptionError, match="demonstrations: expected a share from 0 to 1, got 2"):
        problems(demonstrations=2)
