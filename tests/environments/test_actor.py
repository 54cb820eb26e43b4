"""A worker's handling of messages, in this process."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from rlsdk.environments.actor import Act, EnvWorkerActor, Register, Reset
from rlsdk.plugins import Plugins
from rlsdk.types import Observation, Step
from tests.environments.conftest import LAB


def test_messages_that_come_out_of_order_are_begun_in_theirs() -> None:
    reference = Plugins([LAB]).reference("environment", "worlds_lab/plain")
    messages = [
        [Register(0, reference, "thread")],
        [Reset(5, 0, {}, seed=3, seconds=10.0)],
        [Act(5, "1", seconds=10.0)],
    ]

    async def body() -> tuple[list[object], list[object]]:
        actor = EnvWorkerActor(1, "")
        answers = actor.answers()
        await actor.take(1, messages[1])
        await actor.take(0, messages[0])
        reset = await anext(answers)
        await actor.take(2, messages[2])
        return pickle.loads(reset), pickle.loads(await anext(answers))

    [(first, shown)], [(second, step)] = asyncio.run(asyncio.wait_for(body(), 30))
    assert (first, second) == (5, 5)
    assert isinstance(shown, Observation) and shown.text == "3:"
    assert isinstance(step, Step) and step.observation.text == "1:"


def test_calls_that_run_at_the_same_time_are_answered_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsdk.environments.actor.INTERVAL", 60.0)  # however slow the machine is
    reference = Plugins([LAB]).reference("environment", "worlds_lab/plain")

    async def body() -> list[int]:
        actor = EnvWorkerActor(1, "")
        resets = [Reset(number, 0, {}, seed=number, seconds=10.0) for number in range(8)]
        await actor.take(0, [Register(0, reference, "thread"), *resets])
        return sorted(number for number, _ in pickle.loads(await anext(actor.answers())))

    assert asyncio.run(asyncio.wait_for(body(), 30)) == list(range(8))


def test_an_answer_does_not_wait_for_a_call_that_takes_long() -> None:
    reference = Plugins([LAB]).reference("environment", "worlds_lab/plain")

    async def body() -> list[int]:
        actor = EnvWorkerActor(2, "")
        answers = actor.answers()
        await actor.take(0, [Register(0, reference, "thread"), Reset(0, 0, {}, seed=0, seconds=60.0)])
        await anext(answers)
        # Environment 0 sleeps for a minute.
        await actor.take(1, [Act(0, "99", seconds=60.0), Reset(1, 0, {}, seed=0, seconds=60.0)])
        return [number for number, _ in pickle.loads(await anext(answers))]

    assert asyncio.run(asyncio.wait_for(body(), 30)) == [1]
