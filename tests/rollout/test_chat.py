"""Multi-turn conversations: every token was either sent or sampled, in order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk import nano
from rlsdk.contracts import Chat, Sampling
from rlsdk.engines.client import Answer, GenerateRequest
from rlsdk.errors import ConfigError, OutOfRoomError, ValueFault
from rlsdk.plugins import load
from rlsdk.rollout import chat as chats
from rlsdk.rollout.chat import Prompt, RolloutContext, TokenChat
from rlsdk.rollout.codec import NOTHING, ChatTokenizer
from rlsdk.testing import ScriptedPolicy
from rlsdk.tool_calls import call_id
from rlsdk.types import Message, Rollout, Score, Task
from tests.rollout.codecs import CHATML, FORGETFUL, LLAMA_TOKENS, QWEN_TOKENS, QWEN_WORDS, chatml, like, plain, recorded

TALK = Task(id="t", prompt=[Message("system", "Be brief."), Message("user", "Begin.")])
TEXT = Task(id="t", prompt="3,5>8:")


class Policy(ScriptedPolicy):
    """Gives its scripted answers one after the other, and records them with their requests."""

    def __init__(self, codec: ChatTokenizer, answers: list[str] | None = None) -> None:
        self.answers = list(answers or [])
        super().__init__(codec, lambda _: self.answers.pop(0))
        self.sampled: list[np.ndarray] = []
        self.seeds: list[int | None] = []
        self.affinities: list[int | None] = []

    def sample(self, request: GenerateRequest) -> asyncio.Future[Answer]:
        future = super().sample(request)
        self.sampled.append(future.result().completion.token_ids)
        self.seeds.append(request.seed)
        self.affinities.append(request.affinity)
        return future


def converse(
    codec: ChatTokenizer,
    task: Task,
    talk: Callable[[TokenChat], Awaitable[None]],
    *answers: str,
    max_tokens: int = 64,
    max_length: int = 100_000,
    **how: Any,
) -> tuple[Rollout, Policy]:
    """Result of a conversation."""
    policy: Any = Policy(codec, list(answers))
    context = RolloutContext(
        codec=codec, client=policy, sampling=Sampling(max_tokens=max_tokens), max_length=max_length
    )
    chat = TokenChat(Prompt(task, *codec.prompt(task)), context, "g", how.pop("seed", 0), **how)
    asyncio.run(talk(chat))
    return chat.finish(), policy


def decoded(codec: ChatTokenizer, ids: np.ndarray) -> str:
    """Text with special tokens."""
    text: str = codec.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    return text


def rendered(codec: ChatTokenizer, messages: Any, *, begin: str = "") -> str:
    """The template's rendering of a conversation, with an answer begun."""
    plain = [{"role": m.role, "content": m.content} for m in messages]
    text: str = codec.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    return text + begin


SHOUTS = CHATML.replace(
    "{{ m.content }}", "{{ m.content.upper() if m.role == 'assistant' and not loop.last else m.content }}"
)
TEXTS = st.text("ain o\n<|{", max_size=8)
NUMBERS = st.text("0123456789+-: \n", max_size=8)


def moves(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[Any]]:
    """Turns, tool results and truncations in any order."""
    sample = st.tuples(st.just("sample"), text, st.integers(1, 12), st.sampled_from(["", "<think>"]))
    told = st.tuples(st.just("tool"), text)
    said = st.tuples(st.sampled_from(["user", "system"]), text)
    return st.lists(st.one_of(sample, sample, told, said), max_size=12)


def play(codec: ChatTokenizer, task: Task, steps: list[Any]) -> tuple[Rollout, Policy, list[int]]:
    """Follow the moves; also how many messages there were before each answer."""
    before: list[int] = []

    async def talk(chat: TokenChat) -> None:
        for step in steps:
            if step[0] == "sample":
                before.append(len(chat.finish().messages))
                await chat.sample(max_tokens=step[2], prefill=step[3])
            elif step[0] == "tool":
                chat.tool_result(step[1], name="f")
            else:
                chat.say(step[1], role=step[0])

    rollout, policy = converse(codec, task, talk, *(step[1] for step in steps if step[0] == "sample"))
    return rollout, policy, before


