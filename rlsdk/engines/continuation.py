"""A running continuation: its tokens so far, the weights that sampled them, and the stop strings that end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from rlsdk.contracts import Completion, Finish, Request, Sampled, TopTokens


class StopStrings:
    """Watch one continuation for stop strings."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        """Watch for the given stop strings.

        Args:
            tokenizer: The model's tokenizer.
            stops: Stop strings; one may lie within a token or span several.
        """
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._reach = max(map(len, stops)) - 1
        self._tail = ""
        self._ids: list[int] = []
        self._text = 0
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            from tokenizers.decoders import DecodeStream

            # Special tokens are read too: `</answer>` may be one.
            self._stream = DecodeStream(skip_special_tokens=False)

    @classmethod
    def of(cls, request: Request, tokenizer: Any) -> StopStrings | None:
        """Build the watcher of a request, fed with any answer already begun; None if it has no stop strings."""
        sampling = request.sampling
        if not sampling.stop or sampling.ignore_eos:
            return None
        watch = cls(tokenizer, sampling.stop)
        for token in request.prompt_ids[len(request.prompt_ids) - request.begun :].tolist():
            watch.feed(token)
        return watch

    def feed(self, token: int) -> bool:
        """Append a token; return True if the text now contains a stop string."""
        window = self._tail + self._decode(token)
        self._tail = window[max(0, len(window) - self._reach) :]
        return any(stop in window for stop in self._stops)

    def _decode(self, token: int) -> str:
        """Return the text that this token adds; empty if it is only part of a character."""
        if self._backend is not None:
            return self._stream.step(self._backend, token) or ""
        self._ids.append(token)
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        if text.endswith("\ufffd"):
            return ""
        new, self._text = text[self._text :], len(text)
        return new


@attrs.define(eq=False)
class Continuation:
    """A running continuation: its sampled tokens and the weight versions that produced them.

    Attributes:
        request: Request id.
        index: Index among the request's continuations.
        token_ids: Tokens sampled so far.
        logprobs: Logprobs of these tokens.
        spans: Pairs (first token, weight version used from that token on).
        stops: Stop-string watcher, if there are stop strings.
        likeliest: Number of top tokens to record for each sampled token.
        top: The recorded top tokens, as (ids, logprobs).
        routing: Experts of successive tokens, arrays `[tokens, layers, k]`, starting with the prompt's first token.
        prompt: Number of prompt tokens.
    """

    request: str
    index: int
    stops: StopStrings | None = None
    likeliest: int = 0
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    spans: list[tuple[int, int]] = attrs.field(factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = attrs.field(factory=list)
    routing: list[np.ndarray] = attrs.field(factory=list)
    prompt: int = 0

    @classmethod
    def of(cls, request: Request, index: int, tokenizer: Any) -> Continuation:
        """Create a continuation with no tokens sampled yet."""
        stops = StopStrings.of(request, tokenizer)
        return cls(request.id, index, stops, request.sampling.top_logprobs, prompt=len(request.prompt_ids))

    def stamp(self, version: int) -> None:
        """Record that the following tokens are sampled by weights of this version."""
        if not self.spans or self.spans[-1][1] != version:
            self.spans.append((len(self.token_ids), version))

    def record(
        self, tokens: Sequence[int], logprobs: Sequence[float], top: Sequence[tuple[np.ndarray, np.ndarray]] = ()
    ) -> bool:
        """Append sampled tokens; return whether a stop string ends them (tokens after the stop string are dropped)."""
        kept = len(tokens)
        stopped = False
        if self.stops is not None:
            for position, token in enumerate(tokens):
                if self.stops.feed(token):
                    kept, stopped = position + 1, True
                    break
        self.token_ids += tokens[:kept]
        self.logprobs += logprobs[:kept]
        self.top += top[:kept]
        return stopped

    def complete(self, finish: Finish) -> Completion:
        """Return the finished completion."""
        experts = None
        if self.routing:
            read = self.prompt + len(self.token_ids) - 1  # the last token is not read, so it chooses no experts
            reported = np.concatenate(self.routing)[:read].astype(np.int16)
            experts = np.pad(reported, ((0, read - len(reported)), (0, 0), (0, 0)), constant_values=-1)
        arrays = self._arrays(0)
        return Completion(request=self.request, index=self.index, finish=finish, routed_experts=experts, **arrays)

    def since(self, start: int) -> Sampled:
        """Return the tokens from a position on, of a continuation that is still running."""
        return Sampled(request=self.request, index=self.index, start=start, **self._arrays(start))

    def _arrays(self, start: int) -> dict[str, Any]:
        versions = spread(self.spans, len(self.token_ids))
        return {
            "token_ids": np.asarray(self.token_ids[start:], dtype=np.int64),
            "logprobs": np.asarray(self.logprobs[start:], dtype=np.float32),
            "versions": versions[start:],
            "top": stack_top(self.top[start:]) if self.likeliest else None,
        }


def stack_top(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> TopTokens:
    """Join the most likely tokens of successive positions, each given as (ids, logprobs)."""
    if not rows:
        return TopTokens(np.zeros((0, 0), np.int64), np.zeros((0, 0), np.float32))
    ids, logprobs = zip(*rows, strict=True)
    return TopTokens(np.array(ids, np.int64), np.array(logprobs, np.float32))


def spread(spans: Sequence[tuple[int, int]], count: int) -> np.ndarray:
    """Return the version of each token, int64 `[count]`, from (first token, version) pairs in order."""
    versions = np.empty(count, dtype=np.int64)
    for start, version in spans:
        versions[start:] = version
    return versions


def unsampled(request: str = "", index: int = 0) -> Completion:
    """Return the completion of a continuation that was aborted before its first token."""
    none, logprobs = np.zeros(0, np.int64), np.zeros(0, np.float32)
    return Completion(request=request, index=index, token_ids=none, logprobs=logprobs, versions=none, finish="abort")
