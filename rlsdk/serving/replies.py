"""Replies in OpenAI's format: bodies, stream chunks, logprobs, usage, and model lists."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlsdk.contracts import TopTokens
from rlsdk.rollout.codec import ChatTokenizer

LEAST_LOGPROB = -9999.0
"""OpenAI's logprob of an impossible token, since JSON has no infinity."""


@attrs.frozen(kw_only=True)
class HttpReply:
    """Reply to a request.

    Attributes:
        body: JSON body; empty for a stream.
        events: A stream's chunks. The first is awaited before anything is sent, so that errors get their own status.
        text: Plain text instead of JSON.
        headers: Additional headers.
    """

    body: Mapping[str, Any] = attrs.field(factory=dict)
    events: AsyncGenerator[Mapping[str, Any], None] | None = None
    text: str = ""
    headers: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class AnswerHead:
    """Fields shared by all parts of one answer.

    Attributes:
        id: Id of the answer.
        model: Name of the model.
        fingerprint: Name of the weights, such as `step-40`.
        created: Seconds since 1970.
    """

    id: str
    model: str
    fingerprint: str | None = None
    created: int = attrs.field(factory=lambda: int(time.time()))

    def write(self, kind: str, choices: Sequence[Any], usage: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Write a body or a chunk.

        Args:
            kind: `chat.completion`, `chat.completion.chunk` or `text_completion`.
            choices: Choices of the answer.
            usage: Numbers of tokens.
        """
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        known = {} if self.fingerprint is None else {"system_fingerprint": self.fingerprint}
        return {**head, **known, "choices": list(choices), **({} if usage is None else {"usage": dict(usage)})}


@attrs.frozen(eq=False)
class TokenLogprobs:
    """Sampled tokens with their logprobs, and the likeliest alternatives."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    top: TopTokens | None = None


def chat_logprobs(codec: ChatTokenizer, tokens: TokenLogprobs) -> dict[str, Any]:
    """Write logprobs in the format of chat completions."""
    content = []
    for i, (token, logprob) in enumerate(zip(tokens.token_ids, tokens.logprobs, strict=True)):
        top = [] if tokens.top is None else list(zip(tokens.top.ids[i], tokens.top.logprobs[i], strict=True))
        others = [_token(codec, each, value) for each, value in top]
        content.append({**_token(codec, token, logprob), "top_logprobs": others})
    return {"content": content, "refusal": None}


def _token(codec: ChatTokenizer, token: int, logprob: float) -> dict[str, Any]:
    text = codec.shown(np.array([token]))
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def text_logprobs(codec: ChatTokenizer, tokens: TokenLogprobs, offset: int = 0) -> dict[str, Any]:
    """Write logprobs in the format of completions.

    Args:
        codec: Tokenizer of the model.
        tokens: The tokens.
        offset: Characters of the answer before them.
    """
    texts = [codec.shown(tokens.token_ids[i : i + 1]) for i in range(len(tokens.token_ids))]
    lengths = [0, *(len(text) for text in texts[:-1])] if texts else []
    top = None
    if tokens.top is not None:
        rows = zip(tokens.top.ids, tokens.top.logprobs, strict=True)
        top = [
            {codec.shown(np.array([token])): _finite(value) for token, value in zip(*row, strict=True)} for row in rows
        ]
    return {
        "tokens": texts,
        "token_logprobs": [_finite(value) for value in tokens.logprobs],
        "top_logprobs": top,
        "text_offset": (offset + np.cumsum(lengths, dtype=np.int64)).tolist(),
    }


def _finite(logprob: float) -> float:
    return max(float(logprob), LEAST_LOGPROB) if not math.isnan(logprob) else LEAST_LOGPROB


def tokens_used(prompt: int, sampled: int) -> dict[str, int]:
    """Count tokens as OpenAI does."""
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def models(names: Sequence[str], **facts: Any) -> HttpReply:
    """Answer `/models`; `facts` are added to each model."""
    listed = [{"id": name, "object": "model", "created": 0, "owned_by": "rlsdk", **facts} for name in names]
    return HttpReply(body={"object": "list", "data": listed})
