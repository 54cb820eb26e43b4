"""Check that a tokenizer and its renderer are suitable for training: `rlsdk check model`.

A property is a function of a `ModelSubject` and a conversation. It returns a fault or None, or raises `NotApplicable`
with a reason if the renderer lacks the feature. A `ConfigError` means that the renderer rejects a conversation; this
counts as not applicable, since conversations that a template rejects are never trained.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal

import attrs
import numpy as np

from rlsdk.contracts import Completion, Sampling
from rlsdk.errors import ConfigError, RefusedMessagesError
from rlsdk.readiness.tasks import not_embedded
from rlsdk.rollout.chat import Prompt, RolloutContext, TokenChat
from rlsdk.rollout.codec import NOTHING
from rlsdk.testing.findings import NotApplicable
from rlsdk.testing.model_subject import ModelSubject, round_trip_fault, tools_of, with_calls
from rlsdk.testing.samples import conversations, describe, smaller_conversations
from rlsdk.types import Message, Task

Held = bool | Literal["n/a"]
CONVERSATIONS = 48
_NO_TEMPLATE = "the tokenizer has no chat template; text prompts work"
_VLLM_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes supported by vLLM's CPU attention, the most restrictive of its backends (vLLM 0.32)."""
_EMPTY_THOUGHT = re.compile(r"<think>\s*</think>\s*")
_DTYPES = ("float32", "float16", "bfloat16")


@attrs.frozen
class ModelProperty:
    """A property with its outcome: `ok` is True, False or "n/a"; `reason` explains any outcome except True."""

    name: str
    ok: Held
    reason: str = ""


def check_model(subject: ModelSubject) -> list[ModelProperty]:
    """Check each property on conversations, shortest first, up to the first that violates it."""
    tried = conversations(CONVERSATIONS)
    return [_check(name, fault, subject, tried) for name, fault in PROPERTIES.items()]


def _check(
    name: str, fault: Callable[..., str | None], subject: ModelSubject, tried: Sequence[tuple[Message, ...]]
) -> ModelProperty:
    applied, reason = False, ""
    for conversation in tried:
        try:
            found = fault(subject, conversation)
        except NotApplicable as error:
            reason = str(error)
        except ConfigError as error:
            reason = "; ".join(error.faults) if subject.codec.renderer.usable else _NO_TEMPLATE
        else:
            applied = True
            if found:
                shortest, found = _shrunk(fault, subject, conversation, found)
                return ModelProperty(name, False, f"{found}; conversation: {describe(shortest)}")
    return ModelProperty(name, True) if applied else ModelProperty(name, "n/a", reason)


def _shrunk(
    fault: Callable[..., str | None], subject: ModelSubject, conversation: tuple[Message, ...], found: str
) -> tuple[tuple[Message, ...], str]:
    """Remove messages and words while a conversation still violates a property; return it and the fault."""
    for smaller in smaller_conversations(conversation):
        if not any(message.role == "user" for message in smaller):
            continue
        with suppress(NotApplicable, ConfigError):
            if still := fault(subject, smaller):
                return _shrunk(fault, subject, smaller, still)
    return conversation, found


def _difference(subject: ModelSubject, expected: np.ndarray, got: np.ndarray) -> str | None:
    """Describe the first token at which two sequences differ."""
    if np.array_equal(expected, got):
        return None
    for i in range(max(len(expected), len(got))):
        left, right = expected[i : i + 1], got[i : i + 1]
        if not np.array_equal(left, right):
            shown = [f"{ids[0]} {subject.codec.shown(ids)!r}" if len(ids) else "nothing" for ids in (left, right)]
            return f"token {i} differs: expected {shown[0]}, got {shown[1]}"
    return None


def _question(conversation: tuple[Message, ...]) -> tuple[Message, ...]:
    return conversation[: 1 + (conversation[0].role == "system")]


def _prompt(subject: ModelSubject, conversation: tuple[Message, ...]) -> np.ndarray:
    """Return the tokens of a first prompt: a conversation, or only its question if there is no chat template."""
    question = _question(conversation)
    return subject.codec.prompt(Task("check", question if subject.codec.renderer.usable else question[-1].text))[1]


def prompt_shows_the_question(subject: ModelSubject, conversation: tuple[Message, ...]) -> str | None:
    """The prompt equals the template's rendering, token by token, and contains the user's text."""
    if not subject.codec.renderer.usable:
        raise NotApplicable(_NO_TEMPLATE)
    question = _question(conversation)
    try:
        text = subject.text.render(question)
    except ConfigError as error:
        if question[0].role == "system":
            raise
        return "; ".join(error.faults)
    if question[-1].text not in text:
        return f"the prompt {text!r} lacks the user's text"
    if header := subject.codec.missing_header:
        return (
            f"the prompt ends before {header!r}, which the template writes before an answer: it ignores "
            "add_generation_prompt, so that the policy must write this text itself"
        )
    _, ids = subject.codec.prompt(Task("check", question))
    return _difference(subject, subject.codec.encode(text), ids)


