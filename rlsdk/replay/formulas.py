"""Identify how a trainer computed its advantages: the common formula that reproduces the recorded numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import attrs
import numpy as np

CENTRES = {
    "group": "the group's mean",
    "others": "the mean of the group's other rollouts",
    "batch": "the batch's mean",
    "none": "nothing",
}
SCALES = {
    "none": "nothing",
    "group": "the group's standard deviation",
    "batch": "the batch's standard deviation",
}
EPSILONS = (1e-6, 1e-8, 1e-4, 1e-5, 1e-3, 0.0)
AFTERS = {
    "none": "",
    "tokens": "whitened over the batch's tokens",
    "rollouts": "whitened over the batch's rollouts",
}
_WHITEN_EPSILON = 1e-8


@attrs.frozen(kw_only=True)
class Formula:
    """`(reward - centre) / (scale + epsilon)`, optionally whitened.

    Attributes:
        centre: Key of `CENTRES`.
        scale: Key of `SCALES`.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        epsilon: Added to the standard deviation.
        after: Key of `AFTERS`.
    """

    centre: str = "group"
    scale: str = "none"
    ddof: int = 1
    epsilon: float = 0.0
    after: str = "none"

    def __str__(self) -> str:
        text = "the reward" if self.centre == "none" else f"the reward minus {CENTRES[self.centre]}"
        if self.scale != "none":
            text += f", divided by {SCALES[self.scale]} (ddof {self.ddof}) + {self.epsilon:g}"
        return f"{text}, {AFTERS[self.after]}" if AFTERS[self.after] else text

    def values(self, rewards: np.ndarray, groups: np.ndarray, segments: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return the advantages of all tokens.

        Args:
            rewards: float64 `[n]`.
            groups: int64 `[n]`, dense.
            segments: int64 `[t]`, rollout of each token.
            mask: bool `[t]`.
        """
        plain = (rewards - self._centre(rewards, groups)) / self._divisor(rewards, groups)
        if self.after == "rollouts":
            plain = _whitened(plain, np.ones(len(plain), bool))
        values = np.where(mask, plain[segments], 0.0)
        return _whitened(values, mask) if self.after == "tokens" else values

    def _centre(self, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray | float:
        if self.centre in ("none", "batch"):
            return 0.0 if self.centre == "none" else float(rewards.mean())
        count, total = np.bincount(groups)[groups], np.bincount(groups, rewards)[groups]
        others: np.ndarray = (total - rewards) / np.maximum(count - 1, 1)
        return np.where(count > 1, others, rewards) if self.centre == "others" else total / count

    def _divisor(self, rewards: np.ndarray, groups: np.ndarray) -> np.ndarray | float:
        if self.scale == "none":
            return 1.0
        within = groups if self.scale == "group" else np.zeros_like(groups)
        count = np.bincount(within)[within]
        squares = (rewards - np.bincount(within, rewards)[within] / count) ** 2
        std = np.sqrt(np.bincount(within, squares)[within] / np.maximum(count - self.ddof, 1)) + self.epsilon
        return np.where(std > 0, std, 1.0)


def _whitened(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    chosen = values[mask]
    variance = chosen.var(ddof=1) if len(chosen) > 1 else 0.0
    return np.where(mask, (values - chosen.mean()) / np.sqrt(variance + _WHITEN_EPSILON), 0.0)


def formulas() -> Iterator[Formula]:
    """Yield the known formulas, simplest first."""
    for after in AFTERS:
        yield from (Formula(centre=centre, after=after) for centre in CENTRES)
        for centre, scale, ddof, epsilon in itertools.product(CENTRES, ("group", "batch"), (1, 0), EPSILONS):
            yield Formula(centre=centre, scale=scale, ddof=ddof, epsilon=epsilon, after=after)


def formulas_of(
    values: np.ndarray,
    rewards: np.ndarray,
    groups: np.ndarray,
    segments: np.ndarray,
    mask: np.ndarray,
    tolerance: float,
) -> list[Formula]:
    """Return the formulas that reproduce the values, simplest first; none if all values are equal.

    Args:
        values: float64 `[t]`, recorded advantages.
        rewards: float64 `[n]`.
        groups: int64 `[n]`, dense.
        segments: int64 `[t]`.
        mask: bool `[t]`.
        tolerance: Maximum difference.
    """
    if not mask.any() or np.ptp(values[mask]) <= tolerance:
        return []
    fits: list[tuple[float, Formula]] = []
    for formula in formulas():
        off = float(np.abs(formula.values(rewards, groups, segments, mask) - values)[mask].max())
        if off <= tolerance:
            fits.append((off, formula))
    # Keep those that fit about as well as the best: recorded values were rounded to float32.
    least = min((off for off, _ in fits), default=0.0)
    return [formula for off, formula in fits if off <= max(10 * least, 1e-7)]


def contrast(theirs: Formula, ours: Formula) -> str:
    """Describe the parts in which two formulas differ."""
    differences = []
    if theirs.centre != ours.centre:
        differences.append(f"theirs subtracts {CENTRES[theirs.centre]}, rlsdk {CENTRES[ours.centre]}")
    if theirs.scale != ours.scale:
        differences.append(f"theirs divides by {SCALES[theirs.scale]}, rlsdk by {SCALES[ours.scale]}")
    elif theirs.scale != "none":
        if theirs.ddof != ours.ddof:
            names = {1: "the sample's (ddof 1)", 0: "the population's (ddof 0)"}
            differences.append(f"theirs takes {names[theirs.ddof]} standard deviation, rlsdk {names[ours.ddof]}")
        if theirs.epsilon != ours.epsilon:
            theirs_has = f"{theirs.epsilon:g}" if theirs.epsilon else "no eps"
            differences.append(f"theirs adds {theirs_has} to the standard deviation, rlsdk {ours.epsilon:g}")
    if theirs.after != ours.after:
        differences.append(
            f"theirs is {AFTERS[theirs.after] or 'not whitened'}, rlsdk's {AFTERS[ours.after] or 'not whitened'}"
        )
    return "; ".join(differences)
