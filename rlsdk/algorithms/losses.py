"""Policy losses: policy gradients, PPO's clipped surrogate with a ratio per token or per rollout, covariance losses.

`r = π / π_old` is the ratio of a token, `A` its advantage, `sg[·]` stops the gradient. The core
masks, sums and divides.

The last losses restrain the tokens that make entropy collapse: those with the highest covariance. A token's covariance
is `(A - mean A) · (log π - mean log π)`, with means over the trained tokens of the whole optimiser batch. They read
`x.whole`, so that micro-batches choose the same tokens as the whole batch would.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlsdk.algorithms.packed import (
    DualClip,
    Metrics,
    clip_shares,
    clipped_surrogate,
    credit,
    dual_clipped,
    in_order,
    log_ratio,
    masked_mean,
    removed_gradients,
    trained,
)
from rlsdk.batch import LossInputs, wide
from rlsdk.batch.arithmetic import bounded
from rlsdk.limits import NonNegative, Positive, Share
from rlsdk.marks import policy_loss


@policy_loss("ppo")
def ppo(
    x: LossInputs, *, clip_low: NonNegative = 0.2, clip_high: NonNegative = 0.2, dual_clip: DualClip | None = 3.0
) -> tuple[Tensor, Metrics]:
    """PPO's clipped surrogate, for several updates per batch without large policy changes; the default of most methods.

    Paper: PPO, arXiv:1707.06347, eq. 7; separate bounds (clip-higher), DAPO, arXiv:2503.14476, eq. 10; dual clip,
    arXiv:1912.09729.
    Formula: `max(-A·r, -A·clip(r, 1 - clip_low, 1 + clip_high))`, for `A < 0` at most `-A·dual_clip`. The log-ratio is
    clamped to ±20.
    When to use: the first choice; with one update per batch the clip hardly ever applies, with several it stabilises
    them.

    Args:
        x: The batch.
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1; more than `clip_low` leaves room for unlikely tokens.
        dual_clip: Maximum ratio in the loss of a token with negative advantage; null for none.
    """
    difference, advantages = log_ratio(x), credit(x)
    ratio = bounded(difference).exp()
    open_loss = clipped_surrogate(advantages, ratio, clip_low, clip_high)
    loss = dual_clipped(open_loss, advantages, dual_clip)
    metrics = {
        **removed_gradients(x, ratio, clip_low, clip_high),
        "old_kl": masked_mean(-difference, x.loss_mask),
    }
    if dual_clip is not None:
        metrics["dual_clip_share"] = masked_mean((loss < open_loss).float(), x.loss_mask)
    return loss, metrics


@policy_loss("decoupled_ppo", corrects="old")
def decoupled_ppo(
    x: LossInputs,
    *,
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
    dual_clip: DualClip | None = None,
    weight_cap: Positive | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO that clips around a recent policy while samples come from older ones: for asynchronous training.

    `old_logprobs` are those of the proximal policy, which clipping is relative to; `behaviour_logprobs` are those of
    the policies that sampled.
    Paper: decoupled PPO, arXiv:2110.00641; for language models, AReaL, arXiv:2505.24298, eq. 5.
    Formula: `sg[π_old / μ] · ppo`.
    When to use: asynchronous training, with samples more than a step or two old.

    Args:
        x: The batch.
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1.
        dual_clip: As in ppo.
        weight_cap: Tokens with `π_old / μ` above this are dropped; null for no cap, which lets one token weigh e^20.
    """
    loss, metrics = ppo(x, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    weight = bounded(trained(x, wide(x.old_logprobs) - wide(x.behaviour_logprobs))).exp().detach()
    metrics["behaviour_weight"] = masked_mean(weight, x.loss_mask)
    if weight_cap is not None:
        weight = torch.where(weight <= weight_cap, weight, 0)
    return weight * loss, metrics


@policy_loss("reinforce")
def reinforce(x: LossInputs) -> Tensor:
    """The plain policy gradient: exact for one update per batch, on samples of the current policy.

    Paper: REINFORCE, Williams 1992 (doi:10.1007/BF00992696), for language models arXiv:2402.14740.
    Formula: `-A · log π`.
    When to use: strictly on-policy training: one update per batch, and no stale samples.
    """
    return -credit(x) * trained(x, x.logprobs)


@policy_loss("gpg")
def gpg(x: LossInputs) -> Tensor:
    """The plain policy gradient, under the name of the method whose advantage is `gpg`.

    Paper: GPG, arXiv:2504.02546.
    Formula: `-A · log π`.
    When to use: with the advantage `gpg`, strictly on-policy.
    """
    return reinforce(x)


@policy_loss("sft")
def sft(x: LossInputs) -> Tensor:
    """Maximum likelihood, whatever the advantage: for demonstrations and selected rollouts.

    Source: no paper; maximum likelihood, as in pre-training.
    Formula: `-log π`.
    When to use: demonstrations, and rollouts selected by a filter.
    """
    return -trained(x, x.logprobs)


@policy_loss("opmd")
def opmd(x: LossInputs, *, tau: Positive = 1.0) -> Tensor:
    """The policy gradient of online mirror descent: used with the advantage `opmd`, on- or off-policy.

    Paper: arXiv:2509.24203 and Kimi k1.5, arXiv:2501.12599, eq. 3, as in Trinity-RFT.
    Formula: `-A · log π / (1 + τ)`.
    When to use: with the advantage `opmd`, on stale samples, without importance weights.

    Args:
        x: The batch.
        tau: Strength of the regularisation.
    """
    return reinforce(x) / (1 + tau)


@policy_loss("cispo")
def cispo(x: LossInputs, *, clip_low: NonNegative = 1.0, clip_high: NonNegative = 0.28) -> tuple[Tensor, Metrics]:
    """Clips a token's importance weight but keeps its gradient, so that rare but important tokens keep learning.

    Paper: CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4 and 5. The paper sets no lower bound and gives no value for the
    upper one; 0.28 is DAPO's, arXiv:2503.14476.
    Formula: `-sg[clip(r, 1 - clip_low, 1 + clip_high)] · A · log π`.
    When to use: long reasoning, where PPO's clip removes the gradient of rare tokens that change an answer's course.

    Args:
        x: The batch.
        clip_low: How far the weight may fall below 1; 1 means no lower bound.
        clip_high: How far it may rise above 1.
    """
    ratio = bounded(log_ratio(x)).exp().detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return weight * reinforce(x), clip_shares(x, ratio < weight, ratio > weight)


@policy_loss("tis")
def tis(x: LossInputs, *, cap: Positive = 1.0) -> tuple[Tensor, Metrics]:
    """The policy gradient weighted by a truncated ratio: off-policy samples never weigh more than `cap`.

    Paper: truncated importance sampling, IMPALA, arXiv:1802.01561, §4.1; per token as in ROLL.
    Formula: `-sg[min(r, cap)] · A · log π`.
    When to use: slightly stale samples; unlike PPO's clip, the cap removes no gradient.

    Args:
        x: The batch.
        cap: Maximum weight.
    """
    ratio = bounded(log_ratio(x)).exp().detach()
    return ratio.clamp(max=cap) * reinforce(x), {"capped_share": masked_mean((ratio > cap).float(), x.loss_mask)}


@policy_loss("topr", corrects="policy")
def topr(x: LossInputs, *, cap: Positive = 1.0) -> tuple[Tensor, Metrics]:
    """Good rollouts weigh 1, bad ones the truncated ratio of the whole answer: stable far off-policy.

    Paper: TOPR, arXiv:2503.14286, in its canonical form.
    Formula: `-A · log π` for `A > 0`; else `-sg[min(π(y) / μ(y), cap)] · A · log π`, `y` being the whole answer and `μ`
    the policy that sampled it.
    When to use: batches used many times, or samples from another policy.

    Args:
        x: The batch.
        cap: Maximum weight of a bad rollout.
    """
    difference = log_ratio(x, x.behaviour_logprobs).detach()
    ratio = bounded(x.sequence_sum(difference)).exp()
    bad = credit(x) <= 0
    weight = torch.where(bad, ratio.clamp(max=cap), 1)
    return weight * reinforce(x), {"capped_share": masked_mean((bad & (ratio > cap)).float(), x.loss_mask)}


@policy_loss("sapo")
def sapo(x: LossInputs, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05) -> Tensor:
    """A soft gate in place of the clip: distant tokens are attenuated instead of cut off.

    Paper: SAPO, arXiv:2511.20347.
    Formula: `-A · (4 / τ) · sigmoid(τ·(r - 1))`, where `τ` is `tau_pos` for `A > 0`, else `tau_neg`.
    When to use: mixtures of experts and long answers, whose ratios are noisy.

    Args:
        x: The batch.
        tau_pos: Sharpness of the gate for good tokens.
        tau_neg: Sharpness for bad tokens, which destabilise training and need a sharper gate.
    """
    ratio, advantages = bounded(log_ratio(x)).exp(), credit(x)
    tau = torch.where(advantages > 0, tau_pos, tau_neg).to(ratio.dtype)
    return -advantages * (4 / tau) * torch.sigmoid(tau * (ratio - 1))


PER_ROLLOUT = ("seq-mean-token-mean",)
"""The aggregation for objectives defined as a mean over rollouts of a mean over tokens."""
LOG_SEQUENCE_RATIO_BOUND = 10.0
"""Upper bound that clamps a mean log-ratio (verl's; the paper gives none)."""


@policy_loss("gspo", aggregates=PER_ROLLOUT)
def gspo(
    x: LossInputs, *, clip_low: NonNegative = 3e-4, clip_high: NonNegative = 4e-4, dual_clip: DualClip | None = None
) -> tuple[Tensor, Metrics]:
    """PPO's clip on the ratio of the whole rollout: stable for long answers and mixtures of experts.

    The sequence ratio is detached and the gradient flows through the token, as in the paper's eq. 14. With one
    advantage per rollout and `seq-mean-token-mean`, the gradient equals that of eq. 5.
    Paper: GSPO, arXiv:2507.18071, eq. 5 to 7; bounds are the paper's.
    Formula: PPO's, with `s = sg[exp(mean_t(log π - log π_old))] · π / sg[π]` in place of `r`.
    When to use: rewards for whole answers, and mixtures of experts, whose token ratios are noisy.

    Args:
        x: The batch.
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1.
        dual_clip: Maximum ratio in the loss of a rollout with negative advantage; null for none.
    """
    log_prob = trained(x, x.logprobs)
    mean = x.sequence_mean(log_ratio(x)).detach()
    ratio = (mean + log_prob - log_prob.detach()).clamp(max=LOG_SEQUENCE_RATIO_BOUND).exp()
    loss = dual_clipped(clipped_surrogate(credit(x), ratio, clip_low, clip_high), credit(x), dual_clip)
    return loss, removed_gradients(x, ratio, clip_low, clip_high)


@policy_loss("gspo_token", aggregates=PER_ROLLOUT)
def gspo_token(
    x: LossInputs, *, clip_low: NonNegative = 3e-4, clip_high: NonNegative = 4e-4, dual_clip: DualClip | None = None
) -> tuple[Tensor, Metrics]:
    """GSPO for rollouts whose tokens differ in advantage (turns, steps); otherwise equal to `gspo`.

    Paper: GSPO-token, arXiv:2507.18071, eq. 13 and 14.
    Formula: as `gspo`, which already has this form.
    When to use: rollouts with rewards per turn or step.

    Args:
        x: The batch.
        clip_low: How far the ratio may fall below 1.
        clip_high: How far it may rise above 1.
        dual_clip: As in gspo.
    """
    return gspo(x, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


@policy_loss("geo_mean", aggregates=PER_ROLLOUT)
def geo_mean(
    x: LossInputs, *, clip_low: NonNegative = 0.4, clip_high: NonNegative = 0.4, dual_clip: DualClip | None = None
) -> tuple[Tensor, Metrics]:
    """Geometric mean of token ratios, clipped in log space: single tokens cannot dominate.

    Tokens whose advantage is 0, such as those that `top_entropy_quantile` leaves out, get no gradient, and that of the
    others stays as it is without them (arXiv:2506.01939): their ratios still count in the mean.
    Paper: GMPO, arXiv:2507.20673, eq. 4; bounds `(e^-0.4, e^0.4)` are the paper's.
    Formula: `-Ā · exp(mean_t c_t)`, one value per rollout on all its tokens; `c_t` is the log-ratio clipped to
    `-clip_low…clip_high` where that makes the objective smaller, `Ā` the mean of the advantages other than 0.
    When to use: several updates per batch, where a few tokens with extreme ratios would dominate.

    Args:
        x: The batch.
        clip_low: How far the log-ratio may fall below 0.
        clip_high: How far it may rise above 0.
        dual_clip: Maximum geometric mean in the loss of a rollout with negative advantage; null for none.
    """
    difference, advantages = bounded(log_ratio(x)), credit(x)
    clipped, taught = difference.clamp(-clip_low, clip_high), advantages != 0
    average = x.sequence_sum(advantages) / x.sequence_sum(taught.to(advantages.dtype)).clamp(min=1)
    sign = torch.where(taught, advantages, average).sign()
    worse = sign * torch.minimum(sign * difference, sign * clipped)
    worse = torch.where(taught, worse, worse.detach())
    loss = dual_clipped(-average * x.sequence_mean(worse).exp(), average, dual_clip)
    return loss, clip_shares(x, (difference < worse) & taught, (difference > worse) & taught)


@policy_loss("clip_cov", whole_batch=True, check=in_order("cov_low", "cov_high"))
def clip_cov(
    x: LossInputs,
    *,
    ratio: Share = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
) -> tuple[Tensor, Metrics]:
    """PPO's clip, with no gradient for a few random tokens of high covariance.

    Paper: Clip-Cov, arXiv:2505.22617; tokens already clipped by PPO are not drawn.
    Formula: PPO's loss, zero for `max(1, ratio · tokens)` tokens drawn from those with covariance in
    `cov_low…cov_high`.
    When to use: the entropy collapses, and the reward stops improving.

    Args:
        x: The batch.
        ratio: Share of trained tokens to draw.
        cov_low: Exclusive lower bound of the covariance of tokens to draw.
        cov_high: Exclusive upper bound of the covariance of tokens to draw.
        clip_low: How far PPO's ratio may fall below 1.
        clip_high: How far it may rise above 1.
    """
    loss = _surrogate(x, clip_low, clip_high)
    whole = x.whole
    silent = _surrogate(whole, clip_low, clip_high) > _unclipped(whole)
    covariance = _covariance(whole)
    candidates = whole.loss_mask & ~silent & (covariance > cov_low) & (covariance < cov_high)
    places = candidates.nonzero()[:, 0]
    order = torch.randperm(len(places), generator=x.generator, device=x.generator.device).to(places.device)
    cut = torch.zeros_like(candidates).index_fill(0, places[order[: _count(whole, ratio)]], True)
    drawn = _part(x, cut)
    return torch.where(drawn, 0, loss), {"cut": masked_mean(drawn.float(), x.loss_mask)}


@policy_loss("kl_cov", whole_batch=True)
def kl_cov(x: LossInputs, *, ratio: Share = 2e-4, kl_coef: NonNegative = 1.0) -> tuple[Tensor, Metrics]:
    """The unclipped surrogate, with a KL penalty on the few tokens of highest covariance.

    Paper: KL-Cov, arXiv:2505.22617.
    Formula: `-A·r`, plus `kl_coef · |log π - log π_old|` for the `max(1, ratio · tokens)` tokens of highest covariance.
    When to use: as `clip_cov`, if those tokens should be restrained rather than cut off. Use one update per batch:
    neither the paper nor this loss bounds the ratio, and over several updates one token may dominate the batch.

    Args:
        x: The batch.
        ratio: Share of trained tokens to penalise.
        kl_coef: Weight of the penalty.
    """
    whole = x.whole
    covariance = torch.where(whole.loss_mask, _covariance(whole), -torch.inf)
    count = min(_count(whole, ratio), int(whole.loss_mask.sum()))
    greatest = torch.zeros_like(whole.loss_mask).index_fill(0, covariance.topk(count).indices, True)
    chosen = _part(x, greatest)
    loss = _unclipped(x) + torch.where(chosen, kl_coef * log_ratio(x).abs(), 0)
    return loss, {"penalised": masked_mean(chosen.float(), x.loss_mask)}


def _unclipped(x: LossInputs) -> Tensor:
    return -credit(x) * bounded(log_ratio(x)).exp()


def _surrogate(x: LossInputs, low: float, high: float) -> Tensor:
    return clipped_surrogate(credit(x), bounded(log_ratio(x)).exp(), low, high)


def _covariance(x: LossInputs) -> Tensor:
    advantages, log_prob = credit(x), trained(x, x.logprobs)
    return (advantages - masked_mean(advantages, x.loss_mask)) * (log_prob - masked_mean(log_prob, x.loss_mask))


def _count(x: LossInputs, ratio: float) -> int:
    return max(int(ratio * int(x.loss_mask.sum())), 1)


def _part(x: LossInputs, chosen: Tensor) -> Tensor:
    """Return the part of `chosen`, over the whole batch, that belongs to `x`."""
    return chosen[x.offset : x.offset + len(x.loss_mask)]