def check_integrity(rollout: Rollout, policy: Policy) -> None:
    """The tokens are those sent and sampled; each request continues the previous one."""
    stream, mask, logprobs = np.empty(0, np.int64), np.empty(0, bool), np.empty(0, np.float32)
    for sent, sampled in zip(policy.prompts, policy.sampled, strict=True):
        assert np.array_equal(sent[: len(stream)], stream)  # nothing that stood there has changed
        new = len(sent) - len(stream)
        stream = np.concatenate([sent, sampled])
        mask = np.concatenate([mask, np.zeros(new, bool), np.ones(len(sampled), bool)])
        logprobs = np.concatenate([logprobs, np.zeros(new), np.full(len(sampled), -0.5)])
    if policy.prompts:
        assert rollout.token_ids.tolist() == stream.tolist()
        assert rollout.loss_mask.tolist() == mask.tolist()
        assert rollout.logprobs.tolist() == logprobs.tolist()
        assert rollout.policy_versions.tolist() == np.where(mask, 0, -1).tolist()
    assert rollout.metrics["turns"] == len(policy.sampled)
    assert rollout.metrics["tokens"] == sum(len(s) for s in policy.sampled)


@settings(deadline=None, max_examples=150)
@given(steps=moves(TEXTS))
def test_tokens_with_a_chat_template(steps: list[Any]) -> None:
    codec = chatml()
    rollout, policy, before = play(codec, TALK, steps)
    check_integrity(rollout, policy)
    starts = [step[3] for step in steps if step[0] == "sample"]
    for sent, count, start in zip(policy.prompts, before, starts, strict=True):
        assert decoded(codec, sent) == rendered(codec, rollout.messages[:count], begin=start)


@settings(deadline=None, max_examples=100)
@given(steps=moves(NUMBERS))
def test_tokens_without_a_chat_template(steps: list[Any]) -> None:
    codec = plain()
    rollout, policy, _ = play(codec, TEXT, steps)
    check_integrity(rollout, policy)
    if policy.prompts:
        cut = len(policy.prompts[-1]) + len(policy.sampled[-1])
        assert cut == len(rollout.token_ids)


HOSTILE = st.lists(
    st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<pad>", "<", "a", "\ufdd0"]), max_size=6
)


@settings(deadline=None, max_examples=100)
@given(observation=HOSTILE.map("".join), result=HOSTILE.map("".join))
def test_sent_text_cannot_impersonate_another_role(observation: str, result: str) -> None:
    async def talk(chat: TokenChat) -> None:
        chat.say(observation)
        await chat.sample()
        chat.tool_result(result, name="f" + result)
        chat.say(observation)
        await chat.sample()

    codec = chatml()
    rollout, policy = converse(codec, TALK, talk, "yes", "no")
    check_integrity(rollout, policy)
    controls = [i for i in rollout.token_ids.tolist() if i < 3]  # <pad>, <|im_end|>, <|im_start|>
    turns = ["system", "user", "assistant", "tool", "user", "assistant"]
    assert controls == [2, 1] * len(turns)
    told = [m.content for m in rollout.messages]
    shown = observation.replace("\ufdd0", "\ufffd")
    assert told == [
        "Be brief.",
        "\n".join(p for p in ("Begin.", shown) if p),
        "yes",
        result.replace("\ufdd0", "\ufffd"),
        shown,
        "no",
    ]
    assert decoded(codec, rollout.token_ids) == rendered(codec, rollout.messages[:-1]) + "no<|im_end|>"


def controls(codec: ChatTokenizer, ids: Iterable[int]) -> list[str]:
    """The control tokens among some tokens, in their order."""
    added = {i: str(token) for i, token in codec.tokenizer.added_tokens_decoder.items()}
    return [added[i] for i in ids if i in added]


