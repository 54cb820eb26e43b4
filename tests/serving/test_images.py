"""Images over HTTP: agents' conversations are recorded like workflows', and a served model sees the images sent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import attrs
import httpx
import numpy as np
import pytest

from rlsdk.contracts import Sampling
from rlsdk.rollout.chat import Prompt, RolloutContext, TokenChat
from rlsdk.serving.recording import Recorder
from rlsdk.serving.stateless import EngineService
from rlsdk.tool_calls import Dialect
from rlsdk.types import Image, Message, Task
from tests.engines.test_vision import WIDTH, Direct, Rig, picture
from tests.vision_models import KINDS

pytest.importorskip("aiohttp")


def said(*parts: str | Image) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": part.url}}
            if isinstance(part, Image)
            else {"type": "text", "text": part}
            for part in parts
        ],
    }


@attrs.define
class Asked:
    rig: Rig
    client: Direct
    setting: RolloutContext

    @classmethod
    def of(cls, folder: Path, kind: str) -> Asked:
        rig = Rig.of(folder, kind)
        client = Direct(rig.engine, rig.codec)
        sampling = Sampling(max_tokens=6, ignore_eos=True, temperature=0.0)
        setting = RolloutContext(codec=rig.codec, client=client, sampling=sampling, max_length=WIDTH, recorder=Recorder)
        return cls(rig, client, setting)

    def chat(self, messages: tuple[Message, ...]) -> TokenChat:
        task = Task("t", messages)
        return TokenChat(Prompt(task, *self.rig.codec.prompt(task)), self.setting, "g", 3)


@pytest.mark.parametrize("kind", KINDS)
def test_an_agents_images_are_recorded_as_those_of_a_workflow(tmp_path: Path, kind: str) -> None:
    asked = Asked.of(tmp_path, kind)
    first, second = (picture(1, "wide"), "1 + 2"), ("3", picture(2), picture(3, "tall"))

    async def run() -> tuple[Any, Any]:
        ours = asked.chat((Message("user", first),))
        await ours.sample()
        ours.say(second)
        await ours.sample()
        async with asked.chat((Message("user", "never sent"),)).serve() as served, httpx.AsyncClient() as client:
            history = [said(*first)]
            for more in (second, None):
                reply = await client.post(served.base_url + "/chat/completions", json={"messages": history}, timeout=60)
                assert reply.status_code == 200, reply.text
                history.append(reply.json()["choices"][0]["message"])
                if more:
                    history.append(said(*more))
        return ours.finish(), served.finish()

    ours, (recorded,) = asyncio.run(run())
    assert recorded.images == ours.images == (first[0], *second[1:])
    for name in ("token_ids", "loss_mask", "logprobs", "image_positions"):
        np.testing.assert_array_equal(getattr(recorded, name), getattr(ours, name))
    assert recorded.messages == ours.messages


def test_another_image_is_another_conversation(tmp_path: Path) -> None:
    asked = Asked.of(tmp_path, "qwen2_5_vl")

    async def run() -> Any:
        async with asked.chat((Message("user", "?"),)).serve() as served, httpx.AsyncClient() as client:
            for seed in (1, 2):
                history = [said("1", picture(1))]
                reply = await client.post(served.base_url + "/chat/completions", json={"messages": history})
                history = [said("1", picture(seed)), reply.json()["choices"][0]["message"], said("2")]
                await client.post(served.base_url + "/chat/completions", json={"messages": history})
        return served.finish()

    rollouts = asyncio.run(run())
    assert {each.images for each in rollouts} == {(picture(1),), (picture(2),)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_served_model_sees_the_images_of_a_request(tmp_path: Path, kind: str) -> None:
    asked = Asked.of(tmp_path, kind)
    service = EngineService(asked.setting, "tiny", Dialect.named("hermes", "test"), strict=True)

    async def answer(image: Image) -> list[float]:
        body = {"model": "tiny", "messages": [said("1", image)], "logprobs": True}
        reply = await service.routes["POST /chat/completions"](body)
        return [each["logprob"] for each in reply.body["choices"][0]["logprobs"]["content"]]

    async def expected(image: Image) -> list[float]:
        chat = asked.chat((Message("user", ("1", image)),))
        await chat.sample()
        rollout = chat.finish()
        return rollout.logprobs[rollout.loss_mask].tolist()

    one, other = (asyncio.run(answer(picture(seed))) for seed in (1, 2))
    assert one == pytest.approx(asyncio.run(expected(picture(1))), abs=1e-5)
    assert np.abs(np.array(one) - other).max() > 1e-3
