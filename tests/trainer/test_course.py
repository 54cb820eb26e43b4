"""The order of a step, whoever works: take, learn, settle, publish."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from rlsdk.config.production import ProductionSection
from rlsdk.rollout.lifecycle import State, Ticket
from rlsdk.trainer.course import Clock, Course, pace_of
from rlsdk.types import Task


class Recorded:
    """A production that writes down what it is asked."""

    def __init__(self) -> None:
        self.said: list[str] = []

    async def take(self, step: int) -> list[Ticket]:
        self.said.append(f"take {step}")
        return [Ticket(step, "a", Task(id=step, prompt="x"))]

    def settle(self, tickets: Sequence[Ticket], states: Sequence[State]) -> None:
        self.said += [f"{ticket.number} {state}" for ticket, state in zip(tickets, states, strict=True)]


def walk(steps: int, sync_interval: int, fails: bool = False) -> tuple[list[str], Course, Clock]:
    production = Recorded()
    course = Course(production=production, steps=steps, sync_interval=sync_interval)  # type: ignore[arg-type]
    now = iter(range(1000))
    clock = Clock(lambda: float(next(now)))

    async def learn(tickets: list[Ticket]) -> list[State]:
        production.said.append("learn")
        if fails:
            raise RuntimeError("out of memory")
        return [State.TRAINED for _ in tickets]

    async def publish() -> None:
        production.said.append(f"publish {course.done}")

    async def go() -> None:
        while course.done < steps:
            await course.step(clock, learn, publish)

    if fails:
        with pytest.raises(RuntimeError):
            asyncio.run(go())
    else:
        asyncio.run(go())
    return production.said, course, clock


def test_a_step_has_its_order_and_weights_go_out_under_the_steps_done() -> None:
    said, _, clock = walk(2, 1)
    assert said == [
        "take 0", "learn", "0 trained", "publish 1",
        "take 1", "learn", "1 trained", "publish 2",
    ]  # fmt: skip
    assert clock.seconds == {"take": 2.0, "sync": 2.0}


def test_weights_travel_every_so_many_steps_and_after_the_last() -> None:
    said, course, _ = walk(5, 2)
    assert [text for text in said if text.startswith("publish")] == ["publish 2", "publish 4", "publish 5"]
    assert course.done == 5


def test_a_step_that_fails_is_not_done_and_settles_nothing() -> None:
    said, course, _ = walk(1, 1, fails=True)
    assert said == ["take 0", "learn"]
    assert course.done == 0


def test_a_pace_is_what_the_config_says() -> None:
    in_step = pace_of(ProductionSection())
    assert (in_step.ahead, in_step.limit) == (0, 1)
    ahead = pace_of(ProductionSection(max_staleness=2, sync_interval=3, oversample=0.5))
    assert (ahead.ahead, ahead.limit, ahead.oversample) == (8, 9, 0.5)