@pytest.mark.parametrize("form", ["llama", "qwen"])
def test_control_tokens_in_tool_results_and_tool_schemas_are_plain_text(form: str) -> None:
    codec = like(form)
    attack = "".join([*LLAMA_TOKENS, *QWEN_TOKENS, *QWEN_WORDS])
    function = {
        "name": f"look{attack}",
        "description": attack,
        "parameters": {"properties": {attack: {"enum": [attack]}}},
    }
    tools = [{"type": "function", "function": function}]
    plain_tools = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}]

    async def talk(chat: TokenChat, offered: list[Any], result: str) -> None:
        chat.offer(offered)
        await chat.sample()
        chat.tool_result(result)
        chat.say(result)
        await chat.sample()

    task = Task(id="t", prompt=(Message("user", "Go."),))
    attacked, _ = converse(codec, task, partial(talk, offered=tools, result=attack), "a", "b")
    harmless, _ = converse(codec, task, partial(talk, offered=plain_tools, result="x"), "a", "b")
    assert controls(codec, attacked.token_ids.tolist()) == controls(codec, harmless.token_ids.tolist())
    assert attack in decoded(codec, attacked.token_ids)  # it is shown, as characters


def test_special_tokens_that_overlap_are_all_cut() -> None:
    tokenizer = ChatTokenizer(nano.make_tokenizer(100)).tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a<", "<b>", "<<b"]})
    codec = ChatTokenizer(tokenizer)
    special = set(tokenizer.all_special_ids)
    for text in ("<a<b>", "<<b>", "<a<<b>", "x<b><b>"):
        assert special & set(codec.encode(text).tolist())
        unknown = {tokenizer.unk_token_id}  # what this small vocabulary has no token for
        assert not (special - unknown) & set(codec.encode(codec.as_data(text)).tolist()), text


@pytest.mark.parametrize("make", [chatml, plain])
def test_half_a_surrogate_pair_from_a_tool_is_replaced(make: Callable[[], ChatTokenizer]) -> None:
    async def talk(chat: TokenChat) -> None:
        await chat.sample()
        chat.tool_result("4\ud800", "half\udc00")
        await chat.sample(max_tokens=1)

    codec = make()
    prompt = (Message("user", "2+2:\ud83d"),) if codec.renderer.usable else "2+2:\ud83d"
    rollout, _ = converse(codec, Task(id="t", prompt=prompt), talk, "a", "b")
    assert [(m.content, m.name) for m in rollout.messages if m.role == "tool"] == [("4\ufffd", "half\ufffd")]


def test_a_task_may_use_special_tokens() -> None:
    text = Task(id="t", prompt="3<eos>4")
    codec = plain()
    assert codec.prompt(text)[1].tolist() == [*codec.encode("3"), codec.end, *codec.encode("4")]


def test_a_message_after_a_text_prompt_follows_a_separator() -> None:
    async def talk(chat: TokenChat) -> None:
        await chat.sample()
        chat.say("1+1:")
        await chat.sample(max_tokens=1)
        chat.tool_result("5")
        await chat.sample()

    codec = plain()
    rollout, _ = converse(codec, TEXT, talk, "3+5", "12+3", "7")
    end = codec.end
    one = [*codec.encode("3,5>8:"), *codec.encode("3+5"), end]
    two = [*codec.encode("\n1+1:"), *codec.encode("12")]
    three = [*codec.encode("\n5"), *codec.encode("7"), end]
    assert rollout.token_ids.tolist() == [*one, *two, *three]
    wanted = [(6, 4), (5, 1), (2, 2)]
    assert rollout.loss_mask.tolist() == [x for sent, own in wanted for x in [False] * sent + [True] * own]
    assert [m.role for m in rollout.messages] == ["user", "assistant", "user", "assistant", "tool", "assistant"]


