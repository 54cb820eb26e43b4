"""What engines generate from and with: models, places, requests, completions, weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import attrs

if TYPE_CHECKING:
    import numpy as np

_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "TORCH_EXTENSIONS_DIR": "extensions"}

Finish = Literal["stop", "length", "abort"]
DType = Literal["float32", "bfloat16", "float16"]


@attrs.frozen(kw_only=True)
class Model:
    """Which model, and how it is read.

    Attributes:
        path: Folder that `transformers.from_pretrained` opens, or a hub id.
        dtype: Of the weights while computing.
        max_length: Tokens of prompt and response together.
        trust_remote_code: Run code that comes with the model.
        tokenizer: Folder or hub id of the tokenizer; left out, `path`.
        separator: Stands before what is said later in a conversation whose prompt is text.
        keep_history: Go on where the chat template would rewrite earlier answers.
    """

    path: str
    dtype: DType = "float32"
    max_length: int = 2048
    trust_remote_code: bool = False
    tokenizer: str | None = None
    separator: str = "\n"
    keep_history: bool = False


@attrs.frozen(kw_only=True)
class Place:
    """Where an actor works.

    Attributes:
        role: engine or learner.
        rank: Among the actors of its role, from 0.
        world: How many there are.
        device: cpu or cuda.
        threads: OpenMP threads it may use.
        cache: Folder of its own for compile caches.
        seed: Of the run.
        master: host:port where the ranks of the learner meet.
        cpus: Cores the whole run shares on this machine (for waiting policies).
        colocated: Engine and learner share the device.
    """

    role: Literal["engine", "learner"]
    rank: int = 0
    world: int = 1
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    cache: str = ""
    seed: int = 0
    master: str = ""
    cpus: int = 1
    colocated: bool = True

    def environment(self) -> dict[str, str]:
        """Variables for any actor here: its threads and how they wait, its caches, no bars of progress in its log."""
        found = {
            "OMP_NUM_THREADS": str(self.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }
        if self.cache:
            found |= {variable: str(Path(self.cache) / folder) for variable, folder in _CACHES.items()}
        if self.device == "cpu" and (not self.colocated or self.threads * self.world > self.cpus):
            # Threads that wait would spin on cores where others work.
            found |= {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "0"}
        return found


@attrs.frozen(kw_only=True)
class Sampling:
    """How tokens are sampled.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_p: 1 is off.
        top_k: 0 is off.
        max_tokens: Of one response.
        stop: Strings that end a response; the text up to and including them is kept.
        stop_token_ids: Tokens that end a response, beside the tokenizer's own end; kept.
        ignore_eos: Go on to `max_tokens` whatever is sampled (benchmarks).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@attrs.frozen(kw_only=True, eq=False)
class Request:
    """One prompt to continue `n` times.

    Attributes:
        id: Unique within the run.
        prompt_ids: int64 `[p]`.
        sampling: How.
        n: How many continuations.
        seed: Of this request; its `i`-th continuation differs from the others and is the same in every run. None: the
            engine's own.
        begun: Tokens at the end of the prompt that are the beginning of the answer, sampled by an earlier request: a
            stop string may begin among them. They count neither as `max_tokens` nor into the completion.
    """

    id: str
    prompt_ids: np.ndarray
    sampling: Sampling
    n: int = 1
    seed: int | None = None
    begun: int = 0


@attrs.frozen(kw_only=True, eq=False)
class Completion:
    """One continuation of a request.

    Attributes:
        request: Id of the request.
        index: Which of its `n`, from 0.
        token_ids: int64 `[s]`, the stop token included.
        logprobs: float32 `[s]`, nats, of the distribution sampled from (temperature, top-p and top-k applied).
        versions: int64 `[s]`, version of the weights that sampled each token.
        finish: stop, length, or abort (what was sampled until then is kept).
    """

    request: str
    index: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish: Finish


@attrs.frozen(kw_only=True)
class Adapter:
    """A low-rank adapter over a model's linear layers: `W + alpha / rank · B · A` (LoRA, arXiv:2106.09685).

    Attributes:
        rank: Of `A` `[rank, in]` and `B` `[out, rank]`.
        alpha: Of the scale.
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
        adapter: None for a model's own tensors, under the names that transformers uses; else these are the adapter's
            alone, under the names of peft's files, and the folder's weights stay as they are.
    """

    version: int
    tensors: Mapping[str, np.ndarray]
    dtypes: Mapping[str, str]
    adapter: Adapter | None = None


class Engine(Protocol):
    """Generates tokens. One owner calls it; `step` does a bounded piece of work."""

    def environment(self, place: Place) -> Mapping[str, str]:
        """Environment variables that must stand before the actor's process imports anything."""
        ...

    def start(self, model: Model, place: Place) -> None:
        """Load the model; weights of the folder are version 0."""
        ...

    def add(self, requests: Sequence[Request]) -> None:
        """Admit requests in this order."""
        ...

    def step(self) -> list[Completion]:
        """One decode step of all that runs; returns what finished."""
        ...

    @property
    def unfinished(self) -> int:
        """Continuations that still run or wait."""
        ...

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        """End requests (None: all); returns what they had sampled, as `abort`."""
        ...

    def reseed(self, seed: int) -> None:
        """Seed the generator of requests that bring no seed: the same requests in the same order sample the same."""
        ...

    def load_weights(self, weights: Weights) -> None:
        """Replace the weights between two steps; requests in flight go on, on the new ones."""
        ...

    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 `[k - 1]`: at temperature 1, of each token of `[k]` given those before it (the canary)."""
        ...

    def sleep(self) -> None:
        """Free the device for a colocated learner."""
        ...

    def wake(self) -> None:
        """Take the device back."""
        ...

    def stop(self) -> None:
        """Free everything."""
        ...


@runtime_checkable
class TakesAdapter(Protocol):
    """What an engine offers beside the rest if it can be sent adapters in place of whole models."""

    def expect_adapter(self, adapter: Adapter) -> None:
        """Have `load_weights` take adapters of this shape, over the folder's weights; called before `start`.

        Raises:
            EngineError: It cannot serve this one.
        """
        ...
