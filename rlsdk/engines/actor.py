"""The Ray actor of an engine: one event loop, on which steps, weight loads and aborts take turns."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from rlsdk import weights as transport
from rlsdk.cluster.actors import IDENTIFY_SECONDS, RunActor, pickled
from rlsdk.cluster.compiled import keep_compiled
from rlsdk.contracts import (
    ActorSpec,
    Adapter,
    Completion,
    CopiesEngines,
    LimitsConcurrency,
    LoadsWeightParts,
    LoadsWeightTensors,
    Model,
    ReceivesWeights,
    Request,
    SendsFromEachRank,
    ShowsProgress,
    StreamsWeights,
    WakesInParts,
    Weights,
)
from rlsdk.engines.checks import check_prompts
from rlsdk.engines.copying import CopySender
from rlsdk.engines.messages import Bundle, CompletionStream, Progress
from rlsdk.engines.pretrained import vocabulary_size
from rlsdk.errors import EngineError
from rlsdk.isolation.process import settle
from rlsdk.isolation.vitals import peak_memory
from rlsdk.plugins import CORE, ComponentRef, Plugins
from rlsdk.plurals import counted

log = logging.getLogger(__name__)
INTERVAL = 0.02
"""Minimum seconds between messages of one `generate`, so that a thousand completions take only a few messages."""
SILENT_SECONDS = 1800.0
"""Seconds without a completion after which an engine that has taken more steps than its requests need has failed."""
STEP = ("step_seconds", "steps", "running", "running_squared", "running_seconds")
CLOCK = (*STEP, "tokens", "prompt_tokens", "load_seconds")
"""Counters of an engine, step counters first."""


class EngineActor(RunActor):
    """An engine owned by this actor's event loop.

    `generate` streams completions; a background task steps the engine while there is work. All other methods run
    between steps.
    """

    def __init__(self, reference: ComponentRef, log_path: str = "", transfer: ComponentRef | None = None) -> None:
        """Create the actor; `start` loads the model.

        Args:
            reference: Reference to the engine component.
            log_path: File for everything that this process prints; empty leaves output to Ray.
            transfer: Reference to the weight transfer; None if weights are loaded whole.
        """
        super().__init__(log_path)
        self._engine: Any = Plugins().resolve(reference)
        self._origin = "" if reference.name.startswith(f"{CORE}/") else f" ({reference.origin})"
        self._transfer: Any = None if transfer is None else Plugins().resolve(transfer)
        self._copies = CopySender(self._engine, transfer)
        self._limited = isinstance(self._engine, LimitsConcurrency)
        self._streams: dict[str, CompletionStream] = {}
        self._streaming: list[CompletionStream] = []
        self._failure: BaseException | None = None
        self._paused = self._asleep = self._torn = False
        self._woken = False
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._clock = dict.fromkeys(CLOCK, 0.0)
        self._version, self._vocabulary = 0, sys.maxsize
        self._silent_since, self._silent_steps = 0.0, 0

    async def start(
        self, model: Model, place: ActorSpec, adapter: Adapter | None = None, *, routing: bool = False
    ) -> None:
        """Load the model; the folder's weights are version 0. With an `adapter`, later weights are such adapters.

        Args:
            model: Model to load.
            place: Rank and resources of this engine.
            adapter: Shape of later adapters; None for whole models.
            routing: True to make completions carry routed experts.
        """
        await asyncio.sleep(IDENTIFY_SECONDS)
        if adapter is not None:
            self._engine.expect_adapter(adapter)
        if routing:
            self._engine.return_routing()
        self._engine.start(model, keep_compiled(self._engine, place))
        self._vocabulary = vocabulary_size(model)
        settle()

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[bytes]:
        """Admit requests in this order and yield their completions as they finish, in bundles; see `streamed`.

        For requests with `stream`, tokens arrive as `Progress` before the completion, which contains them all again.

        Raises:
            EngineError: The engine failed, now or earlier; the cause carries the traceback.
            ValueFault: A prompt contains unknown token ids.
        """
        self._check()
        check_prompts(requests, self._vocabulary)
        self._engine.add(requests)
        stream = CompletionStream({request.id: request for request in requests})
        if isinstance(self._engine, ShowsProgress):
            stream.streamed = {(r.id, i): 0 for r in requests if r.stream for i in range(r.n)}
        if stream.streamed:
            self._streaming.append(stream)
        self._streams.update(dict.fromkeys((r.id for r in requests), stream))
        self._clock["prompt_tokens"] += sum(len(r.prompt_ids) for r in requests)
        self._wake()
        try:
            while stream.left or stream.ready:
                await stream.some.wait()
                if stream.left:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(stream.done.wait(), INTERVAL)
                self._check()
                ready, stream.ready = stream.ready, []
                stream.some.clear()
                sampled = self._engine.sampled(stream.streamed) if stream.streamed else []
                if sampled:
                    stream.streamed |= {(s.request, s.index): s.start + len(s.token_ids) for s in sampled}
                    yield pickled(Progress(sampled))
                if ready:
                    yield pickled(Bundle(ready))
        finally:
            for request in requests:
                self._streams.pop(request.id, None)
            if stream in self._streaming:
                self._streaming.remove(stream)
            if stream.left and self._failure is None:  # the caller is gone
                self._engine.abort([r.id for r in requests])

    async def load_weights(
        self, offer: Any, canary: np.ndarray | None = None, *, version: int = 0, seat: int = 0, copied: bool = False
    ) -> np.ndarray | None:
        """Replace the weights between steps, and return the canary's logprobs under the new weights.

        Args:
            offer: The weights, or the offer of the run's weight transfer.
            canary: Fixed tokens, int64 `[k]`.
            version: Version of the weights.
            seat: Number of this engine among the receivers, from 1.
            copied: True if another engine sends what `CopiesEngines.held_weights` yields.

        Raises:
            TransferError: The transfer ended early. Nothing is sampled until other weights are loaded.
        """
        self._check()
        started = time.perf_counter()
        self._version = max(self._version, offer.version if isinstance(offer, Weights) else version)
        if isinstance(offer, Weights):
            self._engine.load_weights(offer)
        elif not isinstance(self._transfer, StreamsWeights):
            name = type(self._transfer).__name__
            raise EngineError(f"{name}.offer returned {offer!r}; expected Weights, or methods send and receive")
        else:
            self._torn = True  # if an exception follows, layers have mixed versions
            if copied:
                self._engine.copy_weights(version, self._transfer.receive(offer, seat))
            elif isinstance(self._engine, ReceivesWeights):
                self._engine.receive_weights(version, self._transfer, offer, seat)
            else:
                self._receive(version, self._transfer.receive(offer, seat))
        self._torn = False
        self._clock["load_seconds"] += time.perf_counter() - started
        return None if canary is None else self._logprobs(canary)

    def _receive(self, version: int, parts: Iterator[Weights]) -> None:
        """Receive and load weights; their buffers are released before the canary runs."""
        if isinstance(self._engine, LoadsWeightParts):
            takes_tensors = isinstance(self._engine, LoadsWeightTensors) and self._engine.loads_tensors
            self._engine.load_weight_parts(version, parts if takes_tensors else map(transport.on_host, parts))
        elif (weights := transport.joined(parts, copy=True)) is not None:
            self._engine.load_weights(weights)

    async def weight_layout(self) -> tuple[int, str]:
        """Return the version of the weights, and their layout, which is empty if no other engine can copy them."""
        self._check()
        copies = isinstance(self._engine, CopiesEngines) and isinstance(self._transfer, StreamsWeights)
        if not copies or self._torn or isinstance(self._transfer, SendsFromEachRank):
            return self._version, ""
        return self._version, self._engine.weight_layout()

    async def offer_copy(self) -> Any:
        """Return an offer of this engine's weights for another engine; see `CopySender`."""
        self._check()
        return self._copies.offer()

    async def send_copy(self) -> None:
        """Send this engine's weights while it continues to sample; see `CopySender`."""
        self._check()
        await self._copies.send()

    async def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the logprob of each token given those before it, at temperature 1, float32 `[k - 1]`."""
        self._check()
        return self._logprobs(token_ids)

    def _logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        logprobs: np.ndarray = self._engine.logprobs(token_ids)
        if np.shape(logprobs) != (len(token_ids) - 1,):
            got = f"{type(logprobs).__name__} {list(np.shape(logprobs))}"
            raise EngineError(
                f"{type(self._engine).__name__}.logprobs returned {got} for {len(token_ids)} tokens; expected an array "
                f"[{len(token_ids) - 1}]"
            )
        self._wake()
        return logprobs

    async def reseed(self, seed: int) -> None:
        """Seed the engine's generator."""
        self._check()
        self._engine.reseed(seed)

    async def pause(self) -> None:
        """Freeze all requests between steps; new ones are admitted and wait."""
        self._paused = True

    async def resume(self) -> None:
        """Let frozen requests continue."""
        self._paused = False
        self._wake()

    async def abort(self, ids: Sequence[str] | None = None) -> int:
        """Abort requests (None: all) and return the number of continuations; `generate` yields their partial tokens."""
        if self._failure is not None:  # its callers get the failure; nobody awaits an abort
            return 0
        try:
            ended = self._engine.abort(ids)
            self._deliver(ended)
        except Exception as error:  # nobody awaits an abort
            log.exception("the engine failed")
            self._fail(error)
            raise
        return len(ended)

    async def sleep(self) -> None:
        """Free the device for a colocated learner; requests stay frozen until `wake`."""
        self._check()
        self._engine.sleep()
        self._asleep, self._woken = True, False

    async def wake_weights(self) -> None:
        """Take back the memory that loading weights needs; an engine that is not `WakesInParts` takes back all of it.

        Requests stay frozen until `wake`.
        """
        self._check()
        self._asleep = True
        if isinstance(self._engine, WakesInParts):
            self._engine.wake_weights()
        elif not self._woken:
            self._engine.wake()
            self._woken = True

    async def wake(self, canary: np.ndarray | None = None) -> np.ndarray | None:
        """Take the device back, and return the canary's logprobs before requests continue.

        Args:
            canary: Fixed tokens, int64 `[k]`.
        """
        self._check()
        if not self._woken:
            self._engine.wake()
        self._asleep = self._woken = False
        logprobs = None if canary is None else self._logprobs(canary)
        self._wake()
        return logprobs

    async def checksums(self, offer: Any, *, seat: int = 0) -> dict[str, str]:
        """Return the CRC-32 of each tensor as received, without loading it; for the arguments, see `load_weights`."""
        parts = (offer,) if isinstance(offer, Weights) else self._transfer.receive(offer, seat)
        checksums: dict[str, str] = {}
        for part in parts:
            checksums |= transport.checksums(part)
        return checksums

    async def clock(self) -> dict[str, float]:
        """Return counters since the start: seconds in `step`, steps, sampled tokens, prompt tokens, load seconds.

        They include the peak host memory of this process (`host_bytes`), and sums over steps for fitting the cost of a
        step: running continuations, their squares, and their products with the step's seconds.
        """
        return {**self._clock, "host_bytes": float(peak_memory())}

    async def health(self) -> dict[str, float]:
        """Return the counters of `clock`, if the engine still works.

        Raises:
            EngineError: The engine failed and answers nothing more.
        """
        self._check()
        return await self.clock()

    async def stop(self) -> None:
        """End the step loop and free everything; waiting `generate` calls fail."""
        if self._failure is None:
            self._fail(EngineError("the engine was stopped"))
        self._engine.stop()

    def _check(self) -> None:
        if self._failure is not None:
            known = isinstance(self._failure, EngineError)
            reason = str(self._failure) if known else f"{type(self._failure).__name__}: {self._failure}"
            raise EngineError(f"the engine failed: {reason}{self._origin}") from self._failure

    def _wake(self) -> None:
        """Wake the step loop; the first call starts it on this actor's event loop."""
        self._work.set()
        self._heard()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._steps())

    async def _steps(self) -> None:
        """Step while there is work; let waiting calls run between steps."""
        try:
            while self._failure is None:
                frozen = self._paused or self._asleep or self._torn
                if frozen or not self._engine.unfinished:
                    if not frozen and (lost := sum(stream.left for stream in set(self._streams.values()))):
                        raise EngineError(
                            f"{type(self._engine).__name__} has no unfinished requests, but never returned the "
                            f"completions of {counted(lost, 'request')}"
                        )
                    self._work.clear()
                    await self._work.wait()
                    self._heard()
                    continue
                running: int = self._engine.unfinished
                if self._limited:  # steps do not advance requests that wait for a slot
                    running = min(running, self._engine.max_num_seqs)
                started = time.perf_counter()
                finished = self._engine.step()
                seconds = time.perf_counter() - started
                for name, value in zip(STEP, (seconds, 1, running, running**2, running * seconds), strict=True):
                    self._clock[name] += value
                self._deliver(finished)
                if finished:
                    self._heard()
                else:
                    self._check_silence()
                for stream in self._streaming:
                    stream.some.set()
                await asyncio.sleep(0)
        except Exception as error:  # the loop ends; current and later callers get the failure
            log.exception("the engine failed")
            self._fail(error)

    def _heard(self) -> None:
        """Note that there is new work or a completion, so that the engine is not silent."""
        self._silent_since, self._silent_steps = time.monotonic(), 0

    def _check_silence(self) -> None:
        """Fail if the engine has long returned nothing, in more steps than all tokens of its requests need."""
        self._silent_steps += 1
        silent = time.monotonic() - self._silent_since
        if silent < SILENT_SECONDS:
            return
        asked = [stream.requests[request] for stream in set(self._streams.values()) for request, _ in stream.open]
        if self._silent_steps > sum(len(request.prompt_ids) + request.sampling.max_tokens for request in asked):
            raise EngineError(
                f"{type(self._engine).__name__} has returned no completion for {silent:.0f} s, in {self._silent_steps} "
                f"steps; expected those of {counted(len(asked), 'request')}, one decode step of each running one per "
                "call of step"
            )

    def _deliver(self, completions: object) -> None:
        if not isinstance(completions, Sequence):
            got, name = type(completions).__name__, type(self._engine).__name__
            raise EngineError(f"{name} returned {got} from step or abort; expected a list of Completion")
        for completion in completions:
            if not isinstance(completion, Completion):
                got, name = type(completion).__name__, type(self._engine).__name__
                raise EngineError(f"{name} returned {got} among its completions; expected Completion")
            stream = self._streams.get(completion.request)  # none if its caller went away during this step
            if stream is not None and (fault := stream.fault(completion, self._version, self._vocabulary)):
                name, request = type(self._engine).__name__, completion.request
                raise EngineError(f"{name} returned a completion of request {request!r} with {fault}")
            self._clock["tokens"] += len(completion.token_ids)
            if stream is not None:
                stream.put(completion)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        for stream in self._streams.values():
            stream.release()
        self._work.set()
