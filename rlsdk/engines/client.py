"""The driver's client of the engines: batches the requests of one turn of the event loop, and routes them.

Engines may die and be replaced: requests that a dead one had not answered are sampled again by another one.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol

import attrs
import numpy as np

from rlsdk.cluster.actors import cause_of, died
from rlsdk.contracts import Completion, Request, Sampled, Sampling
from rlsdk.engines.messages import Progress
from rlsdk.errors import ValueFault
from rlsdk.isolation.spans import Busy
from rlsdk.types import Image


@attrs.frozen(eq=False)
class Answer:
    """A completion with its text, and the engine that holds its tokens."""

    completion: Completion
    text: str
    engine: int | None = None


Watch = Callable[[Sampled], None]
"""Called with the tokens of an answer while they are sampled. After the death of an engine they begin at 0 again."""


@attrs.frozen(eq=False)
class GenerateRequest:
    """A request for one continuation of a prompt.

    Attributes:
        group: Equal prompts of one group are sampled as one request.
        prompt: int64 `[p]`.
        sampling: Sampling parameters; `max_tokens` limits the whole answer, however often it is interrupted.
        seed: Seed of the request; None uses the engine's own generator.
        affinity: Rank of the engine that holds the prefix, if any.
        begun: Number of tokens at the end of the prompt that are the beginning of the answer.
        watch: Called with tokens while they are sampled; a client that cannot show them ignores it.
        images: Images in the prompt, in their order.
        image_positions: int64 `[k]`, positions of the prompt's tokens that stand for them.
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
        """Equal for requests that an engine samples as one."""
        seen = tuple(image.digest for image in self.images)
        return self.group, self.prompt.tobytes(), self.sampling, self.seed, self.affinity, self.begun, seen


class EngineRoutes(Protocol):
    """Routes of requests to engines, as the group of all engines changes them: an `EngineClient`, or those of workers.

    Attributes:
        lost: Called with rank, actor and error when an engine was found dead.
    """

    lost: Callable[[int, Any, Exception], None] | None

    @property
    def sampled_again(self) -> int:
        """Continuations that were requested again, since their engine died."""
        ...

    def admit(self, rank: int, actor: Any) -> None:
        """Route to an engine from now on."""
        ...

    def dismiss(self, rank: int) -> None:
        """Stop routing to an engine."""
        ...

    async def drain(self, rank: int) -> None:
        """Stop routing to an engine, and wait until it has answered the requests that it has."""
        ...

    def fail(self, error: Exception) -> None:
        """Answer whatever waits for an engine, now or later, with an error."""
        ...


class Sampler(Protocol):
    """Interface through which a conversation samples: the engine client, a pausable client or a substitute."""

    def sample(self, request: GenerateRequest) -> Awaitable[Answer]:
        """Sample one continuation of a prompt."""
        ...


@attrs.define(eq=False)
class _Wanted:
    """One engine request: equal prompts of a group are merged into one request for several continuations."""

    first: GenerateRequest
    futures: list[asyncio.Future[Answer]] = attrs.field(factory=list)
    watches: dict[asyncio.Future[Answer], Watch] = attrs.field(factory=dict)

    def show(self, sampled: Sampled) -> None:
        """Hand tokens to whoever watches this continuation and still waits for it."""
        future = self.futures[sampled.index]
        watch = self.watches.get(future)
        if watch is not None and not future.done():
            watch(sampled)

    @property
    def missing(self) -> list[asyncio.Future[Answer]]:
        """Futures that are still waiting for an answer."""
        return [future for future in self.futures if not future.done()]

    def again(self) -> _Wanted:
        """The part to request again; all of a seeded request, since seeds depend on a continuation's index."""
        return self if self.first.seed is not None else attrs.evolve(self, futures=self.missing)


@attrs.define(eq=False)
class _Seat:
    """An engine that gets requests, and how many continuations are due from it."""

    rank: int
    actor: Any
    load: int = 0
    gone: bool = False
    idle: asyncio.Event = attrs.field(factory=asyncio.Event)
    busy: Busy = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.busy = Busy(f"engine {self.rank}", "generate")

    def count(self, count: int, tokens: int = 0) -> None:
        """Count continuations as requested or, below 0, as answered with so many tokens."""
        self.load += count
        (self.idle.clear if self.load else self.idle.set)()
        if count > 0:
            self.busy.begin(count)
        else:
            self.busy.end(-count, tokens=float(tokens))


