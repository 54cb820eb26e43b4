"""The fields of an algorithm, with defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from rlsdk.components import Use
from rlsdk.kinds import PART_LISTS, PARTS
from rlsdk.limits import NonNegative, Positive
from rlsdk.options import CONVERTER

_use = Use  # short name for the defaults below
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""Duplicated from `rlsdk.batch`, which imports torch, so that listing algorithms does not."""


@attrs.frozen(kw_only=True)
class Algorithm:
    """Defaults of an algorithm; a subclass marked `@rlsdk.algorithm("name")` overrides some.

    Attributes:
        advantage: Computes advantages from rewards.
        whiten_advantages: Normalise advantages to mean 0 and variance 1 over the sampled tokens of the batch.
        clip_advantages: Maximum absolute advantage, after whitening; null for no bound.
        policy_loss: Per-token loss.
        shaping: Shapings of the rewards before the advantage, in this order.
        correction: Weights for the mismatch between sampler and trainer.
        kl: Estimator of the KL term of the loss; used if `kl_coef` is above 0.
        kl_coef: Weight of the KL term of the loss.
        entropy_coef: Weight of the entropy bonus.
        aggregate: How per-token losses are reduced to one number.
        norm: Length that `seq-mean-token-sum-norm` divides by; null uses `sampling.max_tokens`.
        filters: Filters that select the groups to train on.
        critic: True if a critic is trained.
        value_clip: Clip range of values around the old ones (PPO's clipped value loss); null for no clipping.
        rollouts: Sampled from the policy, the tasks' demonstrations, or mixed: both, with one demonstration per task.
        passing: Minimum reward of a right answer, for losses that read `preferred` but not pairs.
        defaults: Defaults for the run's other sections, by path: `{"rollout.dynamic_sampling": True}`. Values in a file
            or an override take precedence.
    """

    advantage: Use = _use("grpo")
    whiten_advantages: bool = False
    clip_advantages: Positive | None = None
    policy_loss: Use = _use("ppo")
    shaping: tuple[Use, ...] = ()
    correction: Use | None = None
    kl: Use | None = None
    kl_coef: NonNegative = 0.0
    entropy_coef: float = 0.0
    aggregate: Aggregation = "token-mean"
    norm: float | None = None
    filters: tuple[Use, ...] = ()
    critic: bool = False
    value_clip: Positive | None = None
    rollouts: Literal["sampled", "demonstrations", "mixed"] = "sampled"
    passing: float = 1.0
    defaults: Mapping[str, Any] = {}

    def __attrs_post_init__(self) -> None:
        """Convert parts given as text, a mapping or a marked object to `Use`."""
        for part in (*PARTS, *PART_LISTS):
            value = getattr(self, part)
            if value is None:
                continue
            many = part in PART_LISTS
            made = CONVERTER.structure(value, tuple[Use, ...] if many and isinstance(value, list | tuple) else Use)
            object.__setattr__(self, part, (made,) if many and isinstance(made, Use) else made)
