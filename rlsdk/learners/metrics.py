"""Additive metrics, exact over micro-batches, optimiser steps and ranks, and the state of components that read them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlsdk.batch import LossInputs
from rlsdk.components import title_of
from rlsdk.errors import LearnerError

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
            before = self._held.get(name)
            if before is None:
                self._held[name] = (total, weight)
            elif name.endswith("_max"):
                self._held[name] = (max(before[0], total), 1.0)
            elif name.endswith("_min"):
                self._held[name] = (min(before[0], total), 1.0)
            else:
                self._held[name] = (before[0] + total, before[1] + weight)

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
        metrics: name -> `[t]` values per token (averaged over trained tokens), `[k]` values per rollout, pair or
            trained token of an expert or of the policy (averaged), or a number, weighted by trained tokens.
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


Gather = Callable[[Any], list[Any]]
"""All-gather: takes a rank's value and returns the values of all ranks, by rank."""


class Memory:
    """State of a component whose calls are spread over micro-batches and ranks.

    All calls of an optimiser step start from the same state. At its end, a component with `advance(metrics)` updates
    its state from the metrics of all micro-batches and ranks. Without `advance`, the state that the calls left is used,
    which must be the same for all: a component may count steps, but not the contents of micro-batches.
    """

    def __init__(self, part: Any) -> None:
        """Start from the component's current state.

        Args:
            part: Component with `state()` and `restore(state)`, in plain JSON.
        """
        self.part = part
        self._advances = callable(getattr(part, "advance", None))
        self._before = self.state()
        self._left: list[Any] = []
        self._reported = MetricAccumulator()

    @classmethod
    def of(cls, part: Any) -> Memory | None:
        """Return the memory of a component; None if it has no state.

        Raises:
            LearnerError: It has only some of the methods `state`, `restore` and `advance` that belong together.
        """
        has = {name: callable(getattr(part, name, None)) for name in ("state", "restore", "advance")}
        if not any(has.values()):
            return None
        if missing := [f"{name}()" for name in ("state", "restore") if not has[name]]:
            raise LearnerError(
                f"{title_of(part)} has no {' and no '.join(missing)}; a memory needs state() and restore()"
            )
        return cls(part)

    def state(self) -> Any:
        """Return the current state as plain JSON.

        Raises:
            LearnerError: It is not plain JSON.
        """
        state = self.part.state()
        try:
            return json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise LearnerError(f"{title_of(self.part)}: state() must be plain JSON; got {state!r} ({error})") from error

    def restore(self, state: Any) -> None:
        """Continue from a state."""
        if state != self.state():
            self.part.restore(state)
        self._before, self._left, self._reported = self.state(), [], MetricAccumulator()

    def forget(self) -> None:
        """Discard the calls of an unfinished optimiser step."""
        self.restore(self._before)

    def call(self, x: LossInputs) -> Any:
        """Call the component on a micro-batch, from the state at the start of the optimiser step."""
        if self._left and self._left[-1] != self._before:
            self.part.restore(self._before)
        result = self.part(x)
        metrics: Mapping[str, Any] = result[1] if isinstance(result, tuple) else {}
        add_component_metrics(self._reported, "", metrics, x.loss_mask)
        self._left.append(self.state())
        return result

    def advance(self, gather: Gather, *, taken: bool = True) -> None:
        """End an optimiser step; a collective call.

        Args:
            gather: Exchanges values between the ranks.
            taken: False if the step was skipped, which leaves the memory unchanged.

        Raises:
            LearnerError: Calls left states that cannot be computed from the step as a whole.
        """
        shares = gather((self._left, self._reported.pairs)) if taken else []
        left = [state for states, _ in shares for state in states]
        after = self._before if self._advances or not left else left[0]
        if wrong := [state for state in left if state != after]:
            raise LearnerError(
                f"{title_of(self.part)}: its state must not depend on how a batch is split over micro-batches and "
                "ranks: report the value as a metric, and update the state in advance(metrics), which is called once "
                f"per optimiser step; calls ended in the states {after!r} and {wrong[0]!r}"
            )
        self.restore(after)
        if taken and self._advances:
            reported = MetricAccumulator()
            for _, pairs in shares:
                reported.merge(pairs)
            self.part.advance(reported.means())
            self.restore(self.state())