class EngineClient:
    """Routes requests to the least loaded engine, and a conversation to the engine that holds its prefix.

    Attributes:
        unheard: Tokens of answers that nobody waited for any more.
        lost: Called with rank, actor and error when an engine has died; its unanswered requests go to other engines, or
            wait for `admit`. None: its death is the answer to its requests.
        sampled_again: Continuations that were requested again, since their engine died.
    """

    def __init__(self, actors: Sequence[Any], decode: Any, *, name: str = "", first: int = 0) -> None:
        """Create a client.

        Args:
            actors: Handles of the engines, by rank.
            decode: Function that decodes token sequences into texts.
            name: Prefix of the ids of its requests, where engines have several clients.
            first: Rank of the engine that it prefers among those with equal load; several clients that all preferred
                rank 0 would crowd it.
        """
        self.lost: Callable[[int, Any, Exception], None] | None = None
        self.sampled_again = 0
        self._seats = {rank: _Seat(rank, actor) for rank, actor in enumerate(actors)}
        self._leaving: list[_Seat] = []
        self._decode = decode
        self._wanted: dict[Hashable, _Wanted] = {}
        self._waiting: list[_Wanted] = []
        self._failure: Exception | None = None
        self._serial = (f"{name}{number}" for number in itertools.count())
        self._first = first
        self._consumers: set[asyncio.Task[None]] = set()
        self.unheard = 0

    @property
    def actors(self) -> list[Any]:
        """Handles of the engines that receive requests."""
        return [seat.actor for seat in self._seats.values()]

    def sample(self, request: GenerateRequest) -> asyncio.Future[Answer]:
        """Sample one continuation of a prompt; once all requests for it are cancelled, the engine aborts it."""
        loop = asyncio.get_running_loop()
        if not self._wanted:
            loop.call_soon(self._flush)
        wanted = self._wanted.setdefault(request.key, _Wanted(request))
        future: asyncio.Future[Answer] = loop.create_future()
        wanted.futures.append(future)
        if request.watch is not None:
            wanted.watches[future] = request.watch
        return future

    def abort(self) -> None:
        """End all requests that run or wait for an engine; they are answered with what was sampled, as `abort`."""
        for seat in (*self._seats.values(), *self._leaving):
            seat.actor.abort.remote(None)
        waiting, self._waiting = self._waiting, []
        for future in itertools.chain.from_iterable(want.missing for want in waiting):
            # A name of its own for each: seeds of resumed requests derive from it.
            future.set_result(Answer(nothing(next(self._serial)), ""))

    def admit(self, rank: int, actor: Any) -> None:
        """Route to an engine from now on; requests that waited for one are sent.

        Args:
            rank: Rank of the engine, currently unused.
            actor: Actor handle of an engine with the current weights.
        """
        self._seats[rank] = _Seat(rank, actor)
        waiting, self._waiting = self._waiting, []
        self._send(waiting)

    def dismiss(self, rank: int) -> None:
        """Stop routing to an engine; requests that it has are still answered, if it lives."""
        seat = self._seats.pop(rank, None)
        if seat is not None:
            seat.gone = True

    async def drain(self, rank: int) -> None:
        """Stop routing to an engine, and wait until it has answered the requests that it has."""
        seat = self._seats.pop(rank, None)
        if seat is not None and seat.load:
            self._leaving.append(seat)
            await seat.idle.wait()
            self._leaving.remove(seat)

    def fail(self, error: Exception) -> None:
        """Answer requests that wait for an engine, and all later ones, with an error."""
        self._failure = error
        waiting, self._waiting = self._waiting, []
        self._send(waiting)

    def _flush(self) -> None:
        wanted, self._wanted = self._wanted, {}
        # Partial answers go first after a sync: after requests that had only been waiting, they would grow too old.
        self._send(sorted(wanted.values(), key=lambda want: not want.first.begun))

    def _send(self, wanted: Iterable[_Wanted]) -> None:
        """Send requests that somebody waits for to engines; without an engine, keep them."""
        batches: dict[int, list[tuple[Request, _Wanted]]] = {}
        for want in wanted:
            if not want.missing:
                continue
            if self._failure is not None:
                _fail(want.missing, self._failure)
                continue
            if not self._seats:
                self._waiting.append(want)
                continue
            seat = self._route(want)
            seat.count(len(want.futures))
            request = Request(
                id=next(self._serial),
                prompt_ids=want.first.prompt,
                sampling=want.first.sampling,
                n=len(want.futures),
                seed=want.first.seed,
                begun=want.first.begun,
                stream=bool(want.watches),
                images=want.first.images,
                image_positions=want.first.image_positions,
            )
            batches.setdefault(seat.rank, []).append((request, want))
            for future in want.missing:
                future.add_done_callback(functools.partial(self._cancel, seat, request.id, want))
        for rank, batch in batches.items():
            self._begin(self._seats[rank], batch)

    def _begin(self, seat: _Seat, batch: list[tuple[Request, _Wanted]]) -> None:
        task = asyncio.get_running_loop().create_task(self._consume(seat, batch))
        self._consumers.add(task)
        task.add_done_callback(self._consumers.discard)

    def _cancel(self, seat: _Seat, request: str, want: _Wanted, future: asyncio.Future[Answer]) -> None:
        if future.cancelled() and not want.missing and not seat.gone:
            seat.actor.abort.remote([request])

    def _route(self, want: _Wanted) -> _Seat:
        if want.first.affinity in self._seats:
            return self._seats[want.first.affinity]
        return min(self._seats.values(), key=lambda seat: (seat.load, seat.rank < self._first, seat.rank))

    async def _consume(self, seat: _Seat, batch: list[tuple[Request, _Wanted]]) -> None:
        waiting = {request.id: want for request, want in batch}
        unanswered = whole = sum(request.n for request, _ in batch)
        try:
            stream = seat.actor.generate.options(num_returns="streaming").remote([request for request, _ in batch])
            async for reference in stream:
                message: list[Completion] | Progress = await reference
                if isinstance(message, Progress):
                    for sampled in message.sampled:
                        waiting[sampled.request].show(sampled)
                    continue
                completions = message
                texts = self._decode([c.token_ids for c in completions])
                seat.count(-len(completions), sum(len(c.token_ids) for c in completions))
                unanswered -= len(completions)
                for completion, text in zip(completions, texts, strict=True):
                    future = waiting[completion.request].futures[completion.index]
                    if future.done():
                        self.unheard += len(completion.token_ids)
                    else:
                        future.set_result(Answer(completion, text, seat.rank))
        except Exception as error:  # noqa: BLE001 - every waiting rollout gets the engine's failure
            self._failed(seat, batch, error, unanswered, begun=unanswered < whole)

    def _failed(
        self, seat: _Seat, batch: list[tuple[Request, _Wanted]], error: Exception, unanswered: int, *, begun: bool
    ) -> None:
        """Handle the end of a call before its time.

        Args:
            seat: Engine that was called.
            batch: Requests of the call.
            error: Reason.
            unanswered: Number of continuations that were not answered.
            begun: True if some were.
        """
        if isinstance(cause_of(error), ValueFault):  # it refused a request, and runs
            if len(batch) > 1 and not begun:  # it has admitted none of them, and only the one at fault is to fail
                for each in batch:
                    self._begin(seat, [each])
                return
            seat.count(-unanswered)
        else:
            seat.idle.set()
            seat.busy.drop()
        if self.lost is None or not died(error):
            _fail(itertools.chain.from_iterable(want.futures for _, want in batch), error)
            return
        if self._seats.get(seat.rank) is seat:
            self.dismiss(seat.rank)
        self.lost(seat.rank, seat.actor, error)
        again = [want.again() for _, want in batch if want.missing]
        self.sampled_again += sum(len(want.missing) for want in again)
        self._send(again)


def _fail(futures: Iterable[asyncio.Future[Answer]], error: Exception) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


def nothing(request: str = "") -> Completion:
    """Return the answer to a request that was aborted before its first token."""
    blank, logprobs = np.zeros(0, np.int64), np.zeros(0, np.float32)
    return Completion(request=request, index=0, token_ids=blank, logprobs=logprobs, versions=blank, finish="abort")
