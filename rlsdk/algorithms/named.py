"""Named algorithms: the parts of a published method with the defaults of its paper."""

from __future__ import annotations

from typing import Literal

import attrs

from rlsdk.algorithms.base import Aggregation, Algorithm
from rlsdk.components import Use, algorithm


@algorithm("grpo")
@attrs.frozen(kw_only=True)
class GRPO(Algorithm):
    """GRPO: rewards relative to the group, clipped ratios, KL to the reference in the loss.

    Paper: arXiv:2402.03300, eq. 3 and 4; β = 0.04 (§4.2).
    """

    advantage: Use = Use("grpo", {"std_normalize": True})
    policy_loss: Use = Use("ppo", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None})
    kl: Use | None = Use("k3")
    kl_coef: float = 0.04
    aggregate: Aggregation = "seq-mean-token-mean"


@algorithm("ppo")
@attrs.frozen(kw_only=True)
class PPO(Algorithm):
    """PPO: a critic, GAE, clipped ratios and values, KL to the reference in the reward.

    Paper: arXiv:1707.06347, for language models arXiv:1909.08593 and arXiv:2203.02155. Coefficient of the KL and clip
    of the value as in TinyZero. The reference model is loaded for `kl_penalty`; `shaping: []` does without.
    """

    advantage: Use = Use("gae", {"gamma": 1.0, "lam": 1.0})
    policy_loss: Use = Use("ppo", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None})
    shaping: tuple[Use, ...] = (Use("kl_penalty", {"coef": 0.001}),)
    aggregate: Aggregation = "token-mean"
    critic: bool = True
    value_clip: float | None = 0.5


@algorithm("sft")
@attrs.frozen(kw_only=True)
class SFT(Algorithm):
    """Supervised fine-tuning: maximum likelihood of the tasks' demonstrations."""

    advantage: Use = Use("constant")
    policy_loss: Use = Use("sft")
    aggregate: Aggregation = "token-mean"
    rollouts: Literal["sampled", "demonstrations"] = "demonstrations"