def later_messages_leave_answers_alone(subject: ModelSubject, conversation: tuple[Message, ...]) -> str | None:
    """Prefix property: the rendering of an answer does not change when messages follow it."""
    text, codec = subject.text, subject.codec
    for i, message in _followed_answers(conversation):
        for role in dict.fromkeys(m.role for m in conversation[i + 1 :] if m.role != "assistant"):
            rewrite = None if text.keep_history else text.rewrite([role])
            if rewrite is not None and not rewrite.keeps_text:
                expected, got = codec.encode(rewrite.written_whole), codec.encode(rewrite.found_whole)
                return (
                    f"{rewrite.written!r} becomes {rewrite.found!r} once a message ({role}) follows: "
                    f"{_difference(subject, expected, got)}"
                )
            if rewrite is not None:
                history = (*conversation[: i + 1], Message(role, "R"))
                if codec.bridge_tokens(history, 1, plain=False) is not None:
                    return f"an answer's thought is dropped once a message ({role}) follows, but its tokens stay"
                expected = codec.encode(text.render(history))
                return _difference(subject, expected, codec.prompt_tokens(history, plain=False))
        alone = text.render_closed(conversation[: i + 1]).partition(message.text)
        later = text.render_closed(conversation).partition(message.text)
        # Qwen3's template writes an empty thought before a last answer without one
        written, found = (_EMPTY_THOUGHT.sub("", "".join(each[:2])) for each in (alone, later))
        if not alone[1] or written != found:
            expected, got = codec.encode(written), codec.encode(found)
            return _difference(subject, expected, got) or f"the answer {message.text!r} is not rendered"
    return None


def _followed_answers(conversation: tuple[Message, ...]) -> list[tuple[int, Message]]:
    found = [(i, m) for i, m in enumerate(conversation[:-1]) if m.role == "assistant"]
    if not found:
        raise NotApplicable("no answer is followed by a message")
    return found


def bridges_equal_the_template(subject: ModelSubject, conversation: tuple[Message, ...]) -> str | None:
    """The tokens between two answers are the template's, both after answers that ended and truncated ones."""
    codec = subject.codec
    for i, message in _followed_answers(conversation):
        end = next((j for j in range(i + 1, len(conversation)) if conversation[j].role == "assistant"), None)
        history = conversation[:end]
        if any(m.role == "tool" for m in history) and (found := _results_after_calls(subject, history, i)) != "bare":
            if found:
                return found
            continue
        rendered = subject.text.render(history).partition(message.text)
        if not rendered[1]:
            raise NotApplicable("the template does not render answers unchanged")
        expected, new = codec.encode(rendered[2]), len(history) - i - 1
        if not subject.text.keeps_answers(tuple(dict.fromkeys(m.role for m in history[i + 1 :]))):
            raise NotApplicable("thoughts of earlier answers are dropped: the next turn starts a new rollout")
        bridge = codec.bridge_tokens(history, new, plain=False)
        if bridge is None:
            return "the template keeps earlier answers, but the next turn starts a new rollout"
        if found := _difference(subject, expected, bridge):
            return f"after a truncated answer: {found}"
        if len(expected) and expected[0] in subject.ends:
            ended = np.append(codec.encode(message.text), expected[0])
            got = codec.bridge_tokens(history, new, plain=False, ended=ended)
            if found := _difference(subject, expected[1:], NOTHING if got is None else got):
                return f"after an answer that ended: {found}"
    return None


def _results_after_calls(subject: ModelSubject, history: tuple[Message, ...], answer: int) -> str | None:
    """If a template shows tool results only after calls, the bridge contains them, as the template writes them.

    Returns:
        The fault; None if there is none, and "bare" for a template that needs no calls.
    """
    words = [m.text.split()[0] for m in history if m.role == "tool"]
    try:
        if all(word in subject.text.render(history) for word in words):
            return "bare"
    except ConfigError:
        pass  # gpt-oss and Mistral reject such a conversation
    called = with_calls(history)
    rendered, new = subject.text.render(called), len(history) - answer - 1
    try:
        bridge = subject.codec.bridge_tokens(called, new, plain=False)
    except RefusedMessagesError as error:  # the template writes this conversation: it is a bridge without the result
        return f"after a call: {'; '.join(error.faults)}"
    if bridge is None:
        raise NotApplicable("thoughts of earlier answers are dropped: the next turn starts a new rollout")
    shown = subject.codec.shown(bridge)
    if not rendered.endswith(shown):
        return f"after a call: expected the end of {rendered!r}, got {shown!r}"
    lost = [m.text for m in history[answer + 1 :] if m.role == "tool" and m.text.split()[0] not in shown]
    return f"after a call, the policy is not shown the result {lost[0]!r}" if lost else None


