"""Means over seeds with confidence intervals, and interquartile means over tasks and seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from rlsdk.reporting.intervals import student_95

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
    reach = student_95(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
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
