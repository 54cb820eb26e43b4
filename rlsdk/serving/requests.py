"""Convert a request in OpenAI's format to a conversation with the policy, and its answer to a reply."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import attrs
import numpy as np

from rlsdk.contracts import Completion
from rlsdk.engines.client import Watch
from rlsdk.errors import ConfigError, ValueFault
from rlsdk.messages import QUICK_CHARACTERS
from rlsdk.rollout.chat import RolloutContext
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.serving.messages import (
    AnswerHead,
    APIError,
    ChatMessage,
    ChatToolCall,
    TokenLogprobs,
    chat_logprobs,
    tokens_used,
)
from rlsdk.serving.streaming import LiveChatAnswer, sampled_live, without_prefill
from rlsdk.serving.wire import ChatCompletionRequest
from rlsdk.tool_calls import Call, Dialect, Malformed, call_id
from rlsdk.types import Message

MODEL = "policy"
"""Default model name for clients; any other is also accepted."""
MESSAGE_CHARACTERS = 100
"""Cost of one more message in the template, in characters."""
_CHUNK = "chat.completion.chunk"


def expect_readable(asked: ChatCompletionRequest, context: RolloutContext) -> None:
    """Reject a conversation that the model cannot read, before it is tokenised.

    Raises:
        APIError: It has more characters than fit into the model's length, or images that the model cannot read.
    """
    if any(message.images for message in asked.messages):
        vision = context.codec.vision
        if vision is None or not vision.usable or not context.codec.renderer.usable:
            raise APIError(f"messages: {context.codec.name!r} reads no images", param="messages")
    if asked.characters > context.max_length * context.codec.longest:
        fault = f"messages of {asked.characters} characters cannot fit in model.max_length={context.max_length} tokens"
        raise full(ValueFault(fault))


Turn = tuple[Any, ...]
"""Keys of a message and of the answer to it."""
NO_TURNS: Mapping[Turn, str] = {}


@attrs.frozen(eq=False)
class Opening:
    """Beginning of a conversation, before its first answer; nothing in it was sampled.

    Attributes:
        messages: Messages as shown to the policy.
        token_ids: int64 `[p]`.
        plain: The conversation is text, without a template.
        tools: Schemas that the chat template shows.
        images: Additional fields of an engine request, if messages have images.
    """

    messages: tuple[Message, ...]
    token_ids: np.ndarray
    plain: bool
    tools: tuple[Mapping[str, Any], ...]
    images: Mapping[str, Any]


async def opening(
    asked: ChatCompletionRequest, codec: ChatTokenizer, dialect: Dialect, written: Mapping[Turn, str] = NO_TURNS
) -> Opening:
    """Tokenise the conversation of a request.

    In a conversation that does not continue the recorded tokens, `written` has the policy's earlier turns with their
    thoughts: they still count as the policy's. Other assistant messages are the agent's, such as few-shot answers.

    Raises:
        APIError: The chat template rejects it.
    """
    # A long history is tokenised in a thread, since other rollouts share the event loop.
    if asked.characters + MESSAGE_CHARACTERS * len(asked.messages) > QUICK_CHARACTERS:
        return await asyncio.to_thread(_opening, asked, codec, dialect, dict(written))
    return _opening(asked, codec, dialect, written)


def _opening(
    asked: ChatCompletionRequest, codec: ChatTokenizer, dialect: Dialect, written: Mapping[Turn, str]
) -> Opening:
    plain = not codec.renderer.usable
    conversation = [_shown(asked.as_message(message), codec, dialect) for message in asked.messages]
    for i, (before, message) in enumerate(itertools.pairwise(asked.messages), 1):
        if message.role == "assistant":
            turn = before.key, message.key
            thought = conversation[i].reasoning or written.get(turn, "")
            conversation[i] = attrs.evolve(conversation[i], prompt=turn not in written, reasoning=thought)
    try:
        offered = asked.tools if asked.calling and not plain and codec.renderer.shows_tools(asked.tools) else ()
        if asked.calling and not offered:
            introduction = dialect.introduce(asked.tools)
            if conversation[0].role == "system":
                introduction = f"{conversation.pop(0).text}\n{introduction}"
            conversation.insert(0, Message("system", introduction))
        # Messages are data, whether written by an agent, a tool or a web page. A prefill is the agent's own request, as
        # in `chat.sample`, and may contain control tokens such as `<think>`.
        kept = len(conversation) - bool(asked.prefill)
        messages = (*map(codec.message_as_data, conversation[:kept]), *conversation[kept:])
        ids = codec.prompt_tokens(messages, plain=plain, tools=offered)
    except ConfigError as error:
        raise APIError("; ".join(error.faults), param="messages") from error
    images: dict[str, Any] = {}
    if (token := codec.image_token(messages)) is not None:
        seen = tuple(image for message in messages for image in message.images)
        images = {"images": seen, "image_positions": np.flatnonzero(ids == token)}
    return Opening(messages, ids, plain, tuple(offered), images)


@attrs.frozen(eq=False)
class ChatAnswer:
    """An answer to a request of `/chat/completions`.

    Attributes:
        message: Message for the client, with parsed tool calls and without the stop string.
        completion: The sampled completion.
        prompt: Number of tokens before it.
    """

    message: ChatMessage
    completion: Completion
    prompt: int

    @property
    def finish(self) -> str:
        """OpenAI's finish reason."""
        return "tool_calls" if self.message.calls else "stop" if self.completion.finish == "stop" else "length"