@pytest.mark.parametrize(("limit", "sampled"), [(64, "no<|im_end|>"), (1, "n")])
def test_what_closes_a_turn_is_sampled_or_added(limit: int, sampled: str) -> None:
    """The line break after the end of a turn is never sampled; in a truncated turn, not even the end is."""

    async def talk(chat: TokenChat) -> None:
        await chat.sample(max_tokens=limit)
        chat.say("again")
        await chat.sample()

    codec = chatml()
    rollout, _ = converse(codec, TALK, talk, "no", "yes")
    ids, mask = rollout.token_ids, rollout.loss_mask
    second = int(np.flatnonzero(~mask[:-1] & mask[1:])[1]) + 1
    first = int(np.flatnonzero(mask)[0])
    own = ids[first:second][mask[first:second]]
    assert decoded(codec, own) == sampled
    rest = decoded(codec, ids[first + len(own) : second])
    assert (
        sampled + rest
        == f"{rollout.messages[2].content}<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_that_ends_with_the_next_header_is_followed_by_one_header() -> None:
    """As GLM's do: their generation_config.json ends an answer at `<|user|>` and `<|observation|>`."""
    codec = chatml(
        "{% for m in messages %}{{ 'A:' if m.role == 'assistant' else '<|im_start|>' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}"
    )
    talk = [Message("user", "1+1"), Message("assistant", "2"), Message("user", "2+2")]
    for end, rest in [("<|im_start|>", "2+2A:"), ("", "<|im_start|>2+2A:")]:
        bridge = codec.bridge_tokens(talk, 1, plain=False, ended=codec.encode(f"2{end}"))
        assert bridge is not None
        assert decoded(codec, bridge) == rest


def test_messages_before_the_first_answer_join_the_prompt() -> None:
    async def talk(chat: TokenChat) -> None:
        chat.say("You see a door.")
        await chat.sample()

    codec = chatml()
    rollout, policy = converse(codec, TALK, talk, "open")
    assert [m.content for m in rollout.messages] == ["Be brief.", "Begin.\nYou see a door.", "open"]
    assert decoded(codec, policy.prompts[0]) == rendered(codec, rollout.messages[:2])


def test_a_prefill_of_the_task_and_one_of_a_turn() -> None:
    task = Task(id="p", prompt=[Message("user", "Go."), Message("assistant", "<think>")])

    async def talk(chat: TokenChat) -> None:
        await chat.sample()
        chat.say("On.")
        await chat.sample(prefill="So")

    codec = chatml()
    rollout, policy = converse(codec, task, talk, "hm", " be it")
    assert [m.content for m in rollout.messages] == ["Go.", "<think>hm", "On.", "So be it"]
    assert decoded(codec, policy.prompts[0]).endswith("<|im_start|>assistant\n<think>")
    assert decoded(codec, rollout.token_ids[rollout.loss_mask]) == "hm<|im_end|> be it<|im_end|>"


def test_a_template_that_rewrites_an_answer_is_an_error_that_names_it() -> None:
    async def talk(chat: TokenChat) -> None:
        await chat.sample()
        chat.say("again")
        await chat.sample()

    with pytest.raises(ConfigError) as caught:
        converse(chatml(SHOUTS), TALK, talk, "<think>hm</think>no", "yes")
    for words in ("the chat template of 'tests/chatml' rewrites an earlier answer", "user", "model.keep_history"):
        assert words in str(caught.value)
    codec = chatml(FORGETFUL, keep_history=True)
    rollout, policy = converse(codec, TALK, talk, "<think>hm</think>no", "yes")
    check_integrity(rollout, policy)
    assert "<think>hm</think>no<|im_end|>\n<|im_start|>user\nagain<|im_end|>\n" in decoded(codec, policy.prompts[1])


def test_results_belong_to_the_calls_in_their_order_also_with_a_message_between_them() -> None:
    async def talk(chat: TokenChat) -> None:
        await chat.sample()
        chat.tool_result("4", name="add")
        chat.say("Continue.")
        chat.tool_result("5", name="add")
        await chat.sample()

    rollout, _ = converse(chatml(), TALK, talk, "a", "b")
    ids = [m.tool_call_id for m in rollout.messages if m.role == "tool"]
    assert ids == [call_id(1, 0), call_id(1, 1)]


def test_a_template_that_refuses_a_role_is_named() -> None:
    strict = CHATML.replace(
        "<|im_start|>{{ m.role }}",
        "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}<|im_start|>{{ m.role }}",
    )

    async def talk(chat: TokenChat) -> None:
        await chat.sample()
        chat.tool_result("4", name="add")
        await chat.sample()

    with pytest.raises(ConfigError, match=r"tests/chatml' refuses a conversation of user, assistant, tool: no tools"):
        converse(chatml(strict), TALK, talk, "a", "b")


def test_tools_are_shown_where_the_template_has_a_place() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]

    async def talk(chat: TokenChat) -> None:
        shown = chat.offer(tools)
        assert shown is not chat._plain
        await chat.sample()
        with pytest.raises(ValueFault, match="before the first answer"):
            chat.offer(tools)
        chat.say("x")
        await chat.sample()

    rollout, policy = converse(chatml(), TALK, talk, "a", "b")
    assert decoded(chatml(), policy.prompts[0]).startswith("<|im_start|>system\nadd <|im_end|>\n<|im_start|>system\nBe")
    check_integrity(rollout, policy)
    converse(plain(), TEXT, talk, "1", "2")


