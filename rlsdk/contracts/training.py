"""Interfaces of learners, and the values that they operate on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

from rlsdk.contracts.generation import ActorSpec, Adapter, Model, Weights
from rlsdk.fields import WHOLE_GROUPS
from rlsdk.schedules import EntropyTarget, Schedule

if TYPE_CHECKING:
    import numpy as np

    from rlsdk.batch import Totals
    from rlsdk.plugins import ComponentRef
    from rlsdk.types import Image

TrainedRole = Literal["actor", "critic"]
"""A model that a learner trains."""
ApartRole = Literal["critic", "reference"]
"""A role that may have dedicated processes."""


@attrs.frozen(kw_only=True)
class LossSpec:
    """Objective of an update, as component references that each rank resolves itself.

    Coefficients may be schedules: `rlsdk.schedules.at` evaluates them at a training step, as it does a KL estimator
    with scheduled options. Losses and corrections with scheduled options read the training step from their inputs.

    Attributes:
        policy_loss: Per-token loss.
        correction: Per-token weights for the sampler/trainer mismatch; several corrections are one reference, with
            `parts`, which resolves to the product of their weights.
        kl: Estimator of the KL term of the loss.
        kl_coef: Weight of the KL term.
        entropy_coef: Weight of the entropy bonus, or the entropy that it holds.
        aggregate: Aggregation mode of the loss.
        norm: Length that `seq-mean-token-sum-norm` divides by.
        value_clip: Clip range of the critic's values around the old ones (PPO's clipped value loss); None for no
            clipping.
        temperature: Divisor of the logits.
        train_steps: Training steps of the whole run.
        critic_warmup: Training steps at its start in which only the critic is trained.
    """

    policy_loss: ComponentRef
    correction: ComponentRef | None = None
    kl: ComponentRef | None = None
    kl_coef: float | Schedule = 0.0
    entropy_coef: float | Schedule | EntropyTarget = 0.0
    aggregate: str = "token-mean"
    norm: float | Schedule | None = None
    value_clip: float | Schedule | None = None
    temperature: float = 1.0
    train_steps: int = 1
    critic_warmup: int = 0


@attrs.frozen(kw_only=True)
class Roles:
    """Models that a learner holds; a learner without an actor runs the critic or reference model of another learner.

    Attributes:
        actor: The policy.
        critic: Model that estimates values.
        reference: Reference model.
        reference_mix: Share of the policy's weights in each move of the reference model (`MovesReference`); None if it
            never moves.
    """

    actor: Model | None = None
    critic: Model | None = None
    reference: Model | None = None
    reference_mix: float | None = None

    def __attrs_post_init__(self) -> None:
        if self.actor is None and self.critic is None and self.reference is None:
            raise ValueError("roles: expected at least one model, got none")

    @property
    def main(self) -> Model:
        """The actor, or the only model if there is no actor."""
        found = self.actor or self.critic or self.reference
        assert found is not None
        return found

    @property
    def copies_reference(self) -> bool:
        """True if the reference model also has float32 weights, since small moves would be lost in its 16 bits."""
        narrow = self.reference is not None and self.reference.dtype != "float32"
        return narrow and self.reference_mix not in (None, 1)

    @property
    def trains(self) -> bool:
        """True if any of the models is trained; a reference model alone only runs forward passes."""
        return self.actor is not None or self.critic is not None


@attrs.frozen(kw_only=True, eq=False)
class TrainBatch:
    """Rollouts as packed arrays, the input of a learner.

    Axes: `n` rollouts; `T` all their tokens, prompts included, concatenated; `t` their response tokens (from the first
        sampled token to the last of each rollout), concatenated.

    Attributes:
        token_ids: int64 `[T]`.
        lengths: int64 `[n]`, tokens of each rollout; their sum is `T`.
        starts: int64 `[n]`, offset of each rollout's response from its first token (at least 1).
        responses: int64 `[n]`, response tokens of each rollout; their sum is `t`.
        loss_mask: bool `[t]`.
        tokens: name -> `[t]` array: behaviour_logprobs, old_logprobs, ref_logprobs, advantages, returns, values.
        rollouts: name -> `[n]` array: groups, pairs, preferred, expert.
        context: name -> `[T, …]` array: routed_experts; image_mask (bool, True for image tokens).
        images: Images of each rollout, in token order; empty if no rollout has any.
    """

    token_ids: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    responses: np.ndarray
    loss_mask: np.ndarray
    tokens: Mapping[str, np.ndarray] = attrs.field(factory=dict)
    rollouts: Mapping[str, np.ndarray] = attrs.field(factory=dict)
    context: Mapping[str, np.ndarray] = attrs.field(factory=dict)
    images: tuple[tuple[Image, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.lengths)

    def with_tokens(self, **fields: np.ndarray) -> TrainBatch:
        """Return a copy with additional per-token fields."""
        return attrs.evolve(self, tokens={**self.tokens, **fields})

    def with_rollouts(self, **fields: np.ndarray) -> TrainBatch:
        """Return a copy with additional per-rollout fields."""
        return attrs.evolve(self, rollouts={**self.rollouts, **fields})

    @classmethod
    def concatenate(cls, batches: Sequence[TrainBatch]) -> TrainBatch:
        """Concatenate the rollouts of several batches; only fields that all of them have are kept."""
        import numpy as np

        def join(name: str) -> np.ndarray:
            return np.concatenate([getattr(b, name) for b in batches])

        def fields(name: str) -> dict[str, np.ndarray]:
            held = [getattr(b, name) for b in batches]
            return {k: np.concatenate([h[k] for h in held]) for k in held[0] if all(k in h for h in held)}

        arrays = {name: join(name) for name in ("token_ids", "lengths", "starts", "responses", "loss_mask")}
        images = (
            tuple(own for b in batches for own in (b.images or ((),) * len(b)))
            if any(b.images for b in batches)
            else ()
        )
        return cls(
            **arrays, tokens=fields("tokens"), rollouts=fields("rollouts"), context=fields("context"), images=images
        )

    @property
    def whole_groups(self) -> np.ndarray | None:
        """Label of the group of each rollout, int64 `[n]`, if the loss needs whole groups; None if it does not."""
        return next((self.rollouts[name] for name in WHOLE_GROUPS if name in self.rollouts), None)

    @property
    def trained_tokens(self) -> np.ndarray:
        """Number of trained tokens of each rollout, int64 `[n]`."""
        import numpy as np

        sums, ends = np.append(0, np.cumsum(self.loss_mask)), np.cumsum(self.responses)
        return np.asarray(sums[ends] - sums[ends - self.responses])

    @property
    def totals(self) -> Totals:
        """Denominators of an optimiser step on these rollouts; add those of several batches."""
        import numpy as np

        from rlsdk.batch import Totals

        trained = self.trained_tokens
        return Totals(int(trained.sum()), int(np.count_nonzero(trained)))

    def response_positions(self, index: np.ndarray) -> np.ndarray:
        """Return the positions, on the `t` axis, of the response tokens of the rollouts `index`, in that order."""
        return _positions(self.responses, index)

    def select(self, index: np.ndarray) -> TrainBatch:
        """Return the rollouts `index` (int64), in that order."""
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
            context={k: v[everything] for k, v in self.context.items()},
            images=tuple(self.images[i] for i in index.tolist()) if self.images else (),
        )


def _positions(lengths: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the positions, on the packed axis, of the tokens of the rollouts `index`."""
    import numpy as np

    ends = np.cumsum(lengths)
    chosen = lengths[index]
    shift = (ends - lengths)[index] - (np.cumsum(chosen) - chosen)
    positions: np.ndarray = np.arange(int(chosen.sum())) + np.repeat(shift, chosen)
    return positions


