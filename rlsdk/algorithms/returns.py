"""Per-token advantages, from the rewards that follow each token.

All of them skip tokens that were not sampled (tool results, observations) without discounting the gap; a reward belongs
to the sampled token at its position. Advantages of tokens that were not sampled are zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlsdk.algorithms.packed import SampledTokens, Segments, in_parts, whiten_sampled
from rlsdk.batch import Credit, CreditInputs, Groups, row_sums, wide
from rlsdk.contracts import RunFacts
from rlsdk.limits import Share
from rlsdk.marks import advantage


@advantage("gae", needs=("values",))
def gae(x: CreditInputs, *, gamma: Share = 1.0, lam: Share = 1.0, whiten: bool = True) -> Credit:
    """Generalised advantage estimation with a critic, as in PPO, for intermediate rewards and long episodes.

    Paper: GAE, arXiv:1506.02438, eq. 16; defaults as in TinyZero and verl.
    Formula: `A_t = Σ_k (γλ)^k · (r_{t+k} + γ V_{t+k+1} - V_{t+k})`, computed as `G_t - V_t` with `G_t = r_t + γ(1-λ)
    V_{t+1} + γλ G_{t+1}`. The critic's returns are `A + V = G`, before whitening. After a rollout's last sampled token,
    `V` and `G` are 0, even if it was truncated: the critic's value of what would have followed is not added.
    When to use: a critic is trained, and there are intermediate rewards or long episodes.

    Args:
        x: The batch.
        gamma: Discount per sampled token.
        lam: 1 relies on the rewards only, 0 on the critic's next value.
        whiten: Mean 0 and variance 1 over the sampled tokens of the batch.
    """

    def estimate(part: CreditInputs) -> tuple[Tensor, Tensor]:
        sampled = SampledTokens.of(part)
        values = sampled.take(part.values)
        targets = sampled.rewards(part).to(values.dtype)
        if gamma * (1 - lam):
            targets = sampled.next(values).mul_(gamma * (1 - lam)).add_(targets)
        returns = Segments.of(sampled.counts).to_go(targets, gamma * lam)
        return sampled.put(returns - values), sampled.put(returns)

    advantages, returns = in_parts(estimate, x)
    return Credit(whiten_sampled(advantages, x.loss_mask) if whiten else advantages, returns)


@advantage("reinforce_plus_plus")
def reinforce_plus_plus(x: CreditInputs, *, gamma: Share = 1.0) -> Credit:
    """Discounted return, whitened over the batch, without critic or groups; best with `kl_penalty` in the reward.

    Paper: REINFORCE++, arXiv:2501.03262.
    Formula: `A = whiten(G)` with `G_t = r_t + γ G_{t+1}`.
    When to use: one rollout per task, and no memory for a critic.

    Args:
        x: The batch.
        gamma: Discount per sampled token.
    """

    def estimate(part: CreditInputs) -> tuple[Tensor]:
        sampled = SampledTokens.of(part)
        return (sampled.put(Segments.of(sampled.counts).to_go(sampled.rewards(part), gamma)),)

    (returns,) = in_parts(estimate, x)
    return Credit(whiten_sampled(returns.clone(), x.loss_mask), returns)


_RESHAPES = ("length_penalty", "overlong", "rank_penalty", "reward_clip", "reward_norm")


def _same_reward(run: RunFacts, _: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Refuse shapings that change the rewards of sampled answers, but not that of the greedy answer."""
    if changing := [name for name in run.shaping if name in _RESHAPES]:
        yield (
            "",
            f"its baseline is the reward of the greedy answer as it was scored, and the shaping {changing[0]!r} "
            "changes the rewards that are compared with it; leave that shaping out, change the reward itself, such as "
            "by adding a length_penalty, or use another advantage, such as rloo",
        )


@advantage("remax", needs=("baseline_rewards",), check=_same_reward)
def remax(x: CreditInputs) -> Credit:
    """Return relative to the reward of the greedy answer to the same task: one sample per task is enough.

    Paper: ReMax, arXiv:2310.10505, algorithm 1.
    Formula: `A_t = Σ_{k ≥ t} r_k - r(greedy answer)`; shapings do not change the latter.
    When to use: one or two rollouts per task; the greedy answer costs one additional rollout.
    """

    def estimate(part: CreditInputs) -> tuple[Tensor, Tensor]:
        sampled = SampledTokens.of(part)
        returns = sampled.returns(part)
        baseline = sampled.per_token(wide(part.baseline_rewards))
        return sampled.put(returns - baseline), sampled.put(returns)

    return Credit(*in_parts(estimate, x))


