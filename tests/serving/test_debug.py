"""Rollouts over HTTP: the server of `rlsdk debug engine` on a script, and servers that return less."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import rlsdk
from rlsdk.contracts import Sampling
from rlsdk.engines.client import GenerateRequest
from rlsdk.errors import ConfigError, DataError, EngineError
from rlsdk.rollout.chat import RolloutContext
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.generator import RolloutGenerator
from rlsdk.serving.debug import RemoteClient
from rlsdk.serving.http_server import Routes, endpoint
from rlsdk.serving.messages import HttpReply, models
from rlsdk.serving.recording import Recorder
from rlsdk.serving.stateless import EngineService
from rlsdk.testing import ScriptedPolicy
from rlsdk.tool_calls import Dialect
from rlsdk.types import Image, Message, Rollout, Task
from tests.rollout.codecs import chatml

pytest.importorskip("aiohttp")
AGENT = """
import httpx

async def solve(task, base_url, api_key):
    async with httpx.AsyncClient(verify=False) as client:
        body = {"messages": [{"role": "user", "content": "1 + 2?"}], "stop": ["!"]}
        (await client.post(base_url + "/chat/completions", json=body)).raise_for_status()
"""
TASK = Task(id="t", prompt=[Message("user", "Begin.")])


def through(
    routes: Routes, use: Callable[[RemoteClient, ChatTokenizer], Awaitable[Any]], codec: ChatTokenizer, **how: Any
) -> tuple[Any, RemoteClient]:
    """Result of a client of these routes."""

    async def run() -> tuple[Any, RemoteClient]:
        place = (await endpoint()).mount(routes)
        client = RemoteClient(place.base_url, codec, **how)
        try:
            return await use(client, codec), client
        finally:
            await client.close()

    return asyncio.run(run())


def service(policy: Any, codec: ChatTokenizer, max_length: int = 200) -> Routes:
    setting = RolloutContext(codec=codec, client=policy, sampling=Sampling(max_tokens=50), max_length=max_length)
    return EngineService(setting, "tiny", Dialect.named("hermes", "test")).routes


def played(workflow: Any, max_length: int = 200) -> Callable[[RemoteClient, ChatTokenizer], Awaitable[Rollout]]:
    async def use(client: Any, codec: ChatTokenizer) -> Rollout:
        setting = RolloutContext(
            codec=codec,
            client=client,
            sampling=Sampling(max_tokens=20, top_k=3),
            max_length=max_length,
            recorder=Recorder,
        )
        (group,) = await RolloutGenerator(workflow, None, None).produce([TASK], setting, 1, "debug")
        assert group.scores[0].valid, group.scores[0].reason
        return group.rollouts[0]

    return use


def test_images_are_refused_and_not_left_out():
    client = RemoteClient("http://127.0.0.1:9/v1", chatml())
    request = GenerateRequest("g", np.array([1]), Sampling(), images=(Image(np.zeros((2, 2, 3), np.uint8)),))
    with pytest.raises(EngineError, match="a conversation has an image"):
        client.sample(request)


def test_a_rollout_over_http_is_the_rollout_that_a_run_would_make():
    codec = chatml()
    workflow = rlsdk.load("workflow", "single_turn")
    policy = ScriptedPolicy(codec, lambda _: "An answer.", version=7)
    rollout, client = through(service(policy, codec), played(workflow), codec)
    (there,) = asyncio.run(
        RolloutGenerator(workflow, None, None).produce(
            [TASK],
            RolloutContext(codec=codec, client=policy, sampling=Sampling(max_tokens=20), max_length=200),
            1,
            "debug",
        )
    )
    for name in ("token_ids", "loss_mask", "logprobs", "policy_versions"):
        assert np.array_equal(getattr(rollout, name), getattr(there.rollouts[0], name)), name
    assert rollout.messages == there.rollouts[0].messages
    assert client.notes == {}
    assert [timed.tokens for timed in client.served] == [int(rollout.loss_mask.sum())]


def test_an_agent_over_http(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    codec = chatml()
    workflow = rlsdk.load("workflow", "agent", agent=f"{tmp_path / 'agent.py'}:solve")
    policy = ScriptedPolicy(codec, lambda _: "3!")
    rollout, _ = through(service(policy, codec), played(workflow), codec)
    assert codec.shown(rollout.token_ids[rollout.loss_mask]) == "3!<|im_end|>"
    assert rollout.metrics["calls"] == 1


def test_requests_of_completions():
    codec = chatml()
    policy = ScriptedPolicy(codec, lambda text: f"{len(text)}")
    seen: list[Sampling] = []
    sample = policy.sample

    def spied(request: GenerateRequest) -> Any:
        seen.append(request.sampling)
        return sample(request)

    policy.sample = spied  # type: ignore[method-assign]

    async def use(client: Any, _: ChatTokenizer) -> None:
        ask = client._request
        found = await ask(
            "POST",
            "/completions",
            {"prompt": "abc", "n": 3, "stop": ["9", "\n\n\n"], "top_k": -1, "top_p": 0.5, "logprobs": 0},
        )
        assert [c["text"] for c in found["choices"]] == ["3"] * 3
        logprobs = {"tokens": ["3", "<|im_end|>"], "token_logprobs": [-0.5, -0.5]}
        assert found["choices"][1]["logprobs"] == {**logprobs, "top_logprobs": None, "text_offset": [0, 1]}
        assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
        assert (seen[0].top_k, seen[0].top_p, len(policy.prompts)) == (0, 0.5, 3)
        assert (seen[0].stop, seen[0].stop_token_ids) == (("\n\n\n",), (codec.encode("9")[0],))
        assert [m["id"] for m in (await ask("GET", "/models"))["data"]] == ["tiny"]
        chat = {"messages": [{"role": "user", "content": "abc"}], "temperature": 0}
        assert (await ask("POST", "/chat/completions", chat))["choices"][0]["finish_reason"] == "stop"
        assert seen[-1].temperature == 0
        for body, said in [
            ({"prompt": [1] * 200}, "context_length_exceeded"),
            ({"prompt": []}, "a list of token ids"),
            ({"prompt": ["a", ""]}, "none may be empty"),
            ({"prompt": ["a", [1]], "n": 2, "stream": 1}, "true or false"),
            ({"prompt": ["a"] * 100, "n": 11}, "1100 answers; a request may ask for at most 1024"),
            ({"prompt": [[1, 2], [2**40]]}, "token 1099511627776 is not in the vocabulary"),
            ({"prompt": "a", "logprobs": 21}, "expected 0 to 20"),
            ({"prompt": "a", "n": 1000}, "1 to 128"),
            ({"prompt": "a", "temperature": -1}, "expected 0 to"),
        ]:
            with pytest.raises(EngineError, match="status 400.*" + said):
                await ask("POST", "/completions", body)

    through(service(policy, codec), use, codec)


@pytest.mark.parametrize("ids", [True, False])
def test_servers_that_tell_less(ids):
    """vLLM tells token ids where it is asked to; most servers tell text alone."""
    codec = chatml()
    asked: list[Any] = []

    async def complete(body: Any) -> HttpReply:
        asked.append(body)
        choice = {"text": "Yes.", "finish_reason": "stop", "logprobs": None}
        told = {"token_ids": [*codec.encode("Yes.").tolist(), codec.end]} if ids else {}
        return HttpReply(body={"choices": [{**choice, **told}]})

    async def listed(_: Any) -> HttpReply:
        return models(["theirs"])

    routes = {"POST /completions": complete, "GET /models": listed}
    rollout, client = through(routes, played(rlsdk.load("workflow", "single_turn")), codec)
    assert (asked[0]["model"], asked[0]["return_token_ids"], asked[0]["top_k"]) == ("theirs", True, 3)
    assert "stop" not in asked[0]
    assert codec.shown(rollout.token_ids[rollout.loss_mask]) == "Yes.<|im_end|>"
    assert not rollout.logprobs.any()
    assert any("logprobs" in note for note in client.notes)
    assert any("token ids" in note for note in client.notes) is not ids


def test_servers_that_are_not_there_or_speak_otherwise():
    codec = chatml()

    choices = [{"text": None}, {"text": "x", "logprobs": [-1.0]}, {"text": "x", "logprobs": {"token_logprobs": 1}}]
    bodies = iter([{"answer": 42}, *({"choices": [choice]} for choice in choices), {"answer": 42}])

    async def odd(_: Any) -> HttpReply:
        return HttpReply(body=next(bodies))

    async def use(client: Any, _: ChatTokenizer) -> None:
        for _each in range(4):
            with pytest.raises(EngineError, match="is not a completion"):
                await client.sample(GenerateRequest("g", codec.encode("x"), Sampling()))
        with pytest.raises(EngineError, match="lists no model"):
            await RemoteClient(client._url, codec)._name()
        with pytest.raises(EngineError, match=r"nothing answers at .*debug engine"):
            await RemoteClient("http://127.0.0.1:9/v1", codec, model="x").sample(
                GenerateRequest("g", codec.encode("x"), Sampling())
            )

    through({"POST /completions": odd, "GET /models": odd}, use, codec, model="x")


def test_what_debug_says_where_it_cannot(tmp_path):
    from rlsdk.config import check
    from rlsdk.serving.debug import FILE, debug_workflow

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    tree = {
        "name": "run",
        "out": str(tmp_path),
        "model": str(tmp_path / "model"),
        "tasks": {"train": {"use": "countdown", "size": 5}},
        "reward": "countdown",
        "steps": 1,
        "engine": "transformers",
    }
    with pytest.raises(ConfigError, match="start `rlsdk debug engine CONFIG` in another terminal"):
        debug_workflow(check(tree))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE).write_text("{")
    with pytest.raises(ConfigError, match="delete it"):
        debug_workflow(check(tree))
    with pytest.raises(DataError, match="from 0 to 4"):
        debug_workflow(check(tree), 5, url="http://127.0.0.1:9/v1")
