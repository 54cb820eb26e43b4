"""Named algorithms: the parts of published methods, with the defaults of their papers.

If a paper's KL coefficient depends on its reward model, it is 0.001 here. Beyond the papers, no single token can
dominate the batch: `low_var` replaces k3, from which it differs only beyond 2.6 nats, and the ratio of a token with
negative advantage is capped at 20. `kl: k3` and `dual_clip: null` follow the papers exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from rlsdk.algorithms.marking import Aggregation, Algorithm, algorithm
from rlsdk.components import Use
from rlsdk.limits import NonNegative, Positive

DUAL_CLIP = 20.0
_PPO = Use("ppo", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": DUAL_CLIP})
_KL_IN_REWARD = (Use("kl_penalty", {"coef": 0.001}),)


@algorithm("grpo")
@attrs.frozen(kw_only=True)
class GRPO(Algorithm):
    """GRPO: rewards relative to the group, clipped ratios, KL to the reference in the loss.

    Paper: arXiv:2402.03300, eq. 3 and 4; β = 0.04 (§4.2). `kl_coef: 0` needs no reference model. The KL is the paper's
    k3, clamped far from the reference so that one token cannot dominate the batch; `kl: k3` is not clamped.
    When to use: the first choice if a reward checks answers and several rollouts per task are affordable.
    """

    advantage: Use = Use("grpo", {"std_normalize": True})
    policy_loss: Use = _PPO
    kl: Use | None = Use("low_var")
    kl_coef: NonNegative = 0.04
    aggregate: Aggregation = "seq-mean-token-mean"


@algorithm("ppo")
@attrs.frozen(kw_only=True)
class PPO(Algorithm):
    """PPO: a critic, GAE, clipped ratios and values, KL to the reference in the reward.

    Paper: arXiv:1707.06347; for language models, arXiv:1909.08593 and arXiv:2203.02155. KL coefficient and value clip
    as in TinyZero. The reference model is loaded for `kl_penalty`; `shaping: []` needs none.
    When to use: intermediate rewards or long episodes, and enough memory for a critic.
    """

    advantage: Use = Use("gae", {"gamma": 1.0, "lam": 1.0})
    policy_loss: Use = _PPO
    shaping: tuple[Use, ...] = _KL_IN_REWARD
    critic: bool = True
    value_clip: Positive | None = 0.5


@algorithm("sft")
@attrs.frozen(kw_only=True)
class SFT(Algorithm):
    """Supervised fine-tuning: maximum likelihood of the tasks' demonstrations.

    Source: no paper; maximum likelihood, as in pre-training.
    When to use: before reinforcement learning, or if there are only demonstrations.
    """

    advantage: Use = Use("constant")
    policy_loss: Use = Use("sft")
    rollouts: Literal["sampled", "demonstrations", "mixed"] = "demonstrations"


@algorithm("dr_grpo")
@attrs.frozen(kw_only=True)
class DrGRPO(Algorithm):
    """GRPO without its two biases: no division by the standard deviation or by the length of an answer.

    Paper: arXiv:2503.20783, whose `norm` is the token budget of a response: null uses `sampling.max_tokens`.
    When to use: answers that grow longer without improving, or tasks that should weigh equally whatever their
    difficulty.
    """

    advantage: Use = Use("grpo", {"std_normalize": False})
    policy_loss: Use = _PPO
    aggregate: Aggregation = "seq-mean-token-sum-norm"


@algorithm("gdpo")
@attrs.frozen(kw_only=True)
class GDPO(Algorithm):
    """GRPO for rewards of several parts, each relative to the group before they are added; no KL.

    Paper: arXiv:2601.05242, with the loss of GRPO, arXiv:2402.03300, eq. 3.
    When to use: several rewards that should all be learned, such as correctness, format and length, if GRPO on their
    sum learns only the easiest.
    """

    advantage: Use = Use("gdpo")
    policy_loss: Use = _PPO
    aggregate: Aggregation = "seq-mean-token-mean"


@algorithm("dapo")
@attrs.frozen(kw_only=True)
class DAPO(Algorithm):
    """GRPO with clip-higher, dynamic sampling, a token-level loss and soft overlong punishment; no KL.

    It sets `rollout.dynamic_sampling`: another task replaces each group of equal rewards. The punishment begins at four
    fifths of `sampling.max_tokens`, as in the paper, and reaches its full value at the limit.
    Paper: arXiv:2503.14476, eq. 8 to 13.
    When to use: long reasoning on hard tasks: groups of equal rewards, entropy collapse, truncated answers.
    """

    advantage: Use = Use("grpo", {"std_normalize": True})
    policy_loss: Use = Use("ppo", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": DUAL_CLIP})
    shaping: tuple[Use, ...] = (Use("overlong", {"max_length": None, "buffer": None, "penalty": 1.0}),)
    filters: tuple[Use, ...] = (Use("nonzero_variance"),)
    defaults: Mapping[str, Any] = {"rollout.dynamic_sampling": True}


@algorithm("gspo")
@attrs.frozen(kw_only=True)
class GSPO(Algorithm):
    """GRPO with ratio and clip of the whole answer: for long answers and mixtures of experts.

    Paper: arXiv:2507.18071, eq. 5 to 7.
    When to use: long answers and mixtures of experts, with several updates per batch.
    """

    advantage: Use = Use("grpo", {"std_normalize": True})
    policy_loss: Use = Use("gspo", {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": DUAL_CLIP})
    aggregate: Aggregation = "seq-mean-token-mean"


@algorithm("cispo")
@attrs.frozen(kw_only=True)
class CISPO(Algorithm):
    """GRPO whose clip bounds a token's importance weight but keeps its gradient; no KL.

    Paper: MiniMax-M1, arXiv:2506.13585, eq. 4 and 5; `clip_high`, for which it gives no value, is DAPO's.
    When to use: long reasoning, with several updates per batch.
    """

    advantage: Use = Use("grpo", {"std_normalize": True})
    policy_loss: Use = Use("cispo", {"clip_low": 1.0, "clip_high": 0.28})


@algorithm("sapo")
@attrs.frozen(kw_only=True)
class SAPO(Algorithm):
    """GRPO with a soft gate in place of the clip.

    Paper: arXiv:2511.20347.
    When to use: as GRPO, if its hard clip makes training unstable.
    """

    advantage: Use = Use("grpo", {"std_normalize": True})
    policy_loss: Use = Use("sapo", {"tau_pos": 1.0, "tau_neg": 1.05})
    aggregate: Aggregation = "seq-mean-token-mean"


@algorithm("gmpo")
@attrs.frozen(kw_only=True)
class GMPO(Algorithm):
    """GRPO with the geometric mean of token ratios.

    Paper: arXiv:2507.20673.
    When to use: as GRPO, if a few tokens with extreme ratios dominate.
    """

    advantage: Use = Use("grpo", {"std_normalize": True})
    policy_loss: Use = Use("geo_mean", {"clip_low": 0.4, "clip_high": 0.4, "dual_clip": DUAL_CLIP})
    aggregate: Aggregation = "seq-mean-token-mean"


@algorithm("rloo")
@attrs.frozen(kw_only=True)
class RLOO(Algorithm):
    """REINFORCE with the mean of the other rollouts as baseline, whole answers as actions, KL in the reward.

    Paper: arXiv:2402.14740.
    When to use: small groups and one update per batch; reward models.
    """

    advantage: Use = Use("rloo")
    policy_loss: Use = Use("reinforce")
    shaping: tuple[Use, ...] = _KL_IN_REWARD
    aggregate: Aggregation = "seq-mean-token-sum"


@algorithm("reinforce_plus_plus")
@attrs.frozen(kw_only=True)
class ReinforcePlusPlus(Algorithm):
    """Whitened returns and PPO's clip without critic or groups, KL in the reward.

    Paper: arXiv:2501.03262.
    When to use: one rollout per task: preferences, reward models.
    """

    advantage: Use = Use("reinforce_plus_plus", {"gamma": 1.0})
    policy_loss: Use = _PPO
    shaping: tuple[Use, ...] = _KL_IN_REWARD


@algorithm("reinforce_plus_plus_baseline")
@attrs.frozen(kw_only=True)
class ReinforcePlusPlusBaseline(Algorithm):
    """Group mean as baseline, normalised by the batch's spread, and k2 in the loss.

    Paper: arXiv:2501.03262.
    When to use: several rollouts per task, with rewards on one scale.
    """

    advantage: Use = Use("reinforce_plus_plus_baseline")
    policy_loss: Use = _PPO
    kl: Use | None = Use("k2")
    kl_coef: NonNegative = 0.001


@algorithm("remax")
@attrs.frozen(kw_only=True)
class ReMax(Algorithm):
    """REINFORCE with the greedy answer's reward as baseline, KL in the reward.

    Paper: arXiv:2310.10505, algorithm 1.
    When to use: too little memory for a critic or large groups.
    """

    advantage: Use = Use("remax")
    policy_loss: Use = Use("reinforce")
    shaping: tuple[Use, ...] = _KL_IN_REWARD
    aggregate: Aggregation = "seq-mean-token-sum"


@algorithm("opo")
@attrs.frozen(kw_only=True)
class OPO(Algorithm):
    """Strictly on-policy REINFORCE with the minimum-variance baseline; no clip, no KL: one update per batch.

    Paper: arXiv:2505.23585.
    When to use: strictly on-policy training, with answers of very different lengths.
    """

    advantage: Use = Use("opo")
    policy_loss: Use = Use("reinforce")
    aggregate: Aggregation = "seq-mean-token-sum"


@algorithm("gpg")
@attrs.frozen(kw_only=True)
class GPG(Algorithm):
    """The plain policy gradient with the group mean as baseline; no clip, no KL.

    Paper: arXiv:2504.02546, eq. 7.
    When to use: the simplest method that may work, strictly on-policy.
    """

    advantage: Use = Use("gpg", {"std_normalize": False})
    policy_loss: Use = Use("gpg")


@algorithm("opmd")
@attrs.frozen(kw_only=True)
class OPMD(Algorithm):
    """Online policy mirror descent, on- or off-policy.

    Paper: arXiv:2501.12599, §2.3.2, and arXiv:2509.24203.
    When to use: stale or reused samples, without importance weights.
    """

    advantage: Use = Use("opmd", {"baseline": "mean", "tau": 1.0})
    policy_loss: Use = Use("opmd", {"tau": 1.0})


@algorithm("topr")
@attrs.frozen(kw_only=True)
class TOPR(Algorithm):
    """Good answers weigh 1, bad ones their truncated ratio: stable far off-policy, without KL.

    Paper: arXiv:2503.14286.
    When to use: many updates per batch, or data from another policy.
    """

    advantage: Use = Use("grpo", {"std_normalize": False})
    policy_loss: Use = Use("topr", {"cap": 1.0})
    aggregate: Aggregation = "seq-mean-token-sum"


@algorithm("raft")
@attrs.frozen(kw_only=True)
class RAFT(Algorithm):
    """Rejection sampling: maximum likelihood of the best answer of each group.

    Paper: arXiv:2304.06767, algorithm 1.
    When to use: a robust start: rare right answers are imitated, nothing is pushed down.
    """

    advantage: Use = Use("constant")
    policy_loss: Use = Use("sft")
    filters: tuple[Use, ...] = (Use("top_k", {"k": 1}),)


@algorithm("pass_at_k")
@attrs.frozen(kw_only=True)
class PassAtK(Algorithm):
    """Trains the best of a group rather than its mean.

    Paper: arXiv:2503.19595.
    When to use: verifiable answers, so that the best of several can be selected.
    """

    advantage: Use = Use("pass_at_k", {"std_normalize": True})
    policy_loss: Use = _PPO


@algorithm("gigpo")
@attrs.frozen(kw_only=True)
class GiGPO(Algorithm):
    """Credit per trajectory and per step, for agents whose trajectories pass through equal states.

    Paper: arXiv:2505.10978; β = 0.01.
    When to use: agents in environments whose states recur: games, web sites, households.
    """

    advantage: Use = Use("gigpo", {"omega": 1.0, "gamma": 0.95, "std_normalize": False})
    policy_loss: Use = _PPO
    kl: Use | None = Use("low_var")
    kl_coef: NonNegative = 0.01
    aggregate: Aggregation = "seq-mean-token-mean"


@algorithm("decoupled_ppo")
@attrs.frozen(kw_only=True)
class DecoupledPPO(Algorithm):
    """For asynchronous training: clips around a recent policy, with importance weights to the sampling policy.

    Paper: AReaL, arXiv:2505.24298, eq. 5, with the group mean in place of a critic; the weight cap is that of AReaL's
    configurations.
    When to use: asynchronous rollouts that are several steps stale.
    """

    advantage: Use = Use("grpo", {"std_normalize": True})
    policy_loss: Use = Use(
        "decoupled_ppo", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": DUAL_CLIP, "weight_cap": 5.0}
    )


@algorithm("dpo")
@attrs.frozen(kw_only=True)
class DPO(Algorithm):
    """Preferences between the best and worst answer of each group, relative to the reference.

    With `rollouts: demonstrations` it learns from a data set of pairs, `chosen` and `rejected` in the tasks' metadata.
    Paper: DPO, arXiv:2305.18290, eq. 7, with pairs sampled online, arXiv:2402.04792.
    When to use: a reward that ranks better than it scores, or pairs compared by people.
    """

    advantage: Use = Use("constant")
    policy_loss: Use = Use("dpo", {"beta": 0.1})
    aggregate: Aggregation = "seq-mean-token-mean"
    filters: tuple[Use, ...] = (Use("best_worst"),)


@algorithm("kto")
@attrs.frozen(kw_only=True)
class KTO(Algorithm):
    """Right answers gain and wrong ones lose relative to the reference, each by itself, without pairs or group mean.

    An answer is right if its reward is at least `passing`. With `rollouts: demonstrations` it learns from a data set of
    answers, each marked right or wrong by `label` in its task's metadata.
    Paper: KTO, arXiv:2402.01306, eq. 8; β = 0.1 and equal weights, its defaults.
    When to use: answers that are right or wrong: a reward that checks them, or a data set of labelled answers.
    """

    advantage: Use = Use("constant")
    policy_loss: Use = Use("kto", {"beta": 0.1, "desirable": 1.0, "undesirable": 1.0})
    aggregate: Aggregation = "seq-mean-token-mean"


@algorithm("mix")
@attrs.frozen(kw_only=True)
class Mix(Algorithm):
    """GRPO on the policy's samples and maximum likelihood on the tasks' demonstrations, in one batch.

    Paper: CHORD, arXiv:2508.11408, with a fixed μ.
    When to use: expert answers are available for tasks that the policy cannot solve yet.
    """

    advantage: Use = Use("grpo", {"std_normalize": True})
    policy_loss: Use = Use("mix", {"mu": 0.1, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": DUAL_CLIP})
    rollouts: Literal["sampled", "demonstrations", "mixed"] = "mixed"


@algorithm("opd")
@attrs.frozen(kw_only=True)
class OPD(Algorithm):
    """On-policy distillation: the student samples, the reference model teaches token by token; no rewards are read.

    The teacher is `model.reference`, which must be given; no reward is needed. It is the policy gradient of the sampled
    tokens, not GKD's divergence over the vocabulary (arXiv:2306.13649).
    Source: "On-Policy Distillation" (Lu et al., Thinking Machines Lab, 2025). The advantage of a token is bounded by 10
    nats, beyond which the teacher considers it impossible.
    When to use: a stronger model with the same tokenizer is available.
    """

    advantage: Use = Use("on_policy_distill", {"coef": 1.0})
    clip_advantages: Positive | None = 10.0
    policy_loss: Use = _PPO
