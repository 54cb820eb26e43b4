"""The server of `rlsdk train --mode serve` on a script, called by OpenAI's own client."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import sys
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from rlsdk.contracts import Sampling
from rlsdk.errors import ConfigError, EngineError, EnvironmentFault, ValueFault
from rlsdk.rollout.chat import RolloutContext
from rlsdk.serving.http_server import MAX_BODY
from rlsdk.serving.server import PublicServer, ServerOptions
from rlsdk.serving.stateless import EngineService
from rlsdk.testing import ScriptedPolicy
from rlsdk.tool_calls import Dialect
from tests.rollout.codecs import chatml

pytest.importorskip("aiohttp")
openai = pytest.importorskip("openai")
SAY = {"role": "user", "content": "What is 1 + 2?"}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
KEY = "sesame"


def served(
    use: Callable[[Any, str], Awaitable[None]], script: Callable[[str], str], *, key: str = KEY, step: int = 7
) -> ScriptedPolicy:
    """Have `use` talk to a server whose policy answers by a script."""
    codec = chatml()
    policy = ScriptedPolicy(codec, script, version=step)

    async def run() -> None:
        setting = RolloutContext(codec=codec, client=policy, sampling=Sampling(max_tokens=120), max_length=400)
        service = EngineService(setting, "tiny", Dialect.named("hermes", "test"), strict=True)
        service.step = step
        options = ServerOptions(port=0, api_key=key)
        server = PublicServer(service, options, lambda: {'tokens_total{engine="0"}': 12_345_678})
        with options.bind() as taken:
            url = await server.start(taken)
            async with openai.AsyncOpenAI(base_url=url, api_key=key or "none", max_retries=0, timeout=20) as client:
                await use(client, url)
            await server.stop()

    asyncio.run(run())
    return policy


def test_chat_with_several_answers_and_logprobs():
    async def use(client: Any, url: str) -> None:
        found = await client.chat.completions.create(
            model="tiny", messages=[SAY], n=3, logprobs=True, top_logprobs=0, seed=1, max_tokens=20
        )
        assert [c.message.content for c in found.choices] == ["It is 3."] * 3
        assert [c.index for c in found.choices] == [0, 1, 2] and found.choices[0].finish_reason == "stop"
        content = found.choices[2].logprobs.content
        assert "".join(each.token for each in content) == "It is 3.<|im_end|>"
        assert {each.logprob for each in content} == {-0.5}
        assert found.usage.completion_tokens == 3 * len(content)
        assert (found.model, found.system_fingerprint) == ("tiny", "step-7")
        raw = await client.chat.completions.with_raw_response.create(model="tiny", messages=[SAY])
        assert raw.headers["x-rlsdk-step"] == "7"

    served(use, lambda _: "It is 3.")


def test_chat_is_streamed_with_usage():
    async def use(client: Any, url: str) -> None:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[SAY],
            n=2,
            stream=True,
            logprobs=True,
            stop=["END"],
            stream_options={"include_usage": True},
        )
        texts, finished, tokens, usage = ["", ""], [], ["", ""], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                tokens[choice.index] += "".join(t.token for t in choice.logprobs.content) if choice.logprobs else ""
                finished += [choice.finish_reason] if choice.finish_reason else []
        assert texts == ["It is 3. "] * 2 and finished == ["stop"] * 2
        assert tokens == ["It is 3. END<|im_end|>"] * 2
        assert usage.completion_tokens == 2 * len("It is 3. END!")

    served(use, lambda _: "It is 3. END")


def test_completions_of_lists_of_texts_and_of_tokens():
    async def use(client: Any, url: str) -> None:
        create = client.completions.create
        many = await create(model="tiny", prompt=["ab", "abc"], n=2, logprobs=0)
        assert [c.text for c in many.choices] == ["2", "2", "3", "3"]
        assert many.choices[3].logprobs.tokens == ["3", "<|im_end|>"]
        assert many.choices[3].logprobs.text_offset == [0, 1]
        assert (many.usage.prompt_tokens, many.usage.completion_tokens) == (5, 8)
        ids = [chatml().encode(text).tolist() for text in ("ab", "abcd")]
        both = await create(model="tiny", prompt=ids, extra_body={"return_token_ids": True})
        assert [c.text for c in both.choices] == ["2", "4"]
        assert both.choices[1].prompt_token_ids == ids[1] and set(both.choices[1].versions) == {7}
        assert [c.text for c in (await create(model="tiny", prompt=ids[1])).choices] == ["4"]
        texts = ["", ""]
        async for chunk in await create(model="tiny", prompt=["ab", "abc"], stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == ["2", "3"]

    served(use, lambda text: str(len(text)))


@pytest.mark.parametrize("said", ["I add. ", ""])
def test_tool_calls_whole_and_streamed(said):
    async def use(client: Any, url: str) -> None:
        ask = {"model": "tiny", "messages": [SAY], "tools": [ADD]}
        whole = (await client.chat.completions.create(**ask)).choices[0]
        assert whole.finish_reason == "tool_calls" and whole.message.content == (said.strip() or None)
        text, calls, finish = "", {}, None
        async for chunk in await client.chat.completions.create(**ask, stream=True):
            delta = chunk.choices[0].delta
            text += delta.content or ""
            calls |= {call.index: call.function for call in delta.tool_calls or ()}
            finish = chunk.choices[0].finish_reason or finish
        assert text == said.strip() and finish == "tool_calls"
        assert (calls[0].name, json.loads(calls[0].arguments)) == ("add", {"a": 1})

    served(use, lambda _: said + CALL)


def test_text_that_turns_out_not_to_be_a_call_is_streamed_as_text():
    async def use(client: Any, url: str) -> None:
        ask = {"model": "tiny", "messages": [SAY], "tools": [ADD], "stream": True}
        parts = [c.choices[0].delta.content or "" async for c in await client.chat.completions.create(**ask)]
        assert "".join(parts) == "So: <tool_call>{broken"
        assert parts[1:4] == ["S", "o", ":"]

    served(use, lambda _: "So: <tool_call>{broken")


def test_a_prefill_is_continued():
    async def use(client: Any, url: str) -> None:
        messages = [SAY, {"role": "assistant", "content": "It is"}]
        create = client.chat.completions.create
        found = await create(model="tiny", messages=messages, extra_body={"continue_final_message": True})
        assert found.choices[0].message.content == " 3."

    policy = served(use, lambda _: " 3.")
    assert chatml().shown(policy.prompts[0]).endswith("<|im_start|>assistant\nIt is")


def test_errors_are_those_that_the_client_knows():
    deep: dict[str, Any] = functools.reduce(lambda inner, _: {"a": inner}, range(900), {})
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}

    async def use(client: Any, url: str) -> None:
        create, complete = client.chat.completions.create, client.completions.create
        with pytest.raises(openai.AuthenticationError, match="API key"):
            await client.with_options(api_key="guess").models.list()
        with pytest.raises(openai.NotFoundError, match="this server serves 'tiny'") as unknown:
            await create(model="gpt-5", messages=[SAY])
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError, match="POST /v1/chat/completions"):
            await client.embeddings.create(model="tiny", input="x")
        for ask in ({"messages": [{**SAY, "content": "a" * 1000}]}, {"messages": [SAY, SAY] * 40}):
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError) as full:
                    await create(model="tiny", stream=stream, **ask)
                assert full.value.code == "context_length_exceeded"
        for refused, ask in [
            ("n: expected 1 to 128", {"n": 1000}),
            ("presence_penalty: not supported by this server", {"presence_penalty": 0.5}),
            ("response_format: not supported by this server", {"response_format": {"type": "json_object"}}),
            ("chat_template_kwargs: not s", {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}),
            ("guided_choice: not supported by this server", {"extra_body": {"guided_choice": ["a", "b"]}}),
            ("tool_choice: not supported", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
            *([("nested too deeply", {"tools": [tool]})] if sys.version_info < (3, 12) else []),  # others read it
            ("top_logprobs: expected 0 to 20", {"logprobs": True, "top_logprobs": 50}),
        ]:
            with pytest.raises(openai.BadRequestError, match=refused):
                await create(model="tiny", messages=[SAY], **ask)
        with pytest.raises(openai.BadRequestError, match="not in the vocabulary"):
            await complete(model="tiny", prompt=[1, 2**60])
        with pytest.raises(openai.BadRequestError, match="at most 1024"):
            await complete(model="tiny", prompt=["a"] * 5000)
        with pytest.raises(openai.APIStatusError, match=str(MAX_BODY)) as large:
            await complete(model="tiny", prompt="a" * MAX_BODY)
        assert large.value.status_code == 413

    policy = served(use, lambda _: "x")
    assert policy.prompts == []


def test_a_failing_engine_is_reported_with_its_reason_also_in_a_stream():
    def broken(text: str) -> str:
        raise EngineError("out of memory")

    async def use(client: Any, url: str) -> None:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="out of memory"):
                await client.chat.completions.create(model="tiny", messages=[SAY], stream=stream)

    served(use, broken)


def test_a_prompt_that_an_engine_refuses_is_a_bad_request():
    class RemoteError(Exception):
        """Raise an actor's exception as Ray does."""

        cause = ValueFault("its prompt has token ids from 0 to 900; the model has 0 to 800")

    def refused(text: str) -> str:
        raise RemoteError("a traceback with paths")

    async def use(client: Any, url: str) -> None:
        with pytest.raises(openai.BadRequestError, match="the model has 0 to 800") as told:
            await client.completions.create(model="tiny", prompt=[1, 2])
        assert "traceback" not in str(told.value)

    served(use, refused)


