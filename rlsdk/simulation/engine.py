"""A simulated engine, which generates no text but takes the time given by its rates."""

from __future__ import annotations

import asyncio
import bisect
import functools
import heapq
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import attrs
import numpy as np

from rlsdk.contracts import Completion, Finish, Request
from rlsdk.simulation.clock import RESOLUTION
from rlsdk.simulation.rates import Lengths, Rates

MOST = 1 << 20
"""Maximum tokens of a response: the length of the arrays that all responses share."""
WIDTH = 2 * MOST
"""A token encodes its response: number of the response * WIDTH + length of the response."""
ROUNDING = 1e-6
"""Tolerance for a number of decode steps."""


@functools.cache
def _shared(value: int, dtype: str) -> np.ndarray:
    array = np.full(MOST, value, dtype)
    array.setflags(write=False)
    return array


def constant(value: int, dtype: str, count: int) -> np.ndarray:
    """Return a read-only array of one value, `[count]`: a view of a shared array."""
    return _shared(value, dtype)[:count]


@attrs.frozen
class Method:
    """A method that is called like a Ray actor's."""

    remote: Callable[..., Any]

    def options(self, **_: Any) -> Method:
        """Return itself; Ray's options have no effect."""
        return self


@attrs.define(eq=False)
class _GenerateCall:
    """A call of `generate`, with its pending and finished continuations."""

    left: int
    ready: list[Completion] = attrs.field(factory=list)
    some: asyncio.Event = attrs.field(factory=asyncio.Event)

    def put(self, completion: Completion) -> None:
        self.left -= 1
        self.ready.append(completion)
        self.some.set()


@attrs.define(eq=False)
class _Sequence:
    """A continuation of `length` equal tokens; `began` and `ends` are decode steps of its engine."""

    call: _GenerateCall
    request: Request
    index: int
    token: int
    length: int
    began: float = 0.0
    ends: float = 0.0
    over: bool = False