LISTS = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {}}}


def test_tools_whose_calls_no_parser_reads_are_refused() -> None:
    """As Kimi K2's and MiniMax M2's: with the default parser, every call would be a final answer."""

    async def talk(chat: TokenChat, parser: Any = None) -> None:
        chat.offer([ADD], parser=parser)
        await chat.sample()

    codec = chatml(LISTS.replace("CALL", "<call>{{ c.function.name }}</call>"))
    with pytest.raises(
        ConfigError, match=r"no tool parser reads the calls that .* writes \('<call>rlsdk_lookup</call>'\)"
    ):
        converse(codec, TALK, talk, "a")
    converse(codec, TALK, partial(talk, parser=load("tool_parser", "hermes")), "a")


def test_the_parser_is_the_one_that_writes_calls_as_the_template_does() -> None:
    call = '{"name": "{{ c.function.name }}", "%s": {{ c.function.arguments | tojson }}}'
    assert chatml(LISTS.replace("CALL", call % "parameters")).tool_form == "llama3"
    assert chatml(LISTS.replace("CALL", call % "arguments")).tool_form == "json"


def test_an_answer_that_ends_as_answers_with_a_call_do_is_not_closed_again() -> None:
    llama, cohere = like("llama"), chatml(CHATML.replace("<|im_end|>\n", "<pad><|im_end|>"))
    talk = [Message("user", "1+1"), Message("assistant", "2"), Message("tool", "3")]
    for codec, end, next_token in [
        (llama, "<|eom_id|>", "<|start_header_id|>"),
        (llama, "<|eot_id|>", "<|start_header_id|>"),
        (llama, "", "<|eot_id|>"),
        (cohere, "<|im_end|>", "<|im_start|>"),
        (cohere, "<pad>", "<|im_end|>"),
        (cohere, "", "<pad>"),
    ]:
        bridge = codec.bridge_tokens(talk, 1, plain=False, ended=codec.encode(f"2{end}") if end else NOTHING)
        assert bridge is not None
        assert decoded(codec, bridge).startswith(next_token), end


def test_rewards_lie_on_the_last_sampled_token_of_their_turn() -> None:
    async def talk(chat: TokenChat) -> None:
        with pytest.raises(ValueFault, match=r"a reward of 1.0 was given before anything was sampled"):
            chat.reward(1.0)
        await chat.sample()
        with pytest.raises(ValueFault, match=r"a reward is \[1.0\]; expected a number"):
            chat.reward([1.0])  # type: ignore[arg-type]
        with pytest.raises(ValueFault, match=r"the result is {'sum': 3}; expected text"):
            chat.tool_result({"sum": 3})  # type: ignore[arg-type]
        chat.reward(0.25)
        chat.say("1:")
        await chat.sample()
        chat.say("2:")
        chat.reward(1.0)

    rollout, _ = converse(plain(), TEXT, talk, "3", "4+5")
    assert rollout.rewards == ((7, 0.25), (14, 1.0))
    assert rollout.loss_mask.nonzero()[0].tolist() == [6, 7, 11, 12, 13, 14]


