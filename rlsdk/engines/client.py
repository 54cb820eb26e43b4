"""Engine client: batch the requests of one event-loop turn, and route them to engines.

Engines may die and be replaced; another engine resamples the requests that a dead one has not answered.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol

import attrs
import numpy as np

from rlsdk.cluster.actors import cause_of, described, died, streamed
from rlsdk.contracts import Completion, Request, Sampled, Sampling
from rlsdk.engines.continuation import unsampled
from rlsdk.engines.messages import Progress
from rlsdk.errors import EngineError, ValueFault
from rlsdk.isolation.watching import Busy
from rlsdk.types import Image


@attrs.frozen(eq=False)
class Answer:
    """A completion with its text, and the engine that holds its tokens."""

    completion: Completion
    text: str
    engine: int | None = None


Watch = Callable[[Sampled], None]
"""Callback for an answer's tokens while they are sampled. After an engine dies, positions start at 0 again."""


@attrs.frozen(eq=False)
class GenerateRequest:
    """A request for one continuation of a prompt.

    Attributes:
        group: Equal prompts of one group are sampled as one request.
        prompt: int64 `[p]`.
        sampling: Sampling parameters; `max_tokens` limits the whole answer, including interrupted parts.
        seed: Seed of the request; None uses the engine's generator.
        affinity: Rank of the engine that holds the prefix, if any.
        begun: Number of tokens at the end of the prompt that belong to the answer.
        watch: Called with tokens while they are sampled; clients without streaming ignore it.
        images: Images in the prompt, in order.
        image_positions: int64 `[k]`, positions of the image tokens in the prompt.
    """

    group: str
    prompt: np.ndarray
    sampling: Sampling
    seed: int | None = attrs.field(default=None, kw_only=True)
    affinity: int | None = attrs.field(default=None, kw_only=True)
    begun: int = attrs.field(default=0, kw_only=True)
    watch: Watch | None = attrs.field(default=None, kw_only=True)
    images: tuple[Image, ...] = attrs.field(default=(), kw_only=True)
    image_positions: np.ndarray | None = attrs.field(default=None, kw_only=True)

    @property
    def key(self) -> Hashable:
        """Merge key: requests with equal keys are sampled as one."""
        seen = tuple(image.digest for image in self.images)
        return self.group, self.prompt.tobytes(), self.sampling, self.seed, self.affinity, self.begun, seen


class EngineRoutes(Protocol):
    """Routing interface for the engine group: an `EngineClient`, or the clients of rollout workers.

    Attributes:
        lost: Called with rank, actor and error when an engine has died.
    """

    lost: Callable[[int, Any, Exception], None] | None

    @property
    def sampled_again(self) -> int:
        """Number of continuations that were requested again after their engine died."""
        ...

    def admit(self, rank: int, actor: Any) -> None:
        """Start routing to an engine."""
        ...

    def dismiss(self, rank: int) -> None:
        """Stop routing to an engine."""
        ...

    async def drain(self, rank: int) -> None:
        """Stop routing to an engine, and wait until it has answered the requests that it has."""
        ...

    def fail(self, error: Exception) -> None:
        """Fail all requests that wait for an engine, now or later, with an error."""
        ...


class Sampler(Protocol):
    """Interface through which a conversation samples, such as the engine client or a pausable client."""

    def sample(self, request: GenerateRequest) -> Awaitable[Answer]:
        """Sample one continuation of a prompt."""
        ...


@attrs.define(eq=False)
class _MergedRequest:
    """One engine request, which merges a group's equal prompts into one request for several continuations."""

    first: GenerateRequest
    futures: list[asyncio.Future[Answer]] = attrs.field(factory=list)
    watches: dict[asyncio.Future[Answer], Watch] = attrs.field(factory=dict)

    def show(self, sampled: Sampled) -> None:
        """Pass tokens to the watchers that still wait for this continuation."""
        future = self.futures[sampled.index]
        watch = self.watches.get(future)
        if watch is not None and not future.done():
            watch(sampled)

    @property
    def missing(self) -> list[asyncio.Future[Answer]]:
        """Futures without an answer."""
        return [future for future in self.futures if not future.done()]

    def again(self) -> _MergedRequest:
        """Return the part to request again; for a seeded request, all of it, since seeds depend on the index."""
        return self if self.first.seed is not None else attrs.evolve(self, futures=self.missing)