@advantage("segment_returns")
def segment_returns(x: CreditInputs, *, gamma: Share = 1.0, whiten: bool = False) -> Credit:
    """Return of each turn of a conversation, discounted per turn instead of per token.

    A turn is a run of sampled tokens between two observations.
    Source: ROLL's agentic_reinforce.
    Formula: `R_k = r_k + γ R_{k+1}` with the rewards `r_k` of turn `k`; every token of turn `k` gets `R_k`.
    When to use: conversations with tools or an environment, with rewards per turn.

    Args:
        x: The batch; `token_rewards` hold the rewards of each turn.
        gamma: Discount per turn.
        whiten: Mean 0 and variance 1 over the sampled tokens of the batch.
    """

    def estimate(part: CreditInputs) -> tuple[Tensor]:
        sampled = SampledTokens.of(part)
        starts = _turn_starts(sampled)
        turn = starts.cumsum(0) - 1
        per_rollout = row_sums(starts.float(), sampled.counts).long()
        rewards = sampled.rewards(part)
        earned = rewards.new_zeros(int(per_rollout.sum())).index_add_(0, turn, rewards)
        return (sampled.put(Segments.of(per_rollout).to_go(earned, gamma).index_select(0, turn)),)

    (returns,) = in_parts(estimate, x)
    return Credit(whiten_sampled(returns.clone(), x.loss_mask) if whiten else returns, returns)


def _has_teacher(run: RunFacts, _: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Refuse a run whose model would be its own teacher."""
    if not run.teacher:
        yield (
            "",
            "it learns from the reference model, but model.reference names none, or the model that is trained: the "
            "model would teach itself; set model.reference to the teacher",
        )


@advantage("on_policy_distill", needs=("logprobs", "ref_logprobs"), reads_rewards=False, check=_has_teacher)
def on_policy_distill(x: CreditInputs, *, coef: float = 1.0) -> Tensor:
    """Log-ratio of teacher to student for each token that the student sampled; no reward is used.

    The teacher is the reference model, `model.reference`. Only the sampled tokens contribute to the gradient, an
    estimate of the reverse KL's with discount 0. GKD (arXiv:2306.13649) instead differentiates a divergence over the
    whole vocabulary at each position.
    Source: "On-Policy Distillation" (Lu et al., Thinking Machines Lab, 2025); the per-token reward is that of MiniLLM,
    arXiv:2306.08543.
    Formula: `A_t = coef · (log π_teacher - log π)`, whose mean is minus the KL.
    When to use: a stronger model with the same tokenizer is at hand, and rewards are sparse or absent.

    Args:
        x: The batch.
        coef: Scale.
    """
    sampled = SampledTokens.of(x)
    return sampled.put(coef * (sampled.take(x.ref_logprobs) - sampled.take(x.logprobs)))


@advantage("optimal_token_baseline", needs=("logprobs", "probs_squared_sum"))
def optimal_token_baseline(x: CreditInputs) -> Credit:
    """A baseline per position that minimises the variance of the gradient: for long answers.

    Paper: arXiv:2602.07078; the weights need no backward pass (its logit-gradient proxy).
    Formula: `A_t = G_t - Σ W_t·G_t / Σ W_t`, sums over the group's rollouts that have a `t`-th sampled token, with
    `G_t` the return and `W_t = Σ_{j ≤ t} (1 - 2π_j + Σ_v π_j(v)²)`.
    When to use: long answers with noisy gradients; it costs one more number per token.
    """
    return Credit(*in_parts(_against_token_baseline, x, together=x.groups))


def _against_token_baseline(x: CreditInputs) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of whole groups."""
    sampled = SampledTokens.of(x)
    segments = Segments.of(sampled.counts)
    returns = segments.sums(segments.in_blocks(sampled.rewards(x)), forwards=False)
    energy = sampled.take(x.logprobs).exp().mul_(-2).add_(1).add_(sampled.take(x.probs_squared_sum)).clamp_(min=0)
    weights = segments.sums(segments.in_blocks(energy), forwards=True).to(returns.dtype)
    # These sums continue in the padding of a rollout's last block, where they must not count.
    blocks, width, some = segments.blocks, segments.width, segments.blocks > 0
    used = (sampled.counts - (blocks - 1) * width)[some]
    weights[blocks[some].cumsum(0) - 1] *= torch.arange(width, device=used.device) < used[:, None]
    groups, outcomes = Groups(x.groups - x.groups.min() if len(x.groups) else x.groups), wide(x.outcomes)
    # Blocks at the same position of the same group's rollouts share a cell.
    row = torch.repeat_interleave(blocks)
    most = int(blocks.max()) if len(blocks) else 0
    cell = torch.arange(len(row), device=row.device) + (groups.index * most - (blocks.cumsum(0) - blocks))[row]
    # Subtracting the group's minimum reward keeps precision, and gives exactly zero if rewards are equal.
    above = returns - groups.min(outcomes).to(returns.dtype)[row][:, None]
    weight = returns.new_zeros(groups.count * most, width).index_add_(0, cell, weights)
    mean = torch.zeros_like(weight).index_add_(0, cell, weights.mul_(above)).div_(torch.where(weight > 0, weight, 1))
    above.sub_(mean.index_select(0, cell))
    above.masked_fill_((groups.members() < 2)[row][:, None], 0)
    return sampled.put(segments.joined(above)), sampled.put(segments.joined(returns))


def _turn_starts(sampled: SampledTokens) -> Tensor:
    """Return bool `[s]`, True where a run of sampled tokens begins."""
    if sampled.index is None:
        starts = torch.zeros(sampled.total, dtype=torch.bool, device=sampled.counts.device)
    else:
        starts = torch.diff(sampled.index, prepend=sampled.index[:1]) > 1
    starts[(sampled.ends - sampled.counts)[sampled.counts > 0]] = True
    return starts
