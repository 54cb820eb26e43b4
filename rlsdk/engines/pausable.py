"""A client that interrupts running requests for a weight sync or a pause, and resumes them afterwards.

A conversation only notices that its answer took longer, since the answer keeps the tokens sampled before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import attrs
import numpy as np

from rlsdk.contracts import Completion, Finish, Sampled, Sampling, TopTokens
from rlsdk.engines.client import Answer, GenerateRequest, Sampler, Watch
from rlsdk.engines.continuation import unsampled
from rlsdk.seeds import derive
from rlsdk.types import Rollout

log = logging.getLogger(__name__)
AGAIN = 2.0
"""Seconds after which requests that still run are aborted again, since an abort may overtake its request."""
PATIENCE = 60.0
"""Maximum seconds that a weight sync waits for running requests to end."""


class PausableEngines(Sampler, Protocol):
    """Interface of the engines that a `PausableClient` wraps, such as `engines.client.EngineClient`."""

    def abort(self) -> None:
        """End all running requests."""
        ...


class PausableClient:
    """Client that can pause all sampling and resume interrupted answers.

    Attributes:
        engines: The wrapped engine client.
        resumed: Number of answers resumed from their partial tokens.
        dropped: Number of sampled tokens discarded because their answers were restarted.
    """

    def __init__(
        self,
        engines: PausableEngines,
        decode: Callable[[Sequence[np.ndarray]], list[str]],
        *,
        partial: bool = True,
        ends: Collection[int] = (),
    ) -> None:
        """Create a client that is not paused.

        Args:
            engines: Engine client to wrap.
            decode: Function that decodes token sequences into texts.
            partial: Keep the partial tokens of an interrupted answer; if false, the answer restarts from its prompt.
            ends: End-of-text tokens that apply to every request.
        """
        self.engines, self._decode, self._partial, self._ends = engines, decode, partial, frozenset(ends)
        self._through, self._idle = asyncio.Event(), asyncio.Event()
        self._through.set()
        self._idle.set()
        self._asked = self._holders = 0
        self._interrupted = False
        self.resumed = self.dropped = 0

    async def sample(self, request: GenerateRequest, *, begun: Completion | None = None) -> Answer:
        """Sample one continuation of a prompt, resuming it after pauses and engine failures.

        Resumed parts use derived seeds, so that no random number is used twice. If an interrupted answer restarts,
        `watch` is not called, since the tokens that it has already received would not be part of the answer.

        Args:
            request: Request to sample.
            begun: Existing part of the answer; the prompt does not contain it.

        Returns:
            The answer; its finish reason is `abort` only while the client is `interrupted`.
        """
        last = begun
        kept = begun if self._partial else None
        if not self._partial:
            request = attrs.evolve(request, watch=None)
        while True:
            finish = None if kept is None else self._finish(kept, request.sampling)
            if kept is not None and finish is not None:
                return self._answer(attrs.evolve(kept, finish=finish), None)
            await self._through.wait()
            if self._interrupted:
                return self._answer(unsampled() if kept is None else attrs.evolve(kept, finish="abort"), None)
            asked = request
            if request.seed is not None and last is not None:
                # The same seed would repeat the random numbers of the first part.
                asked = attrs.evolve(request, seed=derive(request.seed, last.request, last.index))
            answer = await self._ask(asked, kept)
            done = answer.completion if kept is None else joined(kept, answer.completion)
            if done.finish != "abort" or self._interrupted:
                return answer if kept is None else self._answer(done, answer.engine)
            last = answer.completion
            kept = done if self._partial and len(done.token_ids) else None
            if kept is None:
                self.dropped += len(done.token_ids)

    @asynccontextmanager
    async def held(self, *, again: float = AGAIN, patience: float = PATIENCE) -> AsyncIterator[None]:
        """Pause sampling and abort running requests; they resume by themselves after the block. Blocks may overlap.

        Args:
            again: Seconds between repeated aborts of requests that still run.
            patience: Total seconds to wait; the block then starts anyway, and requests still running continue.
        """
        self._holders += 1
        self._through.clear()
        try:
            loop = asyncio.get_running_loop()
            # An abort may reach an engine before its request, so it is repeated at growing intervals.
            until, wait = loop.time() + patience, min(again, 0.05)
            while self._asked and (left := until - loop.time()) > 0:
                self.engines.abort()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._idle.wait(), min(wait, left))
                wait = min(2 * wait, again)
            if self._asked:
                log.warning(
                    "%d requests did not end within %g s: they continue with the new weights", self._asked, patience
                )
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._through.set()

    def interrupt(self) -> None:
        """Abort running and new requests; they are answered immediately with partial tokens and reason `abort`."""
        self._interrupted = True
        self._through.set()
        self.engines.abort()

    def release(self) -> None:
        """Let requests through again after `interrupt`, unless a block of `held` still pauses them."""
        self._interrupted = False
        if self._holders:
            self._through.clear()

    def after(self, rollout: Rollout, member: int) -> PartialRolloutClient:
        """Return a client whose first answer starts with the tokens of an aborted rollout."""
        return PartialRolloutClient(self, rollout, member)

    async def _ask(self, request: GenerateRequest, kept: Completion | None) -> Answer:
        if kept is not None:
            watch, sampling, count = request.watch, request.sampling, len(kept.token_ids)
            if watch is not None:  # `watch` may not have received the last tokens of the first part
                names = ("token_ids", "logprobs", "versions", "top")
                watch(Sampled(request="", index=0, start=0, **{name: getattr(kept, name) for name in names}))
            self.resumed += 1
            request = attrs.evolve(
                request,
                prompt=np.concatenate([request.prompt, kept.token_ids]),
                sampling=attrs.evolve(sampling, max_tokens=sampling.max_tokens - count),
                begun=count,
                watch=None if watch is None else _later(watch, count),
            )
        self._asked += 1
        self._idle.clear()
        try:
            return await self.engines.sample(request)
        finally:
            self._asked -= 1
            if not self._asked:
                self._idle.set()

    def _finish(self, kept: Completion, sampling: Sampling) -> Finish | None:
        """Return the finish reason of a partial answer that is already complete; None if it is not."""
        if not sampling.ignore_eos:
            if int(kept.token_ids[-1]) in self._ends or int(kept.token_ids[-1]) in sampling.stop_token_ids:
                return "stop"
            if sampling.stop and any(stop in self._decode([kept.token_ids])[0] for stop in sampling.stop):
                return "stop"
        return "length" if len(kept.token_ids) >= sampling.max_tokens else None

    def _answer(self, completion: Completion, engine: int | None) -> Answer:
        return Answer(completion, self._decode([completion.token_ids])[0], engine)


class PartialRolloutClient:
    """Client for one conversation whose first answer already exists in part; later answers are sampled as usual."""

    def __init__(self, client: PausableClient, rollout: Rollout, member: int) -> None:
        """Create a client for one rollout."""
        self._client, self._images = client, rollout.images
        self._begun = beginning(rollout, member)

    async def sample(self, request: GenerateRequest) -> Answer:
        """Sample like `PausableClient.sample`, starting the first answer with the partial rollout's tokens."""
        begun, self._begun = self._begun, None
        fits = begun is not None and np.array_equal(begun[0], request.prompt) and self._images == request.images
        return await self._client.sample(request, begun=begun[1] if begun is not None and fits else None)


