"""Values that engines work with: models, actor specs, requests, completions, weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    import numpy as np

    from rlsdk.types import Image

NO_PROGRESS_BARS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
"""Variables that keep progress bars out of logs; libraries read them when they are imported."""
_RESOLVER = {"RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1")}
"""Torch asks for the names of all addresses that it connects, only to show them: where no name server answers, each
rank would wait for 5 s, again and again."""
_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "TORCH_EXTENSIONS_DIR": "extensions"}

Finish = Literal["stop", "length", "abort"]
DType = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: Mapping[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a number."""
HeadDType = Literal["model", "float32"]


@attrs.frozen(kw_only=True)
class Model:
    """A model and how to load it.

    Attributes:
        path: Folder that `transformers.from_pretrained` opens, or a hub id.
        dtype: Dtype of the weights in computations.
        head_dtype: Precision of the logits: `model` computes them in `dtype`, `float32` from the same weights in
            float32.
        exact: Compute logprobs as `rlsdk.exact` does, bit for bit alike in engine and learner.
        max_length: Tokens of prompt and response together.
        trust_remote_code: Run code that comes with the model.
        tokenizer: Folder or hub id of the tokenizer; left out, `path`.
        separator: Text before every later message of a conversation whose prompt is text.
        keep_history: Keep the sampled tokens where the renderer would show earlier answers without their thoughts.
    """

    path: str
    dtype: DType = "float32"
    head_dtype: HeadDType = "model"
    exact: bool = False
    max_length: int = 2048
    trust_remote_code: bool = False
    tokenizer: str | None = None
    separator: str = "\n"
    keep_history: bool = False


@attrs.frozen(kw_only=True)
class ActorSpec:
    """Role, rank and resources of an actor.

    Attributes:
        role: engine or learner.
        rank: Rank among the actors of its role, from 0.
        world_size: Number of actors of its role.
        device: cpu or cuda.
        threads: OpenMP threads it may use.
        cache: Folder of its own for compile caches.
        seed: Random seed of the run.
        master: host:port where the ranks of the learner meet.
        cpus: Cores the whole run shares on this machine (for waiting policies).
        colocated: Engine and learner share the device.
    """

    role: Literal["engine", "learner"]
    rank: int = 0
    world_size: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    cache: str = ""
    seed: int = 0
    master: str = ""
    cpus: int = 1
    colocated: bool = True

    def environment(self) -> dict[str, str]:
        """Environment variables for any actor here: threads and how they wait, caches, no progress bars in logs."""
        found = {
            "OMP_NUM_THREADS": str(self.threads),
            "TOKENIZERS_PARALLELISM": "false",
            **NO_PROGRESS_BARS,
            **_RESOLVER,
        }
        if self.cache:
            found |= {variable: str(Path(self.cache) / folder) for variable, folder in _CACHES.items()}
        if self.device == "cpu" and (not self.colocated or self.threads * self.world_size > self.cpus):
            # Threads that wait would spin on cores where others work.
            found |= {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "0"}
        return found


