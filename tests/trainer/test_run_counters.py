"""Counters of a run over its resumes."""

from __future__ import annotations

import json

from rlsdk.trainer.summary import MOST_REASONS, OTHER, RunCounters
from rlsdk.types import Group, Rollout, Score, Task

TASK = Task(id="t", prompt="?")


def test_counters_continue_after_a_resume_and_stay_bounded() -> None:
    counters = RunCounters(reused=5)
    counters.skipped_updates.update({"actor": 2})
    reasons = ["hung"] * 3 + [f"reason {i}" for i in range(2 * MOST_REASONS)]
    scores = [Score(1.0), *map(Score.invalid, reasons)]
    counters.note([Group(TASK, [Rollout.from_text(TASK, "x")] * len(scores), scores)])
    resumed = RunCounters()
    resumed.restore(json.loads(json.dumps(counters.state())))
    assert (resumed.scored, resumed.unscored.total(), resumed.reused) == (len(scores), len(reasons), 5)
    assert resumed.skipped_updates == {"actor": 2}
    assert (resumed.unscored["hung"], len(resumed.unscored)) == (3, MOST_REASONS + 1)
    resumed.note([Group(TASK, [Rollout.from_text(TASK, "x")], [Score.invalid("new")])])
    again = RunCounters()
    again.restore(resumed.state())
    assert again.unscored.total() == len(reasons) + 1 and again.unscored[OTHER] >= MOST_REASONS


def test_counters_of_an_older_checkpoint_begin_at_zero() -> None:
    counters = RunCounters(scored=3)
    counters.restore({})
    assert counters == RunCounters()
