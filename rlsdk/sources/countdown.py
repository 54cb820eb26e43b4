"""Countdown tasks: reach a target from given numbers. Tasks are created on access, and always solvable.

Prompts follow a template, and expert answers have the same format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from random import Random
from typing import Any, Literal

import attrs

import rlsdk
from rlsdk.contracts import TaskList
from rlsdk.errors import DataError, OptionError
from rlsdk.types import Message, Task

Template = Literal["base", "qwen-instruct", "chat", "compact"]

_PREFILL = "Let me solve this step by step.\n<think>"
_QUESTION = (
    "Take the numbers [{numbers}] and write an arithmetic expression that equals {target}. You may add, subtract, "
    "multiply and divide (+, -, *, /) and use brackets; every number must be used exactly once. First think between "
    "<think> and </think>, then give nothing but the expression between <answer> and </answer>, as in "
    "<answer> (1 + 2) / 3 </answer>."
)
_BASE = (
    "This is a conversation between a User, who asks, and an Assistant, who thinks a question over and answers it.\n"
    "User: {question}\n"
    "Assistant: {prefill}"
)
_QWEN = (
    "<|im_start|>system\nYou are a helpful assistant. You think a question over before you answer it.<|im_end|>\n"
    "<|im_start|>user\n{question}<|im_end|>\n"
    "<|im_start|>assistant\n{prefill}"
)


def prompt(
    template: Template, numbers: Sequence[int], target: int, system: str | None = None, prefill: str | None = None
) -> str | tuple[Message, ...]:
    """Return the prompt of a task: text, or messages if the template is `chat`."""
    if template == "compact":
        return f"{','.join(map(str, numbers))}>{target}:"
    question = _QUESTION.format(numbers=", ".join(map(str, numbers)), target=target)
    if template != "chat":
        return (_BASE if template == "base" else _QWEN).format(question=question, prefill=_PREFILL)
    messages = (("system", system), ("user", question), ("assistant", prefill))
    return tuple(Message(role, content) for role, content in messages if content)  # type: ignore[arg-type]


def demonstration(template: Template, expression: str, value: int | Fraction, prefill: str | None = None) -> str:
    """Return the continuation of a prompt that answers with an expression."""
    if template == "compact":
        return f"<answer>{expression}</answer>"
    thinking = template != "chat" or (prefill or "").rstrip().endswith("<think>")
    return f"{'' if thinking else '<think>'} {expression} = {value} </think>\n<answer> {expression} </answer>"


SIZES = {"train": 327_680, "test": 1_024}
"""Sizes of TinyZero's splits."""
MAX_DRAWS = 100_000
"""Attempts to draw a task before the options count as impossible."""
_TEST_SHARE = 10
"""One problem in this many is a test problem."""
Value = int | Fraction
Drawn = tuple[Value, str]
"""Value of an expression and its text, with every operation except the outermost in brackets."""


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
    """Reach a target from given numbers: every task is solvable, and no test problem occurs in training.

    Numbers are drawn and combined by random operations; the result is the target. A hash of the sorted numbers and the
    target assigns a problem to training or test. Hence the splits are disjoint for all sizes and seeds, even if the
    order of the numbers differs. Tasks are drawn independently: if few problems are possible, they repeat within a
    split.

    Args:
        split: `train`, or `test` (a tenth of all problems).
        size: Number of tasks; by default, 327,680 for `train` and 1,024 for `test`.
        numbers: How many numbers a task has, or a range (minimum, maximum).
        number_range: Smallest and largest number.
        target_range: Smallest and largest target.
        operators: Operators, from `+-*/`, that a solution may use.
        natural: Generate tasks from solutions whose intermediate values are whole numbers of at least 0.
        seed: Random seed of the tasks.
        template: `base` and `qwen-instruct` (text that ends within the answer, at `<think>`), `chat` (messages), or
            `compact` (`3,5,17>9:`).
        system: System message for `chat`.
        prefill: Beginning of the answer for `chat`; not trained on.
        demonstrations: Add an answer to imitate to each task, in `metadata["demonstration"]`. This share of them is
            right; the others are random expressions of the same numbers.
        turns: Maximum number of answers in a demonstration. Above 1, it is a conversation as in the workflow
            `dialogue`: a wrong answer is followed by feedback and the next answer.
        feedback: Message that follows a wrong answer in a demonstration.

    Returns:
        Tasks whose answer is `{"target": 9, "numbers": [3, 5, 17]}`.

    Raises:
        OptionError: An option is invalid, or incompatible with another.
        DataError: No task with these options was found.
    """
    size = SIZES[split] if size is None else size
    counts = (numbers, numbers) if isinstance(numbers, int) else numbers
    drawing = (split, counts, number_range, target_range, operators, natural, seed)
    maker = _CountdownMaker(*drawing, template, system, prefill, demonstrations, turns, feedback)
    faults = [*maker.faults(), *([] if size > 0 else [("size", f"expected at least 1, got {size}")])]
    if faults:
        raise OptionError("tasks 'countdown'", faults)
    maker(0)  # fail now on impossible options, not in the middle of a run
    return TaskList(maker, size)


