"""The endpoint with templates of model families: thoughts and calls, whole and streamed, with OpenAI's client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlsdk.contracts import Sampling
from rlsdk.rollout.chat import RolloutContext, TokenChat
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.context import Prompt
from rlsdk.serving.http_server import endpoint
from rlsdk.serving.recording import Recorder
from rlsdk.serving.stateless import EngineService
from rlsdk.testing import ScriptedPolicy
from rlsdk.tool_calls import Dialect
from rlsdk.types import Message, Rollout, Task
from tests.testing.test_model_check import tokenizer_of

pytest.importorskip("aiohttp")
openai = pytest.importorskip("openai")
SAY = {"role": "user", "content": "What is 1 + 2?"}
NUMBER = {"type": "number"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
MISTRAL = (
    "<s>{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}"
    "{% if messages[loop.index0 - 1].role != 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('no call') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
"""As Mistral's, version 3: results only after calls, and ids of nine letters."""
QWEN_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
CODER_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM_CALL = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n"
    "</tool_call>"
)
HARMONY_CALL = (
    "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
    '<|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>'
)
MISTRAL_CALL = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]'
DEEPSEEK_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
    '```json\n{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
FORMS: dict[str, tuple[str, str, str, str, str]] = {
    # parser, answer with a call, its thought, final answer, its thought
    "qwen3": (
        "hermes",
        f"<think>\nI add.\n</think>\n\n{QWEN_CALL}",
        "I add.",
        "<think>\nhm\n</think>\n\nIt is 3.",
        "hm",
    ),
    "qwen3_5_think": ("qwen3_coder", f"I add.\n</think>\n\n{CODER_CALL}", "I add.", "hm\n</think>\n\nIt is 3.", "hm"),
    "qwen2_5": ("hermes", QWEN_CALL, "", "It is 3.", ""),
    "glm4moe": ("glm", f"<think>I add.</think>\n{GLM_CALL}", "I add.", "<think>hm</think>\nIt is 3.", "hm"),
    "gptoss": (
        "harmony",
        HARMONY_CALL,
        "I add.",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>It is 3.",
        "hm",
    ),
    "deepseekv3": ("deepseek", f"I add.\n</think>\n\n{DEEPSEEK_CALL}", "I add.", "hm\n</think>\n\nIt is 3.", "hm"),
    "mistral": ("mistral", MISTRAL_CALL, "", "It is 3.", ""),
}
SPECIAL = {
    "gptoss": ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    "deepseekv3": [
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ],
}
ENDS = {"gptoss": "<|return|>", "mistral": "</s>", "deepseekv3": "<｜end▁of▁sentence｜>"}


def codec_of(form: str) -> ChatTokenizer:
    """Make a tokenizer with the template of a family, and its control tokens as special ones."""
    text = MISTRAL
    if form != "mistral":
        trl = pytest.importorskip("trl")
        text = (Path(trl.__file__).parent / "chat_templates" / f"{form}.jinja").read_text("utf-8")
    made = tokenizer_of(text, eos_token=ENDS.get(form, "<|im_end|>"), bos_token="<s>")
    made.add_tokens(SPECIAL.get(form, []), special_tokens=True)
    made.add_tokens(["<think>", "</think>"])
    return ChatTokenizer(made)


def ask(codec: ChatTokenizer, use: Callable[[Any], Any], script: Callable[[str], str]) -> ScriptedPolicy:
    """Have a client talk to a service whose policy answers by a script."""
    policy = ScriptedPolicy(codec, script)

    async def run() -> None:
        setting = RolloutContext(codec=codec, client=policy, sampling=Sampling(max_tokens=900), max_length=9_000)
        server = await endpoint()
        mount = server.mount(EngineService(setting, "tiny", Dialect.of(codec.tool_parser)).routes)
        async with openai.AsyncOpenAI(base_url=mount.base_url, api_key="none", max_retries=0, timeout=20) as client:
            await use(client)

    asyncio.run(run())
    return policy