def stop_token_is_sampled_and_trained(subject: ModelSubject, conversation: tuple[Message, ...]) -> str | None:
    """The template's first token after an answer ends it, and is trained on as the policy's own token."""
    codec = subject.codec
    question = _question(conversation)
    answer = "rlsdkanswer"
    closing = codec.encode(
        subject.text.render_closed([*question, Message("assistant", answer)]).partition(answer)[2].lstrip()
    )
    if not len(closing) or not subject.ends:
        raise NotApplicable("the template writes nothing after an answer, or the tokenizer has no end-of-text token")
    stop = int(closing[0])
    if stop not in subject.ends:
        if stop not in subject.tokenizer.all_special_ids and codec.shown(closing[:1]) not in codec.controls:
            raise NotApplicable("the text that the template writes after an answer is ordinary text for this tokenizer")
        return (
            f"the template ends an answer with {codec.shown(closing[:1])!r} ({stop}), but sampling stops only at "
            f"{sorted(subject.ends)}; set it as eos_token, or add it to generation_config.json"
        )
    sampled = np.append(codec.encode(answer), stop)
    context = RolloutContext(codec=codec, client=None, sampling=Sampling(), max_length=1 << 30)
    messages, ids = codec.prompt(Task("check", question))
    chat = TokenChat(Prompt(Task("check", question), messages, ids), context, "check", None)
    logprobs, versions = np.zeros(len(sampled), np.float32), np.zeros(len(sampled), np.int64)
    completion = Completion(
        request="check", index=0, token_ids=sampled, logprobs=logprobs, versions=versions, finish="stop"
    )
    chat.take(completion)
    rollout = chat.finish()
    return _difference(subject, sampled, rollout.token_ids[rollout.loss_mask])


def prefills_are_left_open(subject: ModelSubject, conversation: tuple[Message, ...]) -> str | None:
    """A final assistant message ends the prompt and is left open."""
    i, message = _followed_answers(conversation)[0]
    text = subject.text.render(conversation[: i + 1])
    if message.text not in text:
        raise NotApplicable("the template does not render a prefill unchanged")
    _, ids = subject.codec.prompt(Task("check", conversation[: i + 1]))
    wanted = subject.codec.encode(text.partition(message.text)[0] + message.text)
    return _difference(subject, wanted, ids)


def injected_control_tokens_are_text(subject: ModelSubject, conversation: tuple[Message, ...]) -> str | None:
    """Names of control tokens in a message do not become control tokens in the prompt."""
    codec = subject.codec
    if not codec.controls:
        raise NotApplicable("the tokenizer has no control tokens")
    messages = [m for m in conversation if m.role != "assistant"][:2]
    controls = {subject.tokenizer.convert_tokens_to_ids(name) for name in codec.controls}

    def counted(text: str) -> int:
        prompt = [*messages[:-1], attrs.evolve(messages[-1], content=codec.as_data(text))]
        return sum(int(token) in controls for token in codec.prompt_tokens(prompt, plain=False))

    plain, names = messages[-1].text, sorted(codec.controls)
    harmless = counted(plain)
    # All at once first, since rendering each name takes most of the time; then one by one, to name the culprit
    if counted(f"{plain} {' '.join(names)} {plain}") == harmless:
        return None
    for name in names:
        if counted(f"{plain} {name} {plain}") != harmless:
            return f"{name!r} in a {messages[-1].role} message becomes the control token"
    return f"a sequence of control-token names in a {messages[-1].role} message becomes control tokens"


def lengths_fit_the_positions(subject: ModelSubject, conversation: tuple[Message, ...]) -> str | None:
    """Conversations, and `model.max_length` if given, fit into the model's positions."""
    limit = subject.text_config.get("max_position_embeddings")
    if not isinstance(limit, int):
        raise NotApplicable("config.json names no max_position_embeddings")
    if subject.max_length is not None and subject.max_length > limit:
        return f"max_length={subject.max_length} exceeds the model's {limit} positions"
    length = len(_prompt(subject, conversation))
    return None if length < limit else f"a prompt of {length} tokens leaves no room in {limit} positions"


