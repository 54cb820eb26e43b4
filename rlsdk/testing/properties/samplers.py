"""Properties of task samplers: their draws, their memory, and the weights of their sources."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlsdk.contracts import WeighsSource, memory_of
from rlsdk.testing import samples
from rlsdk.testing.findings import Violated, shape
from rlsdk.testing.subject import Subject, holds

SEEDS = range(16)


@holds(
    "draws-what-is-available",
    "sampler",
    inputs=lambda _: [*samples.ordinary_groups(), *samples.degenerate_groups()],
    remedy="return one of the indices in `available`, chosen with the given generator; a group may have no valid score",
)
def draws_what_is_available(subject: Subject, held: Any) -> None:
    """It draws an available index, before and after it has noted any group, and the same one from the same seed."""
    made: Any = subject.make()
    twin: Any = subject.make()
    for step, available in enumerate((np.array([3]), np.arange(5), np.array([0, 2, 7, 40]))):
        drawn = [subject.call(each.draw, available, np.random.default_rng(step)) for each in (made, twin)]
        if isinstance(drawn[0], bool) or not isinstance(drawn[0], int | np.integer) or drawn[0] not in available:
            raise Violated("form", f"one of {available.tolist()}", shape(drawn[0]))
        if drawn[0] != drawn[1]:
            raise Violated("value", f"index {drawn[0]}, as the same seed gave before", f"index {drawn[1]}")
        for each in (made, twin):
            subject.call(each.note, int(drawn[0]), held)


@holds(
    "resumes-its-draws",
    "sampler",
    inputs=lambda _: [*samples.ordinary_groups(), *samples.degenerate_groups()],
    remedy="give the class state(), which returns all that its draws depend on as plain JSON, and restore(state)",
    after=("draws-what-is-available",),
)
def resumes_its_draws(subject: Subject, held: Any) -> None:
    """After `restore(state())` it draws what it would have drawn; a source's weight is a number of at least 0."""
    made: Any = subject.make()
    resumed: Any = subject.make()
    available = np.arange(6)
    for index in (1, 4, 1):
        subject.call(made.draw, available, np.random.default_rng(index))
        subject.call(made.note, index, held)
    if memory_of(made) is not None:
        subject.restore(made, resumed)
    drawn = [[subject.call(each.draw, available, np.random.default_rng(i)) for i in SEEDS] for each in (made, resumed)]
    if drawn[0] != drawn[1]:
        raise Violated("value", f"indices {drawn[0]}, as without a stop", f"{drawn[1]}")
    if isinstance(made, WeighsSource):
        weights = [subject.call(each.source_weight) for each in (made, resumed)]
        if isinstance(weights[0], bool) or not isinstance(weights[0], int | float | np.number):
            raise Violated("form", "a number from source_weight()", shape(weights[0]))
        if not 0 <= weights[0] < math.inf or weights[0] != weights[1]:
            raise Violated("value", f"a finite weight of at least 0, twice {weights[0]}", f"{weights}")