@attrs.define(eq=False)
class _RoutedEngine:
    """An engine that receives requests, with its number of outstanding continuations."""

    rank: int
    actor: Any
    load: int = 0
    gone: bool = False
    idle: asyncio.Event = attrs.field(factory=asyncio.Event)
    busy: Busy = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.busy = Busy(f"engine {self.rank}", "generate")

    def count(self, count: int, tokens: int = 0) -> None:
        """Add requested continuations or, if `count` is negative, answered ones with their tokens."""
        self.load += count
        (self.idle.clear if self.load else self.idle.set)()
        if count > 0:
            self.busy.begin(count)
        else:
            self.busy.end(-count, tokens=float(tokens))


class EngineClient:
    """Route requests to the least loaded engine, and conversations to the engine that holds their prefix.

    Attributes:
        unheard: Number of tokens in answers whose callers were gone.
        lost: Called with rank, actor and error when an engine has died; its unanswered requests go to other engines or
            wait for `admit`. If None, its requests fail.
        sampled_again: Number of continuations that were requested again after their engine died.
    """

    def __init__(self, actors: Sequence[Any], decode: Any, *, name: str = "", first: int = 0) -> None:
        """Create a client.

        Args:
            actors: Handles of the engines, by rank.
            decode: Function that decodes token sequences into texts.
            name: Prefix of its request ids, if engines have several clients.
            first: Rank of the preferred engine among equally loaded ones; differs between clients, so that they do
                not all choose rank 0.
        """
        self.lost: Callable[[int, Any, Exception], None] | None = None
        self.sampled_again = 0
        self._engines = {rank: _RoutedEngine(rank, actor) for rank, actor in enumerate(actors)}
        self._leaving: list[_RoutedEngine] = []
        self._decode = decode
        self._merged: dict[Hashable, _MergedRequest] = {}
        self._waiting: list[_MergedRequest] = []
        self._failure: Exception | None = None
        self._serial = (f"{name}{number}" for number in itertools.count())
        self._first = first
        self._consumers: set[asyncio.Task[None]] = set()
        self.unheard = 0

    @property
    def actors(self) -> list[Any]:
        """Handles of the engines that get requests."""
        return [engine.actor for engine in self._engines.values()]

    def sample(self, request: GenerateRequest) -> asyncio.Future[Answer]:
        """Sample one continuation of a prompt; the engine aborts it once all requests for it are cancelled."""
        loop = asyncio.get_running_loop()
        if not self._merged:
            loop.call_soon(self._flush)
        merged = self._merged.setdefault(request.key, _MergedRequest(request))
        future: asyncio.Future[Answer] = loop.create_future()
        merged.futures.append(future)
        if request.watch is not None:
            merged.watches[future] = request.watch
        return future

    def abort(self) -> None:
        """Abort all running and waiting requests; they are answered with their partial tokens and reason `abort`."""
        for engine in (*self._engines.values(), *self._leaving):
            engine.actor.abort.remote(None)
        waiting, self._waiting = self._waiting, []
        for future in itertools.chain.from_iterable(merged.missing for merged in waiting):
            # Each gets a unique name, from which seeds of resumed requests derive.
            future.set_result(Answer(unsampled(next(self._serial)), ""))

    def admit(self, rank: int, actor: Any) -> None:
        """Start routing to an engine, and send it the requests that waited for one.

        Args:
            rank: Rank of the engine, currently unused.
            actor: Actor handle of an engine with the current weights.
        """
        self._engines[rank] = _RoutedEngine(rank, actor)
        waiting, self._waiting = self._waiting, []
        self._send(waiting)

    def dismiss(self, rank: int) -> None:
        """Stop routing to an engine; if alive, it still answers its requests."""
        engine = self._engines.pop(rank, None)
        if engine is not None:
            engine.gone = True

    async def drain(self, rank: int) -> None:
        """Stop routing to an engine, and wait until it has answered the requests that it has."""
        engine = self._engines.pop(rank, None)
        if engine is not None and engine.load:
            self._leaving.append(engine)
            await engine.idle.wait()
            self._leaving.remove(engine)

    def fail(self, error: Exception) -> None:
        """Fail requests that wait for an engine, and all later ones, with an error."""
        self._failure = error
        waiting, self._waiting = self._waiting, []
        self._send(waiting)

    def _flush(self) -> None:
        requests, self._merged = self._merged, {}
        # Partial answers go first after a sync; behind waiting requests, they would become too stale.
        self._send(sorted(requests.values(), key=lambda merged: not merged.first.begun))

    def _send(self, requests: Iterable[_MergedRequest]) -> None:
        """Send requests that still have callers to engines; keep them if there is no engine."""
        batches: dict[int, list[tuple[Request, _MergedRequest]]] = {}
        for merged in requests:
            if not merged.missing:
                continue
            if self._failure is not None:
                _fail(merged.missing, self._failure)
                continue
            if not self._engines:
                self._waiting.append(merged)
                continue
            rank = merged.first.affinity
            if rank not in self._engines:
                rank = min(self._engines, key=lambda each: (self._engines[each].load, each < self._first, each))
            engine = self._engines[rank]
            engine.count(len(merged.futures))
            request = Request(
                id=next(self._serial),
                prompt_ids=merged.first.prompt,
                sampling=merged.first.sampling,
                n=len(merged.futures),
                seed=merged.first.seed,
                begun=merged.first.begun,
                stream=bool(merged.watches),
                images=merged.first.images,
                image_positions=merged.first.image_positions,
            )
            batches.setdefault(engine.rank, []).append((request, merged))
            for future in merged.missing:
                future.add_done_callback(functools.partial(self._cancel, engine, request.id, merged))
        for rank, batch in batches.items():
            self._begin(self._engines[rank], batch)

    def _begin(self, engine: _RoutedEngine, batch: list[tuple[Request, _MergedRequest]]) -> None:
        task = asyncio.get_running_loop().create_task(self._consume(engine, batch))
        self._consumers.add(task)
        task.add_done_callback(self._consumers.discard)

    def _cancel(
        self, engine: _RoutedEngine, request: str, merged: _MergedRequest, future: asyncio.Future[Answer]
    ) -> None:
        if future.cancelled() and not merged.missing and not engine.gone:
            engine.actor.abort.remote([request])

    async def _consume(self, engine: _RoutedEngine, batch: list[tuple[Request, _MergedRequest]]) -> None:
        waiting = {request.id: merged for request, merged in batch}
        unanswered = whole = sum(request.n for request, _ in batch)
        try:
            message: list[Completion] | Progress
            async for message in streamed(engine.actor.generate, [request for request, _ in batch]):
                if isinstance(message, Progress):
                    for sampled in message.sampled:
                        waiting[sampled.request].show(sampled)
                    continue
                completions = message
                texts = self._decode([c.token_ids for c in completions])
                engine.count(-len(completions), sum(len(c.token_ids) for c in completions))
                unanswered -= len(completions)
                for completion, text in zip(completions, texts, strict=True):
                    future = waiting[completion.request].futures[completion.index]
                    if future.done():
                        self.unheard += len(completion.token_ids)
                    else:
                        future.set_result(Answer(completion, text, engine.rank))
        except Exception as error:  # noqa: BLE001 - every waiting rollout gets the engine's failure
            self._failed(engine, batch, error, unanswered, begun=unanswered < whole)

    def _failed(
        self,
        engine: _RoutedEngine,
        batch: list[tuple[Request, _MergedRequest]],
        error: Exception,
        unanswered: int,
        *,
        begun: bool,
    ) -> None:
        """Handle a call that ended early.

        Args:
            engine: Engine that was called.
            batch: Requests of the call.
            error: Reason.
            unanswered: Number of unanswered continuations.
            begun: True if some continuations were answered.
        """
        if isinstance(cause_of(error), ValueFault):  # the engine rejected a request and still runs
            if len(batch) > 1 and not begun:  # none was admitted; only the request at fault should fail
                for each in batch:
                    self._begin(engine, [each])
                return
            engine.count(-unanswered)
        else:
            engine.idle.set()
            engine.busy.drop()
        if self.lost is None or not died(error):
            cause = cause_of(error)
            # The text of Ray's error is the traceback, which is in the engine's log, or a page on what ends processes.
            if isinstance(cause, EngineError) or died(error):
                said = f": {cause}" if isinstance(cause, EngineError) else f" failed: {described(error)}"
                cause = EngineError(f"engine {engine.rank}{said}")
                cause.__cause__ = error
            _fail(itertools.chain.from_iterable(merged.futures for _, merged in batch), cause)
            return
        if self._engines.get(engine.rank) is engine:
            self.dismiss(engine.rank)
        self.lost(engine.rank, engine.actor, error)
        again = [merged.again() for _, merged in batch if merged.missing]
        self.sampled_again += sum(len(merged.missing) for merged in again)
        self._send(again)


def _fail(futures: Iterable[asyncio.Future[Answer]], error: BaseException) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)
