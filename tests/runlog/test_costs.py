"""With a hundred times the rollouts, the cost of a batch grows little, as a ratio on one machine."""

from __future__ import annotations

from pathlib import Path

from tests.runlog.store_costs import costs


def test_costs_do_not_grow_with_what_is_kept(tmp_path: Path) -> None:
    few, many = (costs(tmp_path / str(count), count, rounds=9, distinct=10**3) for count in (10**3, 10**5))
    for name in ("put", "take", "by_step", "by_reward", "by_number"):
        assert many[name] <= 20 * few[name], (name, few, many)  # by what there is, it would be a hundred times
    assert many["memory"] < 64
