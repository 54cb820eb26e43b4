"""Counts agree with their nouns."""

from __future__ import annotations

import numpy as np

from rlsdk.plurals import counted, every


def test_a_noun_is_singular_after_one_and_plural_after_any_other_count() -> None:
    assert [counted(n, "step") for n in (0, 1, 2, 1024)] == ["0 steps", "1 step", "2 steps", "1,024 steps"]
    assert [counted(n, "epoch") for n in (1.0, 0.5, 2.5)] == ["1 epoch", "0.5 epochs", "2.5 epochs"]
    assert [counted(n, "token") for n in (2.0, 1e6, np.int64(1))] == ["2 tokens", "1,000,000 tokens", "1 token"]
    assert [counted(n, "pass", "passes") for n in (1, 3)] == ["1 pass", "3 passes"]


def test_an_interval_of_one_has_no_number() -> None:
    assert [every(n, "step") for n in (1, 10)] == ["every step", "every 10 steps"]