@attrs.frozen(kw_only=True)
class Sampling:
    """Sampling parameters.

    Attributes:
        temperature: Softmax temperature; 0 is greedy decoding.
        top_p: 1 is off.
        top_k: 0 is off.
        max_tokens: Most tokens of one response.
        stop: Strings that end a response; the text up to and including them is kept.
        stop_token_ids: Tokens that end a response, beside the tokenizer's own end; kept.
        ignore_eos: Continue to `max_tokens` whatever is sampled (benchmarks).
        top_logprobs: Likeliest tokens that are reported beside each sampled one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Request:
    """One prompt to continue `n` times.

    Attributes:
        id: Unique within the run.
        prompt_ids: int64 `[p]`.
        sampling: Sampling parameters.
        n: Number of continuations.
        seed: Random seed of this request; its `i`-th continuation differs from the others and is the same in every
            run. None uses the engine's own.
        begun: Tokens at the end of the prompt that are the beginning of the answer, sampled by an earlier request: a
            stop string may begin among them. They count neither as `max_tokens` nor into the completion.
        stream: Hand out tokens while they are sampled, besides the completion; an engine without `ShowsProgress`
            hands out the completion alone.
        images: Images in the prompt, in their order.
        image_positions: int64 `[k]`, ascending positions of the prompt's tokens that stand for them.
    """

    id: str
    prompt_ids: np.ndarray
    sampling: Sampling
    n: int = 1
    seed: int | None = None
    begun: int = 0
    stream: bool = False
    images: tuple[Image, ...] = ()
    image_positions: np.ndarray | None = None


@attrs.frozen(eq=False)
class TopTokens:
    """The likeliest tokens at each position of a continuation, the likeliest first.

    Attributes:
        ids: int64 `[s, k]`.
        logprobs: float32 `[s, k]`, nats, of the distribution sampled from.
    """

    ids: np.ndarray
    logprobs: np.ndarray


@attrs.frozen(kw_only=True, eq=False)
class Completion:
    """One continuation of a request.

    Attributes:
        request: Id of the request.
        index: Index among its `n` continuations, from 0.
        token_ids: int64 `[s]`, the stop token included.
        logprobs: float32 `[s]`, nats, of the distribution sampled from (temperature, top-p and top-k applied).
        versions: int64 `[s]`, version of the weights that sampled each token.
        finish: stop, length, or abort (what was sampled until then is kept).
        top: `sampling.top_logprobs` tokens at each position, where that is above 0.
        routed_experts: int16 `[p + s - 1, layers, k]`, experts that each token of the prompt and of the continuation
            chose; the last token was not read. -1 where that is unknown, and in layers without experts. None unless the
            engine was told to return them.
    """

    request: str
    index: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish: Finish
    top: TopTokens | None = None
    routed_experts: np.ndarray | None = None


@attrs.frozen(kw_only=True, eq=False)
class Sampled:
    """Tokens of a continuation that is still being sampled.

    Attributes:
        request: Id of the request.
        index: Index among its `n` continuations, from 0.
        start: Position of the first of these tokens in the continuation.
        token_ids: int64 `[s]`.
        logprobs: float32 `[s]`.
        versions: int64 `[s]`.
        top: Likeliest tokens at each position, as in `Completion`.
    """

    request: str
    index: int
    start: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    top: TopTokens | None = None


@attrs.frozen(kw_only=True)
class Adapter:
    """A low-rank adapter over a model's linear layers: `W + alpha / rank · B · A` (LoRA, arXiv:2106.09685).

    Attributes:
        rank: Rank of the matrices `A` `[rank, in]` and `B` `[out, rank]`.
        alpha: Numerator of the scale `alpha / rank`.
    """

    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        """Factor of `B · A`."""
        return self.alpha / self.rank


@attrs.frozen(eq=False)
class Weights:
    """All tensors of a model, or of an adapter over it, under one version, as numpy arrays that Ray shares uncopied.

    Attributes:
        version: Trainer steps done when they were published.
        tensors: name -> array; bfloat16 travels as uint16 of the same bits.
        dtypes: name -> torch dtype's name ("float32", "bfloat16").
        adapter: None for a model's own tensors, by the names of its checkpoint, as `save_pretrained` writes them (tied
            tensors may stand under both names); else these are the adapter's alone, by the names of peft's files, and
            the folder's weights stay as they are.
    """

    version: int
    tensors: Mapping[str, np.ndarray]
    dtypes: Mapping[str, str]
    adapter: Adapter | None = None


class Engine(Protocol):
    """Generates tokens. One owner calls it; `step` does a bounded piece of work."""

    def environment(self, place: ActorSpec) -> Mapping[str, str]:
        """Environment variables to set before the actor's process imports anything."""
        ...

    def start(self, model: Model, place: ActorSpec) -> None:
        """Load the model; weights of the folder are version 0."""
        ...

    def add(self, requests: Sequence[Request]) -> None:
        """Admit requests in this order."""
        ...

    def step(self) -> list[Completion]:
        """Take one decode step for all running continuations; return those that finished."""
        ...

    @property
    def unfinished(self) -> int:
        """Number of continuations that run or wait."""
        ...

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        """End requests (None: all); return what they sampled so far, with the finish reason `abort`."""
        ...

    def reseed(self, seed: int) -> None:
        """Seed the sampling of requests without a seed: the same requests in the same order give the same tokens."""
        ...

    def load_weights(self, weights: Weights) -> None:
        """Replace the weights between two steps; requests in flight continue with the new ones."""
        ...

    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 `[k - 1]`: at temperature 1, of each token of `[k]` given those before it (the canary)."""
        ...

    def sleep(self) -> None:
        """Free the device for a colocated learner."""
        ...

    def wake(self) -> None:
        """Reclaim the device after `sleep`."""
        ...

    def stop(self) -> None:
        """Free everything."""
        ...


@runtime_checkable
class TakesAdapter(Protocol):
    """Optional interface of an engine that can receive adapters instead of whole models."""

    def expect_adapter(self, adapter: Adapter) -> None:
        """Have `load_weights` take adapters of this shape, over the folder's weights; called before `start`.

        Raises:
            EngineError: It cannot serve this one.
        """
        ...


@runtime_checkable
class ReturnsRouting(Protocol):
    """Optional interface of an engine that can say which experts each token chose."""

    def routing_faults(self, model: Any) -> Sequence[str]:
        """Say why the experts of a model cannot be returned with the options given; none if they can.

        Args:
            model: The transformers model, without its weights (on torch's meta device).
        """
        ...

    def return_routing(self) -> None:
        """Have completions carry `routed_experts`; called before `start`."""
        ...


@runtime_checkable
class ReadsImages(Protocol):
    """Optional interface of an engine that generates from prompts with images."""

    def image_faults(self, model: Any) -> Sequence[str]:
        """Say why a model's images cannot be read with the options given; none if they can.

        Args:
            model: The transformers model, without its weights (on torch's meta device).
        """
        ...


@runtime_checkable
class SpansGPUs(Protocol):
    """Optional interface of an engine that divides its model among GPUs."""

    @property
    def gpus(self) -> int:
        """Number of GPUs that one engine uses, which must be `placement.gpus_per_engine`."""
        ...


@runtime_checkable
class LimitsConcurrency(Protocol):
    """Optional interface of an engine that samples a limited number of continuations at once."""

    @property
    def max_num_seqs(self) -> int:
        """Most continuations that one step advances; the others wait."""
        ...


@runtime_checkable
class LimitsLength(Protocol):
    """Optional interface of an engine that does not start where sequences may be longer than a model was made for."""

    def longest(self, model: Any) -> float:
        """Return the number of tokens of the longest sequence; infinity if there is no limit.

        Args:
            model: The transformers model, without its weights (on torch's meta device).
        """
        ...


@runtime_checkable
class ShowsProgress(Protocol):
    """Optional interface of an engine that can show the tokens of unfinished continuations."""

    def sampled(self, since: Mapping[tuple[str, int], int]) -> list[Sampled]:
        """Return new tokens of running continuations.

        Args:
            since: (id of the request, index) -> the first position that is wanted; no others are looked at.
        """
        ...
