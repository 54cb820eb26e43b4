"""Weight of the entropy bonus that follows the measured entropy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from rlsdk.batch import LossInputs
    from rlsdk.schedules import EntropyTarget


class AdaptiveEntropyCoef:
    """Weight of the entropy bonus for an `EntropyTarget`, whose calls are spread as `Memory` describes.

    Attributes:
        rule: The target, and how the weight follows it.
        coef: Weight whenever the entropy is at most the target.
        low: True if it was in the last optimiser step; False before the first.
    """

    def __init__(self, rule: EntropyTarget) -> None:
        self.rule, self.coef, self.low = rule, rule.initial, False

    def __call__(self, x: LossInputs) -> tuple[float, dict[str, Tensor]]:
        """Return the weight in this optimiser step, and the metric that `advance` reads."""
        return self.coef if self.low else 0.0, {"entropy": x.entropy}

    def advance(self, metrics: Mapping[str, float]) -> None:
        """Change the weight by one step; a step without trained tokens has no entropy, and changes nothing."""
        if "entropy" in metrics:
            rule, self.low = self.rule, metrics["entropy"] <= self.rule.target
            moved = self.coef + (rule.delta if self.low else -rule.delta)
            self.coef = min(max(moved, rule.min), rule.max)

    def state(self) -> dict[str, Any]:
        """Return the state as plain JSON."""
        return {"coef": self.coef, "low": self.low}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state()`."""
        self.coef, self.low = float(state["coef"]), bool(state["low"])
