"""The limit on groups that are dropped in a row."""

from __future__ import annotations

import pytest

from rlsdk.errors import RunError
from rlsdk.rollout.buffer import DropLimit


def test_groups_that_are_dropped_in_a_row_end_the_run() -> None:
    drops = DropLimit(3, "algorithm.filters left out", "the filters may be too strict")
    for kept in (False, False, True, False, False):
        drops.note(kept=kept)
    with pytest.raises(
        RunError, match=r"filters left out 3 groups in a row .* no batch can be filled; the filters may be too strict"
    ):
        drops.note(kept=False)
    endless = DropLimit(None, "algorithm.filters left out", "the filters may be too strict")
    for _ in range(1000):
        endless.note(kept=False)
