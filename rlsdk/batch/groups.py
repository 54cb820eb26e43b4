"""Statistics over groups of rollouts, each written on every member of its group."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from rlsdk.batch.arithmetic import size, total, wide

EPSILON = 1e-6
"""Beside a standard deviation (GRPO, arXiv:2402.03300, is silent; this is what its users run)."""


@attrs.frozen(eq=False)
class Groups:
    """Rollouts that belong together.

    Attributes:
        index: int64 `[n]`, dense index of the group.
    """

    index: Tensor

    @classmethod
    def by(cls, *labels: Tensor) -> Groups:
        """Groups of the rollouts that agree in all of these labels, int `[n]` each."""
        return cls(torch.unique(torch.stack(labels), dim=1, return_inverse=True)[1])

    @property
    def count(self) -> int:
        """How many groups there are."""
        return size(self.index)

    @property
    def first(self) -> Tensor:
        """int64 `[count]`: the first rollout of each group."""
        order = torch.arange(len(self.index), device=self.index.device)
        return order.new_zeros(self.count).scatter_reduce(0, self.index, order, "amin", include_self=False)

    def members(self) -> Tensor:
        """int64 `[n]`: how many rollouts the group has."""
        return torch.bincount(self.index)[self.index]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the group."""
        return total(values, self.index, self.count)[self.index]

    def max(self, values: Tensor) -> Tensor:
        """Greatest value in the group."""
        empty = values.new_zeros(self.count)
        return empty.scatter_reduce(0, self.index, values, "amax", include_self=False)[self.index]

    def min(self, values: Tensor) -> Tensor:
        """Least value in the group."""
        return -self.max(-values)

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the group; of equal values exactly that value."""
        return self.weighted_mean(values, torch.ones_like(wide(values)))

    def weighted_mean(self, values: Tensor, weights: Tensor) -> Tensor:
        """Mean over the group by weights that are not negative; of equal values exactly that value.

        What exceeds the least value is averaged: a common offset would cost the digits of the differences.
        """
        least = self.min(wide(values))
        weight = self.sum(weights)
        return least + self.sum((values - least) * weights) / torch.where(weight > 0, weight, 1)

    def std(self, values: Tensor) -> Tensor:
        """Unbiased standard deviation over the group; 0 for a single member.

        In two passes: the one-pass formula loses all digits where the spread is small beside the mean.
        """
        squares = self.sum((values - self.mean(values)) ** 2)
        return (squares / (self.members() - 1).clamp(min=1)).sqrt()

    def centred(self, values: Tensor, *, std_normalize: bool = False) -> Tensor:
        """`values - mean`, divided by `std + 1e-6` if asked; exactly 0 in a group of one, or of equal values."""
        values = wide(values)
        difference = values - self.mean(values)
        return difference / (self.std(values) + EPSILON) if std_normalize else difference

    def rank(self, values: Tensor) -> Tensor:
        """int64 `[n]`: how many members have a greater value."""
        order = torch.argsort(values, descending=True, stable=True)
        order = order[torch.argsort(self.index[order], stable=True)]
        group, value = self.index[order], values[order]
        place = torch.arange(len(order), device=order.device)
        new_group = torch.diff(group, prepend=group[:1] - 1) != 0
        new_value = new_group | (torch.diff(value, prepend=value[:1]) != 0)
        start = torch.where(new_group, place, 0).cummax(0).values
        return torch.empty_like(order).index_copy(0, order, torch.where(new_value, place, 0).cummax(0).values - start)
