"""A transformers model with a slot cache: reads prompts, then decodes one token at a time for all running rows.

Sampling is reproducible for each continuation regardless of the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from rlsdk.contracts import ActorSpec, Model, Request, Weights
from rlsdk.conversion import from_checkpoint, policy_class, shapes
from rlsdk.engines.checks import check_names, checked
from rlsdk.engines.memory import check_layers, token_bytes
from rlsdk.engines.rows import RunningRows
from rlsdk.engines.slots import See, Slots, prefill, use_attention
from rlsdk.errors import EngineError
from rlsdk.exact import sequence_logprobs
from rlsdk.routing import Routers
from rlsdk.vision import Vision
from rlsdk.weights import from_weights


class CachedModel:
    """A model with the cache of its running continuations.

    Attributes:
        net: The transformers model.
        vision: Image processing of the model.
        rows: Running continuations.
        vocabulary: Vocabulary size.
        row_bytes: Cache bytes per continuation, independent of its length.
        token_bytes: Cache bytes per token of a continuation.
    """

    def __init__(self, model: Model, place: ActorSpec, *, capacity: int, compiled: bool, routed: bool) -> None:
        """Load the model.

        Args:
            model: Model to load.
            place: Placement of the engine.
            capacity: Maximum number of concurrent continuations.
            compiled: True to decode with `torch.compile`.
            routed: True to record the experts that tokens choose.

        Raises:
            EngineError: A layer has neither keys and values nor a state.
        """
        self._model, self._device, self._routed = model, place.device, routed
        self.vision = Vision(model)
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
        net = policy_class(config).from_pretrained(
            model.path, dtype=getattr(torch, model.dtype), trust_remote_code=model.trust_remote_code
        )
        if model.head_dtype == "float32":
            net.set_output_embeddings(ExactHead(net.get_output_embeddings()))
        if place.device == "cuda":
            # Torch prefers cuDNN's attention on an H100, which is compiled again for every length.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self.net: Any = net.to(place.device).eval().requires_grad_(False)
        self._routers = Routers(self.net)
        config = self.net.config.get_text_config()
        check_layers(config, compiled)
        use_attention(self.net, compiled)
        self._decoder = _compiled(net) if compiled else net
        self.rows = RunningRows(capacity, *((self._routers.layers, self._routers.chosen) if routed else ()))
        self._slots = Slots(config)
        self.vocabulary: int = config.vocab_size
        self.token_bytes = token_bytes(config, net.dtype.itemsize)
        with torch.inference_mode():
            self.row_bytes = self._slots.state_bytes(net, place.device)
        self._expected: Mapping[str, tuple[int, ...]] | None = None

    def replace(self, weights: Weights) -> None:
        """Replace the weights; if they are rejected, nothing changes.

        Raises:
            EngineError: A tensor of the model is missing, has a different shape, or does not belong to the model.
        """
        check_names(weights, self._shapes())
        self._copy(weights)

    def replace_parts(self, version: int, parts: Iterator[Weights]) -> None:
        """Replace the weights part by part; if a part is rejected, earlier parts stay replaced."""
        for part in checked(version, parts, self._shapes()):
            self._copy(part)

    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        if self._expected is None:
            self._expected = shapes(self.net)
        return self._expected

    def _copy(self, weights: Weights) -> None:
        tensors = self.net.state_dict()
        known = {*self._shapes(), *tensors, *(name for name, _ in self.net.named_buffers())}
        if unknown := [name for name in weights.tensors if name not in known]:
            raise EngineError(
                f"weights of version {weights.version}: {len(unknown)} tensors do not belong to the model: "
                f"{', '.join(unknown[:5])}"
            )
        with torch.inference_mode():
            for name, tensor in from_checkpoint(self.net, dict(from_weights(weights))):
                if name in tensors:
                    tensors[name].copy_(tensor)

    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 `[k - 1]`: at temperature 1, of each token of `[k]` given those before it."""
        if self._model.exact:
            return sequence_logprobs(self.net, token_ids, self._model.max_length, 1.0)
        with torch.inference_mode():
            ids = torch.as_tensor(np.array(token_ids), device=self._device)
            scores = self.net(ids[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
            logprobs: np.ndarray = scores.gather(-1, ids[1:, None])[:, 0].cpu().numpy()
        return logprobs

    def sleep(self) -> None:
        """Free the device for a colocated learner; on a CPU there is nothing to free."""
        if self._device != "cpu":
            self.net.to("cpu")
            self._slots.clear()
            torch.cuda.empty_cache()  # otherwise torch keeps the freed memory for this process

    def wake(self) -> None:
        """Take back the memory of the weights; the cache of running continuations must be recomputed."""
        self.net.to(self._device)

    def read_again(self, budget: int) -> None:
        """Recompute the cache of all running continuations, in passes of `budget` tokens.

        Tokens keep the experts that they chose when they were first read.
        """
        rows, running = self.rows, self.rows.running
        if len(running):
            tokens = [rows.tokens[row, : rows.length[row]] for row in running]
            with torch.inference_mode():
                self._read(
                    tokens, rows.requests(running), running, np.arange(len(running)), budget, keeps_experts=False
                )

    def read(self, requests: Sequence[Request], rows: np.ndarray, source: np.ndarray, budget: int) -> torch.Tensor:
        """Read prompts, each once for all rows that continue it.

        Args:
            requests: Requests whose prompts are read.
            rows: int64 `[k]`, rows to fill.
            source: int64 `[k]`, index of each row's request.
            budget: Maximum prompt tokens per pass, padding included.

        Returns:
            Logits after each row's prompt, `[k, vocabulary]`.
        """
        prompts = [request.prompt_ids for request in requests]
        return self._read(prompts, requests, rows, source, budget, keeps_experts=self._routed)

    def _read(
        self,
        prompts: Sequence[np.ndarray],
        requests: Sequence[Request],
        rows: np.ndarray,
        source: np.ndarray,
        budget: int,
        *,
        keeps_experts: bool,
    ) -> torch.Tensor:
        result: torch.Tensor | None = None
        for part in _parts([len(p) for p in prompts], budget):
            if keeps_experts:
                self._routers.record()
            see = self._seeing([requests[i] for i in part], [len(prompts[i]) for i in part])
            logits, cache, lengths, offsets = prefill(self.net, [prompts[i] for i in part], self._device, see)
            members = np.flatnonzero((source >= part.start) & (source < part.stop))
            if keeps_experts:
                routing = self._routers.take().numpy()
                routing = routing.reshape(len(part), -1, *routing.shape[1:])
                for i in members.tolist():
                    count = len(prompts[source[i]])
                    self.rows.routing[rows[i], :count] = routing[source[i] - part.start, -count:]
            at = torch.from_numpy(source[members] - part.start).to(self._device)
            if offsets is not None:
                self.rows.offset[rows[members]] = offsets[at].cpu().numpy()
            self._slots.fill(cache, at, lengths, torch.from_numpy(rows[members]).to(self._device))
            if result is None:
                result = logits.new_empty(len(rows), logits.shape[-1])
            result[torch.from_numpy(members).to(self._device)] = logits[at]
        assert result is not None
        return result

    def _seeing(self, requests: Sequence[Request], lengths: Sequence[int]) -> See | None:
        """Return a function that builds the model's arguments from tokens and images; None if there are no images."""
        if not any(request.images for request in requests):
            return None

        def see(tokens: torch.Tensor, seen: torch.Tensor) -> Mapping[str, torch.Tensor]:
            mask = np.zeros(tokens.shape, dtype=bool)
            for row, request, length in zip(mask, requests, lengths, strict=True):
                if request.image_positions is not None:
                    row[len(row) - length + request.image_positions] = True
            images = [request.images for request in requests]
            return self.vision.inputs(self.net, tokens, torch.from_numpy(mask).to(self._device), images, seen)

        return see

    def advance(self) -> torch.Tensor:
        """Read the newest token of each running row; return the logits after it, `[running, vocabulary]`."""
        rows = self.rows
        alive, running = rows.alive[: rows.used], rows.running
        width = int(rows.length[running].max()) + 1
        columns = np.minimum(rows.length[: rows.used], width - 1)  # for a dead row, any column works
        inputs = rows.tokens[np.arange(rows.used), columns]
        # A single row would compile another graph.
        decoder = self._decoder if rows.used > 1 else self.net
        if self._routed:
            self._routers.record()
        offsets = rows.offset[: rows.used]
        shifted = offsets if offsets.any() else None
        logits = self._slots.advance(decoder, self._device, inputs, columns, width, shifted)
        if self._routed:
            rows.routing[running, rows.length[running]] = self._routers.take().numpy()[running]
        rows.length[: rows.used] += alive
        return logits if len(running) == rows.used else logits[running]

    def compact(self) -> None:
        """Move the running rows to the front."""
        width = int(self.rows.length[self.rows.running].max())
        with torch.inference_mode():
            self._slots.keep(torch.from_numpy(self.rows.compact()).to(self._device), width)


def _compiled(net: Any) -> Callable[..., Any]:
    """Return the model as a function, compiled once for any number of rows and columns."""
    from torch.fx.experimental import _config as config

    # Otherwise dimensions that happen to be equal in the first step would be treated as one, and compiled again later.
    # The setting belongs to the calling context, and steps do not run in the context of `start`.
    context = copy_context()
    context.run(setattr, config, "use_duck_shape", False)
    return partial(context.run, torch.compile(net, dynamic=True))


def _parts(lengths: Sequence[int], budget: int) -> Iterable[range]:
    """Return consecutive ranges; the padded size of a range of several, count times longest, is within the budget."""
    start, longest = 0, 0
    for index, length in enumerate(lengths):
        if index > start and (index + 1 - start) * max(longest, length) > budget:
            yield range(start, index)
            start, longest = index, 0
        longest = max(longest, length)
    yield range(start, len(lengths))


class ExactHead(nn.Module):
    """Head that computes logits in float32 from the parameters of another head, and keeps their names."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = getattr(linear, "bias", None)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[…, d]` -> float32 `[…, V]`."""
        if hidden.is_cuda and hidden.dtype != torch.float32:
            # Accumulates in float32 without copying the weight to float32 at every step.
            rows = hidden.reshape(-1, hidden.shape[-1])
            logits = torch.mm(rows, self.weight.t(), out_dtype=torch.float32).view(*hidden.shape[:-1], -1)
        else:
            logits = hidden.float() @ self.weight.float().t()
        return logits if self.bias is None else logits + self.bias.float()


def uniforms(seeds: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Draw a number in [0, 1) for each continuation, determined only by its seed and position.

    SplitMix64 as a counter-based generator: no state, and no loop over generators.

    Args:
        seeds: Seeds of the continuations, uint64 `[n]`.
        counts: Number of tokens sampled so far, int64 `[n]`.

    Returns:
        float64 `[n]`, multiples of 2^-48, so that a product with a rounded sum also stays below that sum.
    """
    state = seeds + (counts.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    numbers: np.ndarray = (state >> np.uint64(16)).astype(np.float64) * 2.0**-48
    return numbers


def sample(
    logits: torch.Tensor, temperature: np.ndarray, top_p: np.ndarray, top_k: np.ndarray, uniform: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sample one token per row by inverting the cumulative distribution.

    Args:
        logits: `[n, vocabulary]`, any float type; not changed.
        temperature: float32 `[n]`; 0 takes the most likely token, with its logprob at temperature 1.
        top_p: float32 `[n]`; 1 is off. Applied after top-k.
        top_k: int64 `[n]`; 0 is off.
        uniform: float64 `[n]`, in [0, 1).

    Returns:
        Tokens int64 `[n]` and their logprobs float32 `[n]`, nats, of the distribution sampled from.
    """
    logprobs, greedy = _distribution(logits, temperature, top_p, top_k), temperature == 0
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    point = torch.from_numpy(uniform).to(logits.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, point, right=True)
    if greedy.any():
        chosen = torch.from_numpy(greedy).to(logits.device)[:, None]
        tokens = torch.where(chosen, logprobs.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0].cpu().numpy(), logprobs.gather(-1, tokens)[:, 0].cpu().numpy()


def likeliest(
    logits: torch.Tensor, temperature: np.ndarray, top_p: np.ndarray, top_k: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the most likely tokens of one row, in the distribution that `sample` draws from.

    Returns:
        Ids int64 `[count]` and their logprobs float32 `[count]`, descending.
    """
    top = _distribution(logits, temperature, top_p, top_k)[0].topk(count)
    return top.indices.cpu().numpy(), top.values.cpu().numpy()


def _distribution(logits: torch.Tensor, temperature: np.ndarray, top_p: np.ndarray, top_k: np.ndarray) -> torch.Tensor:
    """Return the logprobs `[n, vocabulary]` of the distributions to sample from."""
    scores = logits.float()
    greedy = temperature == 0
    if (temperature != 1).any():
        divisor = np.where(greedy, 1.0, temperature).astype(np.float32)
        scores = scores / torch.from_numpy(divisor).to(scores.device)[:, None]
    limited = ~greedy & ((top_p < 1) | (top_k > 0))
    if limited.any():
        rows = torch.from_numpy(np.flatnonzero(limited)).to(scores.device)
        scores = scores.index_copy(0, rows, _limit(scores[rows], top_p[limited], top_k[limited]))
    return scores.log_softmax(-1)


def _limit(scores: torch.Tensor, top_p: np.ndarray, top_k: np.ndarray) -> torch.Tensor:
    """Return `scores` `[n, vocabulary]` with minus infinity outside `top_k` and, within it, outside `top_p`."""
    ordered, order = scores.sort(dim=-1, descending=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    most = torch.from_numpy(np.where(top_k > 0, top_k, scores.shape[-1])).to(scores.device)[:, None]
    ordered = ordered.masked_fill(rank >= most, -torch.inf)
    mass = ordered.softmax(-1)
    before = mass.cumsum(-1) - mass
    # Keep the most likely token despite rounding and, if top_p is off, all others.
    share = torch.from_numpy(np.where(top_p < 1, top_p, np.inf).astype(np.float32)).to(scores.device)[:, None]
    ordered = ordered.masked_fill((before >= share) & (rank > 0), -torch.inf)
    return torch.empty_like(scores).scatter_(-1, order, ordered)