def test_room_and_a_conversation_that_fills_the_model() -> None:
    left: list[int] = []

    async def talk(chat: TokenChat) -> None:
        left.append(chat.room())
        await chat.sample()
        left.append(chat.room())
        chat.say("1,2,3:")  # seven tokens with the line break
        left.append(chat.room())
        with pytest.raises(OutOfRoomError):
            await chat.sample()

    rollout, _ = converse(plain(), TEXT, talk, "3+5", max_length=16)
    assert left == [10, 6, 0]
    assert rollout.status == "truncated"
    assert len(rollout.token_ids) == 10  # what was said last was not sent
    assert rollout.messages[-1].content == "1,2,3:"

    async def once(chat: TokenChat) -> None:
        await chat.sample()

    cut, _ = converse(plain(), TEXT, once, "1+2+3+4+5", max_length=8)
    assert cut.status == "truncated" and cut.text == "1+"
    with pytest.raises(ValueFault, match=r"task 't': 6 tokens leave no room in model.max_length"):
        converse(plain(), TEXT, once, "1", max_length=6)


@pytest.mark.parametrize("make", [plain, partial(chatml, CHATML), partial(chatml, FORGETFUL)])
def test_long_messages_are_tokenized_in_a_thread_into_the_same_tokens(
    make: Callable[[], ChatTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "12345, " * 4000

    async def talk(chat: TokenChat) -> None:
        chat.say(long)
        await chat.sample()
        chat.say(f"{long}7")
        await chat.sample()

    codec = recorded(make())
    found, _ = converse(codec, TALK if codec.renderer.usable else TEXT, talk, "3+5", "4")
    threads = {thread for length, thread in codec.seen if length >= len(long)}
    assert threads and threading.get_ident() not in threads
    monkeypatch.setattr(chats, "QUICK_CHARACTERS", 10**9)
    codec = recorded(make())
    alone, _ = converse(codec, found.task, talk, "3+5", "4")
    assert {thread for _, thread in codec.seen} == {threading.get_ident()}
    assert found.token_ids.tolist() == alone.token_ids.tolist()
    assert found.loss_mask.tolist() == alone.loss_mask.tolist() and found.messages == alone.messages


@pytest.mark.parametrize("turns", [0, 1])
def test_messages_that_cannot_fit_are_refused_without_being_tokenized(turns: int) -> None:
    codec = recorded(plain())
    most = 100 * codec.longest

    async def talk(chat: TokenChat) -> None:
        if turns:
            await chat.sample()
            chat.say("+" * most)
            assert chat.room() == 0
            assert codec.seen.pop()[0] > most  # at the limit, its tokens must be counted
            chat.say("+")
        else:
            chat.say("+" * (most + 1))
        assert chat.room() == 0 and not chat.begins_new_rollout
        with pytest.raises(OutOfRoomError if turns else ValueFault, match=r"leave no room in model\.max_length"):
            await chat.sample()

    found, _ = converse(codec, TEXT, talk, "3+5", max_length=100)
    assert max(length for length, _ in codec.seen) < most
    assert len(found.token_ids) < 100 and found.messages[-1].content.endswith("+")


def test_a_conversation_that_changes_while_long_messages_are_tokenized_is_refused() -> None:
    async def talk(chat: TokenChat) -> None:
        chat.say("12345, " * 4000)
        answer = asyncio.ensure_future(chat.sample())
        await asyncio.sleep(0)
        chat.say("6")
        with pytest.raises(ValueFault, match=r"task 't': the conversation changed while an answer to it was sampled"):
            await answer
        await chat.sample()

    found, _ = converse(plain(), TEXT, talk, "3+5")
    assert found.messages[0].content.endswith("12345, \n6") and found.messages[-1].content == "3+5"


@pytest.mark.parametrize("changes", ["sample", "say", "branch"])
def test_a_conversation_that_changes_while_its_answer_is_sampled_is_refused(changes: str) -> None:
    class Later(Policy):
        def sample(self, request: GenerateRequest) -> Any:
            done = super().sample(request)

            async def answer() -> Answer:
                await asyncio.sleep(0)
                return await done

            return answer()

    async def talk() -> None:
        codec = plain()
        policy: Any = Later(codec, ["3+5", "4+4"])
        context = RolloutContext(codec=codec, client=policy, sampling=Sampling(), max_length=64)
        chat = TokenChat(Prompt(TEXT, *codec.prompt(TEXT)), context, "g", None)
        answer = asyncio.ensure_future(chat.sample())
        await asyncio.sleep(0)
        if changes == "say":
            chat.say("1+1:")
        else:
            await (chat if changes == "sample" else chat.branch()).sample()
        await answer

    if changes == "branch":
        asyncio.run(talk())
    else:
        with pytest.raises(ValueFault, match=r"task 't': the conversation changed while an answer to it was sampled"):
            asyncio.run(talk())


def test_a_limit_of_no_tokens_is_refused() -> None:
    async def talk(chat: TokenChat) -> None:
        await chat.sample(max_tokens=0)

    with pytest.raises(ValueFault, match="max_tokens must be at least 1 or left out; got 0"):
        converse(plain(), TEXT, talk, "3+5")


def test_a_cancelled_turn_leaves_the_conversation_as_it_was() -> None:
    class Slow(Policy):
        def sample(self, request: GenerateRequest) -> asyncio.Future[Answer]:
            if len(self.prompts) == 1:
                self.prompts.append(request.prompt)
                return asyncio.get_running_loop().create_future()
            return super().sample(request)

    async def talk() -> Rollout:
        codec = plain()
        policy: Any = Slow(codec, ["3", "4"])
        context = RolloutContext(codec=codec, client=policy, sampling=Sampling(), max_length=64)
        chat = TokenChat(Prompt(TEXT, *codec.prompt(TEXT)), context, "g", None)
        await chat.sample()
        before = chat.finish()
        chat.say("1:")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await chat.sample()
        assert chat.finish().token_ids.tolist() == before.token_ids.tolist()
        await chat.sample()
        return chat.finish()

    assert [m.content for m in asyncio.run(talk()).messages] == ["3,5>8:", "3", "1:", "4"]


def test_a_later_turn_goes_to_the_engine_that_holds_its_prefix_with_a_seed_of_its_own() -> None:
    async def talk(chat: TokenChat) -> None:
        await chat.sample()
        chat.say("1:")
        await chat.sample()

    one, two = (converse(plain(), TEXT, talk, "1", "2", seed=7, member=member)[1] for member in range(2))
    assert one.affinities == [None, 0]
    assert one.seeds[0] == two.seeds[0] == 7  # one request with two continuations
    assert one.seeds[1] != two.seeds[1]  # two requests, also where the conversations are equal

    async def told(chat: TokenChat) -> None:
        chat.say("1:")
        await chat.sample()

    first, second = (converse(plain(), TEXT, told, "1", seed=7, member=member)[1].seeds for member in range(2))
    assert first != second


def test_the_runs_reward_tells_what_an_answer_is_worth() -> None:
    async def scorer(rollout: Rollout) -> Score:
        return Score(float(len(rollout.text)))

    async def talk(chat: Chat) -> None:
        await chat.sample()
        assert (await chat.score()).value == 3.0

    converse(plain(), TEXT, talk, "3+5", scorer=scorer)
    with pytest.raises(ConfigError, match="reward: none given"):
        converse(plain(), TEXT, talk, "3+5")


class Routed(Policy):
    """Reports for every token it read, the prompt's among them, the number of the answer as its expert."""

    def sample(self, request: GenerateRequest) -> asyncio.Future[Answer]:
        answer = super().sample(request).result()
        count = len(request.prompt) + len(answer.completion.token_ids) - 1
        experts = np.full((count, 1, 2), len(self.sampled), np.int16)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        future.set_result(attrs.evolve(answer, completion=attrs.evolve(answer.completion, routed_experts=experts)))
        return future


def test_tokens_keep_the_experts_with_which_an_answer_first_read_them() -> None:
    codec = plain()
    policy: Any = Routed(codec, ["<answer>8</answer>", "<answer>9</answer>"])
    context = RolloutContext(codec=codec, client=policy, sampling=Sampling(max_tokens=64), max_length=1000)
    prompt = Prompt(TEXT, *codec.prompt(TEXT))
    chat = TokenChat(prompt, context, "g", 0)

    async def talk() -> None:
        await chat.sample()
        chat.say("no")
        await chat.sample()

    asyncio.run(talk())
    rollout = chat.finish()
    assert rollout.routed_experts is not None
    first = len(prompt.token_ids) + len(policy.sampled[0]) - 1
    expected = [1] * first + [2] * (len(rollout.token_ids) - first - 1) + [-1]
    assert rollout.routed_experts[:, 0, 0].tolist() == expected
