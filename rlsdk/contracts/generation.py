"""Values that engines work with: models, actor specs, requests, completions, weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    import numpy as np
    import torch

    from rlsdk.types import Image

NO_PROGRESS_BARS = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
"""Environment variables that keep progress bars out of logs; libraries read them on import."""
_RESOLVER = {"RES_OPTIONS": os.environ.get("RES_OPTIONS", "timeout:1")}
"""Torch resolves the name of every address that it connects to, only for logging: without a working name server, each
rank would wait 5 s every time."""
_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "TORCH_EXTENSIONS_DIR": "extensions"}

MAX_TOP_LOGPROBS = 20
"""Maximum number of alternatives per token; the limit of OpenAI's API and of vLLM."""
Finish = Literal["stop", "length", "abort"]
DType = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: Mapping[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element."""
HeadDType = Literal["model", "float32"]


@attrs.frozen(kw_only=True)
class Model:
    """A model and how to load it.

    Attributes:
        path: Folder in transformers format, or a hub id.
        dtype: Compute dtype of the weights.
        head_dtype: Precision of the logits: `model` computes them in `dtype`, `float32` from the same weights in
            float32.
        exact: Compute logprobs as `rlsdk.exact` does, bitwise identical in engine and learner.
        max_length: Maximum tokens of prompt plus response.
        trust_remote_code: Run Python code shipped with the model.
        tokenizer: Folder or hub id of the tokenizer; defaults to `path`.
        separator: Text inserted before each later message of a conversation whose prompt is plain text.
        keep_history: Keep earlier answers as sampled where the renderer would drop their thoughts.
        chat_template: Chat template that replaces the tokenizer's, in Jinja; None keeps its own.
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
    chat_template: str | None = None


@attrs.frozen(kw_only=True)
class ActorSpec:
    """Role, rank and resources of an actor.

    Attributes:
        role: engine or learner.
        rank: Rank among the actors of its role, from 0.
        world_size: Number of actors of its role.
        device: cpu or cuda.
        threads: Number of OpenMP threads.
        cache: Private folder for what is compiled.
        seed: Random seed of the run.
        master: host:port of the learner ranks' rendezvous.
        cpus: Cores that the whole run shares on this machine; determines how threads wait.
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
        """Environment variables of any actor: threads and how they wait, caches, no progress bars in logs."""
        found = {
            "OMP_NUM_THREADS": str(self.threads),
            "TOKENIZERS_PARALLELISM": "false",
            **NO_PROGRESS_BARS,
            **_RESOLVER,
        }
        if self.cache:
            found |= {variable: str(Path(self.cache) / folder) for variable, folder in _CACHES.items()}
        if self.device == "cpu" and (not self.colocated or self.threads * self.world_size > self.cpus):
            # Waiting threads would spin on cores that other processes need.
            found |= {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "0"}
        return found


@attrs.frozen(kw_only=True)
class Sampling:
    """Sampling parameters.

    Attributes:
        temperature: Softmax temperature; 0 is greedy decoding.
        top_p: 1 is off.
        top_k: 0 is off.
        max_tokens: Maximum tokens of one response.
        stop: Stop strings; a response is kept up to and including one.
        stop_token_ids: Tokens that end a response, in addition to the tokenizer's end of text; they are kept.
        ignore_eos: Sample `max_tokens` tokens, ignoring stop tokens and strings (for benchmarks).
        top_logprobs: Number of likeliest tokens to report for each position.
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
    """A prompt to continue `n` times.

    Attributes:
        id: Unique within the run.
        prompt_ids: int64 `[p]`.
        sampling: Sampling parameters.
        n: Number of continuations.
        seed: Random seed of this request: its `n` continuations differ from one another, and each is reproducible. None
            uses the engine's seed.
        begun: Number of tokens at the end of the prompt that begin the answer, sampled by an earlier request; a stop
            string may start among them. They neither count towards `max_tokens` nor appear in the completion.
        stream: Return tokens while they are sampled, in addition to the completion; an engine without `ShowsProgress`
            returns the completion only.
        images: Images in the prompt, in order.
        image_positions: int64 `[k]`, ascending positions of the prompt's image tokens.
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
    """The likeliest tokens at each position of a continuation, in descending order of probability.

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
        finish: stop, length, or abort (the tokens sampled so far are kept).
        top: The `sampling.top_logprobs` likeliest tokens at each position, if that is above 0.
        routed_experts: int16 `[p + s - 1, layers, k]`, experts chosen for each token of prompt and continuation, except
            the last, which the model did not process. -1 if unknown, and in layers without experts. None unless
            requested by `return_routing`.
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
    """New tokens of a continuation that is still being sampled.

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
    """All tensors of a model or of its adapter, at one version.

    They are numpy arrays, which Ray shares without copying. Between a learner and an engine that both support it, a
    weight transfer that is `StreamsTensors` moves torch tensors instead.

    Attributes:
        version: Number of training steps completed when they were published.
        tensors: name -> array, in which bfloat16 is stored as uint16 with the same bits; or name -> torch tensor.
        dtypes: name -> name of the torch dtype ("float32", "bfloat16").
        adapter: None if the tensors are the model's, named as `save_pretrained` writes them (tied tensors may appear
            under both names). Otherwise they are the adapter's only, named as in peft's files; the base model is
            unchanged.
    """

    version: int
    tensors: Mapping[str, np.ndarray | torch.Tensor]
    dtypes: Mapping[str, str]
    adapter: Adapter | None = None


class Engine(Protocol):
    """Generates tokens. It has a single caller; `step` does a bounded amount of work."""

    def environment(self, place: ActorSpec) -> Mapping[str, str]:
        """Environment variables to set before the actor's process imports anything."""
        ...

    def start(self, model: Model, place: ActorSpec) -> None:
        """Load the model; the weights in its folder are version 0."""
        ...

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests, in this order."""
        ...

    def step(self) -> list[Completion]:
        """Take one decode step for all running continuations; return those that finished."""
        ...

    @property
    def unfinished(self) -> int:
        """Number of continuations that are running or waiting."""
        ...

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        """Abort requests (None: all); return the tokens sampled so far, with the finish reason `abort`."""
        ...

    def reseed(self, seed: int) -> None:
        """Seed the sampling of requests that have no seed: the same requests in the same order give the same tokens."""
        ...

    def load_weights(self, weights: Weights) -> None:
        """Replace the weights between two steps; in-flight requests continue with the new ones."""
        ...

    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 `[k - 1]`: logprob at temperature 1 of each token of `[k]` given those before it (for the canary)."""
        ...

    def sleep(self) -> None:
        """Free the device for a colocated learner."""
        ...

    def wake(self) -> None:
        """Reclaim the device after `sleep`, or what is left of it after `WakesInParts.wake_weights`."""
        ...

    def stop(self) -> None:
        """Release all resources."""
        ...