def beginning(rollout: Rollout, member: int = 0) -> tuple[np.ndarray, Completion] | None:
    """Return a rollout's prompt and its sampled tokens; None unless these are a single answer at its end.

    Multi-turn rollouts are not resumed, since the state of tools and environments would have to be restored.
    """
    start, end = rollout.span
    if start == end or end < len(rollout.token_ids) or not rollout.loss_mask[start:].all():
        return None
    return rollout.token_ids[:start], Completion(
        request=f"before/{rollout.task.id}",
        index=member,
        token_ids=rollout.token_ids[start:],
        logprobs=rollout.logprobs[start:],
        versions=rollout.policy_versions[start:],
        finish="abort",
        routed_experts=None if rollout.routed_experts is None else rollout.routed_experts[:-1],
    )


def joined(begun: Completion, more: Completion) -> Completion:
    """Concatenate two parts of an answer. Tokens keep logprobs and versions; the finish reason is the second part's."""
    fields = ("token_ids", "logprobs", "versions")
    parts: dict[str, Any] = {name: np.concatenate([getattr(begun, name), getattr(more, name)]) for name in fields}
    if begun.top is not None and more.top is not None and len(begun.token_ids) and len(more.token_ids):
        ids, logprobs = (np.concatenate([getattr(each.top, n) for each in (begun, more)]) for n in ("ids", "logprobs"))
        parts["top"] = TopTokens(ids, logprobs)
    elif len(begun.token_ids):
        parts["top"] = begun.top if not len(more.token_ids) else None
    if more.routed_experts is None:
        parts["routed_experts"] = begun.routed_experts if not len(more.token_ids) else None
    elif len(begun.token_ids):
        # Tokens of the first part keep the routed experts from when they were sampled.
        routing = more.routed_experts.copy()
        routing[: len(routing) - len(more.token_ids)] = -1 if begun.routed_experts is None else begun.routed_experts
        parts["routed_experts"] = routing
    return attrs.evolve(more, **parts)


def _later(watch: Watch, count: int) -> Watch:
    """Return a watch that shifts token positions by `count`."""

    def shifted(sampled: Sampled) -> None:
        watch(attrs.evolve(sampled, start=sampled.start + count))

    return shifted
