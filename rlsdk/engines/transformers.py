"""The engine `transformers`: batched generation with a model of transformers, for machines without vLLM."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from rlsdk.contracts import ActorSpec, Completion, Finish, Model, Request, Sampled, Weights
from rlsdk.conversion import from_checkpoint, policy_class, shapes
from rlsdk.engines.common import (
    StopStrings,
    check_images,
    check_known,
    check_names,
    check_requests,
    end_ids,
    mix,
    open_tokenizer,
)
from rlsdk.engines.rows import Pending, RunningRows, room
from rlsdk.errors import EngineError, ValueFault
from rlsdk.exact import sequence_logprobs
from rlsdk.marks import engine
from rlsdk.vision import Vision, sees
from rlsdk.weights import from_weights

if TYPE_CHECKING:
    import torch

    from rlsdk.engines.slots import See

_DEAD = 0.25
"""Rows that ended stay in the batch until they are this share of it: moving the others costs a copy of their cache."""

_END_SETS = 256
"""Sets of end tokens that are kept while nothing runs: clients of a server may choose ever new ones."""


@engine("transformers")
@attrs.define(kw_only=True, eq=False, slots=False)
class Transformers:
    """Generate with a model of transformers, on a CPU or one GPU.

    Continuations run in one batch with a KV cache that is written in place; those of one request share the reading of
    the prompt; a row that ends is given to the next request. Random numbers come from the seed of the continuation and
    its position alone, so that what runs beside it changes nothing but rounding; requests without a seed get one from
    the engine's own, which `reseed` sets. After new weights the cache of what runs is computed anew. At temperature 0
    the logprobs are those of temperature 1.

    Attributes:
        max_num_seqs: Continuations that run at once; the rest wait.
        max_num_batched_tokens: Prompt tokens, padding included, that are read at once.
        kv_cache_gib: Memory for the KV cache, in GiB; fewer continuations run at once where it is short.
        compile: Decode with a model under `torch.compile`: on the two cores of docs/benchmarks.md a quarter faster, but
            the first steps take half a minute more. Needs g++, or what `CXX` names.
    """

    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 16384
    kv_cache_gib: float = 4.0
    compile: bool = False

    _net: Any = attrs.field(init=False, default=None)
    _decoder: Any = attrs.field(init=False, default=None)
    _model: Any = attrs.field(init=False, default=None)
    _tokenizer: Any = attrs.field(init=False, default=None)
    _device: str = attrs.field(init=False, default="cpu")
    _ends: Any = attrs.field(init=False, default=None)
    _default_ends: tuple[int, ...] = attrs.field(init=False, default=())
    _rows: Any = attrs.field(init=False, default=None)
    _slots: Any = attrs.field(init=False, default=None)
    _per_token: int = attrs.field(init=False, default=0)
    _expected: Any = attrs.field(init=False, default=None)
    _version: int = attrs.field(init=False, default=0)
    _seed: int = attrs.field(init=False, default=0)
    _admitted: int = attrs.field(init=False, default=0)
    _waiting: Any = attrs.field(init=False, factory=deque)
    _routers: Any = attrs.field(init=False, default=None)
    _vision: Any = attrs.field(init=False, default=None)
    _returns_routing: bool = attrs.field(init=False, default=False)

    @property
    def programs(self) -> tuple[str, ...]:
        """Programs these options need: `torch.compile` calls the compiler that `CXX` names, as torch parses it."""
        return (os.environ.get("CXX", "g++"),) if self.compile else ()

    def model_faults(self, model: Any) -> Sequence[str]:
        """Say why a model cannot be run; it may have no weights."""
        from rlsdk.engines.slots import check_layers

        try:
            check_layers(model.config.get_text_config())
        except EngineError as error:
            return [str(error)]
        return []

    def routing_faults(self, model: Any) -> Sequence[str]:
        """Say why the experts that tokens choose cannot be returned; the model may have no weights."""
        from rlsdk.routing import replay_fault

        if self.compile:
            return ["compile: true returns no experts that tokens chose; set engine.compile=false"]
        fault = replay_fault(model)
        return [fault] if fault else []

    def return_routing(self) -> None:
        """Have completions carry the experts that their tokens chose; called before `start`."""
        self._returns_routing = True

    def image_faults(self, model: Any) -> Sequence[str]:
        """Say why a model's images cannot be read; the model may have no weights."""
        if self.compile:
            return ["compile: true reads no images; set engine.compile=false"]
        return [] if sees(model) else [f"a {type(model).__name__} reads no images"]

    def exact_faults(self) -> Sequence[str]:
        """Say which options stand in the way of `model.exact`."""
        return ["compile: true fuses operations, which rounds otherwise than the learner; leave it out"] * self.compile

    def environment(self, place: ActorSpec) -> Mapping[str, str]:
        """Environment variables to set before the actor's process imports anything."""
        found = place.environment()
        if self.compile and place.device == "cpu":
            found["TORCHINDUCTOR_COMPILE_THREADS"] = str(place.threads)
        return found

    def start(self, model: Model, place: ActorSpec) -> None:
        """Load the model; weights of the folder are version 0.

        Raises:
            EngineError: The model has layers other than attention.
        """
        import torch
        from transformers import AutoConfig

        from rlsdk.engines.heads import ExactHead
        from rlsdk.engines.slots import Slots, check_layers, token_bytes, use_attention
        from rlsdk.routing import Routers

        self._model, self._device = model, place.device
        self._tokenizer = open_tokenizer(model)
        self._default_ends = end_ids(model, self._tokenizer)
        self._vision = Vision(model)
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        net = policy_class(config).from_pretrained(
            model.path, dtype=getattr(torch, model.dtype), trust_remote_code=model.trust_remote_code
        )
        if model.head_dtype == "float32":
            net.set_output_embeddings(ExactHead(net.get_output_embeddings()))
        self._net = net.to(place.device).eval().requires_grad_(False)
        self._routers = Routers(self._net)
        config = net.config.get_text_config()
        check_layers(config)
        use_attention(net, self.compile)
        self._decoder = _compiled(net) if self.compile else net
        kept = (self._routers.layers, self._routers.chosen) if self._returns_routing else ()
        self._rows, self._slots = RunningRows(self.max_num_seqs, *kept), Slots(config)
        self._per_token = token_bytes(config, net.dtype.itemsize)
        self._ends = _EndTable(config.vocab_size)
        self.reseed(mix(place.seed, place.rank))

    def add(self, requests: Sequence[Request]) -> None:
        """Admit requests in this order; none, if one of them cannot be generated.

        Raises:
            ValueFault: A request cannot be generated, or its id is in use.
        """
        limit = self._model.max_length
        check_images(requests, self._vision if sees(self._net) and not self.compile else None)
        check_requests(requests, max_length=limit, vocabulary=self._ends.vocabulary)
        held = (p.request.id for p in [*self._rows.held, *self._waiting] if p is not None)
        check_known([r.id for r in requests], held)
        if len(self._ends.table) > _END_SETS and not self.unfinished:
            self._ends = _EndTable(self._ends.vocabulary)
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
        """Read the prompts of waiting requests if there is room, else one decode step; returns what finished."""
        import torch

        with torch.inference_mode():
            if chosen := self._choose():
                return self._admit(chosen)
            return self._decode() if self._rows.used else []

    def sampled(self, since: Mapping[tuple[str, int], int]) -> list[Sampled]:
        """Return new tokens of running continuations.

        Args:
            since: (id of the request, index) -> the first position that is wanted; no others are looked at.

        Returns:
            The new tokens; none with `Model.exact`, since logprobs are exact once a continuation has ended.
        """
        if self._model.exact:
            return []
        found: list[Sampled] = self._rows.sampled(since)
        return found

    @property
    def unfinished(self) -> int:
        """Continuations that still run or wait."""
        return len(self._waiting) + int(self._rows.alive.sum())

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        """End requests (None: all); returns what they had sampled, as `abort`."""
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
                ended.append(_nothing(pending))
            else:
                self._waiting.append(pending)
        self._tidy()
        return ended

    def load_weights(self, weights: Weights) -> None:
        """Replace the weights between two steps; requests in flight continue with a recomputed cache.

        Raises:
            EngineError: A tensor of the model is missing, has a different shape, or does not belong to the model.
        """
        import torch

        if self._expected is None:
            self._expected = shapes(self._net)
        check_names(weights, self._expected)
        held = self._net.state_dict()
        known = {*self._expected, *held, *(name for name, _ in self._net.named_buffers())}
        if unknown := [name for name in weights.tensors if name not in known]:
            raise EngineError(
                f"weights of version {weights.version}: {len(unknown)} tensors are none of the model's: "
                f"{', '.join(unknown[:5])}"
            )
        with torch.inference_mode():
            for name, tensor in from_checkpoint(self._net, dict(from_weights(weights))):
                if name in held:
                    held[name].copy_(tensor)
            self._version = weights.version
            running = self._rows.running
            if len(running):
                self._read_again(running)

    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 `[k - 1]`: at temperature 1, of each token of `[k]` given those before it.

        Raises:
            ValueFault: `k` is less than 2, or above `model.max_length`.
        """
        import torch

        count, limit = len(token_ids), self._model.max_length
        if not 2 <= count <= limit:
            raise ValueFault(f"logprobs of {count} tokens; give at least 2 and at most model.max_length, {limit}")
        if self._model.exact:
            return sequence_logprobs(self._net, token_ids, limit, 1.0)
        with torch.inference_mode():
            ids = torch.as_tensor(np.array(token_ids), device=self._device)
            scores = self._net(ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
            found: np.ndarray = scores.gather(-1, ids[1:, None])[:, 0].cpu().numpy()
        return found

    def reseed(self, seed: int) -> None:
        """Seed the engine's own generator: the same requests, admitted in the same order, then give the same tokens."""
        self._seed, self._admitted = seed, 0

    def sleep(self) -> None:
        """Free the device for a colocated learner; on a CPU there is nothing to free."""
        if self._device != "cpu":
            self._net.to("cpu")
            self._slots.clear()

    def wake(self) -> None:
        """Take the device back."""
        import torch

        if self._device != "cpu":
            self._net.to(self._device)
            running = self._rows.running
            if len(running):
                with torch.inference_mode():
                    self._read_again(running)

    def stop(self) -> None:
        """Free everything."""
        self._net = self._decoder = self._slots = self._rows = None
        self._waiting.clear()

    def _choose(self) -> list[tuple[int, Pending]]:
        """Rows for waiting continuations, in order: at once if nothing runs, else when enough rows are free."""
        rows = self._rows
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
            if count and (count + 1) * longest * self._per_token > budget:
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
        asked = list(requests.values())
        logits = self._read([r.prompt_ids for r in asked], asked, where, source, routed=self._returns_routing)
        return self._sample(where, logits)

    def _read_again(self, running: np.ndarray) -> None:
        """Compute the cache of all that runs anew."""
        rows = self._rows
        tokens = [rows.tokens[r, : rows.length[r]] for r in running]
        self._read(tokens, [rows.held[r].request for r in running], running)

    def _read(
        self,
        prompts: Sequence[np.ndarray],
        requests: Sequence[Request],
        rows: np.ndarray,
        source: np.ndarray | None = None,
        *,
        routed: bool = False,
    ) -> torch.Tensor:
        """Prefill the prompts in parts that fit.

        Args:
            prompts: Prompts, int64 arrays; tokens that were sampled since may follow.
            requests: Request of each prompt.
            rows: int64, rows to fill.
            source: Index of each row's prompt; left out, as they come.
            routed: Keep the experts that the tokens choose. Tokens that are read again, after new weights, keep those
                with which they were sampled.

        Returns:
            Logits after each row's prompt, `[len(rows), vocabulary]`.
        """
        import torch

        from rlsdk.engines.slots import prefill

        source = np.arange(len(rows)) if source is None else source
        found: torch.Tensor | None = None
        for part in _parts([len(p) for p in prompts], self.max_num_batched_tokens):
            if routed:
                self._routers.record()
            see = self._seeing([requests[i] for i in part], [len(prompts[i]) for i in part])
            logits, cache, lengths, offsets = prefill(self._net, [prompts[i] for i in part], self._device, see)
            mine = np.flatnonzero((source >= part.start) & (source < part.stop))
            if routed:
                routing = self._routers.take().numpy()
                routing = routing.reshape(len(part), -1, *routing.shape[1:])
                for i in mine.tolist():
                    count = len(prompts[source[i]])
                    self._rows.routing[rows[i], :count] = routing[source[i] - part.start, -count:]
            at = torch.from_numpy(source[mine] - part.start).to(self._device)
            if offsets is not None:
                self._rows.offset[rows[mine]] = offsets[at].cpu().numpy()
            self._slots.fill(cache, at, lengths, torch.from_numpy(rows[mine]).to(self._device))
            if found is None:
                found = logits.new_empty(len(rows), logits.shape[-1])
            found[torch.from_numpy(mine).to(self._device)] = logits[at]
        assert found is not None
        return found

    def _seeing(self, requests: Sequence[Request], lengths: Sequence[int]) -> See | None:
        """Return what makes the model's arguments of the requests' tokens and images; None if there are no images."""
        if not any(request.images for request in requests):
            return None
        import torch

        def see(tokens: torch.Tensor, seen: torch.Tensor) -> Mapping[str, torch.Tensor]:
            mask = np.zeros(tokens.shape, dtype=bool)
            for row, request, length in zip(mask, requests, lengths, strict=True):
                if request.image_positions is not None:
                    row[len(row) - length + request.image_positions] = True
            images = [request.images for request in requests]
            on_device = torch.from_numpy(mask).to(self._device)
            found: Mapping[str, torch.Tensor] = self._vision.inputs(self._net, tokens, on_device, images, seen)
            return found

        return see

    def _decode(self) -> list[Completion]:
        """Sample one token for each row."""
        rows = self._rows
        alive, running = rows.alive[: rows.used], rows.running
        width = int(rows.length[running].max()) + 1
        columns = np.minimum(rows.length[: rows.used], width - 1)  # of a dead row, any column will do
        inputs = rows.tokens[np.arange(rows.used), columns]
        # One row would be another graph.
        decoder = self._decoder if rows.used > 1 else self._net
        if self._returns_routing:
            self._routers.record()
        offsets = rows.offset[: rows.used]
        shifted = offsets if offsets.any() else None
        logits = self._slots.advance(decoder, self._device, inputs, columns, width, shifted)
        if self._returns_routing:
            rows.routing[running, rows.length[running]] = self._routers.take().numpy()[running]
        rows.length[: rows.used] += alive
        if len(running) < rows.used:
            logits = logits[running]
        return self._sample(running, logits)

    def _sample(self, where: np.ndarray, logits: torch.Tensor) -> list[Completion]:
        """Sample for these rows, record, and end those that are done."""
        from rlsdk.engines.sampler import likeliest, sample, uniforms

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
                found = likeliest(logits[one], temperature[one], top_p[one], top_k[one], count)
                rows.top[int(where[i])].append(found)
        stopped = self._ends.table[rows.ends[where], tokens] | rows.stopped_by_text(where)
        full = at + 1 >= rows.limit[where]
        done = np.flatnonzero(stopped | full)
        finished = [self._end(int(where[i]), int(at[i]) + 1, "stop" if stopped[i] else "length") for i in done]
        if finished:
            self._tidy()
        return finished

    def _end(self, row: int, end: int, finish: Finish) -> Completion:
        """End a row; what it sampled before position `end` is handed out, with the learner's logprobs in exact mode."""
        rows, held = self._rows, self._rows.held[row]
        sampling, start = held.request.sampling, int(rows.start[row])
        whole = sampling.temperature == 0 or (sampling.top_p == 1 and sampling.top_k == 0)
        if self._model.exact and whole:  # the learner knows no part of a vocabulary
            tokens, width = rows.tokens[row, :end], self._model.max_length
            found = sequence_logprobs(self._net, tokens, width, sampling.temperature or 1.0)
            rows.logprobs[row, start:end] = found[start - 1 :]
        completion: Completion = rows.take(row, end, finish)
        return completion

    def _tidy(self) -> None:
        """Close the gaps once they cost more than a copy, unless waiting requests will fill them."""
        import torch

        rows = self._rows
        running = rows.running
        if not len(running):
            rows.used = 0
        elif not self._waiting and len(running) <= (1 - _DEAD) * rows.used:
            width = int(rows.length[running].max())
            with torch.inference_mode():
                self._slots.keep(torch.from_numpy(rows.compact()).to(self._device), width)


