"""The engine `transformers`: batched generation with a transformers model, for machines without vLLM."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import numpy as np

from rlsdk.cluster.compiled import compiler_environment, compiler_programs
from rlsdk.contracts import ActorSpec, Completion, Finish, MemoryUse, Model, Request, Sampled, Weights
from rlsdk.engines.checks import check_images, check_known, check_requests
from rlsdk.engines.continuation import StopStrings, unsampled
from rlsdk.engines.copying import copy_parts, held_parts, layout_of
from rlsdk.engines.memory import check_layers, transformers_memory
from rlsdk.engines.pretrained import end_ids, open_tokenizer
from rlsdk.engines.rows import EndTable, Pending, room
from rlsdk.errors import EngineError, ValueFault
from rlsdk.exact import sequence_logprobs
from rlsdk.limits import Count, Positive
from rlsdk.marks import engine
from rlsdk.seeds import mix
from rlsdk.vision import sees

if TYPE_CHECKING:
    import torch

_DEAD = 0.25
"""Share of ended rows up to which they stay in the batch, since moving the others copies their KV cache."""

_END_SETS = 256
"""Maximum number of cached sets of end tokens while idle, since clients of a server may send ever new ones."""


@engine("transformers")
@attrs.define(kw_only=True, eq=False, slots=False)
class Transformers:
    """Generate with a transformers model, on a CPU or one GPU.

    Continuations run in one batch with an in-place KV cache. The prompt of a request is read once for all its
    continuations, and the next request takes over rows that end. Random numbers depend only on a continuation's seed
    and position, so other requests in the batch affect nothing but rounding. Requests without a seed get one derived
    from the engine's seed, which `reseed` sets. After a weight sync, the KV cache of running continuations is
    recomputed. At temperature 0, logprobs are those at temperature 1.

    Attributes:
        max_num_seqs: Maximum number of continuations that run at once; the rest wait.
        max_num_batched_tokens: Maximum number of prompt tokens, padding included, that are read at once.
        kv_cache_gib: Memory for the KV cache, in GiB; fewer continuations run at once if it is too small.
        compile: Decode with `torch.compile`: 25 % faster on the two cores of docs/benchmarks.md, but the first steps
            take half a minute longer, unless an earlier run compiled the same. Needs g++ or the compiler that `CXX`
            names.
    """

    max_num_seqs: Count = 1024
    max_num_batched_tokens: Count = 16384
    kv_cache_gib: Positive = 4.0
    compile: bool = False
    loads_tensors: ClassVar[bool] = True

    _loaded: Any = attrs.field(init=False, default=None)
    _model: Any = attrs.field(init=False, default=None)
    _tokenizer: Any = attrs.field(init=False, default=None)
    _ends: Any = attrs.field(init=False, default=None)
    _default_ends: tuple[int, ...] = attrs.field(init=False, default=())
    _rows: Any = attrs.field(init=False, default=None)
    _version: int = attrs.field(init=False, default=0)
    _asleep: bool = attrs.field(init=False, default=False)
    _seed: int = attrs.field(init=False, default=0)
    _admitted: int = attrs.field(init=False, default=0)
    _waiting: Any = attrs.field(init=False, factory=deque)
    _returns_routing: bool = attrs.field(init=False, default=False)

    @property
    def programs(self) -> tuple[str, ...]:
        """Programs that these options need."""
        return compiler_programs() if self.compile else ()

    def model_faults(self, model: Any) -> Sequence[str]:
        """Return why a model cannot be run; the model may have no weights."""
        try:
            check_layers(model.config.get_text_config(), self.compile)
        except EngineError as error:
            return [str(error)]
        return []

    def generation_memory(
        self, model: Model, net: Any, place: ActorSpec, device_bytes: int | None
    ) -> Sequence[MemoryUse]:
        """Estimate the peak memory of an engine; see `EstimatesGeneration`."""
        return transformers_memory(model, net, place, max_num_seqs=self.max_num_seqs, kv_cache_gib=self.kv_cache_gib)

    def routing_faults(self, model: Any) -> Sequence[str]:
        """Return why routed experts cannot be returned; the model may have no weights."""
        from rlsdk.routing import replay_fault

        if self.compile:
            return ["compile: true cannot return routed experts; set engine.compile=false"]
        fault = replay_fault(model)
        return [fault] if fault else []

    def return_routing(self) -> None:
        """Make completions carry their tokens' routed experts; called before `start`."""
        self._returns_routing = True

    def image_faults(self, model: Any) -> Sequence[str]:
        """Return why this engine cannot read images for a model; the model may have no weights."""
        if self.compile:
            return ["compile: true cannot read images; set engine.compile=false"]
        return [] if sees(model) else [f"a {type(model).__name__} does not read images"]

    def exact_faults(self) -> Sequence[str]:
        """Return the options that conflict with `model.exact`."""
        return ["compile: true fuses operations and rounds differently than the learner; leave it out"] * self.compile

    def environment(self, place: ActorSpec) -> Mapping[str, str]:
        """Return the environment variables to set before the actor's process imports anything."""
        return place.environment() | compiler_environment(place, compiled=self.compile)

    def preload(self) -> None:
        """Import torch and transformers."""
        from rlsdk.engines import actor, cached  # noqa: F401

    def start(self, model: Model, place: ActorSpec) -> None:
        """Load the model; the folder's weights are version 0.

        Raises:
            EngineError: A layer of the model has neither a KV cache nor a state.
        """
        from rlsdk.engines.cached import CachedModel

        self._model = model
        self._tokenizer = open_tokenizer(model)
        self._default_ends = end_ids(model, self._tokenizer)
        self._loaded = CachedModel(
            model, place, capacity=self.max_num_seqs, compiled=self.compile, routed=self._returns_routing
        )
        self._rows, self._ends = self._loaded.rows, EndTable(self._loaded.vocabulary)
        self.reseed(mix(place.seed, place.rank))

    def add(self, requests: Sequence[Request]) -> None:
        """Admit requests in this order, or none if one of them cannot be generated.

        Raises:
            ValueFault: A request cannot be generated, or its id is in use.
        """
        limit, loaded = self._model.max_length, self._loaded
        check_images(requests, loaded.vision if sees(self.net) and not self.compile else None)
        check_requests(requests, max_length=limit, vocabulary=self._ends.vocabulary)
        active = (p.request.id for p in [*self._rows.held, *self._waiting] if p is not None)
        check_known([r.id for r in requests], active)
        if len(self._ends.table) > _END_SETS and not self.unfinished:
            self._ends = EndTable(self._ends.vocabulary)
        for request in requests:
            sampling = request.sampling
            ends = () if sampling.ignore_eos else (*sampling.stop_token_ids, *self._default_ends)
            seed = mix(self._seed, self._admitted) if request.seed is None else request.seed
            self._admitted += 1
            self._waiting.extend(
                Pending(
                    request,
                    index,
                    mix(seed, index),
                    room(sampling, len(request.prompt_ids), limit),
                    self._ends.row(ends),
                    StopStrings.of(request, self._tokenizer),
                )
                for index in range(request.n)
            )

    def step(self) -> list[Completion]:
        """Read the prompts of waiting requests if there is room, else decode one step; return finished completions."""
        import torch

        with torch.inference_mode():
            if chosen := self._choose():
                return self._admit(chosen)
            return self._sample(self._rows.running, self._loaded.advance()) if self._rows.used else []

    def sampled(self, since: Mapping[tuple[str, int], int]) -> list[Sampled]:
        """Return new tokens of running continuations.

        Args:
            since: (request id, index) -> first position to return; only these continuations are considered.

        Returns:
            The new tokens; none with `Model.exact`, since logprobs are exact only once a continuation has ended.
        """
        if self._model.exact:
            return []
        sampled: list[Sampled] = self._rows.sampled(since)
        return sampled

    @property
    def net(self) -> Any:
        """The loaded transformers model."""
        return self._loaded.net

    @property
    def unfinished(self) -> int:
        """Number of continuations that run or wait."""
        return len(self._waiting) + int(self._rows.alive.sum())

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        """Abort requests (None: all); return what they had sampled, with finish reason `abort`."""
        wanted = None if ids is None else set(ids)
        rows = self._rows
        ended = [
            self._end(r, int(rows.length[r]) + 1, "abort")
            for r in rows.running.tolist()
            if wanted is None or rows.held[r].request.id in wanted
        ]
        waiting, self._waiting = self._waiting, deque()
        for pending in waiting:
            if wanted is None or pending.request.id in wanted:
                ended.append(unsampled(pending.request.id, pending.index))
            else:
                self._waiting.append(pending)
        self._tidy()
        return ended

    def load_weights(self, weights: Weights) -> None:
        """Replace the weights between steps; in-flight requests continue with a recomputed KV cache.

        Raises:
            EngineError: A tensor of the model is missing, has a different shape, or does not belong to the model.
        """
        self._loaded.replace(weights)
        self._version = weights.version
        self._read_again()

    def load_weight_parts(self, version: int, parts: Iterator[Weights]) -> None:
        """Replace the weights as `load_weights` does, loading each part, arrays or tensors, as it arrives.

        Raises:
            EngineError: A tensor is missing, has a different shape, or does not belong to the model.
        """
        self._loaded.replace_parts(version, parts)
        self._version = version
        self._read_again()

    def weight_layout(self) -> str:
        """Return a digest of the names, dtypes and shapes of the model's tensors; see `CopiesEngines`."""
        return layout_of(self.net.state_dict())

    def held_weights(self) -> Iterator[Weights]:
        """Return the model's tensors in parts; see `CopiesEngines`."""
        return held_parts(self._version, self.net.state_dict())

    def copy_weights(self, version: int, parts: Iterator[Weights]) -> None:
        """Replace the weights by those of another engine; see `CopiesEngines`."""
        copy_parts(self.net.state_dict(), parts)
        self._version = version
        self._read_again()

    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the logprob of each token given those before it, at temperature 1, float32 `[k - 1]`.

        Raises:
            ValueFault: `k` is less than 2 or above `model.max_length`.
        """
        count, limit = len(token_ids), self._model.max_length
        if not 2 <= count <= limit:
            raise ValueFault(f"logprobs of {count} tokens; give at least 2 and at most model.max_length, {limit}")
        logprobs: np.ndarray = self._loaded.logprobs(token_ids)
        return logprobs

    def reseed(self, seed: int) -> None:
        """Seed the engine's generator, so that the same requests in the same order give the same tokens."""
        self._seed, self._admitted = seed, 0

    def sleep(self) -> None:
        """Free the device for a colocated learner; does nothing on a CPU."""
        self._asleep = True
        self._loaded.sleep()

    def wake_weights(self) -> None:
        """Take back the memory of the weights; only `wake` takes back the KV cache of running continuations."""
        self._loaded.wake()

    def wake(self) -> None:
        """Take the device back, and recompute the KV cache of running continuations."""
        self._loaded.wake()
        if self._asleep:
            self._asleep = False
            self._read_again()

    def _read_again(self) -> None:
        if not self._asleep:  # otherwise `wake` does
            self._loaded.read_again(self.max_num_batched_tokens)

    def stop(self) -> None:
        """Free everything."""
        self._loaded = self._rows = None
        self._waiting.clear()

    def _choose(self) -> list[tuple[int, Pending]]:
        """Choose rows for waiting continuations, in order: immediately if idle, else once enough rows are free."""
        rows, loaded = self._rows, self._loaded
        running = rows.running
        free = self.max_num_seqs - len(running)
        if not self._waiting or (len(running) and free < min(len(self._waiting), max(1, self.max_num_seqs // 8))):
            return []
        longest = max((int(rows.limit[r]) for r in running), default=0)
        budget = int(self.kv_cache_gib * 2**30)
        chosen: list[tuple[int, Pending]] = []
        for row in rows.free().tolist():
            if not self._waiting:
                break
            longest = max(longest, self._waiting[0].limit)
            count = len(running) + len(chosen)
            if count and (count + 1) * (longest * loaded.token_bytes + loaded.row_bytes) > budget:
                break
            chosen.append((row, self._waiting.popleft()))
        return chosen

    def _admit(self, chosen: Sequence[tuple[int, Pending]]) -> list[Completion]:
        """Read the prompts, each once for all continuations of its request, and sample the first tokens."""
        for row, pending in chosen:
            self._rows.place(row, pending)
        requests = {id(pending.request): pending.request for _, pending in chosen}
        order = {key: i for i, key in enumerate(requests)}
        source = np.array([order[id(p.request)] for _, p in chosen])
        where = np.array([row for row, _ in chosen])
        logits = self._loaded.read(list(requests.values()), where, source, self.max_num_batched_tokens)
        return self._sample(where, logits)

    def _sample(self, where: np.ndarray, logits: torch.Tensor) -> list[Completion]:
        """Sample for these rows, record the tokens, and end finished rows."""
        from rlsdk.engines.cached import likeliest, sample, uniforms

        rows = self._rows
        at = rows.length[where]
        uniform = uniforms(rows.seed[where], at - rows.start[where])
        temperature, top_p, top_k = rows.temperature[where], rows.top_p[where], rows.top_k[where]
        tokens, logprobs = sample(logits, temperature, top_p, top_k, uniform)
        rows.write(where, tokens, logprobs, self._version)
        if rows.top:
            for i in np.flatnonzero([row in rows.top for row in where.tolist()]).tolist():
                count = rows.held[where[i]].request.sampling.top_logprobs
                one = slice(i, i + 1)
                rows.top[int(where[i])].append(likeliest(logits[one], temperature[one], top_p[one], top_k[one], count))
        stopped = self._ends.table[rows.ends[where], tokens] | rows.stopped_by_text(where)
        full = at + 1 >= rows.limit[where]
        done = np.flatnonzero(stopped | full)
        finished = [self._end(int(where[i]), int(at[i]) + 1, "stop" if stopped[i] else "length") for i in done]
        if finished:
            self._tidy()
        return finished

    def _end(self, row: int, end: int, finish: Finish) -> Completion:
        """End a row and return the tokens before position `end`, with exact logprobs in exact mode."""
        rows, pending = self._rows, self._rows.held[row]
        sampling, start = pending.request.sampling, int(rows.start[row])
        whole = sampling.temperature == 0 or (sampling.top_p == 1 and sampling.top_k == 0)
        if self._model.exact and whole:  # the learner cannot restrict the vocabulary
            tokens, width = rows.tokens[row, :end], self._model.max_length
            exact = sequence_logprobs(self.net, tokens, width, sampling.temperature or 1.0)
            rows.logprobs[row, start:end] = exact[start - 1 :]
        completion: Completion = rows.take(row, end, finish)
        return completion

    def _tidy(self) -> None:
        """Compact the batch once gaps cost more than a copy, unless waiting requests will fill them."""
        rows, running = self._rows, len(self._rows.running)
        if not running:
            rows.used = 0
        elif not self._waiting and running <= (1 - _DEAD) * rows.used:
            self._loaded.compact()