@runtime_checkable
class WakesInParts(Protocol):
    """Optional interface of an engine that can take back the memory of its weights before that of its KV cache.

    At a sync, a sleeping engine gets `wake_weights`, then the weights; the learner frees the memory that it needed to
    send them, and only then does `wake` take back the rest. Other engines get `wake` before the weights.
    """

    def wake_weights(self) -> None:
        """Take back the memory of the weights after `sleep`; until `wake`, only loading weights must work."""
        ...


@runtime_checkable
class TakesAdapter(Protocol):
    """Optional interface of an engine that can load adapters instead of whole models."""

    def expect_adapter(self, adapter: Adapter) -> None:
        """Make `load_weights` expect adapters of this shape on top of the base model; called before `start`.

        Raises:
            EngineError: The engine does not support this adapter.
        """
        ...


@runtime_checkable
class ReturnsRouting(Protocol):
    """Optional interface of an engine that can return the experts chosen for each token."""

    def routing_faults(self, model: Any) -> Sequence[str]:
        """Return the reasons why a model's experts cannot be returned with the given options; empty if they can.

        Args:
            model: The transformers model, without its weights (on torch's meta device).
        """
        ...

    def return_routing(self) -> None:
        """Make completions include `routed_experts`; called before `start`."""
        ...


@runtime_checkable
class ReadsImages(Protocol):
    """Optional interface of an engine that accepts prompts with images."""

    def image_faults(self, model: Any) -> Sequence[str]:
        """Return the reasons why a model cannot read images with the given options; empty if it can.

        Args:
            model: The transformers model, without its weights (on torch's meta device).
        """
        ...


@runtime_checkable
class SpansGPUs(Protocol):
    """Optional interface of an engine that shards its model across GPUs."""

    @property
    def gpus(self) -> int:
        """Number of GPUs that one engine uses, which must equal `placement.gpus_per_engine`."""
        ...


@runtime_checkable
class LimitsConcurrency(Protocol):
    """Optional interface of an engine that samples a limited number of continuations at once."""

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of continuations that one step advances; the others wait."""
        ...


@runtime_checkable
class LimitsLength(Protocol):
    """Optional interface of an engine that refuses sequences longer than the model supports."""

    def longest(self, model: Any) -> float:
        """Return the maximum sequence length in tokens; infinity if there is no limit.

        Args:
            model: The transformers model, without its weights (on torch's meta device).
        """
        ...


@runtime_checkable
class ShowsProgress(Protocol):
    """Optional interface of an engine that can return the tokens of unfinished continuations."""

    def sampled(self, since: Mapping[tuple[str, int], int]) -> list[Sampled]:
        """Return new tokens of running continuations.

        Args:
            since: (id of the request, index) -> first position to return; only these continuations are returned.
        """
        ...
