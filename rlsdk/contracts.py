"""What engines, learners, workflows, environments and trackers must offer, and the values that they exchange.

Engines and learners are plain Python objects with one owner; the Ray actors around them are rlsdk's business, so that a
plugin's engine is written and tested without Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import attrs

if TYPE_CHECKING:
    import numpy as np

    from rlsdk.components import Use
    from rlsdk.plugins import Reference
    from rlsdk.types import Message, Observation, Rollout, Step, Task

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
    """

    path: str
    dtype: DType = "float32"
    max_length: int = 2048
    trust_remote_code: bool = False
    tokenizer: str | None = None


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
    """

    id: str
    prompt_ids: np.ndarray
    sampling: Sampling
    n: int = 1
    seed: int | None = None


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


@attrs.frozen(eq=False)
class Weights:
    """All tensors of a model under one version, as numpy arrays that Ray shares without a copy.

    Attributes:
        version: Trainer steps done when they were published.
        tensors: name -> array; bfloat16 travels as uint16 of the same bits.
        dtypes: name -> torch dtype's name ("float32", "bfloat16").
    """

    version: int
    tensors: Mapping[str, np.ndarray]
    dtypes: Mapping[str, str]


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


@attrs.frozen(kw_only=True)
class LossSpec:
    """What one update minimises, as references that each rank resolves itself.

    Attributes:
        policy_loss: Per-token loss.
        correction: Per-token weights for the sampler/trainer mismatch.
        kl: Estimator of the KL term of the loss.
        kl_coef: Its weight.
        entropy_coef: Weight of the entropy bonus.
        aggregate: Mode of the aggregation.
        norm: Length that `seq-mean-token-sum-norm` divides by.
        value_clip: How far the critic may move from the old values (PPO's clipped value loss); None for no clipping.
        temperature: That logits are divided by.
    """

    policy_loss: Reference
    correction: Reference | None = None
    kl: Reference | None = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    aggregate: str = "token-mean"
    norm: float | None = None
    value_clip: float | None = None
    temperature: float = 1.0


@attrs.frozen(kw_only=True)
class Roles:
    """Which models a learner holds."""

    actor: Model
    critic: Model | None = None
    reference: Model | None = None


@attrs.frozen(kw_only=True, eq=False)
class TrainBatch:
    """Rollouts as packed arrays: what a learner computes on.

    `n` rollouts; `T` all their tokens, prompts included, one rollout after another; `t` response tokens (from the first
    sampled token to the last of each rollout), one after another.

    Attributes:
        token_ids: int64 `[T]`.
        lengths: int64 `[n]`, all tokens of each rollout; they add up to `T`.
        starts: int64 `[n]`, where each rollout's response begins, counted from its first token (at least 1).
        responses: int64 `[n]`, response tokens of each rollout; they add up to `t`.
        loss_mask: bool `[t]`.
        tokens: name -> `[t]` array: behaviour_logprobs, old_logprobs, ref_logprobs, advantages, returns, values.
        rollouts: name -> `[n]` array: pairs, preferred, expert.
    """

    token_ids: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    responses: np.ndarray
    loss_mask: np.ndarray
    tokens: Mapping[str, np.ndarray] = attrs.field(factory=dict)
    rollouts: Mapping[str, np.ndarray] = attrs.field(factory=dict)

    def __len__(self) -> int:
        return len(self.lengths)

    def with_tokens(self, **fields: np.ndarray) -> TrainBatch:
        """A copy with more per-token fields."""
        return attrs.evolve(self, tokens={**self.tokens, **fields})

    def with_rollouts(self, **fields: np.ndarray) -> TrainBatch:
        """A copy with more per-rollout fields."""
        return attrs.evolve(self, rollouts={**self.rollouts, **fields})

    @classmethod
    def concatenate(cls, batches: Sequence[TrainBatch]) -> TrainBatch:
        """Rollouts of several batches, one batch after another; fields that all of them have."""
        import numpy as np

        def join(name: str) -> np.ndarray:
            return np.concatenate([getattr(b, name) for b in batches])

        def fields(name: str) -> dict[str, np.ndarray]:
            held = [getattr(b, name) for b in batches]
            return {k: np.concatenate([h[k] for h in held]) for k in held[0] if all(k in h for h in held)}

        arrays = {name: join(name) for name in ("token_ids", "lengths", "starts", "responses", "loss_mask")}
        return cls(**arrays, tokens=fields("tokens"), rollouts=fields("rollouts"))

    def response_positions(self, index: np.ndarray) -> np.ndarray:
        """int64: where, in the `t` axis, the response tokens of the rollouts `index` lie, in that order."""
        return _positions(self.responses, index)

    def select(self, index: np.ndarray) -> TrainBatch:
        """The rollouts `index` (int64), in that order."""
        import numpy as np

        index = np.asarray(index, dtype=np.int64)
        everything, response = _positions(self.lengths, index), _positions(self.responses, index)
        return TrainBatch(
            token_ids=self.token_ids[everything],
            lengths=self.lengths[index],
            starts=self.starts[index],
            responses=self.responses[index],
            loss_mask=self.loss_mask[response],
            tokens={k: v[response] for k, v in self.tokens.items()},
            rollouts={k: v[index] for k, v in self.rollouts.items()},
        )


def _positions(lengths: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Positions, in the packed axis, of the tokens of the rollouts `index`."""
    import numpy as np

    ends = np.cumsum(lengths)
    chosen = lengths[index]
    shift = (ends - lengths)[index] - (np.cumsum(chosen) - chosen)
    positions: np.ndarray = np.arange(int(chosen.sum())) + np.repeat(shift, chosen)
    return positions


class Learner(Protocol):
    """One rank of the learner. Every method is called on all ranks, with each rank's own share of the rollouts."""

    def environment(self, place: Place) -> Mapping[str, str]:
        """Environment variables that must stand before the actor's process imports anything."""
        ...

    def start(self, roles: Roles, loss: LossSpec, place: Place, total_updates: int) -> None:
        """Load the models; `total_updates` is the length of the learning-rate schedule, in optimiser steps."""
        ...

    def logprobs(
        self, batch: TrainBatch, role: Literal["actor", "reference"] = "actor", fields: Sequence[str] = ("logprobs",)
    ) -> dict[str, np.ndarray]:
        """float32 `[t]` each, without a graph: of `logprobs`, `entropy`, `probs_squared_sum` those asked for."""
        ...

    def values(self, batch: TrainBatch) -> np.ndarray:
        """float32 `[t]`: the critic's, of the state in which each response token was chosen."""
        ...

    def update(self, minibatches: Sequence[tuple[TrainBatch, int, int]], step: int) -> dict[str, float]:
        """One optimiser step for each (this rank's share, trained tokens, rollouts of all ranks); returns metrics."""
        ...

    def weights(self, version: int) -> Weights | None:
        """All tensors of the actor (rank 0; None elsewhere), tied ones under both names."""
        ...

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 `[k - 1]`: at temperature 1, of each token of `[k]` given those before it."""
        ...

    def save(self, folder: Path) -> None:
        """Write everything that `load` needs to go on, every rank its part."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from a folder that `save` wrote."""
        ...

    def export(self, folder: Path) -> None:
        """Write what `transformers.from_pretrained` opens (rank 0 writes)."""
        ...

    def stop(self) -> None:
        """Free everything."""
        ...


class Chat(Protocol):
    """What a workflow talks to; it builds one rollout, token by token."""

    async def sample(self, *, max_tokens: int | None = None, stop: Sequence[str] = ()) -> Message:
        """Let the policy write the next assistant message."""
        ...

    def write(self, text: str) -> None:
        """Append an expert's assistant message, which is trained on."""
        ...

    def finish(self, **changes: Any) -> Rollout:
        """The rollout as it stands."""
        ...


class Workflow(Protocol):
    """Turns a task into one rollout, or several of one trajectory."""

    async def run(self, task: Task, chat: Chat) -> Rollout | Sequence[Rollout]:
        """Run one task."""
        ...


class Environment(Protocol):
    """A world that answers text with observations."""

    def reset(self, seed: int) -> Observation:
        """Start anew; the same seed gives the same world in every process."""
        ...

    def step(self, text: str) -> Step:
        """Act."""
        ...


class Tracker(Protocol):
    """Takes the metrics of a run."""

    def open(self, run: Run) -> None:
        """A run starts or resumes."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step."""
        ...

    def close(self) -> None:
        """The run ended."""
        ...


@attrs.frozen
class Run:
    """What a tracker is told of a run: name, folder, resolved config, and the step that it resumes from (0: new)."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    resumed_from: int = 0


class AlgorithmDefaults(Protocol):
    """What an algorithm names; `rlsdk.Algorithm` has these fields with defaults."""

    advantage: Use
    whiten_advantages: bool
    clip_advantages: float | None
    policy_loss: Use
    shaping: tuple[Use, ...]
    correction: Use | None
    kl: Use | None
    kl_coef: float
    entropy_coef: float
    aggregate: str
    norm: float | None
    filters: tuple[Use, ...]
    critic: bool
    value_clip: float | None
    rollouts: Literal["sampled", "demonstrations", "mixed"]