class Learner(Protocol):
    """One rank of the learner. Every method is called on all ranks, each with its own share of the rollouts."""

    def environment(self, place: ActorSpec) -> Mapping[str, str]:
        """Environment variables to set before the actor's process imports anything."""
        ...

    def start(self, roles: Roles, loss: LossSpec, place: ActorSpec, total_updates: int) -> None:
        """Load the models; `total_updates` is the length of the learning-rate schedule, in optimiser steps."""
        ...

    def logprobs(
        self, batch: TrainBatch, role: Literal["actor", "reference"] = "actor", fields: Sequence[str] = ("logprobs",)
    ) -> dict[str, np.ndarray]:
        """Return the requested ones of `logprobs`, `entropy`, `probs_squared_sum`, float32 `[t]`, without gradients."""
        ...

    def values(self, batch: TrainBatch) -> np.ndarray:
        """Return the critic's value of the state before each response token, float32 `[t]`."""
        ...

    def update(self, minibatches: Sequence[tuple[TrainBatch, int, int]], step: int) -> dict[str, float]:
        """Take an optimiser step per (this rank's share, trained tokens, rollouts of all ranks), and return metrics.

        `step` is the number of training steps completed; losses read it as `x.train_step`. A metric must not have the
        name of one of the trainer's (`reward/mean`, `time/step`, …).
        """
        ...

    def weights(self, version: int) -> Weights | None:
        """Return all tensors of the actor, by their names in its checkpoint (rank 0; None elsewhere)."""
        ...

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return logprobs at temperature 1 of each token of `[k]` given those before it, float32 `[k - 1]`."""
        ...

    def save(self, folder: Path) -> None:
        """Write everything that `load` needs to resume, each rank its part; this includes the state of losses."""
        ...

    def load(self, folder: Path) -> None:
        """Continue from a folder that `save` wrote."""
        ...

    def export(self, folder: Path) -> None:
        """Write the model in transformers format (on rank 0)."""
        ...

    def stop(self) -> None:
        """Release all resources."""
        ...


@runtime_checkable
class GivesPrimitives(Protocol):
    """Optional interface of a learner that splits `update` into two calls, for custom training loops.

    An optimiser step is one or several `forward_backward` calls for a role, the last with `last=True`, followed by
    `optimizer_step`. Every call is made on all ranks, each with its own share of the rollouts.
    """

    def forward_backward(
        self,
        batch: TrainBatch,
        totals: Totals,
        *,
        role: TrainedRole = "actor",
        step: int = 0,
        update: int = 0,
        updates: int = 1,
        last: bool = True,
    ) -> None:
        """Accumulate the gradient of this rank's rollouts for the optimiser step.

        Args:
            batch: This rank's rollouts; may be empty.
            totals: Denominators of the whole optimiser step, over all its batches and ranks.
            role: Model to train.
            step: Training steps completed; losses read it as `x.train_step`.
            update: Index of the optimiser step within the training step; losses read it as `x.step`.
            updates: Number of optimiser steps in the training step; losses read it as `x.of_steps`.
            last: True in the last call before `optimizer_step`.
        """
        ...

    def optimizer_step(self, role: TrainedRole = "actor") -> dict[str, float]:
        """Take an optimiser step with the accumulated gradient; return metrics, as `update` does for one step."""
        ...


@runtime_checkable
class SharesSequences(Protocol):
    """Optional interface of a learner with sequence parallelism."""

    @property
    def sequence_parallel(self) -> int:
        """Number of consecutive ranks that share sequences; on GPUs they are placed on one node."""
        ...


@runtime_checkable
class SetsLearningRate(Protocol):
    """Optional interface of a learner whose learning rate can be changed during training."""

    def set_learning_rate(self, lr: float, role: TrainedRole = "actor") -> None:
        """Set the peak learning rate from the next optimiser step on, on every rank; `save` includes it.

        Args:
            lr: Peak learning rate, which the schedule multiplies.
            role: Model whose learning rate is set.
        """
        ...


class LearnerHandle(Protocol):
    """All ranks of a learner as the trainer calls them, from threads; `learners.group.LearnerGroup` implements it."""

    def forward(self, batch: TrainBatch, fields: Sequence[str]) -> dict[str, np.ndarray]:
        """Compute fields by forward passes without gradients, float32 `[t]` each; see `rlsdk.fields.FORWARD`."""
        ...

    def update(self, batch: TrainBatch, minibatches: Sequence[np.ndarray], step: int) -> dict[str, float]:
        """Take an optimiser step per minibatch, and return metrics.

        Args:
            batch: Rollouts of a training step, with `advantages` and the other fields that the loss reads.
            minibatches: Indices of the rollouts (int64) of each optimiser step.
            step: Training steps completed.
        """
        ...

    def forward_backward(
        self,
        batch: TrainBatch,
        totals: Totals | None = None,
        *,
        role: TrainedRole = "actor",
        step: int = 0,
        update: int = 0,
        updates: int = 1,
        last: bool = True,
    ) -> None:
        """Accumulate the gradient of a batch for the optimiser step; see `GivesPrimitives`.

        Args:
            batch: Rollouts with `advantages` and the other fields that the loss reads.
            totals: Denominators of the whole optimiser step; defaults to those of this batch.
            role: Model to train.
            step: Training steps completed.
            update: Index of the optimiser step within the training step.
            updates: Number of optimiser steps in the training step.
            last: True in the last call before `optimizer_step`.
        """
        ...

    def optimizer_step(self, role: TrainedRole = "actor") -> dict[str, float]:
        """Take an optimiser step with the gradient accumulated by `forward_backward`, and return metrics."""
        ...

    def set_learning_rate(self, lr: float, role: TrainedRole = "actor") -> None:
        """Set the peak learning rate from the next optimiser step on; see `SetsLearningRate`."""
        ...

    def move_reference(self) -> None:
        """Move the reference model towards the policy; see `MovesReference`."""
        ...

    def weights(self, version: int) -> Any:
        """Return an `ObjectRef` of the actor's weights."""
        ...

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return logprobs at temperature 1 of each token of `[k]` given those before it, as float32 `[k - 1]`."""
        ...

    def checksums(self) -> dict[str, str]:
        """Return the CRC-32 of each tensor of the weights."""
        ...

    def clock(self) -> dict[str, float]:
        """Return accumulated seconds and peak bytes of memory by name, each the maximum over ranks; see `HasClock`."""
        ...

    def save(self, folder: Path) -> None:
        """Write a checkpoint for `load`."""
        ...

    def load(self, folder: Path) -> None:
        """Restore a checkpoint that `save` wrote."""
        ...

    def export(self, folder: Path) -> None:
        """Write the model in transformers format."""
        ...


@runtime_checkable
class CountsTraining(Protocol):
    """Optional interface of a `LearnerHandle` that tells whether an update that failed has changed the learner."""

    @property
    def training_calls(self) -> int:
        """Number of `update`, `forward_backward` and `optimizer_step` calls that have reached a rank."""
        ...


@runtime_checkable
class ContinuesAdapter(Protocol):
    """Optional interface of a learner that can continue an adapter from files."""

    @property
    def adapter_base(self) -> str:
        """Path or name of the model that the adapter was trained on; empty without an adapter, or if it is not told."""
        ...


@runtime_checkable
class GivesAdapter(Protocol):
    """Optional interface of a learner that can send engines an adapter instead of the whole model."""

    @property
    def adapter(self) -> Adapter | None:
        """Shape of the adapter to send; None if whole models are sent."""
        ...

    def adapter_weights(self, version: int) -> Weights | None:
        """Return the adapter's tensors (rank 0; None elsewhere); `weights` still returns the whole, merged model."""
        ...
