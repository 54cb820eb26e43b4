"""`CreditInputs`: the inputs of shaping and advantages; statistics over groups of rollouts."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import attrs
import torch
from torch import Tensor

from rlsdk.batch.arithmetic import Packed, optional, pack, pad, places, row_sums, size, total, wide
from rlsdk.errors import ValueFault
from rlsdk.fields import names

EPSILON = 1e-6
"""Added to a standard deviation in a denominator; a common value, since GRPO (arXiv:2402.03300) specifies none."""


@attrs.frozen(eq=False)
class Groups:
    """Groups of rollouts. Statistics are computed in float64 and returned in the dtype of the values.

    Attributes:
        index: int64 `[n]`, dense index of the group.
    """

    index: Tensor

    @classmethod
    def by(cls, *labels: Tensor) -> Groups:
        """Group the rollouts that agree in all of these labels, int `[n]` each."""
        return cls(torch.unique(torch.stack(labels), dim=1, return_inverse=True)[1])

    @property
    def count(self) -> int:
        """Number of groups."""
        return size(self.index)

    @property
    def first(self) -> Tensor:
        """First rollout of each group, int64 `[count]`."""
        order = torch.arange(len(self.index), device=self.index.device)
        return order.new_zeros(self.count).scatter_reduce(0, self.index, order, "amin", include_self=False)

    def members(self) -> Tensor:
        """Number of rollouts in the group, int64 `[n]`."""
        return torch.bincount(self.index)[self.index]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the group."""
        return self._sum(values.double()).to(wide(values).dtype)

    def max(self, values: Tensor) -> Tensor:
        """Maximum over the group."""
        empty = values.new_zeros(self.count)
        return empty.scatter_reduce(0, self.index, values, "amax", include_self=False)[self.index]

    def min(self, values: Tensor) -> Tensor:
        """Minimum over the group."""
        return -self.max(-values)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the group; exact if all values are equal."""
        return self.weighted_mean(values, torch.ones_like(values))

    def weighted_mean(self, values: Tensor, weights: Tensor) -> Tensor:
        """Mean over the group with non-negative weights; exact if all values are equal.

        Only the excess over the minimum is averaged, since a common offset would cost digits of the differences.
        """
        return self._mean(values.double(), weights.double()).to(_real(values))

    def std(self, values: Tensor) -> Tensor:
        """Unbiased standard deviation over the group; 0 for a single member.

        Computed in two passes: the one-pass formula loses all digits if the spread is small relative to the mean.
        """
        return self._std(values.double()).to(_real(values))

    def centred(self, values: Tensor, *, std_normalize: bool = False) -> Tensor:
        """`values - mean`, optionally divided by `std + 1e-6`; exactly 0 in a group of one or of equal values."""
        exact = values.double()
        centred = exact - self._mean(exact, torch.ones_like(exact))
        return (centred / (self._std(exact) + EPSILON) if std_normalize else centred).to(_real(values))

    def rank(self, values: Tensor) -> Tensor:
        """Number of members with a greater value, int64 `[n]`."""
        order = torch.argsort(values, descending=True, stable=True)
        order = order[torch.argsort(self.index[order], stable=True)]
        group, value = self.index[order], values[order]
        place = torch.arange(len(order), device=order.device)
        new_group = torch.diff(group, prepend=group[:1] - 1) != 0
        new_value = new_group | (torch.diff(value, prepend=value[:1]) != 0)
        start = torch.where(new_group, place, 0).cummax(0).values
        return torch.empty_like(order).index_copy(0, order, torch.where(new_value, place, 0).cummax(0).values - start)

    def _sum(self, exact: Tensor) -> Tensor:
        return total(exact, self.index, self.count)[self.index]

    def _mean(self, exact: Tensor, weights: Tensor) -> Tensor:
        least, weight = self.min(exact), self._sum(weights)
        return least + self._sum((exact - least) * weights) / torch.where(weight > 0, weight, 1)

    def _std(self, exact: Tensor) -> Tensor:
        squares = self._sum((exact - self._mean(exact, torch.ones_like(exact))) ** 2)
        return (squares / (self.members() - 1).clamp(min=1)).sqrt()


def _real(values: Tensor) -> torch.dtype:
    """Return the dtype of a mean of `values`."""
    return wide(values).dtype if values.is_floating_point() else torch.get_default_dtype()


@attrs.frozen(slots=False, eq=False, repr=False)
class Credit:
    """Advantages and the critic's target returns, `[t]` each; an advantage may return this."""

    advantages: Tensor
    returns: Tensor


