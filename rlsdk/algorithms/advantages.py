"""Advantages with a group baseline: one value per rollout, computed from its reward `r`, or one per step.

`μ` and `σ` are the mean and unbiased standard deviation of the rewards of a group. The advantage is zero in groups with
one member, or with equal rewards.

In step-wise workflows, several rollouts are the steps of one trajectory, and a group holds the trajectories of one
task. There, `relative` means minus the mean of a set and, if requested, divided by its standard deviation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from rlsdk.algorithms.packed import Segments
from rlsdk.batch import EPSILON, CreditInputs, Groups, wide
from rlsdk.batch.arithmetic import WHITEN_EPSILON
from rlsdk.contracts import RunFacts
from rlsdk.limits import NonNegative, Positive, Share
from rlsdk.marks import advantage


def _std_is_read(_: RunFacts, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Refuse a choice of the standard deviation that nothing is divided by."""
    if options["std_over"] != "group" and not options["std_normalize"]:
        yield (
            "std_over",
            "'batch' given, but std_normalize=false divides by no standard deviation; leave one of them out",
        )


@advantage("grpo", check=_std_is_read)
def grpo(x: CreditInputs, *, std_normalize: bool = True, std_over: Literal["group", "batch"] = "group") -> Tensor:
    """Reward relative to the group; the default for rewards that check a whole answer.

    Paper: GRPO, arXiv:2402.03300, §4.1.2; without the division, Dr. GRPO, arXiv:2503.20783; with the standard deviation
    of the batch, arXiv:2508.08221.
    Formula: `A = (r - μ) / (σ + 1e-6)`.
    When to use: rewards that judge a whole answer, several rollouts per task. Omit the division if tasks that are
    almost always or almost never solved should not weigh more.

    Args:
        x: The batch.
        std_normalize: Divide by the standard deviation; if false, tasks weigh by the spread of their rewards.
        std_over: Standard deviation of the group's rewards, or of all rewards in the batch.
    """
    rewards = wide(x.outcomes)
    centred = Groups(x.groups).centred(rewards, std_normalize=std_normalize and std_over == "group")
    if std_over == "group" or not std_normalize:
        return centred
    return centred / (_std(rewards) + EPSILON)