def padding_and_end_are_sane(subject: ModelSubject, conversation: tuple[Message, ...]) -> str | None:
    """There is an end-of-text token; it, the padding and prompts are tokens of the model; prompts have no padding."""
    end, pad = subject.tokenizer.eos_token_id, subject.tokenizer.pad_token_id
    if not subject.stops:
        return (
            "no end-of-text token: neither the tokenizer nor the model's config names an eos_token, so that every "
            "answer runs to max_tokens"
        )
    size = subject.text_config.get("vocab_size")
    for name, token in (("eos_token", end), ("pad_token", pad)):
        if isinstance(size, int) and token is not None and not 0 <= token < size:
            return f"{name} is {token}, outside the model's {size} tokens"
    prompt = _prompt(subject, conversation)
    if isinstance(size, int) and (wrong := not_embedded(subject.codec, prompt, size)):
        return f"a prompt has {wrong}"
    if pad not in (None, end) and pad in prompt:
        return f"the template writes the padding token {subject.tokenizer.pad_token!r} into prompts"
    return None


def engine_supports_the_shape(subject: ModelSubject, conversation: tuple[Message, ...]) -> str | None:
    """The head size has attention kernels in vLLM, and the dtype can be trained."""
    config = subject.text_config
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int) or not isinstance(config.get("hidden_size"), int):
        raise NotApplicable("config.json names no attention heads")
    size = config.get("head_dim") or config["hidden_size"] // heads
    if size not in _VLLM_HEADS and "kv_lora_rank" not in config:
        return f"vLLM has no kernel for head size {size} ({', '.join(map(str, _VLLM_HEADS))}); use engine: transformers"
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return None if dtype in _DTYPES else f"dtype is {dtype!r}; expected one of {', '.join(_DTYPES)}"


def tools_are_listed(subject: ModelSubject, conversation: tuple[Message, ...]) -> str | None:
    """A prompt with tools names each tool, and control tokens in descriptions do not come through."""
    codec, question = subject.codec, _question(conversation)
    if not codec.renderer.usable or not codec.renderer.shows_tools(tools_of(conversation)):
        raise NotApplicable("prompts list no tools; a workflow describes them in a message")
    for count in (1, 2):
        tools = tools_of(conversation)[:count]
        ids = codec.prompt_tokens(question, plain=False, tools=tools)
        shown = codec.shown(ids)
        for tool in tools:
            if (name := tool["function"]["name"]) not in shown:
                return f"the prompt with {count} tools lacks the tool {name!r}"
        if found := _difference(subject, codec.encode(subject.text.render(question, tools)), ids):
            return f"with {count} tools: {found}"
    return None


def tool_calls_round_trip(subject: ModelSubject, conversation: tuple[Message, ...]) -> str | None:
    """Calls written by the template are parsed back as the same calls, one or several at once."""
    if not subject.codec.renderer.usable:
        raise NotApplicable(_NO_TEMPLATE)
    return round_trip_fault(subject.codec, conversation)


def answers_are_read(subject: ModelSubject, conversation: tuple[Message, ...]) -> str | None:
    """The content of an answer is parsed from its tokens unchanged, with and without a thought before it."""
    codec, content = subject.codec, conversation[-1].text
    if not codec.renderer.usable:
        raise NotApplicable(_NO_TEMPLATE)
    begin, end = subject.text.thought_marks
    thought = "" if codec.shown(codec.renderer.generation_prompt()).rstrip().endswith(begin) else begin
    answers = {"without a thought": content} if thought else {}
    if begin in codec.controls or begin.startswith("<think"):
        answers["with a thought"] = f"{thought}rlsdkthought{end}{content}"
    for how, text in answers.items():
        ids = codec.encode(text)
        ids = ids if codec.end is None else np.append(ids, codec.end)
        parsed = codec.renderer.parse(ids)
        expected = ("rlsdkthought" if how == "with a thought" else "", codec.decode([codec.encode(content)])[0])
        if (parsed.reasoning, parsed.content) != expected:
            return f"an answer {how}: expected {expected}, got {(parsed.reasoning, parsed.content)}"
    return None


PROPERTIES: dict[str, Callable[[ModelSubject, tuple[Message, ...]], str | None]] = {
    "prompt": prompt_shows_the_question,
    "prefix": later_messages_leave_answers_alone,
    "bridge": bridges_equal_the_template,
    "stop": stop_token_is_sampled_and_trained,
    "prefill": prefills_are_left_open,
    "tools": tools_are_listed,
    "tool_calls": tool_calls_round_trip,
    "parse": answers_are_read,
    "injection": injected_control_tokens_are_text,
    "length": lengths_fit_the_positions,
    "padding": padding_and_end_are_sane,
    "engine": engine_supports_the_shape,
}
"""Name -> property."""
