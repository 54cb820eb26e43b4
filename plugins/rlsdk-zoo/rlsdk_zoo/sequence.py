"""Policy losses that judge a rollout as a whole: kimi, vespo.

`A` is the advantage of a token, `y` the whole rollout, `sg[·]` stops the gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

import rlsdk
from rlsdk.kit import Metrics, bounded, credit, log_ratio, masked_mean, trained
from rlsdk.limits import Positive


@rlsdk.policy_loss("kimi")
def kimi(x: rlsdk.LossInputs, *, tau: Positive = 0.1, level: Literal["sequence", "token"] = "sequence") -> Tensor:
    """The policy gradient, kept close to the old policy by the squared log-ratio: online mirror descent.

    ROLL (kimi15), veRL (dro) and Trinity-RFT (OPMD, with coefficient τ/2) square the log-ratio of each token; the
    paper, and the default here, square the log-ratio of the whole answer. The paper adds up the tokens of a rollout
    (`seq-mean-token-sum`); other aggregations divide both terms by the same length.
    Paper: Kimi k1.5, arXiv:2501.12599, §2.3.2, eq. 3; τ is ROLL's, since the paper gives no value.
    Formula: `-A · log π + τ/2 · d · d(y)`, with `d = log π - log π_old` of the token and `d(y)` the sum over the
    rollout's tokens, which sums to `-A · log π(y) + τ/2 · d(y)²` over a rollout. With level `token`, `-A · log π +
    τ/2 · d²`.
    When to use: several updates on one batch, or batches of older policies, without importance weights; use it with
    the advantage `opmd`. For long answers, `token` is milder.

    Args:
        x: The batch.
        tau: τ, strength of the regularisation.
        level: Square the log-ratio of the whole rollout, or of each token.
    """
    difference = log_ratio(x)
    square = difference * x.sequence_sum(difference) if level == "sequence" else difference.square()
    return -credit(x) * trained(x, x.logprobs) + tau / 2 * square


@rlsdk.policy_loss("vespo", corrects="policy")
def vespo(
    x: rlsdk.LossInputs,
    *,
    power_pos: float = 2.0,
    decay_pos: float = 3.0,
    power_neg: float = 3.0,
    decay_neg: float = 2.0,
) -> tuple[Tensor, Metrics]:
    """A smooth kernel on the weight of the whole rollout: stale rollouts fade out without a cut, whatever their length.

    Paper: VESPO, arXiv:2602.10693, eq. 20 with the shifted kernel of §3.3; constants are the paper's (§4.1). `log W` is
    clamped to ±20, as in the authors' code.
    Formula: `-sg[φ(W)] · A · log π` with `φ(W) = W^c1 · exp(c2·(1 - W))`, which is 1 on-policy, and `W = π(y) / μ(y)`,
    where `μ` is the sampling policy; `c1` and `c2` are `power_pos` and `decay_pos` where `A ≥ 0`, else `power_neg` and
    `decay_neg`.
    When to use: stale or asynchronous samples, and engines that round differently; it needs no further correction.

    Args:
        x: The batch.
        power_pos: c1 of good rollouts; larger values fade out rollouts that became unlikely sooner.
        decay_pos: c2 of good rollouts; larger values fade out rollouts that became likely sooner.
        power_neg: c1 of bad rollouts.
        decay_neg: c2 of bad rollouts.
    """
    advantages = credit(x)
    log_weight = bounded(x.sequence_sum(log_ratio(x, x.behaviour_logprobs).detach()))
    good = advantages >= 0
    power = torch.full_like(log_weight, power_neg).masked_fill(good, power_pos)
    decay = torch.full_like(log_weight, decay_neg).masked_fill(good, decay_pos)
    weight = (power * log_weight + decay * (1 - log_weight.exp())).exp()
    return -weight * advantages * trained(x, x.logprobs), {"weight": masked_mean(weight, x.loss_mask)}
