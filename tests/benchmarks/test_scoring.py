"""Rewards per second, as ratios in one run: countdown, math in the pool, and calls that hang."""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk.contracts import RewardSpec, ScoringLimits
from rlsdk.plugins import Plugins
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.types import Rollout, Task

LAB = Path(__file__).with_name("scoring_lab.py")
BENCHMARK = "Rewards"
ROUNDS = 3


def tiny_zero(text: str, target: int, numbers: Sequence[int]) -> float:
    """Countdown as TinyZero scores it, from its description: the last line's last answer, evaluated by Python."""
    if "Assistant:" not in text:
        return 0.0
    answers = re.findall(r"<answer>(.*?)</answer>", text.split("Assistant:", 1)[1].split("\n")[-1])
    if not answers:
        return 0.0
    equation = answers[-1].strip()
    if sorted(map(int, re.findall(r"\d+", equation))) != sorted(numbers) or not re.match(
        r"^[\d+\-*/().\s]+$", equation
    ):
        return 0.1
    try:
        value = eval(equation, {"__builtins__": None}, {})
    except Exception:
        return 0.1
    return 1.0 if abs(value - target) < 1e-5 else 0.1


def countdown_work(count: int) -> list[tuple[Rollout, str, int, list[int]]]:
    """Answers of a model that is half trained: right ones, wrong ones, other numbers, no answer."""
    draw, found = random.Random(0), []
    for index in range(count):
        a, b, c = (draw.randint(1, 99) for _ in range(3))
        target, kind = a * b - c, index % 4
        text = "Let me think. " * draw.randint(1, 30)
        text += ("", f"<answer>{a}*{b}-{c}</answer>", f"<answer>({a}+{b})*{c}</answer>", f"<answer>{a}+1</answer>")[
            kind
        ]
        task = Task(id=str(index), prompt="?", answer={"target": target, "numbers": [a, b, c]})
        found.append((Rollout.from_text(task, text), f"User: ? Assistant: {text}", target, [a, b, c]))
    return found


def fastest(run: Callable[[], Any]) -> float:
    """Minimum seconds of a few rounds, since other load on the machine only adds."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def test_countdown_is_half_as_fast_as_evaluating(show: Callable[..., None], check: Callable[..., None]) -> None:
    work, reward = countdown_work(20_000), rlsdk.load("reward", "countdown")
    ours = fastest(lambda: [reward(rollout) for rollout, *_ in work])
    theirs = fastest(lambda: [tiny_zero(text, target, numbers) for _, text, target, numbers in work])
    agreed = statistics.mean(reward(r).value == tiny_zero(text, t, n) for r, text, t, n in work)
    show([ours], ratio=round(theirs / ours, 2), per_second=round(len(work) / ours), agreed=agreed)
    assert agreed == 1.0
    check("rewards a second, over the other", theirs / ours, case="`countdown`, TinyZero's method", at_least=0.5)


def math_work(count: int) -> list[Rollout]:
    """Answers in several forms, no two of them the same, half of them wrong."""
    draw, found = random.Random(0), []
    for index in range(count):
        p, q, r = draw.randint(2, 999), draw.randint(2, 99), draw.randint(2, 9)
        reference, answer = (
            (rf"\frac{{{p}}}{{{q}}}", rf"\frac{{{p * r}}}{{{q * r}}}"),
            (rf"{p}\sqrt{{{q}}}", rf"\sqrt{{{q}}} \cdot {p}"),
            (rf"({p}, {q})", rf"\left({p}, {q + 1}\right)"),
            (rf"x^2 + {p}x + {q}", rf"{q} + x^2 + {p + 1} x"),
        )[index % 4]
        text = f"We find that it is {index}. " * 5 + rf"So \boxed{{{answer}}}"
        found.append(Rollout.from_text(Task(id=str(index), prompt="?", answer=reference), text))
    return found


def test_math_in_the_pool_against_math_verify_in_one_process(
    show: Callable[..., None], check: Callable[..., None]
) -> None:
    from math_verify import parse, verify

    work = math_work(1_600)

    def one_process() -> list[bool]:
        return [verify(parse(rf"\boxed{{{r.task.answer}}}"), parse(r.response)) for r in work]

    [scorer] = [_scorer("math")]
    try:
        _score(scorer, work[:50])
        ours, found = _timed(lambda: _score(scorer, work))
        theirs, expected = _timed(one_process)
    finally:
        scorer.close()
    agreed = statistics.mean(bool(a) == b for a, b in zip(found, expected, strict=True))
    show([ours], ratio=round(theirs / ours, 2), per_second=round(len(work) / ours), agreed=agreed)
    assert agreed == 1.0
    check("rewards a second, over the other", theirs / ours, case="`math`, math-verify in one process", at_least=1.7)


@pytest.mark.parametrize("kind", ["sleep", "spin"])
def test_calls_that_hang_cost_a_tenth_at_most(show: Callable[..., None], check: Callable[..., None], kind: str) -> None:
    task, draw = Task(id="t", prompt="?"), random.Random(0)
    good = [Rollout.from_text(task, "work")] * 8_000
    some = list(good)
    for index in draw.sample(range(len(some)), len(some) // 100):
        some[index] = Rollout.from_text(task, kind)
    scorer = _scorer("scoring_lab/work", timeout=0.5)
    try:
        _score(scorer, good[:50])
        plain, _ = _timed(lambda: _score(scorer, good))
        hanging, found = _timed(lambda: _score(scorer, some))
    finally:
        scorer.close()
    show([hanging], ratio=round(plain / hanging, 3), plain=round(plain, 2), hanging=round(hanging, 2))
    assert sum(value == 1.0 for value in found) == len(good) * 99 // 100
    case = {"sleep": "1 % of the calls sleep for ever", "spin": "1 % of the calls compute for ever"}[kind]
    check("rewards a second, over those without", plain / hanging, case=case, at_least=0.9)


def _scorer(name: str, timeout: float = 10.0) -> Scorer:
    plugins = Plugins([LAB])
    reference = plugins.reference("reward", name)
    part = RewardTerm(RewardSpec(name), plugins.resolve(reference), reference)
    return Scorer([part], ScoringLimits(workers=2, timeout=timeout))


def _score(scorer: Scorer, rollouts: Sequence[Rollout]) -> list[float]:
    async def all_of_them() -> list[float]:
        return [s.value for s in await asyncio.gather(*(scorer.score(r) for r in rollouts))]

    return asyncio.run(all_of_them())


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    found = run()
    return time.perf_counter() - start, found