@attrs.frozen(slots=False, eq=False, repr=False)
class CreditInputs(Packed):
    """Inputs of shapings and advantages.

    Attributes:
        rewards: float `[n]`, within ±1e18; in training float32. Statistics of groups are computed in float64.
        groups: int64 `[n]`, dense index of the group (the rollouts that share a baseline).
        lengths: int64 `[n]`, response tokens of each rollout; they add up to `t`.
        loss_mask: bool `[t]`, True where the policy sampled the token.
        token_rewards: float `[t]`; if present, they replace `rewards`, which equal their sums.
        values: float `[t]`, the critic's values.
        logprobs: float `[t]`, logprobs of the policy before the update.
        ref_logprobs: float `[t]`, logprobs of the reference policy.
        entropy: float `[t]`, in nats.
        probs_squared_sum: float `[t]`, sum over the vocabulary of squared probabilities.
        baseline_rewards: float `[n]`, reward of the greedy answer (ReMax).
        sources: int64 `[n]`, dense index of the data source.
        trajectories: int64 `[n]`, dense index of the trajectory.
        steps: int64 `[n]`, position within the trajectory.
        states: int64 `[n]`, equal where the environment's states are equal.
        shared_scores: bool `[n]`, if there are any: True for a rollout without its own score, whose reward is a copy of
            that of the last rollout of its trajectory.
        reward_parts: Name of a part of the reward -> float `[n]`, before its range and weight.
        reward_weights: Name of a part of the reward -> its weight.
        train_step: Number of training steps before this one; the first is 0.
        train_steps: Number of training steps of the run.
    """

    rewards: Tensor
    groups: Tensor
    lengths: Tensor
    loss_mask: Tensor
    token_rewards: Tensor = optional()
    values: Tensor = optional()
    logprobs: Tensor = optional()
    ref_logprobs: Tensor = optional()
    entropy: Tensor = optional()
    probs_squared_sum: Tensor = optional()
    baseline_rewards: Tensor = optional()
    sources: Tensor = optional()
    trajectories: Tensor = optional()
    steps: Tensor = optional()
    states: Tensor = optional()
    shared_scores: Tensor = optional()
    reward_parts: dict[str, Tensor] = optional()
    reward_weights: dict[str, float] = optional()
    train_step: int = attrs.field(default=0, kw_only=True)
    train_steps: int = attrs.field(default=1, kw_only=True)
    _width: int | None = optional()

    CLOCK: ClassVar[tuple[str, ...]] = names("credit", axis="clock")
    ALWAYS: ClassVar[frozenset[str]] = frozenset(names("credit", access="always"))

    def _check(self) -> None:
        n, t = self.rewards.shape[0], self.loss_mask.shape[0]
        self._expect("rollout", n, *names("credit", axis="rollout"))
        self._expect("token", t, *names("credit", axis="token"))
        if int(self.lengths.sum()) != t:
            raise ValueFault(
                f"CreditInputs.lengths add up to {int(self.lengths.sum())}; expected {t}, the tokens of loss_mask"
            )

    @classmethod
    def from_padded(
        cls, rewards: Tensor, mask: Tensor, groups: Tensor, *, lengths: Tensor | None = None, **optional: Any
    ) -> Self:
        """Build the inputs from padded tensors `[n, L]`.

        Args:
            rewards: float `[n]`.
            mask: bool `[n, L]`, True where the policy sampled the token.
            groups: `[n]`, any labels; equal labels share a baseline.
            lengths: int `[n]`; default: up to the last True of each row.
            **optional: The optional fields, `[n, L]` in place of `[t]`.
        """
        mask = mask.bool()
        inside, lengths = places(mask, lengths)
        packed = pack(optional, inside)
        dense = torch.unique(groups, return_inverse=True)[1]
        return cls(rewards, dense, lengths, mask[inside], width=mask.shape[1], **packed)

    @property
    def segments(self) -> Tensor:
        """Rollout of each token, int64 `[t]`."""
        return torch.repeat_interleave(torch.arange(len(self.lengths), device=self.lengths.device), self.lengths)

    @property
    def outcomes(self) -> Tensor:
        """Total reward of each rollout, `[n]`: the sums of `token_rewards` if present, else `rewards`."""
        if not hasattr(self, "token_rewards"):
            return self.rewards
        sums = self.sequence_sum(self.token_rewards).to(self.rewards.dtype)
        # Rewards equal to the sums up to rounding are kept: equal rewards must remain exactly equal.
        return torch.where(torch.isclose(sums, self.rewards), self.rewards, sums)

    def shaped(self, rewards: Tensor) -> Self:
        """Return a copy with the rewards that a shaping returned.

        Args:
            rewards: float `[n]` or `[t]`. If there are token rewards, a change of the total is added to the last
                sampled token, and the others keep their place.
        """
        if len(rewards) != len(self.rewards):
            return self.replace(token_rewards=rewards, rewards=self.sequence_sum(rewards))
        if not hasattr(self, "token_rewards"):
            return self.replace(rewards=rewards)
        order = torch.where(self.loss_mask, torch.arange(len(self.loss_mask), device=rewards.device), -1)
        last = order.new_full((len(rewards),), -1).scatter_reduce(0, self.segments, order, "amax")
        some = last >= 0
        change = (rewards - self.outcomes)[some].to(self.token_rewards.dtype)
        return self.replace(rewards=rewards, token_rewards=self.token_rewards.index_add(0, last[some], change))

    def to_padded(self, values_t: Tensor) -> Tensor:
        """`[t]` -> `[n, L]`, zeros beyond each length."""
        return pad(values_t, self.lengths, self._width)

    def per_token(self, values_n: Tensor) -> Tensor:
        """`[n]` -> `[t]`: repeat each rollout's value on all its tokens."""
        return torch.repeat_interleave(values_n, self.lengths)

    def sequence_sum(self, values_t: Tensor) -> Tensor:
        """`[t]` -> `[n]`: sum over the sampled tokens of each rollout."""
        return row_sums(torch.where(self.loss_mask, values_t, 0), self.lengths)

    def sampled_tokens(self) -> Tensor:
        """Number of sampled tokens of each rollout, int64 `[n]`."""
        if bool(self.loss_mask.all()):
            return self.lengths
        return row_sums(self.loss_mask.float(), self.lengths).long()

    @property
    def _groups(self) -> Groups:
        return Groups(self.groups)

    def group_size(self) -> Tensor:
        """Number of rollouts that share the baseline, int64 `[n]`."""
        return self._groups.members()

    def group_sum(self, values_n: Tensor) -> Tensor:
        """`[n]` -> `[n]`: sum over the group, on each of its members."""
        return self._groups.sum(values_n)

    def group_mean(self, values_n: Tensor) -> Tensor:
        """`[n]` -> `[n]`: mean over the group, on each of its members; exact if all values are equal."""
        return self._groups.mean(values_n)

    def group_std(self, values_n: Tensor) -> Tensor:
        """`[n]` -> `[n]`: unbiased standard deviation over the group; 0 for a single member."""
        return self._groups.std(values_n)