def test_models_health_and_metrics():
    async def use(client: Any, url: str) -> None:
        (model,) = [m async for m in client.models.list()]
        assert (model.id, model.step) == ("tiny", 7)
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other/model")
        async with httpx.AsyncClient(base_url=url.removesuffix("/v1"), verify=False) as plain:
            assert (await plain.get("/health")).json() == {"status": "ok", "step": 7}
            assert (await plain.get("/metrics")).status_code == 401
            found = await plain.get("/metrics", headers={"authorization": f"Bearer {KEY}"})
            assert (
                "rlsdk_serve_step 7\n" in found.text and 'rlsdk_serve_tokens_total{engine="0"} 12345678\n' in found.text
            )

    served(use, lambda _: "x")


def test_without_a_key_no_page_in_a_browser_can_ask():
    async def use(client: Any, url: str) -> None:
        assert (await client.chat.completions.create(model="tiny", messages=[SAY])).choices
        async with httpx.AsyncClient(verify=False) as plain:
            body = json.dumps({"messages": [SAY]})
            simple = await plain.post(f"{url}/chat/completions", content=body, headers={"content-type": "text/plain"})
            assert simple.status_code == 415
            rebound = await plain.get(f"{url}/models", headers={"host": "evil.example:8000"})
            assert rebound.status_code == 403 and "evil.example" in rebound.json()["error"]["message"]

    served(use, lambda _: "x", key="")


def test_an_open_address_requires_a_key_and_a_taken_one_is_reported_at_once():
    with pytest.raises(ConfigError, match="--api-key"):
        ServerOptions(host="0.0.0.0").check()
    ServerOptions(host="0.0.0.0", api_key="k").check()
    ServerOptions(host="localhost").check()
    with ServerOptions(port=0).bind() as taken:
        taken.listen()
        with pytest.raises(EnvironmentFault, match="--port"):
            ServerOptions(port=taken.getsockname()[1]).bind()
    assert "sesame" not in repr(ServerOptions(api_key="sesame"))


def test_an_address_that_cannot_be_bound_leaves_no_socket_open():
    with ServerOptions(port=0).bind() as taken, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        taken.listen()
        for _ in range(2):
            with pytest.raises(EnvironmentFault):
                ServerOptions(port=taken.getsockname()[1]).bind()
        gc.collect()
    assert not [each for each in warned if each.category is ResourceWarning and "socket" in str(each.message)]
