"""Countdown tasks that have a solution, made on demand."""

from __future__ import annotations

import hashlib
from random import Random
from typing import Any, Literal

import attrs

import rlsdk
from rlsdk.contracts import TaskList
from rlsdk.errors import DataError, OptionError
from rlsdk.sources.expressions import Drawn, draw, pick
from rlsdk.sources.templates import Template, demonstration, prompt
from rlsdk.types import Task

SIZES = {"train": 327_680, "test": 1_024}
"""Sizes of TinyZero's splits."""
MAX_DRAWS = 100_000
_TEST_SHARE = 10
"""One in ten problems is a test problem."""


@rlsdk.tasks("countdown")
def countdown(
    *,
    split: Literal["train", "test"] = "train",
    size: int | None = None,
    numbers: int | tuple[int, int] = (3, 4),
    number_range: tuple[int, int] = (1, 99),
    target_range: tuple[int, int] = (10, 100),
    operators: str = "+-*/",
    natural: bool = True,
    seed: int = 0,
    template: Template = "base",
    system: str | None = None,
    prefill: str | None = None,
    demonstrations: float | None = None,
    turns: int = 1,
    feedback: str = "That is not right. Try again.",
) -> TaskList:
    """Make a target from given numbers: every task has a solution, and no test problem occurs in training.

    Numbers are drawn and joined by random operations, whose value is the target. A hash of the sorted numbers and the
    target decides whether the problem is for training or for tests: another order of the numbers is the same problem,
    and the splits stay apart for every size and seed. Tasks are drawn independently of each other: where few problems
    are possible, they repeat within a split.

    Args:
        split: `train`, or `test` (a tenth of all problems).
        size: How many tasks; left out, 327,680 to train and 1,024 to test.
        numbers: How many numbers are offered, or the least and the most.
        number_range: The least and the greatest number.
        target_range: The least and the greatest target.
        operators: Which of `+-*/` a solution may need.
        natural: The solution by which a task is made has only whole numbers from 0 upwards as values in between.
        seed: Other seeds give other tasks.
        template: `base` and `qwen-instruct` (text that ends within the answer, at `<think>`), `chat` (messages), or
            `compact` (`3,5,17>9:`).
        system: System message of `chat`.
        prefill: Beginning of the answer in `chat`; it is not trained on.
        demonstrations: Give each task an answer to imitate, as `metadata["demonstration"]`: this share of them is
            right, the others are random expressions over the same numbers.
        turns: Answers in a demonstration at most. Above 1 it is a conversation like those of the workflow `dialogue`:
            an answer with another value than the target is followed by feedback and the next answer.
        feedback: What follows it.

    Returns:
        Tasks whose answer is `{"target": 9, "numbers": [3, 5, 17]}`.

    Raises:
        OptionError: Options make no sense, or not together.
        DataError: No task with these options was found.
    """
    maker = _CountdownMaker(
        split=split,
        counts=(numbers, numbers) if isinstance(numbers, int) else numbers,
        number_range=number_range,
        target_range=target_range,
        operators=operators,
        natural=natural,
        seed=seed,
        template=template,
        system=system,
        prefill=prefill,
        demonstrations=demonstrations,
        turns=turns,
        feedback=feedback,
    )
    size = SIZES[split] if size is None else size
    faults = [*maker.faults(), *([] if size > 0 else [("size", f"expected at least 1, got {size}")])]
    if faults:
        raise OptionError("tasks 'countdown'", faults)
    maker(0)  # options for which nothing can be found fail here, not in the middle of a run
    return TaskList(maker, size)


@attrs.frozen
class _Problem:
    numbers: tuple[int, ...]
    target: int
    solution: str


