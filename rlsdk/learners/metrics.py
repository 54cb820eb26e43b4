"""Additive metrics, exact over micro-batches, optimiser steps and ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_EXTREMES = ("_max", "_min")


class MetricAccumulator:
    """Weighted sums by name; a name that ends in `_max` or `_min` keeps the maximum or minimum."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[float, float]] = {}

    def add(self, name: str, total: float, weight: float = 1.0) -> None:
        """Add to the sum and weight of a metric; for an extreme, `total` is the value and `weight` is ignored."""
        self.merge({name: (total, weight)})

    def add_tokens(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add a per-token metric, reduced over trained tokens to its mean or extreme.

        Args:
            name: Metric name.
            values: Values `[t]`, of any number type or bool.
            mask: bool `[t]`, True where the token is trained on.
        """
        self.add_values(name, values[mask])

    def add_values(self, name: str, values: Tensor) -> None:
        """Add a metric with one value per rollout, pair or token, reduced to its mean or extreme."""
        values = values.detach().double()
        if not len(values):
            return
        if name.endswith(_EXTREMES):
            self.add(name, float(values.max() if name.endswith("_max") else values.min()))
        else:
            self.add(name, float(values.sum()), len(values))

    def merge(self, other: Mapping[str, tuple[float, float]]) -> None:
        """Add the sums of another rank or micro-batch."""
        for name, (total, weight) in other.items():
            held = self._held.get(name)
            if held is None:
                self._held[name] = (total, weight)
            elif name.endswith("_max"):
                self._held[name] = (max(held[0], total), 1.0)
            elif name.endswith("_min"):
                self._held[name] = (min(held[0], total), 1.0)
            else:
                self._held[name] = (held[0] + total, held[1] + weight)

    @property
    def pairs(self) -> dict[str, tuple[float, float]]:
        """Pairs (sum, weight) by metric name, for merging."""
        return dict(self._held)

    def means(self) -> dict[str, float]:
        """Return the mean (sum / weight) or extreme of each metric by name; NaN where the weight is zero."""
        return {
            name: total if name.endswith(_EXTREMES) else (total / weight if weight else math.nan)
            for name, (total, weight) in sorted(self._held.items())
        }


def add_component_metrics(
    accumulator: MetricAccumulator, prefix: str, metrics: Mapping[str, Any], mask: Tensor
) -> None:
    """Add the metrics that a policy loss or correction reported.

    Args:
        accumulator: Accumulator to add to.
        prefix: Prefix of the names.
        metrics: name -> `[t]` values per token (averaged over trained tokens), `[n]` values per rollout or pair
            (averaged), or a number, weighted by trained tokens.
        mask: bool `[t]`, True where the token is trained on.
    """
    from torch import Tensor

    tokens = int(mask.sum())
    for name, value in metrics.items():
        if isinstance(value, Tensor) and value.dim() == 1:
            accumulator.add_values(prefix + name, value[mask] if value.shape == mask.shape else value)
        elif tokens:
            number = float(value)
            accumulator.add(prefix + name, number if name.endswith(_EXTREMES) else number * tokens, tokens)
