"""Losses on more than the policy's own samples: preferences, and experts' answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlsdk.algorithms.losses import ppo, sft
from rlsdk.algorithms.packed import DualClip, Metrics, log_ratio
from rlsdk.batch import LossInputs
from rlsdk.contracts import RunFacts
from rlsdk.limits import NonNegative, Positive, Share
from rlsdk.marks import policy_loss

PER_ROLLOUT = ("seq-mean-token-mean",)
"""The aggregation that counts a value shared by all tokens of a rollout once per rollout."""


@policy_loss("dpo", needs=("ref_logprobs", "pairs", "preferred"), aggregates=PER_ROLLOUT)
def dpo(x: LossInputs, *, beta: Positive = 0.1, label_smoothing: Share = 0.0) -> tuple[Tensor, Metrics]:
    """Preferences without a reward: the better answer of a pair gains over the reference, the worse one loses.

    Paper: DPO, arXiv:2305.18290, eq. 7; label smoothing cDPO (Mitchell, 2023).
    Formula: `-(1 - ε)·log σ(m) - ε·log σ(-m)` with `m = β·(d(better) - d(worse))`, `d = log π(y) - log π_ref(y)`. Every
    token of both answers has the pair's value: `seq-mean-token-mean` makes it the mean over pairs.
    When to use: pairs of answers, or a reward that ranks better than it scores (with the filter `best_worst`).

    Args:
        x: The batch.
        beta: How strongly the policy is held to the reference.
        label_smoothing: ε, share of pairs with wrong labels.
    """
    gains = _gains(x, len(x.pairs))
    signed = torch.where(x.preferred, gains, -gains)
    count = int(x.pairs.max()) + 1 if len(x.pairs) else 0
    margin = beta * signed.new_zeros(count).index_add(0, x.pairs, signed)
    loss = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    return loss[x.pairs][x.segments], {"pair_accuracy": margin > 0, "pair_margin": margin.detach()}


@policy_loss("kto", needs=("ref_logprobs", "preferred"), whole_batch=True, aggregates=PER_ROLLOUT)
def kto(
    x: LossInputs, *, beta: Positive = 0.1, desirable: NonNegative = 1.0, undesirable: NonNegative = 1.0
) -> tuple[Tensor, Metrics]:
    """Learning from right and wrong answers without pairs, weighted as people weigh gains and losses.

    An answer is right if its reward is at least the algorithm's `passing`, regardless of its group. A demonstration is
    right or wrong according to `label` (true or false) in its task's metadata.
    Paper: KTO, arXiv:2402.01306, eq. 8. Its reference point `z` is KL(π ‖ π_ref), estimated from answers to other
    tasks' prompts. Here it is estimated from the batch's own answers, without another pass: the same KL if the policy
    sampled them; with demonstrations, it exceeds the paper's once `π` has learned them.
    Formula: `λ - λ·σ(±β·(d - z))` with `d = log π(y) - log π_ref(y)`, + for right answers; `z = max(0, mean d)` over
    the optimiser batch, detached. Every token has its rollout's value: `seq-mean-token-mean` counts each once.
    When to use: right and wrong answers without pairs, or with many more of one kind than of the other.

    Args:
        x: The batch.
        beta: How strongly the policy is held to the reference.
        desirable: Weight λ of right answers.
        undesirable: Weight λ of wrong answers.
    """
    gains = _gains(x, len(x.preferred))
    whole = x.whole
    answered = torch.bincount(whole.segments[whole.loss_mask], minlength=len(whole.preferred)) > 0
    gained = _gains(whole, len(whole.preferred))[answered].detach().double()
    reference = (gained.sum() / max(len(gained), 1)).clamp(min=0)
    sign = torch.where(x.preferred, 1, -1)
    weight = torch.where(x.preferred, desirable, undesirable).to(gains.dtype)
    loss = weight * (1 - torch.sigmoid(sign * beta * (gains - reference)))
    return loss[x.segments], {"reference_point": reference}


def per_fits(run: RunFacts, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Refuse a `per` that contradicts the aggregation, and runs without both the policy's and an expert's answers."""
    if run.rollouts != "mixed":
        yield (
            "mu",
            f"weighs the policy's samples against an expert's answers, and with algorithm.rollouts={run.rollouts} "
            "there is only one of the two; set it to mixed, or use the policy loss 'ppo' or 'sft'",
        )
    follows = _per(run.aggregate)
    if options["per"] not in (None, follows):
        yield (
            "per",
            f"{options['per']!r}, but algorithm.aggregate={run.aggregate!r} divides by each {follows}: the two parts "
            "would not have the weights that mu says; leave it out",
        )


@policy_loss("mix", needs=("expert",), whole_batch=True, check=per_fits)
def mix(
    x: LossInputs,
    *,
    mu: Share = 0.1,
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
    dual_clip: DualClip | None = 3.0,
    per: Literal["token", "rollout"] | None = None,
) -> tuple[Tensor, Metrics]:
    """PPO on the policy's samples and maximum likelihood on an expert's answers, each with its own denominator.

    Paper: CHORD, arXiv:2508.11408; CHORD-μ is this loss with a schedule, `mu: {from: 0.9, to: 0.05, over: 200}`.
    Formula: `(1 - μ)·mean(ppo over the policy's) + μ·mean(-log π over the expert's)`. The core divides by all tokens
    (or rollouts), so each part is scaled by the number in the whole optimiser batch over its own.
    When to use: expert answers to tasks that the policy cannot solve yet.

    Args:
        x: The batch.
        mu: Weight of the expert's part.
        clip_low: How far PPO's ratio may fall below 1.
        clip_high: How far it may rise above 1.
        dual_clip: As in ppo.
        per: Divisor of the aggregation: `token` for token-mean, `rollout` for the seq-mean modes; null follows
            the run's aggregation.
    """
    by_expert = x.expert[x.segments]
    own = x.loss_mask & ~by_expert
    clipped, means = ppo(x.replace(loss_mask=own), clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    # One value per token of the policy, so that a micro-batch counts by these and not by the expert's.
    metrics: dict[str, Tensor] = {name: torch.as_tensor(mean).expand(int(own.sum())) for name, mean in means.items()}
    whole = x.whole
    counts = torch.zeros(len(whole.expert), device=whole.segments.device)
    counts = counts.index_add(0, whole.segments, whole.loss_mask.float())  # trained tokens per rollout
    if (per or _per(x.aggregate)) == "rollout":
        counts = (counts > 0).float()
    experts, both = float(counts[whole.expert].sum()), float(counts.sum())
    others = max(both - experts, 1.0)
    experts = max(experts, 1.0)
    imitation = sft(x)
    loss = torch.where(by_expert, mu * (both / experts) * imitation, (1 - mu) * (both / others) * clipped)
    return loss, {**metrics, "expert_loss": imitation.detach()[x.loss_mask & by_expert]}


def _gains(x: LossInputs, rollouts: int) -> Tensor:
    """Return `log π(y) - log π_ref(y)` of each rollout, `[n]`."""
    difference = log_ratio(x, x.ref_logprobs)
    return difference.new_zeros(rollouts).index_add(0, x.segments, difference)


def _per(aggregate: str) -> Literal["token", "rollout"]:
    """Return the unit that an aggregation divides by."""
    return "token" if aggregate == "token-mean" else "rollout"
