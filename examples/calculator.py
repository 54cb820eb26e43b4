"""Arithmetic with a calculator: tasks, tool, and a call syntax for a model with few tokens.

A single-file plugin, named in a config: `plugins: [calculator.py]`. See `examples/calculator_nano.yaml` and,
for a tool with state, `examples/own_calculator_nano.yaml`.
"""

from __future__ import annotations

import hashlib
from fractions import Fraction
from functools import partial
from random import Random
from typing import Any, Literal

import rlsdk
from rlsdk.errors import OptionError
from rlsdk.kit import TaskList, draw, evaluate, pick, tokenize

LONGEST = 100
"""Maximum characters of an expression, which keeps its numbers small."""
SIZES = {"train": 20_000, "test": 500}


def calculate(expression: str) -> str:
    """Return the exact value of an expression.

    Args:
        expression: Whole numbers, + - * / and brackets.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"{len(expression)} characters are more than {LONGEST}")
    return str(Fraction(*evaluate(tokenize(expression))))


class Calculator:
    """A calculator that belongs to one rollout; it rewards the right value, and costs for each call after the first."""

    def reset(self, answer: str) -> None:
        """Take the value that is to be calculated."""
        self.answer, self.calls, self.solved = answer, 0, False

    def calculate(self, expression: str) -> str:
        """Return the exact value of an expression.

        Args:
            expression: Whole numbers, + - * / and brackets.
        """
        self.calls += 1
        value = calculate(expression)
        self.solved = self.solved or value == self.answer
        return value

    def get_reward(self) -> float:
        """Return 1 for the right value from one call, 0 without it."""
        return max(0.0, 1 - 0.2 * (self.calls - 1)) if self.solved else 0.0


def read_call(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse a call, which is `>` and an expression: `>(17*3)-4`."""
    return [("calculate", {"expression": text[1:]})] if text.startswith(">") else []


@rlsdk.tasks("problems")
def problems(
    *,
    split: Literal["train", "test"] = "train",
    size: int | None = None,
    largest: int = 500,
    seed: int = 0,
    demonstrations: float | None = None,
) -> TaskList:
    """Expressions over three numbers from 1 to 20, with their value: `(17*3)-4=`.

    A hash of the sorted numbers assigns a problem to training or test.

    Args:
        split: `train`, or `test` (a tenth of all numbers).
        size: Number of tasks; by default, 20,000 for training and 500 for test.
        largest: Maximum value of an expression.
        seed: Random seed of the tasks.
        demonstrations: Add a conversation to imitate to each task: this share of them calls the calculator and answers
            with its result, the others answer with a random number immediately.

    Raises:
        OptionError: A number is out of range.
    """
    size = SIZES[split] if size is None else size
    rules = [
        ("size", "at least 1", size, size >= 1),
        ("largest", "at least 20", largest, largest >= 20),
        ("demonstrations", "a share from 0 to 1", demonstrations, demonstrations is None or 0 <= demonstrations <= 1),
    ]
    if faults := [(name, f"expected {rule}, got {given}") for name, rule, given, kept in rules if not kept]:
        raise OptionError("tasks 'problems'", faults)
    return TaskList(partial(_task, split, largest, seed, demonstrations), size)


def _task(split: str, largest: int, seed: int, demonstrations: float | None, index: int) -> rlsdk.Task:
    key = f"{seed}/{split}/{index}"
    expression, value = _problem(Random(key), split, largest)
    metadata: dict[str, Any] = {"split": split, "index": index}
    if demonstrations is not None:
        metadata["demonstration"] = _demonstration(Random(f"{key}/demo"), demonstrations, expression, value, largest)
    name = f"calculator/{split}/{index}"
    return rlsdk.Task(id=name, prompt=f"{expression}=", answer=str(value), metadata=metadata, source="calculator")


def _problem(random: Random, split: str, largest: int) -> tuple[str, int]:
    while True:
        numbers = tuple(1 + pick(random, 20) for _ in range(3))
        drawn = draw(random, numbers, "+-*", natural=True)
        if drawn is not None and drawn[0] <= largest and is_test(numbers) == (split == "test"):
            return drawn[1], int(drawn[0])


def is_test(numbers: tuple[int, ...]) -> bool:
    """Return True if problems over these numbers are held out for tests."""
    digest = hashlib.md5(f"{sorted(numbers)}".encode(), usedforsecurity=False).digest()
    return int.from_bytes(digest[:8], "big") % 10 == 0


def _demonstration(random: Random, share: float, expression: str, value: int, largest: int) -> list[dict[str, str]]:
    if random.random() >= share:
        return [{"role": "assistant", "content": f"<answer>{pick(random, largest + 1)}</answer>"}]
    return [
        {"role": "assistant", "content": f">{expression}"},
        {"role": "tool", "name": "calculate", "content": calculate(expression)},
        {"role": "assistant", "content": f"<answer>{value}</answer>"},
    ]
