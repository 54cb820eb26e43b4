"""Samplers: they choose the next tasks by how the policy did on earlier ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs
import numpy as np

import rlsdk
from rlsdk.limits import Share
from rlsdk.types import Group


@rlsdk.sampler("by_pass_rate")
@attrs.define(kw_only=True, eq=False)
class ByPassRate:
    """Prefer tasks that the policy solves sometimes to those that it solves always or never.

    A task's pass rate is the share of its rollouts with a reward of at least `solved`, averaged over its groups so that
    newer ones count more. A task is drawn with a probability proportional to its weight; one without a group yet has
    the greatest. Groups whose rollouts all pass or all fail have no advantage to learn from under GRPO.

    Paper: `prefer: failed` is the prioritized sampling of Kimi k1.5, arXiv:2501.12599, section 2.3.3.

    Formula: `weight = least + (1 - least) · 4 p (1 - p)`, or with `prefer: failed`, `least + (1 - least) (1 - p)`, with
    the pass rate `p`.

    When to use: if many tasks are too easy or too hard, so that groups are filtered or have no advantage.

    Attributes:
        prefer: Tasks to prefer: `uncertain`, with a pass rate near one half, or `failed`, with a low one.
        solved: Least reward of a rollout that passes.
        newest: Weight of the newest group in a task's pass rate; with 1, only that group counts.
        least: Least weight of a task, as a share of the greatest, so that none is forgotten.
    """

    prefer: Literal["uncertain", "failed"] = "uncertain"
    solved: float = 1.0
    newest: Share = 0.5
    least: Share = 0.05
    _rates: np.ndarray = attrs.field(init=False, factory=lambda: np.empty(0))  # by index; NaN without a group

    def draw(self, available: np.ndarray, random: np.random.Generator) -> int:
        """Return the index of the next task; see `TaskSampler.draw`."""
        self._cover(int(available[-1]))
        rates = self._rates[available]
        gain = 4 * rates * (1 - rates) if self.prefer == "uncertain" else 1 - rates
        weights = np.where(np.isnan(rates), 1.0, self.least + (1 - self.least) * gain)
        if not weights.any():  # all are solved, or none is, and `least` is 0
            weights[:] = 1
        return int(random.choice(available, p=weights / weights.sum()))

    def note(self, index: int, group: Group) -> None:
        """Update the pass rate of a task; rollouts without a valid score do not count."""
        passed = [score.value >= self.solved for score in group.scores if score.valid]
        if passed:
            self._cover(index)
            rate, before = float(np.mean(passed)), self._rates[index]
            self._rates[index] = rate if np.isnan(before) else before + self.newest * (rate - before)

    def _cover(self, index: int) -> None:
        missing = index + 1 - len(self._rates)
        if missing > 0:
            self._rates = np.pad(self._rates, (0, missing), constant_values=np.nan)

    def state(self) -> dict[str, float]:
        """Return the pass rate of each task seen, by index."""
        return {str(index): float(self._rates[index]) for index in np.flatnonzero(~np.isnan(self._rates))}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore from `state()`."""
        self._rates = np.empty(0)
        self._cover(max(map(int, state), default=-1))
        self._rates[list(map(int, state))] = list(state.values())
