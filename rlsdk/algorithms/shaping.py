"""Shaping: new rewards per rollout `[n]` or per token `[t]`, chained before the advantage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs
from torch import Tensor

from rlsdk.algorithms import kl
from rlsdk.algorithms.packed import Sampled
from rlsdk.batch import CreditInputs
from rlsdk.components import shaping
from rlsdk.errors import ValueFault

ESTIMATORS: dict[str, kl.Estimator] = {
    "k1": kl.k1,
    "k2": kl.k2,
    "k3": kl.k3,
    "abs": kl.absolute,
    "low_var": kl.low_var,
}
ERROR_BOUND = 0.2


@shaping("kl_penalty", needs=("logprobs", "ref_logprobs"))
@attrs.define(kw_only=True)
class KLPenalty:
    """KL to the reference, charged token by token, with a fixed or an adaptive coefficient.

    Paper: arXiv:1909.08593, §2.2 (the adaptive controller: eq. 6); defaults as in TinyZero and verl.
    Formula: `r_t - β · KL_t` on every sampled token. With a `target`, after each batch of `n` rollouts
    `β ·= 1 + clip(KL / target - 1, ±0.2) · n / horizon`, KL being the mean over rollouts of the mean over their tokens.
    When to use: PPO and REINFORCE++; methods with a baseline from the group put their KL into the loss instead.

    Attributes:
        coef: β, or where an adaptive one starts.
        estimator: Of the KL.
        target: KL that the coefficient is steered to; null keeps it fixed.
        horizon: Rollouts over which the coefficient moves by at most a fifth; greater is slower.
    """

    coef: float = 0.001
    estimator: Literal["k1", "k2", "k3", "abs", "low_var"] = "k1"
    target: float | None = attrs.field(default=None)
    horizon: int = 10_000
    value: float = attrs.field(init=False)

    @target.validator
    def _positive(self, _: Any, target: float | None) -> None:
        if target is not None and target <= 0:
            raise ValueFault(f"target is the KL to steer to, above 0, or null for a fixed coefficient; got {target}")

    def __attrs_post_init__(self) -> None:
        self.value = self.coef

    def __call__(self, x: CreditInputs) -> Tensor:
        """New rewards, `[t]`."""
        sampled = Sampled.of(x)
        divergence = ESTIMATORS[self.estimator](sampled.take(x.logprobs), sampled.take(x.ref_logprobs))
        rewards = sampled.put(sampled.rewards(x) - self.value * divergence)
        self._adapt(x.sequence_sum(sampled.put(divergence)), sampled.counts)
        return rewards

    def _adapt(self, sums: Tensor, counts: Tensor) -> None:
        some = counts > 0
        if self.target is None or not bool(some.any()):
            return
        divergence = float((sums[some] / counts[some]).mean())
        error = min(max(divergence / self.target - 1, -ERROR_BOUND), ERROR_BOUND)
        self.value *= 1 + error * len(counts) / self.horizon

    def state(self) -> dict[str, float]:
        """The coefficient as it stands."""
        return {"value": self.value}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from `state()`."""
        self.value = float(state["value"])
