"""Means over seeds with confidence intervals, and interquartile means over tasks and seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t at 97.5 % for 1 to 30 degrees of freedom."""
NORMAL_95 = 1.960
RESAMPLES = 5000


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


def mean(values: Sequence[float]) -> Estimate:
    """Estimate a mean by Student's t; a single value has no interval."""
    middle = statistics.fmean(values)
    if len(values) < 2:
        return Estimate(middle)
    freedom = len(values) - 1
    quantile = T_95[freedom - 1] if freedom <= len(T_95) else NORMAL_95
    reach = quantile * statistics.stdev(values) / len(values) ** 0.5
    return Estimate(middle, middle - reach, middle + reach)


def interquartile_mean(scores: Mapping[str, Sequence[float]], *, seed: int = 0) -> Estimate:
    """Estimate the mean of the middle half of all scores, as arXiv:2108.13264 recommends.

    The interval is a percentile bootstrap that draws seeds within each task, so that every task keeps its share.

    Args:
        scores: Task -> scores of its seeds.
        seed: Random seed of the bootstrap.
    """
    value = float(trimmed_mean(np.concatenate([np.asarray(each, float) for each in scores.values()])))
    if min(map(len, scores.values())) < 2:
        return Estimate(value)
    rng = np.random.default_rng(seed)
    drawn = [rng.choice(np.asarray(each, float), (RESAMPLES, len(each))) for each in scores.values()]
    low, high = np.percentile(trimmed_mean(np.concatenate(drawn, axis=1)), [2.5, 97.5])
    return Estimate(value, float(low), float(high))


def trimmed_mean(values: np.ndarray) -> np.ndarray:
    """Return the mean along the last axis without the lowest and the highest quarter (rounded down)."""
    cut = values.shape[-1] // 4
    middle = np.sort(values, axis=-1)[..., cut : values.shape[-1] - cut]
    return np.asarray(middle.mean(axis=-1))