def _parts_are_added(run: RunFacts, _: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Refuse rewards whose parts cannot be normalised separately and then added."""
    if run.rollouts == "demonstrations":
        return
    if len(run.reward_parts) < 2:
        given = f"the only part is {run.rewards[0]!r}" if run.rewards else "it has none"
        yield (
            "",
            f"it normalises each part of the reward separately, but {given}; list several parts below `reward`, or use "
            "'grpo'",
        )
    for part in run.reward_parts:
        if part.multiply:
            yield "", f"it adds the parts of the reward, but {part.name!r} is a factor (multiply); use 'grpo'"
        if part.range is not None:
            yield (
                "",
                f"it brings the parts of the reward to one scale itself, and reads {part.name!r} before its range; "
                "leave `range` out, and write a negative weight if small values are better, or use 'grpo'",
            )
    if run.shaping:
        yield (
            "",
            f"it reads the parts of the reward, which shapings do not change: {', '.join(run.shaping)} would have no "
            "effect; leave them out, or use rewards in their place, such as 'length_penalty'",
        )


@advantage("gdpo", needs=("reward_parts", "reward_weights"), check=_parts_are_added)
def gdpo(x: CreditInputs) -> Tensor:
    """Each part of the reward relative to the group, then added: for several rewards that should all be learned.

    A sum of rewards hides its parts: two rollouts that earn it by different ones get the same advantage, and a part
    that varies little is drowned by one that varies much. Here, each part has the same spread within a group before it
    is weighted. Weights are those of the parts of the reward. A part that a gate left out counts as 0, and one that is
    equal in the whole group adds nothing. The mean over the batch need not be subtracted: it is 0, since each part's
    mean over a group is.

    Paper: GDPO, arXiv:2601.05242. veRL normalises over tokens instead of rollouts in the last step; to do so, set
    `whiten_advantages: true`.
    Formula: `A = S / (σ(S) + 1e-6)` with `S = Σ_k w_k · (r_k - μ_k) / (σ_k + 1e-6)`: `μ_k` and `σ_k` of part `k` in the
    group, `σ(S)` over all rollouts of the batch.
    When to use: rewards of several parts on different scales, or of different difficulty, such as format, length and
    correctness. The filter `nonzero_variance` still compares sums.

    Args:
        x: The batch.
    """
    groups = Groups(x.groups)
    total = torch.zeros_like(x.rewards, dtype=torch.float64)
    for name, weight in x.reward_weights.items():
        if name in x.reward_parts:  # a part that applied to no task of the batch has no values
            total = total + weight * groups.centred(x.reward_parts[name].double(), std_normalize=True)
    return (total / (_std(total) + EPSILON)).to(wide(x.rewards).dtype)


@advantage("rloo")
def rloo(x: CreditInputs) -> Tensor:
    """Reward relative to the mean of the *other* rollouts of the group: unbiased, for groups of two or more.

    Paper: RLOO, arXiv:2402.14740.
    Formula: `A = r - mean of the others = g / (g - 1) · (r - μ)` with `g` rollouts in the group.
    When to use: small groups, where it matters that grpo includes a rollout in its own baseline.
    """
    groups = Groups(x.groups)
    size = groups.members()
    return groups.centred(x.outcomes) * size / (size - 1).clamp(min=1)


@advantage("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(x: CreditInputs) -> Tensor:
    """Group mean as baseline, normalised by the spread of the whole batch: steadier than grpo for small groups.

    Paper: REINFORCE++-baseline, arXiv:2501.03262.
    Formula: `A = whiten(r - μ)`, with mean and variance over the sampled tokens of the batch: rollouts weigh by their
    number of tokens.
    When to use: groups too small for their own standard deviation, and rewards on one scale across tasks.
    """
    centred = Groups(x.groups).centred(x.outcomes.double())
    tokens = x.sampled_tokens().to(centred.dtype)
    count = tokens.sum()
    around = centred - (centred * tokens).sum() / count.clamp(min=1)
    variance = (around.square() * tokens).sum() / (count - 1).clamp(min=1)
    return (around * torch.rsqrt(variance + WHITEN_EPSILON)).to(wide(x.outcomes).dtype)


@advantage("opo")
def opo(x: CreditInputs) -> Tensor:
    """Length-weighted baseline, which minimises the variance of the gradient: for strictly on-policy training.

    Paper: OPO, arXiv:2505.23585.
    Formula: `A = r - Σ l·r / Σ l` over the group, `l` being the sampled tokens of a rollout.
    When to use: one update per batch, and answers of very different lengths.
    """
    rewards = wide(x.outcomes)
    return rewards - Groups(x.groups).weighted_mean(rewards, x.sampled_tokens().to(rewards.dtype))


@advantage("gpg")
def gpg(x: CreditInputs, *, std_normalize: bool = False) -> Tensor:
    """Group mean as baseline, rescaled to compensate for groups without signal.

    Paper: GPG, arXiv:2504.02546, eq. 7 (the factor). verl instead divides by the number of rollouts with a nonzero
    reward; the paper, followed here, by the number of rollouts in groups whose rewards differ.
    Formula: `A = B / (B - M) · (r - μ)`: `B` rollouts in the batch, `M` of them in groups of equal rewards.
    When to use: batches with many groups that are all right or all wrong, and no filter that drops them.

    Args:
        x: The batch.
        std_normalize: Divide by `σ + 1e-6` (the paper's F_norm; its best results omit this).
    """
    groups, rewards = Groups(x.groups), wide(x.outcomes)
    useful = (groups.max(rewards) != groups.min(rewards)).to(rewards.dtype).sum()
    return groups.centred(rewards, std_normalize=std_normalize) * (len(rewards) / useful.clamp(min=1))


@advantage("pass_at_k")
def pass_at_k(x: CreditInputs, *, std_normalize: bool = True) -> Tensor:
    """Only the best rollout of a group is credited, by its margin over the second: trains pass@k, not pass@1.

    Paper: arXiv:2503.19595 (the leave-one-out estimate of max@k), as in verl's grpo_passk.
    Formula: `A = (r_max - r_second) / (σ + 1e-6)` for the best, 0 for the others; 0 for all if two share the best.
    When to use: a model that will be sampled several times to pick the best answer.

    Args:
        x: The batch.
        std_normalize: Divide by the standard deviation of the group.
    """
    groups, rewards = Groups(x.groups), wide(x.outcomes)
    best = groups.max(rewards)
    leads = (rewards == best) & (groups.sum((rewards == best).to(rewards.dtype)) == 1)
    second = groups.max(torch.where(leads & (groups.members() > 1), groups.min(rewards), rewards))
    advantages = torch.where(leads, best - second, 0)
    return advantages / (groups.std(rewards) + EPSILON) if std_normalize else advantages


def _tau_is_read(_: RunFacts, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Refuse a temperature that the baseline does not have."""
    if options["baseline"] == "mean" and options["tau"] != 1.0:
        yield (
            "tau",
            f"{options['tau']:g} given, but the mean has no temperature; set baseline=logavgexp, or leave tau out (the "
            "policy loss has a tau of its own)",
        )


@advantage("opmd", check=_tau_is_read)
def opmd(x: CreditInputs, *, baseline: Literal["mean", "logavgexp"] = "mean", tau: Positive = 1.0) -> Tensor:
    """Reward relative to the group's mean, or its soft maximum at temperature τ; used with the loss `opmd`.

    Paper: online policy mirror descent, Kimi k1.5, arXiv:2501.12599, §2.3.2; both baselines arXiv:2509.24203.
    Formula: `A = r - μ`, or `A = r - τ·log mean exp(r / τ)`.
    When to use: with the loss `opmd`; `logavgexp` if only the best answers should count as good.

    Args:
        x: The batch.
        baseline: Mean, or soft maximum.
        tau: Temperature of the soft maximum: small values approach the maximum, large ones the mean.
    """
    groups, rewards = Groups(x.groups), wide(x.outcomes)
    if baseline == "mean":
        return groups.centred(rewards)
    below = rewards - groups.max(rewards)
    return below - tau * groups.mean((below / tau).exp()).log()


@advantage("asymre")
def asymre(x: CreditInputs, *, shift: float = -0.1) -> Tensor:
    """Baseline below the mean, so that good rollouts weigh more than bad ones: for off-policy training.

    Paper: AsymRE, arXiv:2506.20520, except for groups of equal rewards: the paper's advantage there is `-shift`, which
    reinforces right and wrong answers alike; here it is 0, as everywhere in rlsdk.
    Formula: `A = r - (μ + shift)`; 0 in a group with one member or with equal rewards.
    When to use: samples from older policies or another model, where pushing down bad answers destabilises training.

    Args:
        x: The batch.
        shift: Shift of the baseline; below 0 for stability.
    """
    groups, rewards = Groups(x.groups), wide(x.outcomes)
    differ = groups.max(rewards) != groups.min(rewards)
    return torch.where(differ, groups.centred(rewards) - shift, 0)


@advantage("rec")
def rec(x: CreditInputs, *, std_normalize: bool = False, drop: Literal["balance"] | None = None) -> Tensor:
    """Group mean as baseline, optionally with no more bad rollouts than good ones (group-relative REINFORCE).

    Paper: arXiv:2509.24203 (RED-drop). Trinity-RFT drops rollouts at random; here the last ones in the batch are
    dropped, which is equivalent for exchangeable samples, and reproducible.
    Formula: `A = r - μ`; with `drop`, surplus rollouts below the mean get 0, and `μ` is the mean of the others.
    When to use: off-policy training; `drop` if wrong answers dominate the batch.

    Args:
        x: The batch.
        std_normalize: Divide by `σ + 1e-6`.
        drop: `balance` drops the surplus of rollouts below the mean over those at or above it.
    """
    groups, rewards = Groups(x.groups), wide(x.outcomes)
    if drop is None:
        return groups.centred(rewards, std_normalize=std_normalize)
    bad = (rewards < groups.mean(rewards)).to(rewards.dtype)
    order = -torch.arange(len(rewards), device=rewards.device, dtype=rewards.dtype)
    nth_bad = groups.rank(torch.where(bad > 0, order, -float(len(rewards))))
    kept = (bad == 0) | (nth_bad < groups.sum(1 - bad))
    among = Groups.by(x.groups, kept.long())
    return torch.where(kept, among.centred(rewards, std_normalize=std_normalize), 0)


@advantage("constant", reads_rewards=False)
def constant(x: CreditInputs, *, value: float = 1.0) -> Tensor:
    """Same advantage for every token, whatever the reward: for losses on demonstrations or selected rollouts.

    Source: no paper; the weight 1 of maximum likelihood.
    Formula: `A = value`.
    When to use: losses that do not read rewards: `sft`, `dpo`, `kto`.

    Args:
        x: The batch.
        value: The advantage.
    """
    return torch.full_like(wide(x.rewards), value)


@advantage("step_grpo", needs=("trajectories", "steps"))
def step_grpo(
    x: CreditInputs,
    *,
    credit: Literal["broadcast", "step"] = "broadcast",
    std_normalize: bool = True,
    divide_by_steps: bool = False,
) -> Tensor:
    """GRPO for step-wise trajectories.

    Source: rLLM and Trinity-RFT (step_wise_grpo) for `broadcast`; GRPO, arXiv:2402.03300, §4.1.3 (process supervision)
    for the comparison per step.
    Formula: `broadcast`: the reward of a trajectory's last step, relative to the other trajectories of the group, for
    all its steps. `step`: each step's reward, relative to the same step of the other trajectories.
    When to use: agents whose steps are separate rollouts: `broadcast` if only the end is rewarded, `step` if each step
    is.

    Args:
        x: The batch.
        credit: Method, `broadcast` or `step`.
        std_normalize: Divide by `σ + 1e-6`.
        divide_by_steps: Divide by the number of steps, so that long trajectories weigh no more than short ones.
    """
    rewards, trajectories = wide(x.outcomes), Groups.by(x.groups, x.trajectories)
    if credit == "step":
        advantages = Groups.by(x.groups, x.steps).centred(rewards, std_normalize=std_normalize)
    else:
        last = (x.steps == trajectories.max(x.steps)).to(rewards.dtype)
        final = trajectories.weighted_mean(rewards, last)
        advantages = _between(trajectories, final, x.groups, std_normalize)
    return advantages / trajectories.members() if divide_by_steps else advantages


@advantage("gigpo", needs=("trajectories", "steps", "states"))
def gigpo(x: CreditInputs, *, omega: NonNegative = 1.0, gamma: Share = 0.95, std_normalize: bool = False) -> Tensor:
    """Credit for the trajectory, plus credit for actions in states that several trajectories passed through.

    Paper: GiGPO, arXiv:2505.10978.
    Formula: `A = A_E + ω·A_S`: `A_E` the trajectory's total reward relative to the group's other trajectories, `A_S`
    the step's discounted return `Σ_k γ^k r_{t+k}` relative to the steps of the group in an equal state. Where only the
    last rollout of a trajectory was scored, `r` is 0 for those before it.
    When to use: agents in worlds whose states repeat: games, web sites, households.

    Args:
        x: The batch.
        omega: Weight of the step's part.
        gamma: Discount per step.
        std_normalize: Divide both by `σ + 1e-6` (the paper's F_norm = std), else by 1.
    """
    rewards, trajectories = wide(x.outcomes), Groups.by(x.groups, x.trajectories)
    if hasattr(x, "shared_scores"):  # a sum of copies would grow with their number
        rewards = torch.where(x.shared_scores & (x.steps < trajectories.max(x.steps)), 0, rewards)
    episode = _between(trajectories, trajectories.sum(rewards), x.groups, std_normalize)
    # Discounted rewards from each step to the end of its trajectory.
    order = torch.argsort(x.steps, stable=True)
    order = order[torch.argsort(trajectories.index[order], stable=True)]
    to_go = Segments.of(torch.bincount(trajectories.index)).to_go(rewards[order], gamma)
    returns = torch.empty_like(to_go).index_copy(0, order, to_go)
    anchored = Groups.by(x.groups, x.states).centred(returns, std_normalize=std_normalize)
    return episode + omega * anchored


def _between(trajectories: Groups, values: Tensor, groups: Tensor, std_normalize: bool) -> Tensor:
    """Return a trajectory's value relative to its group, counting each trajectory once, on all its steps."""
    first = trajectories.first
    return Groups(groups[first]).centred(values[first], std_normalize=std_normalize)[trajectories.index]


def _std(values: Tensor) -> Tensor:
    """Return the unbiased standard deviation over the batch; 0 for a single value, where torch returns nan."""
    return values.double().std().to(values.dtype) if len(values) > 1 else values.new_zeros(())