@attrs.frozen(kw_only=True)
class _CountdownMaker:
    """Gives the task at an index; everything random in it is seeded by seed, split and index."""

    split: Literal["train", "test"]
    counts: tuple[int, int]
    number_range: tuple[int, int]
    target_range: tuple[int, int]
    operators: str
    natural: bool
    seed: int
    template: Template
    system: str | None
    prefill: str | None
    demonstrations: float | None
    turns: int
    feedback: str

    def faults(self) -> list[tuple[str, str]]:
        """Options that make no sense."""
        share = self.demonstrations
        only_chat = [name for name in ("system", "prefill") if getattr(self, name) and self.template != "chat"]
        rules = [
            ("numbers", "expected at least 2, the lesser first", 2 <= self.counts[0] <= self.counts[1]),
            (
                "number_range",
                "expected at least 0, the lesser first",
                0 <= self.number_range[0] <= self.number_range[1],
            ),
            ("target_range", "expected the lesser first", self.target_range[0] <= self.target_range[1]),
            ("operators", "expected some of + - * /, each once", _is_choice(self.operators)),
            ("demonstrations", "expected a share from 0 to 1", share is None or 0 <= share <= 1),
            ("turns", "expected at least 1", self.turns >= 1),
            *((name, f"belongs to template chat, not {self.template}", False) for name in only_chat),
        ]
        given = {**attrs.asdict(self), "numbers": self.counts}
        return [(name, f"{rule}; got {given[name]!r}") for name, rule, kept in rules if not kept]

    def __call__(self, index: int) -> Task:
        """Make a task."""
        problem = self._problem(Random(f"{self.seed}/{self.split}/{index}"))
        return Task(
            id=f"countdown/{self.split}/{index}",
            prompt=prompt(self.template, problem.numbers, problem.target, self.system, self.prefill),
            answer={"target": problem.target, "numbers": list(problem.numbers)},
            metadata={"split": self.split, "index": index, **self._demonstration(problem, index)},
            source="countdown",
        )

    def _problem(self, random: Random) -> _Problem:
        least, most = self.target_range
        for _ in range(MAX_DRAWS):
            numbers = self._numbers(random)
            drawn = draw(random, numbers, self.operators, natural=self.natural)
            if drawn is None or not least <= drawn[0] <= most or drawn[0].denominator != 1:
                continue
            target = int(drawn[0])
            if is_test(numbers, target) == (self.split == "test"):
                return _Problem(numbers, target, drawn[1])
        raise DataError(
            f"tasks 'countdown': {MAX_DRAWS:,} draws gave no {self.split} task with {self.counts[0]} to "
            f"{self.counts[1]} numbers from {list(self.number_range)}, operators {self.operators!r} and a target in "
            f"{list(self.target_range)}; widen number_range or target_range"
        )

    def _numbers(self, random: Random) -> tuple[int, ...]:
        count = self.counts[0] + pick(random, self.counts[1] - self.counts[0] + 1)
        low, high = self.number_range
        return tuple(low + pick(random, high - low + 1) for _ in range(count))

    def _demonstration(self, problem: _Problem, index: int) -> dict[str, Any]:
        if self.demonstrations is None:
            return {}
        # A source of chance of its own: the tasks are the same with and without demonstrations.
        random = Random(f"{self.seed}/{self.split}/{index}/demonstration")
        value, text = self._answer(problem, random, self.demonstrations)
        if self.turns == 1:
            return {"demonstration": text}
        talk = [{"role": "assistant", "content": text}]
        while value != problem.target and len(talk) < 2 * self.turns - 1:
            value, text = self._answer(problem, random, self.demonstrations)
            talk += [{"role": "user", "content": self.feedback}, {"role": "assistant", "content": text}]
        return {"demonstration": talk}

    def _answer(self, problem: _Problem, random: Random, share: float) -> Drawn:
        """The value of an answer, which is right with chance `share` and random else, and the answer."""
        right = random.random() < share
        drawn: Drawn | None = (problem.target, problem.solution) if right else None
        while drawn is None:
            drawn = draw(random, problem.numbers, self.operators, natural=self.natural)
        value, expression = drawn
        return value, demonstration(self.template, expression, value, self.prefill)


def is_test(numbers: tuple[int, ...], target: int) -> bool:
    """Return True for a test problem: one in ten, by a hash that does not depend on the order of the numbers."""
    key = f"{sorted(numbers)}={target}".encode()
    return int.from_bytes(hashlib.md5(key, usedforsecurity=False).digest()[:8]) % _TEST_SHARE == 0


def _is_choice(operators: str) -> bool:
    return bool(operators) and set(operators) <= set("+-*/") and len(set(operators)) == len(operators)