Start = Callable[[Watch | None], Awaitable[ChatAnswer]]
"""Function that starts an answer; its tokens are passed to the watch, if any."""
T = TypeVar("T")


async def all_answers(starts: Iterable[Callable[[None], Awaitable[T]]]) -> list[T]:
    """Start all answers and wait for them; if one fails or the client disconnects, cancel the others."""
    tasks = [asyncio.ensure_future(start(None)) for start in starts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@attrs.frozen(kw_only=True)
class ChatReplies:
    """Writer of the answers to one request of `/chat/completions`."""

    asked: ChatCompletionRequest
    head: AnswerHead
    codec: ChatTokenizer
    dialect: Dialect

    async def whole(self, starts: Sequence[Start]) -> dict[str, Any]:
        """Wait for all answers and write them as one body."""
        answers = await all_answers(starts)
        choices = [self._choice(i, answer) for i, answer in enumerate(answers)]
        return self.head.write("chat.completion", choices, _usage(answers))

    async def streamed(self, starts: Sequence[Start]) -> AsyncGenerator[dict[str, Any], None]:
        """Write answers in chunks while they are sampled."""
        dialect = self.dialect if self.asked.calling else None
        live = [LiveChatAnswer(self.codec, self.asked, dialect) for _ in starts]
        done: list[ChatAnswer] = []
        begun: set[int] = set()
        async with aclosing(sampled_live(starts)) as events:
            async for i, sampled, answer in events:
                if sampled is not None:
                    live[i].feed(sampled)
                if i not in begun:
                    begun.add(i)
                    yield self._chunk(i, {"role": "assistant", "content": ""})
                if answer is None:
                    if delta := live[i].take_delta():
                        yield self._chunk(i, delta, tokens=live[i].take_tokens())
                    continue
                done.append(answer)
                for chunk in self._last(i, live[i], answer):
                    yield chunk
        if self.asked.stream_usage:
            yield self.head.write(_CHUNK, [], _usage(done))

    def _last(self, i: int, live: LiveChatAnswer, answer: ChatAnswer) -> Iterator[dict[str, Any]]:
        delta = live.take_rest_of(answer.message, answer.completion.token_ids)
        tokens = live.take_tokens(answer.completion)
        if delta or (len(tokens.token_ids) and self.asked.top_logprobs is not None):
            yield self._chunk(i, delta or {"content": ""}, tokens=tokens)
        for position, call in enumerate(answer.message.calls):
            yield self._chunk(i, {"tool_calls": [{"index": position, **call.as_openai()}]})
        last = self._chunk(i, {}, finish=answer.finish)
        if self.asked.return_token_ids:
            last["choices"][0] |= _ids(answer.completion)
        yield last

    def _choice(self, i: int, answer: ChatAnswer) -> dict[str, Any]:
        calls = [call.as_openai() for call in answer.message.calls]
        message = {
            "role": "assistant",
            "content": answer.message.content if answer.message.content or not calls else None,
            "refusal": None,
            **({"reasoning_content": answer.message.reasoning} if answer.message.reasoning else {}),
            **({"tool_calls": calls} if calls else {}),
        }
        done = answer.completion
        logprobs = self._logprobs(TokenLogprobs(done.token_ids, done.logprobs, done.top))
        more = _ids(done) if self.asked.return_token_ids else {}
        return {"index": i, "message": message, "logprobs": logprobs, "finish_reason": answer.finish, **more}

    def _chunk(
        self, i: int, delta: Mapping[str, Any], *, finish: str | None = None, tokens: TokenLogprobs | None = None
    ) -> dict[str, Any]:
        logprobs = None if tokens is None else self._logprobs(tokens)
        return self.head.write(
            _CHUNK, [{"index": i, "delta": dict(delta), "logprobs": logprobs, "finish_reason": finish}]
        )

    def _logprobs(self, tokens: TokenLogprobs) -> dict[str, Any] | None:
        return None if self.asked.top_logprobs is None else chat_logprobs(self.codec, tokens)


def _usage(answers: Sequence[ChatAnswer]) -> dict[str, int]:
    """Count the tokens of all answers; their shared prompt counts once."""
    return tokens_used(answers[0].prompt, sum(len(answer.completion.token_ids) for answer in answers))


def _ids(done: Completion) -> dict[str, Any]:
    return {"token_ids": done.token_ids.tolist(), "versions": done.versions.tolist()}


def answered(
    token_ids: np.ndarray, asked: ChatCompletionRequest, codec: ChatTokenizer, dialect: Dialect, *, continued: bool
) -> ChatMessage:
    """Convert the policy's tokens to the client's message; `continued`: the prefill is a message of the prompt."""
    read = partial(codec.renderer.parse, token_ids, prefill=asked.prefill, continued=continued)
    parsed = read(parser=dialect if asked.calling else None)
    number = sum(message.role == "assistant" for message in asked.messages) + (not asked.prefill)
    calls: list[ChatToolCall] = []
    for i, call in enumerate(parsed.calls):
        named = None if isinstance(call, Malformed) else _arguments(call, asked)
        if isinstance(call, Malformed) or named is None:
            parsed, calls = read(), []  # the agent sees text that cannot be parsed as a call
            break
        calls.append(ChatToolCall(call_id(number, i), call.name, json.dumps(named, ensure_ascii=False)))
    content, thought = without_prefill(parsed, asked, codec)
    return ChatMessage(
        "assistant", until_stop(content, asked.stop), tuple(calls), reasoning=until_stop(thought, asked.stop)
    )


def until_stop(text: str, stops: Sequence[str]) -> str:
    """Return a text up to its first stop string."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]


def full(error: Exception, param: str = "messages") -> APIError:
    """Return the error for a prompt that leaves no room for an answer, with OpenAI's code."""
    return APIError(str(error), code="context_length_exceeded", param=param)


def _shown(message: Message, codec: ChatTokenizer, dialect: Dialect) -> Message:
    """Return a message as shown in a prompt; calls become text if the renderer cannot write them."""
    if not message.tool_calls or codec.tool_form:
        return message
    written = dialect.write([(call.name, call.arguments) for call in message.tool_calls])
    return attrs.evolve(message, content="\n".join(filter(None, [message.text, written])), tool_calls=())


def _arguments(call: Call, asked: ChatCompletionRequest) -> Mapping[str, Any] | None:
    """Return all arguments by name, as JSON values; None if that is impossible."""
    schemas = (tool["function"] for tool in asked.tools)
    schema: Mapping[str, Any] = next((each for each in schemas if each["name"] == call.name), {})
    parameters = schema.get("parameters")
    parameters = parameters if isinstance(parameters, Mapping) else {}
    call = call.as_wanted(parameters)
    if not call.positional:
        return dict(call.arguments)
    names = list(parameters.get("properties") or {})
    placed = dict(zip(names, call.positional, strict=False))
    if len(call.positional) > len(names) or placed.keys() & call.arguments.keys():
        return None
    return {**placed, **call.arguments}
