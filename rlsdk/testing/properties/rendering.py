"""Properties of renderers and tool parsers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from rlsdk.contracts import Call, Malformed
from rlsdk.errors import described
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.testing.findings import Case, NotApplicable, Violated, shape
from rlsdk.testing.subject import Subject, holds
from rlsdk.types import Message

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@functools.cache
def make_chat_tokenizer() -> Any:
    """Create a tokenizer with ChatML as chat template and `<|im_end|>` as end-of-text token.

    Raises:
        ImportError: transformers is not installed.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<pad>")
    made.add_tokens(["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"], special_tokens=True)
    made.chat_template = CHATML
    return made


_QUESTION = Message("user", "What is 1 + 2?")
_ANSWER = Message("assistant", "It is 3")
_MORE = Message("user", "And 2 + 2?")
_ONE = [Call("add", {"a": 1, "b": 2})]
_SEVERAL = [*_ONE, Call("look_up", {"word": "red apple", "deep": True})]
_HOSTILE = ("", "It is 3.", "{", "[" * 2_000, "<tool_call>", "(" * 500, '{"name": ', "\x00\ud800", "9" * 5_000)


def _codec(subject: Subject) -> ChatTokenizer:
    """Return a tokenizer of bytes and ChatML tokens, with the renderer under test."""
    try:
        tokenizer = make_chat_tokenizer()
    except ImportError as error:
        raise NotApplicable(f"a tokenizer needs transformers: {described(error)}") from error
    made: Any = subject.make()
    return subject.call(lambda: ChatTokenizer(tokenizer, renderer=made))  # type: ignore[no-any-return]


def _prompt(subject: Subject, codec: ChatTokenizer, *messages: Message) -> np.ndarray:
    ids = subject.call(codec.renderer.prompt_tokens, messages)
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
        raise Violated("form", "token ids from prompt_tokens, int64 with one axis", shape(ids))
    return ids


@holds(
    "opens-an-answer",
    "renderer",
    remedy="write the whole conversation in prompt_tokens, and end it with the tokens from generation_prompt",
)
def opens_an_answer(subject: Subject, _: Any) -> None:
    """A prompt contains the user's text and ends with the generation prompt."""
    codec = _codec(subject)
    ids = _prompt(subject, codec, _QUESTION)
    shown, opening = codec.shown(ids), subject.call(codec.renderer.generation_prompt)
    if _QUESTION.text not in shown:
        raise Violated("value", f"a prompt with {_QUESTION.text!r}", f"{shown!r}")
    if len(opening) and not np.array_equal(ids[-len(opening) :], opening):
        raise Violated("value", f"a prompt that ends with {codec.shown(opening)!r}", f"{shown!r}")


@holds(
    "leaves-a-prefill-open",
    "renderer",
    remedy="let prompt_tokens end with the content of a final assistant message, without closing it",
    after=("opens-an-answer",),
)
def leaves_a_prefill_open(subject: Subject, _: Any) -> None:
    """A final assistant message ends the prompt, so that the policy continues it."""
    codec = _codec(subject)
    shown = codec.shown(_prompt(subject, codec, _QUESTION, _ANSWER))
    if not shown.endswith(_ANSWER.text):
        raise Violated("value", f"a prompt that ends with {_ANSWER.text!r}", f"{shown[-60:]!r}")


@holds(
    "bridges-once",
    "renderer",
    remedy="return from bridge_tokens the end of the answer, the new messages and the next generation prompt; omit "
    "the part of that end already in `ended`, or return None if the earlier answer is rendered differently",
    after=("opens-an-answer",),
)
def bridges_once(subject: Subject, _: Any) -> None:
    """A bridge contains the new message, opens an answer, and does not close an ended answer twice."""
    codec = _codec(subject)
    renderer, history = codec.renderer, (_QUESTION, _ANSWER, _MORE)
    nothing = np.empty(0, np.int64)
    bridge = subject.call(lambda: renderer.bridge_tokens(history, 1, ended=nothing))
    if bridge is None:
        return
    shown = codec.shown(bridge)
    opening = codec.shown(subject.call(renderer.generation_prompt))
    if _MORE.text not in shown or not shown.endswith(opening):
        raise Violated("value", f"a bridge with {_MORE.text!r} that ends with {opening!r}", f"{shown!r}")
    if len(bridge) and int(bridge[0]) in renderer.stop_tokens:
        ended = np.append(codec.encode(_ANSWER.text), bridge[0])
        after = subject.call(lambda: renderer.bridge_tokens(history, 1, ended=ended))
        if not np.array_equal(after, bridge[1:]):
            raise Violated(
                "value", f"{codec.shown(bridge[1:])!r} after an answer that ended", f"{codec.shown(after)!r}"
            )


