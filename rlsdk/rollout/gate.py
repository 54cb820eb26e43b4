"""Between conversations and engines: ends what runs when weights change or a run pauses, and has it go on afterwards.

A conversation only sees an answer that took longer: what was sampled before is the beginning of its answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import attrs
import numpy as np

from rlsdk.contracts import Completion, Finish, Sampling
from rlsdk.rollout.client import Answer
from rlsdk.rollout.codec import NOTHING
from rlsdk.rollout.seeds import derive
from rlsdk.types import Rollout

log = logging.getLogger(__name__)
AGAIN = 2.0
"""Seconds after which what still runs is told once more to end: the first word may have come before the request."""
PATIENCE = 60.0
"""Seconds that a change of weights waits for engines to hand over what runs; then it goes on where it is."""


class Engines(Protocol):
    """What a gate stands before, as `rollout.client.EngineClient`."""

    def sample(
        self,
        group: str,
        prompt: np.ndarray,
        sampling: Sampling,
        *,
        seed: int | None = None,
        affinity: int | None = None,
        begun: int = 0,
    ) -> Awaitable[Answer]:
        """One continuation of a prompt, whose last `begun` tokens are the beginning of the answer."""
        ...

    def abort(self) -> None:
        """End all that runs."""
        ...


class Gate:
    """Lets requests through to the engines.

    Attributes:
        engines: What sends requests to engines.
        resumed: Answers that went on from what had been sampled of them.
        dropped: Tokens that were sampled and thrown away, since their answers began anew.
    """

    def __init__(
        self,
        engines: Engines,
        decode: Callable[[Sequence[np.ndarray]], list[str]],
        *,
        partial: bool = True,
        ends: Collection[int] = (),
    ) -> None:
        """Make one, open.

        Args:
            engines: What sends requests to engines.
            decode: Texts of tokens.
            partial: What was sampled of an answer that was ended is kept; else the answer begins anew.
            ends: Tokens that end a text, whatever a request says.
        """
        self.engines, self._decode, self._partial, self._ends = engines, decode, partial, frozenset(ends)
        self._through, self._idle = asyncio.Event(), asyncio.Event()
        self._through.set()
        self._idle.set()
        self._asked = 0
        self._interrupted = False
        self.resumed = self.dropped = 0

    async def sample(
        self,
        group: str,
        prompt: np.ndarray,
        sampling: Sampling,
        *,
        seed: int | None = None,
        affinity: int | None = None,
        begun: Completion | None = None,
    ) -> Answer:
        """One continuation of a prompt, whatever happens to the engines meanwhile.

        Args:
            group: Equal prompts of one group are sampled as one request.
            prompt: int64 `[p]`.
            sampling: How; `max_tokens` is of the whole answer, however often it is ended.
            seed: Of the request; what goes on has seeds of its own, so that no random number serves twice.
            affinity: Engine that holds the prefix, if any.
            begun: What there is of the answer.

        Returns:
            The answer; its finish is `abort` only while the gate is `interrupted`.
        """
        last = begun
        kept = begun if self._partial else None
        while True:
            finish = None if kept is None else self._finish(kept, sampling)
            if kept is not None and finish is not None:
                return self._answer(attrs.evolve(kept, finish=finish), None)
            await self._through.wait()
            if self._interrupted:
                return self._answer(attrs.evolve(kept or _none(), finish="abort"), None)
            own = seed if seed is None or last is None else derive(seed, last.request, last.index)
            answer = await self._ask(group, prompt, sampling, own, affinity, kept)
            done = answer.completion if kept is None else joined(kept, answer.completion)
            if done.finish != "abort" or self._interrupted:
                return answer if kept is None else self._answer(done, answer.engine)
            last, kept = answer.completion, self._kept(done)

    @asynccontextmanager
    async def held(self, *, again: float = AGAIN, patience: float = PATIENCE) -> AsyncIterator[None]:
        """Let nothing through, and end what runs; behind the block it goes on by itself.

        Args:
            again: Seconds after which what still runs is told once more to end.
            patience: Seconds in all; then the block begins all the same, and what runs goes on where it is.
        """
        self._through.clear()
        try:
            loop = asyncio.get_running_loop()
            until, wait = loop.time() + patience, min(again, 0.05)
            while self._asked and (left := until - loop.time()) > 0:
                self.engines.abort()
                await _wait(self._idle, min(wait, left))
                wait = min(2 * wait, again)
            if self._asked:
                log.warning("%d requests did not end within %g s: they go on as they are", self._asked, patience)
            yield
        finally:
            self._through.set()

    def interrupt(self) -> None:
        """End what runs: whoever waits, and whoever asks from now on, gets what there is of the answer, as `abort`."""
        self._interrupted = True
        self._through.set()
        self.engines.abort()

    def release(self) -> None:
        """Let requests through again after `interrupt`."""
        self._interrupted = False

    def after(self, rollout: Rollout, member: int) -> Resumed:
        """A way through the gate on which the first answer begins with what an aborted rollout holds of it.

        Args:
            rollout: The aborted one.
            member: Which of its group.
        """
        return Resumed(self, rollout, member)

    async def _ask(
        self,
        group: str,
        prompt: np.ndarray,
        sampling: Sampling,
        seed: int | None,
        affinity: int | None,
        kept: Completion | None,
    ) -> Answer:
        count = 0 if kept is None else len(kept.token_ids)
        if kept is not None:
            self.resumed += 1
            prompt = np.concatenate([prompt, kept.token_ids])
            sampling = attrs.evolve(sampling, max_tokens=sampling.max_tokens - count)
        self._asked += 1
        self._idle.clear()
        try:
            return await self.engines.sample(group, prompt, sampling, seed=seed, affinity=affinity, begun=count)
        finally:
            self._asked -= 1
            if not self._asked:
                self._idle.set()

    def _kept(self, done: Completion) -> Completion | None:
        if self._partial and len(done.token_ids):
            return done
        self.dropped += len(done.token_ids)
        return None

    def _finish(self, kept: Completion, sampling: Sampling) -> Finish | None:
        """How an answer has ended of which nothing is missing; None if something is."""
        if not sampling.ignore_eos:
            if int(kept.token_ids[-1]) in self._ends or int(kept.token_ids[-1]) in sampling.stop_token_ids:
                return "stop"
            if sampling.stop and any(stop in self._decode([kept.token_ids])[0] for stop in sampling.stop):
                return "stop"
        return "length" if len(kept.token_ids) >= sampling.max_tokens else None

    def _answer(self, completion: Completion, engine: int | None) -> Answer:
        return Answer(completion, self._decode([completion.token_ids])[0], engine)


class Resumed:
    """A gate for one conversation whose first answer was begun; the way of its other answers is the usual one."""

    def __init__(self, gate: Gate, rollout: Rollout, member: int) -> None:
        """Make one.

        Args:
            gate: The gate.
            rollout: What there is.
            member: Which of its group.
        """
        self._gate = gate
        self._begun = beginning(rollout, member)

    async def sample(
        self,
        group: str,
        prompt: np.ndarray,
        sampling: Sampling,
        *,
        seed: int | None = None,
        affinity: int | None = None,
    ) -> Answer:
        """As `Gate.sample`; the first answer, to the prompt of that rollout, begins with what there is of it."""
        begun, self._begun = self._begun, None
        fits = begun is not None and np.array_equal(begun[0], prompt)
        there = begun[1] if begun is not None and fits else None
        return await self._gate.sample(group, prompt, sampling, seed=seed, affinity=affinity, begun=there)


def beginning(rollout: Rollout, member: int = 0) -> tuple[np.ndarray, Completion] | None:
    """The prompt of a rollout and what was sampled behind it; None unless that is one answer, at its end.

    Of several turns nothing is kept: tools and environments would have to be led back to where they were.

    Args:
        rollout: An aborted one.
        member: Which of its group.
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
    )


def joined(begun: Completion, more: Completion) -> Completion:
    """One answer of two parts, every token with its own logprob and version; it ended as the second did."""
    fields = ("token_ids", "logprobs", "versions")
    parts = {name: np.concatenate([getattr(begun, name), getattr(more, name)]) for name in fields}
    return attrs.evolve(more, **parts)


def _none() -> Completion:
    blank = NOTHING.astype(np.float32)
    return Completion(request="", index=0, token_ids=NOTHING, logprobs=blank, versions=NOTHING, finish="abort")


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Until the event, but no longer than this."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return