class SimulatedEngine:
    """Accept requests like an engine actor, for `engines.client.EngineClient`.

    Each running sequence gets a token in every decode step, so that one number tells the progress of all: the decode
    steps since the start. Nothing is computed between the arrivals and ends of sequences.

    All tokens of a response are equal, and encode its number and its length. So an interrupted response continues to
    the length that was drawn for it, on any engine, and no two responses of a group are the same request.

    Attributes:
        version: Version of its weights.
        busy: Seconds in which at least one sequence ran.
        tokens: Tokens sampled by the sequences that have ended.
    """

    def __init__(self, rates: Rates, lengths: Lengths, seed: Sequence[int]) -> None:
        """Create an engine on the running event loop."""
        self._rates, self._lengths = rates, lengths
        self._random = np.random.default_rng(seed)
        self._drawn = itertools.count()
        self._clock = asyncio.get_running_loop()
        self._steps = 0.0
        self._since = self._clock.time()
        self._loading = self._reading = 0.0
        self._running: list[tuple[float, int, _Sequence]] = []
        self._waiting: deque[_Sequence] = deque()
        self._sequences: dict[str, list[_Sequence]] = {}
        self._count = self._serial = 0
        self._timer: asyncio.TimerHandle | None = None
        self._published: list[tuple[float, int]] = [(0.0, 0)]
        self.busy = 0.0
        self.tokens = 0
        self.generate, self.abort = Method(self._generate), Method(self._abort)

    @property
    def version(self) -> int:
        """Version of its weights."""
        return self._published[-1][1]

    @property
    def running(self) -> int:
        """Number of running sequences."""
        return self._count

    def load(self, version: int, seconds: float) -> None:
        """Load weights; running requests continue with them after recomputing their KV cache."""
        self._advance()
        self._loading += seconds
        self._reading += sum(map(self._cached, self._running)) / self._rates.prompt_rate
        self._published.append((self._steps, version))
        self._schedule()

    def _cached(self, running: tuple[float, int, _Sequence]) -> float:
        """Return the cached tokens of a sequence; prompt tokens count once per group."""
        *_, sequence = running
        if sequence.over:
            return 0.0
        prompt = self._rates.prompt_tokens if sequence.index == 0 else 0
        return prompt + sequence.request.begun + self._steps - sequence.began

    def measure(self) -> tuple[float, int]:
        """Return the seconds busy and the tokens sampled so far."""
        self._advance()
        return self.busy, self.tokens

    async def _generate(self, requests: Sequence[Request]) -> AsyncIterator[asyncio.Future[list[Completion]]]:
        call = _GenerateCall(sum(request.n for request in requests))
        for request in requests:
            if request.begun:  # a continued response keeps its token
                tokens = [int(request.prompt_ids[-1])] * request.n
            else:
                lengths = self._lengths.draw(self._random, request.n)
                tokens = [next(self._drawn) * WIDTH + length for length in lengths]
            # The prompt of a continued response contains the tokens sampled before.
            self._sequences[request.id] = [
                _Sequence(call, request, i, token, max(1, token % WIDTH - request.begun))
                for i, token in enumerate(tokens)
            ]
            self._waiting.extend(self._sequences[request.id])
        self._advance()
        self._admit()
        while call.left or call.ready:
            await call.some.wait()
            call.some.clear()
            found, call.ready = call.ready, []
            done: asyncio.Future[list[Completion]] = self._clock.create_future()
            done.set_result(found)
            yield done

    def _abort(self, ids: Sequence[str] | None = None) -> int:
        """Abort requests (None: all) and return the number of continuations that were running or waiting."""
        self._advance()
        ended = 0
        for name in list(self._sequences) if ids is None else ids:
            for sequence in self._sequences.get(name, ()):
                if not sequence.over:
                    sampled = min(int(self._steps - sequence.began + ROUNDING), sequence.length) if sequence.ends else 0
                    self._count -= bool(sequence.ends)
                    self._end(sequence, sampled)
                    ended += 1
        if not self._count:  # prompts still to be read are no longer needed
            self._reading = 0.0
        self._admit()
        return ended

    def _advance(self) -> None:
        """Advance the decode steps to the current time."""
        now = self._clock.time()
        passed, self._since = now - self._since, now
        loading = min(self._loading, passed)
        reading = min(self._reading, passed - loading)
        self._loading -= loading
        self._reading -= reading
        if self._count:
            self.busy += passed
            self._steps += (passed - loading - reading) / self._rates.decode(self._count)

    def _admit(self) -> None:
        """Start waiting sequences while there are free slots, and schedule the next end of a sequence."""
        while self._waiting and self._count < self._rates.slots:
            sequence = self._waiting.popleft()
            if sequence.over:
                continue
            if sequence.index == 0:
                self._reading += (self._rates.prompt_tokens + sequence.request.begun) / self._rates.prompt_rate
            sequence.began, sequence.ends = self._steps, self._steps + sequence.length
            self._count += 1
            self._serial += 1
            heapq.heappush(self._running, (sequence.ends, self._serial, sequence))
        self._schedule()

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._running and self._running[0][2].over:
            heapq.heappop(self._running)
        if self._running:
            self._timer = self._clock.call_later(self._until(self._running[0][0]), self._finish)

    def _until(self, ends: float) -> float:
        """Return the seconds until that many decode steps are done, if nothing arrives or ends before."""
        return self._loading + self._reading + max(0.0, ends - self._steps) * self._rates.decode(self._count)

    def _finish(self) -> None:
        self._advance()
        while self._running and (self._running[0][2].over or self._until(self._running[0][0]) <= RESOLUTION):
            _, _, sequence = heapq.heappop(self._running)
            if not sequence.over:
                self._count -= 1
                self._end(sequence, sequence.length)
        self._admit()

    def _end(self, sequence: _Sequence, sampled: int) -> None:
        ended: Finish = "length" if sequence.token % WIDTH >= self._lengths.limit else "stop"
        sequence.over = True
        self.tokens += sampled
        request = sequence.request
        if all(other.over for other in self._sequences[request.id]):
            del self._sequences[request.id]
        completion = Completion(
            request=request.id,
            index=sequence.index,
            token_ids=np.broadcast_to(np.int64(sequence.token), sampled),
            logprobs=constant(0, "float32", sampled),
            versions=self._versions(sequence.began, sampled),
            finish=ended if sampled == sequence.length else "abort",
        )
        sequence.call.put(completion)

    def _versions(self, began: float, count: int) -> np.ndarray:
        """Return the weight version of each token of a sequence, int64 `[count]`; a single version costs no memory."""
        at = bisect.bisect_right(self._published, began, key=lambda published: published[0]) - 1
        versions = np.broadcast_to(np.int64(self._published[at][1]), count)
        for steps, version in self._published[at + 1 :]:
            first = max(0, int(np.ceil(steps - began - ROUNDING)))
            if first < count:
                versions = versions if versions.flags.writeable else versions.copy()
                versions[first:] = version
        return versions
