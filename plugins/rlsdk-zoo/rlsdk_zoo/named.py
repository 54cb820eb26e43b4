"""Named algorithms: each loss and advantage of the zoo with the parts and defaults of its paper."""

from __future__ import annotations

from typing import Literal

import attrs

import rlsdk
from rlsdk import Algorithm, Use
from rlsdk.kit import Aggregation

MU = {"from": 0.9, "to": 0.05, "over": 200, "shape": "cosine"}


@rlsdk.algorithm("sppo")
@attrs.frozen(kw_only=True)
class SPPO(Algorithm):
    """Softmax PPO: the log-ratio instead of the ratio, with the group's mean as baseline; no KL.

    Paper: arXiv:2108.05828; baseline and ε as in Trinity-RFT, since the paper has a critic and tunes ε.
    When to use: like PPO's clip with a group baseline, for tasks where rare tokens matter.
    """

    advantage: Use = Use("opmd", {"baseline": "mean"})
    policy_loss: Use = Use("zoo/sppo", {"clip": 0.3})


@rlsdk.algorithm("rec")
@attrs.frozen(kw_only=True)
class REC(Algorithm):
    """Group-relative REINFORCE with a one-sided clip and no importance weights (the paper's REC-OneSide-NoIS); no KL.

    Paper: arXiv:2509.24203.
    When to use: off-policy training, on batches used more than once, with stale weights, or on other policies' samples.
    """

    advantage: Use = Use("rec", {"std_normalize": False})
    policy_loss: Use = Use(
        "zoo/rec", {"clip": "one_side", "importance_sampling": False, "clip_low": 0.2, "clip_high": 0.2}
    )


@rlsdk.algorithm("kimi")
@attrs.frozen(kw_only=True)
class Kimi(Algorithm):
    """Kimi k1.5's mirror descent: the group's mean as baseline, the squared log-ratio of the answer in the loss.

    The paper's length reward is the shaping `length_penalty`; it is off here, as in the paper's first steps, since the
    paper gives no weight for it.
    Paper: arXiv:2501.12599, §2.3.2, eq. 3.
    When to use: several updates on each batch of long answers.
    """

    advantage: Use = Use("opmd", {"baseline": "mean"})
    policy_loss: Use = Use("zoo/kimi", {"tau": 0.1, "level": "sequence"})
    aggregate: Aggregation = "seq-mean-token-sum"


@rlsdk.algorithm("dppo")
@attrs.frozen(kw_only=True)
class DPPO(Algorithm):
    """GRPO without division by the standard deviation, with a trust region by divergence; no KL.

    `norm` is the token budget of a response, as in the paper's runs; null uses `sampling.max_tokens`.
    Paper: arXiv:2602.04879, eq. 12 and 13, appendix C.1; aggregation as in the authors' script.
    When to use: instead of GRPO, with several updates per batch or a sampler that differs slightly from the policy.
    """

    advantage: Use = Use("grpo", {"std_normalize": False})
    policy_loss: Use = Use("zoo/dppo", {"divergence": "tv", "threshold": 0.15})
    aggregate: Aggregation = "seq-mean-token-sum-norm"


@rlsdk.algorithm("vespo")
@attrs.frozen(kw_only=True)
class VESPO(Algorithm):
    """The group's mean as baseline, and a smooth kernel on the importance weight of the whole answer; no KL.

    Paper: arXiv:2602.10693, eq. 20 and §4.1; aggregation as in the authors' code.
    When to use: asynchronous training, or many updates on one large batch.
    """

    advantage: Use = Use("grpo", {"std_normalize": False})
    policy_loss: Use = Use("zoo/vespo", {"power_pos": 2.0, "decay_pos": 3.0, "power_neg": 3.0, "decay_neg": 2.0})


@rlsdk.algorithm("maxrl")
@attrs.frozen(kw_only=True)
class MaxRL(Algorithm):
    """Maximum likelihood by reinforcement learning: the group's mean as baseline and divisor, PPO's clip; no KL.

    Paper: arXiv:2602.02710; the clip, which matters for several updates per batch only, is SkyRL's.
    When to use: tasks with right and wrong answers that are seldom solved, and large groups.
    """

    advantage: Use = Use("zoo/maxrl")
    policy_loss: Use = Use("ppo", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 20.0})


@rlsdk.algorithm("mix_chord")
@attrs.frozen(kw_only=True)
class MixChord(Algorithm):
    """CHORD-φ: GRPO on the policy's samples, plus an expert's answers weighted token by token; no KL.

    Paper: arXiv:2508.11408, eq. 2, 3, 5 and 6; μ = 0.1 (§4.3).
    When to use: an expert's answers are available for tasks that the policy cannot solve yet.
    """

    advantage: Use = Use("grpo", {"std_normalize": True})
    policy_loss: Use = Use("zoo/mix_chord", {"mu": 0.1, "clip_low": 0.2, "clip_high": 0.2})
    rollouts: Literal["sampled", "demonstrations", "mixed"] = "mixed"


@rlsdk.algorithm("chord_mu")
class ChordMu(Algorithm):
    """CHORD-μ: from imitating an expert to GRPO, with a decaying weight of the expert's answers; no KL.

    μ decays from 0.9 to 0.05 over the first 200 training steps, along a cosine as in the authors' code, and stays
    there. Use a shorter decay for shorter runs: `policy_loss: {mu: {from: 0.9, to: 0.05, over: 50}}`.
    Paper: arXiv:2508.11408, eq. 2 and 3.
    When to use: an expert's answers are available, and the policy should first learn their pattern and then leave it.
    """

    advantage = Use("grpo", {"std_normalize": True})
    policy_loss = Use("mix", {"mu": MU, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 20.0})
    rollouts = "mixed"