@attrs.frozen
class _Problem:
    numbers: tuple[int, ...]
    target: int
    solution: str


@attrs.frozen
class _CountdownMaker:
    """Creates the task at an index, with a random generator seeded by seed, split and index."""

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
        """Return errors in the options, as pairs (option, reason)."""
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
            (
                "operators",
                "expected some of + - * /, each once",
                0 < len(self.operators) == len(set(self.operators)) and set(self.operators) <= set("+-*/"),
            ),
            ("demonstrations", "expected a share from 0 to 1", share is None or 0 <= share <= 1),
            ("turns", "expected at least 1", self.turns >= 1),
            *((name, f"only template chat has it, not {self.template}", False) for name in only_chat),
        ]
        given = {**attrs.asdict(self), "numbers": self.counts}
        return [(name, f"{rule}; got {given[name]!r}") for name, rule, kept in rules if not kept]

    def __call__(self, index: int) -> Task:
        """Create a task."""
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
            low, high = self.number_range
            count = self.counts[0] + pick(random, self.counts[1] - self.counts[0] + 1)
            numbers = tuple(low + pick(random, high - low + 1) for _ in range(count))
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

    def _demonstration(self, problem: _Problem, index: int) -> dict[str, Any]:
        if self.demonstrations is None:
            return {}
        # A separate generator, so that the tasks are the same with and without demonstrations.
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
        """Return the value and the text of an answer, which is right with probability `share`, else random."""
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


def pick(random: Random, count: int) -> int:
    """Draw an index below `count`, reproducibly for a seed in every version of Python."""
    return int(random.random() * count)


def draw(random: Random, numbers: tuple[int, ...], operators: str, *, natural: bool) -> Drawn | None:
    """Combine numbers by random operations: two random ones are replaced by their result until one is left.

    Args:
        random: Random generator.
        numbers: Numbers; each is used once.
        operators: Some of `+-*/`.
        natural: Allow only whole numbers of at least 0, also as intermediate values.

    Returns:
        The value and its expression; None if two values could not be combined.
    """
    left: list[Drawn] = [(number, str(number)) for number in numbers]
    while len(left) > 1:
        first = left.pop(pick(random, len(left)))
        second = left.pop(pick(random, len(left)))
        joined = _join(random, first, second, operators, natural)
        if joined is None:
            return None
        left.append((joined[0], f"({joined[1]})" if left else joined[1]))
    return left[0]


def _join(random: Random, first: Drawn, second: Drawn, operators: str, natural: bool) -> Drawn | None:
    """Apply a random one of the possible operators; the values are swapped if only that makes it possible."""
    a, b = first[0], second[0]
    if "/" in operators and not (_divides(b, a, natural) or _divides(a, b, natural)):
        operators = operators.replace("/", "")
    if not operators:
        return None
    operator = operators[pick(random, len(operators))]
    if (operator == "-" and natural and a < b) or (operator == "/" and not _divides(b, a, natural)):
        return _compute(operator, b, a), f"{second[1]}{operator}{first[1]}"
    return _compute(operator, a, b), f"{first[1]}{operator}{second[1]}"


def _divides(divisor: Value, value: Value, natural: bool) -> bool:
    return divisor != 0 and (not natural or value % divisor == 0)


def _compute(operator: str, a: Value, b: Value) -> Value:
    if operator == "+":
        return a + b
    if operator == "-":
        return a - b
    if operator == "*":
        return a * b
    return a // b if type(a) is type(b) is int and a % b == 0 else Fraction(a) / b
