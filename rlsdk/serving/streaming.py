"""Answers while they are sampled: the text that can be sent already, and the tokens that belong to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from rlsdk.contracts import Completion, Sampled
from rlsdk.engines.client import Watch
from rlsdk.engines.common import stack_top
from rlsdk.errors import EngineError
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.serving.replies import TokenLogprobs
from rlsdk.tool_calls import IN_TAGS, Dialect

T = TypeVar("T")
_CALL = "<tool_call>"
_HALF = "\ufffd"


async def sampled_live(
    starts: Sequence[Callable[[Watch], Awaitable[T]]],
) -> AsyncGenerator[tuple[int, Sampled | None, T | None], None]:
    """Run what makes answers, and yield their tokens while they are sampled, then each answer.

    Leaving the iteration cancels what still runs.

    Args:
        starts: Each begins one answer and has its tokens shown to the watch that it is given.

    Yields:
        (which answer, new tokens, None), or (which answer, None, the answer).
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
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else will look at it


class LiveAnswer:
    """One answer of a stream.

    Text is held back while it may be half a character, the beginning of a stop string, or a call of a tool.
    """

    def __init__(
        self, codec: ChatTokenizer, stops: Sequence[str] = (), dialect: Dialect | None = None, prefill: str = ""
    ) -> None:
        """Begin an answer.

        Args:
            codec: Tokenizer of the model.
            stops: Texts that end the answer and are not part of it.
            dialect: Parser of tool calls; None where no tools are offered.
            prefill: Text before the answer, in which a call may have begun.
        """
        self._codec, self._stops, self._dialect, self._prefill = codec, tuple(stops), dialect, prefill
        self._tokens: list[tuple[int, float, int]] = []
        self._top: list[tuple[np.ndarray, np.ndarray]] = []
        self._text, self._decoder = "", codec.decoder()
        self._reported = 0
        self.sent = ""

    def feed(self, sampled: Sampled) -> None:
        """Take tokens; those from their start on replace what was there, as after the death of an engine."""
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
        """Return the text that can be sent now and was not sent before."""
        text = self._text.rstrip(_HALF)
        text = text[: _stop_begins(text, self._stops)]
        if self._dialect is not None:
            begins = _call_begins(self._prefill + text) - len(self._prefill)
            text = text[: max(begins, 0)] if self._dialect.parse in IN_TAGS else ""
            text = text.rstrip()  # what stands before a call is told without the white space between
        new = text[len(self.sent) :]
        self.sent += new
        return new

    def take_rest(self, content: str) -> str:
        """Return what is missing of the whole content.

        Raises:
            EngineError: Something else was sent before.
        """
        if not content.startswith(self.sent):
            raise EngineError(
                "the answer was sampled again, since its engine died or the connection to it was lost, and is not the "
                "one of which a part was sent; ask again"
            )
        rest, self.sent = content[len(self.sent) :], content
        return rest

    def take_tokens(self, whole: Completion | None = None) -> TokenLogprobs:
        """Return the tokens that were not reported before: those that came, or those of the whole answer."""
        start = self._reported
        if whole is not None:
            top = whole.top and stack_top(list(zip(whole.top.ids, whole.top.logprobs, strict=True))[start:])
            return TokenLogprobs(whole.token_ids[start:], whole.logprobs[start:], top)
        self._reported = len(self._tokens)
        ids, logprobs = (np.array([token[i] for token in self._tokens[start:]]) for i in (0, 1))
        return TokenLogprobs(ids.astype(np.int64), logprobs, stack_top(self._top[start:]) if self._top else None)

    def cut(self) -> Completion | None:
        """Return what was sampled until now as a truncated answer; None if that is nothing."""
        if not self._tokens:
            return None
        ids, logprobs, versions = (np.array(column) for column in zip(*self._tokens, strict=True))
        arrays: dict[str, Any] = {"token_ids": ids, "logprobs": logprobs.astype(np.float32), "versions": versions}
        return Completion(request="cut", index=0, finish="length", **arrays)


def _stop_begins(text: str, stops: Sequence[str]) -> int:
    """Position where a stop string is, or may begin; the end of the text if nowhere."""
    found = len(text)
    for stop in stops:
        at = text.find(stop)
        if at < 0:
            longest = range(min(len(stop) - 1, len(text)), 0, -1)
            at = len(text) - next((n for n in longest if text.endswith(stop[:n])), 0)
        found = min(found, at)
    return found


def _call_begins(text: str) -> int:
    """Position where a call in `<tool_call>` is, or may begin, after the model's thoughts."""
    return _stop_begins(text[(start := max(text.rfind("</think>"), 0)) :], [_CALL]) + start