async def streamed(client: Any, **asked: Any) -> dict[str, Any]:
    """Put the chunks of a stream together."""
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": [], "finish": None}
    async for chunk in await client.chat.completions.create(model="tiny", stream=True, **asked):
        choice = chunk.choices[0]
        found["content"] += choice.delta.content or ""
        found["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        found["tool_calls"] += choice.delta.tool_calls or []
        found["finish"] = choice.finish_reason or found["finish"]
    return found


@pytest.mark.parametrize("form", FORMS)
def test_a_call_its_result_and_an_answer(form: str) -> None:
    parser, called, thought, said, hm = FORMS[form]
    codec = codec_of(form)
    assert codec.tool_form == parser

    async def use(client: Any) -> None:
        create = client.chat.completions.create
        first = (await create(model="tiny", messages=[SAY], tools=[ADD])).choices[0]
        told = first.message
        (call,) = told.tool_calls
        assert (first.finish_reason, call.function.name, json.loads(call.function.arguments)) == (
            "tool_calls",
            "add",
            {"a": 1, "b": 2},
        )
        assert not told.content and (getattr(told, "reasoning_content", None) or "") == thought
        live = await streamed(client, messages=[SAY], tools=[ADD])
        assert (live["content"], live["reasoning_content"], live["finish"]) == ("", thought, "tool_calls")
        assert [each.function.name for each in live["tool_calls"]] == ["add"]
        result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
        history = [SAY, told.model_dump(exclude_none=True), result]
        last = (await create(model="tiny", messages=history, tools=[ADD])).choices[0]
        assert (last.finish_reason, last.message.content) == ("stop", "It is 3.")
        assert (getattr(last.message, "reasoning_content", None) or "") == hm
        live = await streamed(client, messages=history, tools=[ADD])
        assert (live["content"], live["reasoning_content"], live["finish"]) == ("It is 3.", hm, "stop")

    answers = iter([called, called, said, said])
    policy = ask(codec, use, lambda _: next(answers))
    prompt = codec.shown(policy.prompts[-1])
    assert "add" in prompt.partition("What is 1 + 2?")[2] and "3" in prompt.rpartition("add")[2]


def recorded(codec: ChatTokenizer, *answers: str, more: str = "") -> tuple[Rollout, ...]:
    """Have an agent call a tool, and then ask once more, over the endpoint of a rollout."""
    script = iter(answers)
    policy: Any = ScriptedPolicy(codec, lambda _: next(script))
    setting = RolloutContext(
        codec=codec, client=policy, sampling=Sampling(max_tokens=900), max_length=9_000, recorder=Recorder
    )
    task = Task("t", [Message("user", SAY["content"])])

    async def run() -> tuple[Rollout, ...]:
        chat = TokenChat(Prompt(task, *codec.prompt(task)), setting, "g", 0)
        async with chat.serve() as served:
            client = openai.AsyncOpenAI(base_url=served.base_url, api_key="none", max_retries=0, timeout=20)
            history: list[Any] = [SAY]
            told = (await client.chat.completions.create(model="m", messages=history, tools=[ADD])).choices[0].message
            history += [told.model_dump(exclude_none=True)]
            history += [{"role": "tool", "tool_call_id": told.tool_calls[0].id, "content": "3"}]
            told = (await client.chat.completions.create(model="m", messages=history, tools=[ADD])).choices[0].message
            if more:
                history += [{"role": "assistant", "content": told.content}, {"role": "user", "content": more}]
                await client.chat.completions.create(model="m", messages=history, tools=[ADD])
            found: tuple[Rollout, ...] = served.finish()
            return found

    return asyncio.run(run())


@pytest.mark.parametrize("form", FORMS)
def test_an_agent_is_recorded_as_it_was_sampled(form: str) -> None:
    _, called, _, said, _ = FORMS[form]
    codec = codec_of(form)
    rollouts = recorded(codec, called, said)
    sampled = [codec.shown(r.token_ids[r.loss_mask]) for r in rollouts]
    end = codec.tokenizer.eos_token
    dropped = len(rollouts) == 2  # DeepSeek's template tells nothing of an earlier answer once a tool's result follows
    assert "".join(sampled) == f"{called}{end}{said}{end}"
    assert dropped is (form == "deepseekv3")
    (calls,) = (m.tool_calls for m in rollouts[-1].messages if m.tool_calls)
    assert calls[0].arguments == {"a": 1, "b": 2}


@pytest.mark.parametrize("form", ["qwen3", "gptoss", "glm4moe"])
def test_a_question_after_a_thought_begins_another_rollout(form: str) -> None:
    _, called, _, said, _ = FORMS[form]
    codec = codec_of(form)
    first, second = recorded(codec, called, said, said, more="And 2 + 2?")
    assert (first.step, second.step, first.trajectory) == (0, 1, second.trajectory)
    assert "I add." in codec.shown(first.token_ids) and "I add." not in codec.shown(second.token_ids)
    messages = [
        SAY,
        {"role": "assistant", "content": "", "tool_calls": [{**second.messages[1].as_json()["tool_calls"][0]}]},
        {"role": "tool", "name": "add", "tool_call_id": second.messages[2].tool_call_id, "content": "3"},
        {"role": "assistant", "content": "It is 3."},
        {"role": "user", "content": "And 2 + 2?"},
    ]
    prompt = codec.tokenizer.apply_chat_template(messages, tools=[ADD], tokenize=False, add_generation_prompt=True)
    start = int(second.loss_mask.argmax())
    assert codec.shown(second.token_ids[:start]) == prompt
    assert [m.prompt for m in second.messages if m.role == "assistant"] == [False, False, False]
