"""Samplers: they choose the next tasks by how the policy did on earlier ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import attrs
import numpy as np

import rlsdk
from rlsdk.contracts import RunFacts
from rlsdk.errors import ValueFault
from rlsdk.limits import Count, Share
from rlsdk.types import Group

_TRIES = 64
"""Proposals to reject before the weights of all tasks are computed."""
_HARD, _EASY = 0.2, 0.8
"""Pass rates up to and from which a task counts as hard and easy in metrics."""


def _has_other_sources(run: RunFacts, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Refuse to change the share of a source that is the only one."""
    if options["source_window"] is not None and len(run.sources) == 1:
        yield (
            "source_window",
            f"{options['source_window']} given, but {run.sources[0]!r} is the only source of training tasks; leave it "
            "out, or list several sources under tasks.train",
        )


@rlsdk.sampler("by_pass_rate", check=_has_other_sources)
@attrs.define(kw_only=True, eq=False)
class ByPassRate:
    """Prefer tasks that the policy solves sometimes to those that it solves always or never.

    A task's pass rate is the share of its rollouts with a reward of at least `passing`, averaged over its groups so
    that newer ones count more; of a trajectory, only the last rollout counts. A task is drawn with a probability
    proportional to its weight; one without a group yet has the greatest. Groups whose rollouts all pass or all fail
    have no advantage to learn from under GRPO.

    Paper: `prefer: failed` is the prioritized sampling of Kimi k1.5, arXiv:2501.12599, section 2.3.3. A target pass
    rate, as in BOTS, arXiv:2510.26374. Shares of sources that follow what is learned from them, as in the
    Self-Evolving Curriculum, arXiv:2505.14970.

    Formula: with the pass rate `p`, `weight = least + (1 - least) · (1 - ((p - target) / max(target, 1 - target))²)`,
    which is `4 p (1 - p)` for `least` 0 and a target of one half; with `prefer: failed`, `least + (1 - least) (1 - p)`.

    When to use: if many tasks are too easy or too hard, so that groups are filtered or have no advantage.

    Attributes:
        prefer: Tasks to prefer: `uncertain`, with a pass rate near `target`, or `failed`, with a low one.
        target: Pass rate of the tasks to prefer.
        passing: Minimum reward of a passing rollout.
        newest: Weight of the newest group in a task's pass rate; with 1, only that group counts.
        least: Least weight of a task, as a share of the greatest, so that none is forgotten.
        source_window: With several sources, multiply the `weight` of each in the config by the weight of its newest
            groups, averaged over about this many, so that sources with little to learn get fewer tasks; null leaves
            the shares of sources as they are.
    """

    prefer: Literal["uncertain", "failed"] = "uncertain"
    target: Share = 0.5
    passing: float = 1.0
    newest: Share = 0.5
    least: Share = 0.05
    source_window: Count | None = None
    _rates: np.ndarray = attrs.field(init=False, factory=lambda: np.empty(0))  # by index; NaN without a group
    _source_weight: float = attrs.field(init=False, default=1.0)
    _drawn: Counter[str] = attrs.field(init=False, factory=Counter)

    def __attrs_post_init__(self) -> None:
        if self.prefer == "failed" and self.target != 0.5:
            raise ValueFault(f"target {self.target:g} given, but prefer 'failed' has none; leave one of them out")

    def draw(self, available: np.ndarray, random: np.random.Generator) -> int:
        """Return the index of the next task; see `TaskSampler.draw`."""
        self._cover(int(available[-1]))
        for _ in range(_TRIES):  # takes the same time however many tasks there are
            index = int(available[random.integers(len(available))])
            if random.random() < self._weight(self._rates[index]):
                break
        else:  # with the same probabilities
            weights = self._weight(self._rates[available])
            if not weights.any():  # all are solved, or none is, and `least` is 0
                weights = np.ones(len(available))
            index = int(random.choice(available, p=weights / weights.sum()))
        rate = self._rates[index]
        self._drawn[
            "new" if np.isnan(rate) else "hard" if rate <= _HARD else "easy" if rate >= _EASY else "medium"
        ] += 1
        return index

    def note(self, index: int, group: Group) -> None:
        """Update the pass rate of a task; trajectories without a valid score do not count."""
        passed = [group.scores[trajectory[-1]].value >= self.passing for trajectory in group.scored_trajectories]
        if passed:
            self._cover(index)
            rate, before = float(np.mean(passed)), self._rates[index]
            self._rates[index] = rate if np.isnan(before) else before + self.newest * (rate - before)
            if self.source_window is not None:
                self._source_weight += (float(self._weight(rate)) - self._source_weight) / self.source_window

    def source_weight(self) -> float:
        """Return the mean weight of the newest groups, 1 before the first."""
        return self._source_weight

    def metrics(self) -> dict[str, float]:
        """Return the mean pass rate and number of the tasks seen, and the shares of tasks drawn by their pass rate."""
        seen = self._rates[~np.isnan(self._rates)]
        drawn, self._drawn = self._drawn, Counter()
        return {
            "seen": float(len(seen)),
            **({"pass_rate": float(seen.mean())} if len(seen) else {}),
            **({k: drawn[k] / drawn.total() for k in ("new", "hard", "medium", "easy")} if drawn else {}),
            **({} if self.source_window is None else {"source_weight": self._source_weight}),
        }

    def _weight(self, rates: Any) -> Any:
        """Return the weight of tasks with these pass rates; NaN for a task without a group."""
        if self.prefer == "failed":
            gain = 1 - rates
        else:
            gain = 1 - ((rates - self.target) / max(self.target, 1 - self.target)) ** 2
        return np.where(np.isnan(rates), 1.0, self.least + (1 - self.least) * gain)

    def _cover(self, index: int) -> None:
        missing = index + 1 - len(self._rates)
        if missing > 0:
            self._rates = np.pad(self._rates, (0, missing), constant_values=np.nan)

    def state(self) -> dict[str, Any]:
        """Return the pass rate of each task seen, by index, and the weight of the source."""
        rates = {str(index): float(self._rates[index]) for index in np.flatnonzero(~np.isnan(self._rates))}
        return {"rates": rates, "source_weight": self._source_weight}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore from `state()`."""
        rates, self._rates = state["rates"], np.empty(0)
        self._cover(max(map(int, rates), default=-1))
        self._rates[list(map(int, rates))] = list(rates.values())
        self._source_weight = state["source_weight"]
