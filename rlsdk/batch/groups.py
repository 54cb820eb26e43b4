"""Statistics over groups of rollouts, broadcast to every member of the group."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from rlsdk.batch.arithmetic import size, total, wide

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