@holds(
    "data-stays-data",
    "renderer",
    remedy="pass message content to codec.encode unchanged: rlsdk has split the names of control tokens in it",
    after=("opens-an-answer",),
)
def data_stays_data(subject: Subject, _: Any) -> None:
    """Names of control tokens in a message become ordinary text, not control tokens."""
    codec = _codec(subject)
    controls = {codec.tokenizer.convert_tokens_to_ids(name) for name in codec.controls}

    def counted(text: str) -> int:
        ids = _prompt(subject, codec, Message("user", codec.as_data(text)))
        return sum(int(token) in controls for token in ids)

    plain = counted("x")
    for name in sorted(codec.controls):
        if (found := counted(f"x {name} x")) != plain:
            raise Violated("value", f"{plain} control tokens in the prompt", f"{found}, with {name!r} in the message")


@holds(
    "reads-answers",
    "renderer",
    remedy="return ParsedAnswer(content) from parse: the sampled text, without the token that ended it",
)
def reads_answers(subject: Subject, _: Any) -> None:
    """The content of an answer is its text, whether it ended or was truncated."""
    codec = _codec(subject)
    ids = codec.encode(_ANSWER.text)
    for title, sampled in (("cut off", ids), ("ended", np.concatenate([ids, codec.encode("<|im_end|>")]))):
        parsed = subject.call(codec.renderer.parse, sampled)
        if getattr(parsed, "content", None) != _ANSWER.text:
            raise Violated("value", f"content {_ANSWER.text!r} of an answer that was {title}", f"{parsed!r}")


def _parsed(subject: Subject, parser: Any, text: str) -> list[Call | Malformed]:
    found = subject.call(parser.parse, text)
    if not isinstance(found, list | tuple) or not all(isinstance(each, Call | Malformed) for each in found):
        raise Violated(
            "form", "a list of rlsdk.contracts.Call and Malformed from parse", f"{shape(found)}, of {text!r:.80}"
        )
    return list(found)


@holds(
    "reads-what-it-writes",
    "tool_parser",
    inputs=lambda _: [Case("one call", _ONE), Case("two calls of different tools", _SEVERAL)],
    remedy="make parse read the format produced by write, with several calls in one answer",
    after=("never-raises",),
)
def reads_what_it_writes(subject: Subject, calls: list[Call]) -> None:
    """Calls that it writes are parsed back as the same calls."""
    parser: Any = subject.make()
    text = subject.call(parser.write, [(call.name, call.arguments) for call in calls])
    if (found := _parsed(subject, parser, text)) != calls:
        raise Violated("value", f"{calls} of {text!r}", f"{found}")


@holds(
    "never-raises",
    "tool_parser",
    remedy="return Malformed(reason) for calls that cannot be parsed: the policy sees it, and the rollout continues",
)
def never_raises(subject: Subject, _: Any) -> None:
    """Hostile answers and calls truncated anywhere are parsed without an exception."""
    parser: Any = subject.make()
    written = subject.call(parser.write, [(call.name, call.arguments) for call in _SEVERAL])
    for text in (*_HOSTILE, *(written[:end] for end in range(len(written)))):
        _parsed(subject, parser, text)


@holds(
    "prose-is-no-call",
    "tool_parser",
    remedy="return [] if nothing starts a call: that is the final answer",
    after=("never-raises",),
)
def prose_is_no_call(subject: Subject, _: Any) -> None:
    """An answer in prose contains no calls."""
    parser: Any = subject.make()
    if found := _parsed(subject, parser, "I added them: the sum of 1 and 2 is 3."):
        raise Violated("value", "no calls in an answer in prose", f"{found}")
