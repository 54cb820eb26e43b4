"""An engine that takes the time of a real one and computes nothing."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Any

import numpy as np

from rlsdk.contracts import Completion, Sampling
from rlsdk.rollout.client import Answer
from rlsdk.rollout.codec import Codec


class SimulatedEngine:
    """Samples so many tokens a second, shared evenly among the requests that it has, as continuous batching does."""

    def __init__(self, codec: Codec, rate: float, tokens: int) -> None:
        """Make one.

        Args:
            codec: Of the tokens.
            rate: Tokens a second.
            tokens: Of one answer.
        """
        self._rate, self._tokens = rate, tokens
        self._ids = np.resize(codec.encode("1234567890"), tokens)
        self._text = codec.decode([self._ids])[0]
        self._active: list[tuple[float, int, asyncio.Future[Answer]]] = []
        self._order = itertools.count()
        self._clock = self._then = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.sampled = 0

    def sample(
        self,
        group: str,
        prompt: np.ndarray,
        sampling: Sampling,
        *,
        seed: int | None = None,
        affinity: int | None = None,
    ) -> asyncio.Future[Answer]:
        loop = asyncio.get_running_loop()
        self._advance(loop.time())
        future: asyncio.Future[Any] = loop.create_future()
        heapq.heappush(self._active, (self._clock + self._tokens, next(self._order), future))
        self._schedule()
        return future

    def _advance(self, now: float) -> None:
        """`_clock` counts the tokens that a request would have which had been there all the time."""
        if self._active:
            self._clock += (now - self._then) * self._rate / len(self._active)
        self._then = now

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._active:
            left = (self._active[0][0] - self._clock) * len(self._active) / self._rate
            self._timer = asyncio.get_running_loop().call_later(max(left, 0.0), self._finish)

    def _finish(self) -> None:
        self._advance(asyncio.get_running_loop().time())
        while self._active and self._active[0][0] <= self._clock + 1e-6:
            _, _, future = heapq.heappop(self._active)
            self.sampled += self._tokens
            if not future.done():
                future.set_result(Answer(self._completion(), self._text, engine=0))
        self._schedule()

    def _completion(self) -> Completion:
        count = self._tokens
        return Completion(
            request="",
            index=0,
            token_ids=self._ids,
            logprobs=np.full(count, -0.5, np.float32),
            versions=np.zeros(count, np.int64),
            finish="stop",
        )