def _compiled(net: Any) -> Callable[..., Any]:
    """The model as a function, compiled once for any number of rows and columns."""
    import torch
    from torch.fx.experimental import _config as config

    # Else rows that are as many as a head's numbers, say, in the first step, would be taken for the same, and compiled
    # anew when they are not. The setting is the calling task's own, and steps are not taken in that of `start`.
    context = copy_context()
    context.run(setattr, config, "use_duck_shape", False)
    return partial(context.run, torch.compile(net, dynamic=True))


class _EndTable:
    """Sets of tokens that end a continuation, as rows of one table.

    Attributes:
        vocabulary: Tokens of the model.
        table: bool `[sets, vocabulary]`.
    """

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.table = np.zeros((0, vocabulary), dtype=bool)
        self._rows: dict[frozenset[int], int] = {}

    def row(self, ends: Iterable[int]) -> int:
        """The row of a set of tokens, made if there is none."""
        key = frozenset(ends)
        if key not in self._rows:
            new = np.zeros((1, self.vocabulary), dtype=bool)
            new[0, [e for e in key if 0 <= e < self.vocabulary]] = True
            self.table = np.concatenate([self.table, new])
            self._rows[key] = len(self._rows)
        return self._rows[key]


def _nothing(pending: Pending) -> Completion:
    """Return the completion of a continuation that never ran."""
    none = np.zeros(0, dtype=np.int64)
    return Completion(
        request=pending.request.id,
        index=pending.index,
        token_ids=none,
        logprobs=none.astype(np.float32),
        versions=none,
        finish="abort",
    )


def _parts(lengths: Sequence[int], budget: int) -> Iterable[range]:
    """Consecutive ranges; the padded size of one that holds several, count times longest, is within the budget."""
    start, longest = 0, 0
    for index, length in enumerate(lengths):
        if index > start and (index + 1 - start) * max(longest, length) > budget:
            yield range(start, index)
            start, longest = index, 0
        longest = max(longest, length)
    yield range(start, len(lengths))
