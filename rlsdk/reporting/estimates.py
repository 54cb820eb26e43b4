"""Means with 95 % confidence intervals, by Student's t or by bootstrap."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

RESAMPLES = 5000
_ACCURACY = re.compile(
    r"(source/.+/)?accuracy/mean|raw/accuracy|eval/((?!workflow/).+/)?(sampled|greedy|(pass|all|maj)@\d+)"
)
"""Names of accuracies, of all tasks and of one source."""


@attrs.frozen
class Estimate:
    """A value with its 95 % confidence interval.

    Attributes:
        value: The estimate.
        low: Lower end of the interval; None if the sample cannot tell.
        high: Upper end.
    """

    value: float
    low: float | None = None
    high: float | None = None

    def as_json(self) -> dict[str, float | None]:
        """Return a mean and its interval as plain values."""
        return {"mean": self.value, "low": self.low, "high": self.high}


def mean(values: Sequence[float], metric: str = "") -> Estimate:
    """Estimate a mean by Student's t; a single value has no interval.

    Args:
        values: One value per seed.
        metric: Name of the metric; the interval of an accuracy stays between 0 and 1.
    """
    middle = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(middle)
    reach = student_95(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    low, high = middle - reach, middle + reach
    if _ACCURACY.fullmatch(metric) and all(0 <= value <= 1 for value in values):
        low, high = max(low, 0.0), min(high, 1.0)
    return Estimate(middle, low, high)


def interquartile_mean(scores: Mapping[str, Sequence[float]]) -> Estimate:
    """Estimate the mean of the middle half of all scores, as arXiv:2108.13264 recommends.

    The interval is a percentile bootstrap that draws seeds within each task, so that every task keeps its share.
    """
    value = float(trimmed_mean(np.concatenate([np.asarray(each, float) for each in scores.values()])))
    if min(map(len, scores.values())) < 2:
        return Estimate(value)
    rng = np.random.default_rng(0)
    drawn = [rng.choice(np.asarray(each, float), (RESAMPLES, len(each))) for each in scores.values()]
    low, high = np.percentile(trimmed_mean(np.concatenate(drawn, axis=1)), [2.5, 97.5])
    return Estimate(value, float(low), float(high))


def trimmed_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean along the last axis without the lowest and the highest quarter (rounded down)."""
    cut = values.shape[-1] // 4
    middle = np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut]
    return np.asarray(middle.mean(axis=-1))


_T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL_95 = 1.959964


def student_95(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t: the half-width of a 95 % interval in standard errors.

    Args:
        freedom: Degrees of freedom, at least 1: the number of values minus one.
    """
    if freedom <= len(_T_95):
        return _T_95[freedom - 1]
    # The expansion in 1 / freedom (Abramowitz and Stegun, 26.7.5), which is exact to five digits from 31 on.
    z = _NORMAL_95
    terms = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + sum(term / float(freedom) ** power for power, term in enumerate(terms, 1))
