"""Quantiles of Student's t, against printed tables."""

from __future__ import annotations

import pytest

from rlsdk.reporting.compare import student_95


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.706), (9, 2.262), (10, 2.228), (30, 2.042), (31, 2.0395), (60, 2.0003), (120, 1.9799), (10_000, 1.9602)],
)
def test_quantiles_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert student_95(freedom) == pytest.approx(expected, abs=5e-5)
