"""Properties of learning-rate schedules: their values, for runs of various lengths."""

from __future__ import annotations

import math
from typing import Any

from rlsdk.testing.findings import Violated
from rlsdk.testing.subject import Subject, holds

LENGTHS = (0, 1, 7, 100)
"""Optimiser steps of the runs; with 0, the warm-up was the whole run."""


def _values(subject: Subject, steps: range, total: int) -> list[Any]:
    rate = subject.make()
    return [subject.call(rate, step, total) for step in steps]


@holds(
    "shares-of-the-peak",
    "lr_schedule",
    remedy="return a finite number of at least 0 for every step, the share of the peak learning rate; a run may have a "
    "single step, and one that was resumed with more steps counts beyond its end",
)
def shares_of_the_peak(subject: Subject, _: Any) -> None:
    """Each value is a finite number of at least 0, and one of them is greater."""
    for total in LENGTHS:
        values = _values(subject, range(total + 3), total)
        for step, value in enumerate(values):
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise Violated("value", f"a finite number of at least 0 for step {step} of {total}", repr(value))
        if total > 1 and not any(values[:total]):
            raise Violated("value", f"a learning rate above 0 in some step of {total}", "0 in all of them")


@holds(
    "same-step-same-rate",
    "lr_schedule",
    remedy="compute the value from step and steps alone, and remember nothing: a resumed run asks for its next step at "
    "first, and the policy and the critic share the schedule",
    after=("shares-of-the-peak",),
)
def same_step_same_rate(subject: Subject, _: Any) -> None:
    """A resumed run has the same values as one that was not stopped."""
    for total in LENGTHS:
        whole, resumed = _values(subject, range(total), total), _values(subject, range(total // 2, total), total)
        for step, (value, again) in enumerate(zip(whole[total // 2 :], resumed, strict=True), start=total // 2):
            if value != again:
                raise Violated("value", f"{value} for step {step} of {total} after a resume, as without", repr(again))
