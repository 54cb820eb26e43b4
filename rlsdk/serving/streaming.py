"""Stream answers while they are sampled: the text that can be sent, and its tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from rlsdk.contracts import Completion, ParsedAnswer, Sampled
from rlsdk.engines.client import Watch
from rlsdk.engines.continuation import stack_top
from rlsdk.errors import EngineError
from rlsdk.rollout.codec import NOTHING, ChatTokenizer
from rlsdk.serving.messages import ChatMessage, TokenLogprobs
from rlsdk.serving.wire import ChatCompletionRequest
from rlsdk.tool_calls import ToolParser, before_mark

T = TypeVar("T")
_HALF = "\ufffd"


async def sampled_live(
    starts: Sequence[Callable[[Watch], Awaitable[T]]],
) -> AsyncGenerator[tuple[int, Sampled | None, T | None], None]:
    """Sample answers concurrently; yield tokens as they are sampled, and each answer when it is complete.

    Leaving the iteration cancels the remaining answers.

    Args:
        starts: Coroutine functions that sample one answer each, and report its tokens to the given watch.

    Yields:
        (index of the answer, new tokens, None), or (index of the answer, None, the answer).
    """
    queue: asyncio.Queue[tuple[int, Sampled | None]] = asyncio.Queue()

    def begin(i: int, start: Callable[[Watch], Awaitable[T]]) -> asyncio.Future[T]:
        task = asyncio.ensure_future(start(lambda sampled: queue.put_nowait((i, sampled))))
        task.add_done_callback(lambda _: queue.put_nowait((i, None)))
        return task

    running = [begin(i, start) for i, start in enumerate(starts)]
    try:
        left = len(running)
        while left:
            i, sampled = await queue.get()
            if sampled is not None:
                yield i, sampled, None
            else:
                left -= 1
                yield i, None, await running[i]
    finally:
        for task in running:
            task.cancel()
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # marks it as retrieved


class LiveAnswer:
    """Text of one streamed answer.

    Text is held back while it may be an incomplete character or the beginning of a stop string.
    """

    def __init__(self, codec: ChatTokenizer, stops: Sequence[str] = ()) -> None:
        """Create an empty answer."""
        self._codec, self._stops = codec, tuple(stops)
        self._tokens: list[tuple[int, float, int]] = []
        self._top: list[tuple[np.ndarray, np.ndarray]] = []
        self._text, self._decoder = "", codec.decoder()
        self._reported = 0
        self.sent = ""

    def feed(self, sampled: Sampled) -> None:
        """Add tokens; they replace all tokens from their start position, as after the death of an engine."""
        if sampled.start < len(self._tokens):
            del self._tokens[sampled.start :], self._top[sampled.start :]
            self._text, self._decoder = "", self._codec.decoder()
            self._text = "".join(self._decoder(token) for token, *_ in self._tokens)
        columns = sampled.token_ids.tolist(), sampled.logprobs.tolist(), sampled.versions.tolist()
        self._tokens += zip(*columns, strict=True)
        if sampled.top is not None:
            self._top += zip(sampled.top.ids, sampled.top.logprobs, strict=True)
        self._text += "".join(map(self._decoder, columns[0]))

    def take_text(self) -> str:
        """Return the new text that can be sent."""
        text = before_mark(self._text.rstrip(_HALF), self._stops)
        new = text[len(self.sent) :]
        self.sent += new
        return new

    def take_rest(self, content: str) -> str:
        """Return the part of the whole content that was not sent.

        Raises:
            EngineError: The text that was sent is not the beginning of the content.
        """
        rest = _rest(content, self.sent)
        self.sent = content
        return rest

    def take_tokens(self, whole: Completion | None = None) -> TokenLogprobs:
        """Return the tokens that were not reported yet, of the tokens so far or of the whole answer."""
        start = self._reported
        if whole is not None:
            top = whole.top and stack_top(list(zip(whole.top.ids, whole.top.logprobs, strict=True))[start:])
            return TokenLogprobs(whole.token_ids[start:], whole.logprobs[start:], top)
        self._reported = len(self._tokens)
        ids, logprobs = (np.array([token[i] for token in self._tokens[start:]]) for i in (0, 1))
        return TokenLogprobs(ids.astype(np.int64), logprobs, stack_top(self._top[start:]) if self._top else None)

    def cut(self) -> Completion | None:
        """Return the tokens so far as a truncated answer; None if there are none."""
        if not self._tokens:
            return None
        ids, logprobs, versions = (np.array(column) for column in zip(*self._tokens, strict=True))
        arrays: dict[str, Any] = {"token_ids": ids, "logprobs": logprobs.astype(np.float32), "versions": versions}
        return Completion(request="cut", index=0, finish="length", **arrays)


class LiveChatAnswer(LiveAnswer):
    """Thought and content of one streamed chat completion, up to the first tool call."""

    def __init__(self, codec: ChatTokenizer, asked: ChatCompletionRequest, parser: ToolParser | None) -> None:
        """Create an empty answer; without a parser, the request offers no tools."""
        super().__init__(codec, asked.stop)
        self._asked, self._parser = asked, parser
        self._looked_at = NOTHING
        self._thought = ""

    def take_delta(self) -> dict[str, str]:
        """Return the new text that can be sent, by field name."""
        # Each call parses all tokens again, so long answers are sent in longer pieces to bound the total cost.
        if len(self._tokens) - len(self._looked_at) < 1 + len(self._tokens) // 64:
            return {}
        self._looked_at = ids = np.array([token for token, *_ in self._tokens], np.int64)
        parsed = self._codec.renderer.parse(
            ids, prefill=self._asked.prefill, continued=bool(self._asked.prefill), parser=self._parser, done=False
        )
        texts = (text.rstrip(_HALF) for text in without_prefill(parsed, self._asked, self._codec))
        content, thought = (before_mark(text, self._stops) for text in texts)
        if not content.startswith(self.sent) or not thought.startswith(self._thought):
            return {}  # the text already sent is now parsed differently; wait for the whole answer
        return self._delta(content, thought)

    def take_rest_of(self, message: ChatMessage, token_ids: np.ndarray) -> dict[str, str]:
        """Return the part of the whole, parsed answer that was not sent, by field name."""
        fits = message.content.startswith(self.sent) and message.reasoning.startswith(self._thought)
        if not fits and np.array_equal(token_ids[: len(self._looked_at)], self._looked_at):
            # A late mark such as `</think>` splits the answer differently from what was sent. The client gets the rest
            # unsplit.
            text = self._codec.decode([token_ids])[0]
            text = before_mark(text, self._stops) if text.startswith(self.sent) else self.sent
            return self._delta(text, self._thought)
        return self._delta(message.content, message.reasoning)

    def _delta(self, content: str, thought: str) -> dict[str, str]:
        found = {"reasoning_content": _rest(thought, self._thought), "content": _rest(content, self.sent)}
        self.sent, self._thought = content, thought
        return {name: text for name, text in found.items() if text}


def without_prefill(parsed: ParsedAnswer, asked: ChatCompletionRequest, codec: ChatTokenizer) -> tuple[str, str]:
    """Return the content and the thought of an answer without the prefill of its request."""
    if not asked.prefill:
        return parsed.content, parsed.reasoning
    begun = codec.renderer.parse(NOTHING, prefill=asked.prefill, continued=True)
    return _after(begun.content, parsed.content), _after(begun.reasoning, parsed.reasoning)


def _after(begun: str, whole: str) -> str:
    """Return a text without its beginning; white space at the end of a short text may have been cut off."""
    return "" if begun.startswith(whole) else whole.removeprefix(begun)


def _rest(whole: str, sent: str) -> str:
    if not whole.startswith(sent):
        raise EngineError(
            "the engine died or the connection to it was lost, so the answer was sampled again, and it differs from "
            "the part that was already sent. Repeat the request"
        )
    return whole[len(sent) :]
