"""The driver's way to the engines: requests of one turn of the event loop travel together, answers come one by one."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

import attrs
import numpy as np

from rlsdk.contracts import Completion, Request, Sampling


@attrs.frozen(eq=False)
class Answer:
    """A completion with its text, and the engine that holds its tokens."""

    completion: Completion
    text: str
    engine: int | None = None


class Sampler(Protocol):
    """What a conversation asks for answers: the engines' client, a gate before it, or what stands for them."""

    def sample(
        self,
        group: str,
        prompt: np.ndarray,
        sampling: Sampling,
        *,
        seed: int | None = None,
        affinity: int | None = None,
    ) -> Awaitable[Answer]:
        """One continuation of a prompt."""
        ...


@attrs.define(eq=False)
class _Wanted:
    """What one engine request serves: equal prompts of one group become one request for several continuations."""

    prompt: np.ndarray
    sampling: Sampling
    seed: int | None
    affinity: int | None
    begun: int = 0
    futures: list[asyncio.Future[Answer]] = attrs.field(factory=list)

    @property
    def unwanted(self) -> bool:
        """Whether nobody waits for it any more."""
        return all(future.cancelled() for future in self.futures)


class EngineClient:
    """Routes requests to the least loaded engine, and a conversation to the engine that holds its prefix.

    Attributes:
        unheard: Tokens that were sampled for nobody: who asked had gone when they came.
    """

    def __init__(self, actors: Sequence[Any], decode: Any) -> None:
        self.actors = list(actors)
        self._decode = decode
        self._load = [0] * len(actors)
        self._wanted: dict[Any, _Wanted] = {}
        self._serial = itertools.count()
        self._consumers: set[asyncio.Task[None]] = set()
        self.unheard = 0

    def sample(
        self,
        group: str,
        prompt: np.ndarray,
        sampling: Sampling,
        *,
        seed: int | None = None,
        affinity: int | None = None,
        begun: int = 0,
    ) -> asyncio.Future[Answer]:
        """One continuation of a prompt.

        Args:
            group: Equal prompts of one group are sampled as one request.
            prompt: int64 `[p]`.
            sampling: How.
            seed: Of the request; None takes the engine's own generator.
            affinity: Engine that holds the prefix, if any.
            begun: Tokens at the end of the prompt that are the beginning of the answer.

        Returns:
            To be awaited. Once all continuations of a request are cancelled, the engine ends it.
        """
        loop = asyncio.get_running_loop()
        if not self._wanted:
            loop.call_soon(self._flush)
        key = (group, prompt.tobytes(), sampling, seed, affinity, begun)
        wanted = self._wanted.setdefault(key, _Wanted(prompt, sampling, seed, affinity, begun))
        future: asyncio.Future[Answer] = loop.create_future()
        wanted.futures.append(future)
        return future

    def abort(self) -> None:
        """End all that runs on the engines; whoever waits gets what was sampled until then, as `abort`."""
        for actor in self.actors:
            actor.abort.remote(None)

    def _flush(self) -> None:
        wanted, self._wanted = self._wanted, {}
        batches: dict[int, list[tuple[Request, _Wanted]]] = {}
        for want in wanted.values():
            if want.unwanted:
                continue
            engine = self._route(want)
            self._load[engine] += len(want.futures)
            request = Request(
                id=str(next(self._serial)),
                prompt_ids=want.prompt,
                sampling=want.sampling,
                n=len(want.futures),
                seed=want.seed,
                begun=want.begun,
            )
            batches.setdefault(engine, []).append((request, want))
            for future in want.futures:
                future.add_done_callback(functools.partial(self._cancel, engine, request.id, want))
        for engine, batch in batches.items():
            task = asyncio.get_running_loop().create_task(self._consume(engine, batch))
            self._consumers.add(task)
            task.add_done_callback(self._consumers.discard)

    def _cancel(self, engine: int, request: str, want: _Wanted, _: asyncio.Future[Answer]) -> None:
        if want.unwanted:
            self.actors[engine].abort.remote([request])

    def _route(self, want: _Wanted) -> int:
        if want.affinity is not None and want.affinity < len(self.actors):
            return want.affinity
        return min(range(len(self.actors)), key=lambda i: (self._load[i], i))

    async def _consume(self, engine: int, batch: list[tuple[Request, _Wanted]]) -> None:
        waiting = {request.id: want.futures for request, want in batch}
        try:
            stream = (
                self.actors[engine].generate.options(num_returns="streaming").remote([request for request, _ in batch])
            )
            async for reference in stream:
                completions: list[Completion] = await reference
                texts = self._decode([c.token_ids for c in completions])
                self._load[engine] -= len(completions)
                for completion, text in zip(completions, texts, strict=True):
                    future = waiting[completion.request][completion.index]
                    if future.done():
                        self.unheard += len(completion.token_ids)
                    else:
                        future.set_result(Answer(completion, text, engine))
        except Exception as error:  # noqa: BLE001 - every waiting rollout gets the engine's failure
            for future in itertools.chain.from_iterable(waiting.values()):
                if not future.done():
                    future.set_exception(error)
