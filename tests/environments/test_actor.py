"""A worker's handling of messages, in this process."""

from __future__ import annotations

import asyncio

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
        return reset, await anext(answers)

    [(first, shown)], [(second, step)] = asyncio.run(asyncio.wait_for(body(), 30))
    assert (first, second) == (5, 5)
    assert isinstance(shown, Observation) and shown.text == "3:"
    assert isinstance(step, Step) and step.observation.text == "1:"
