"""The fields that an algorithm names, with their defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from rlsdk.components import Use
from rlsdk.kinds import PART_LISTS, PARTS
from rlsdk.limits import NonNegative, Positive
from rlsdk.options import CONVERTER

_use = Use  # a short name for defaults below
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""Repeated from `rlsdk.batch`, which imports torch; listing algorithms does not."""


@attrs.frozen(kw_only=True)
class Algorithm:
    """Defaults of an algorithm; a subclass, marked `@rlsdk.algorithm("name")`, changes some.

    Attributes:
        advantage: How rewards become advantages.
        whiten_advantages: Mean 0 and variance 1 over the sampled tokens of the batch, after the advantage.
        clip_advantages: Greatest absolute advantage, after whitening; null for no bound.
        policy_loss: Per-token loss.
        shaping: Changes of the rewards before the advantage, in this order.
        correction: Weights for the mismatch between sampler and trainer.
        kl: Estimator of the KL term of the loss; used where `kl_coef` is above 0.
        kl_coef: Weight of the KL term of the loss.
        entropy_coef: Weight of the entropy bonus.
        aggregate: How per-token losses become one number.
        norm: Length that `seq-mean-token-sum-norm` divides by; null is the run's `sampling.max_tokens`.
        filters: Which groups are trained on.
        critic: True if a critic is trained.
        value_clip: How far a value may move from the old one (PPO's clipped value loss); null for no clipping.
        rollouts: Sampled from the policy, the tasks' demonstrations, or mixed: both, one demonstration for each task.
        passing: Reward from which on an answer is right, for a loss that reads `preferred` and no pairs.
        defaults: Defaults for the run's other sections, by path: `{"rollout.dynamic_sampling": True}`. What a file
            or an override says wins.
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
        """Make a `Use` of every part that was given as text, a mapping or a marked object."""
        for part in (*PARTS, *PART_LISTS):
            value = getattr(self, part)
            if value is None:
                continue
            many = part in PART_LISTS
            made = CONVERTER.structure(value, tuple[Use, ...] if many and isinstance(value, list | tuple) else Use)
            object.__setattr__(self, part, (made,) if many and isinstance(made, Use) else made)
