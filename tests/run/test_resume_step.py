"""A run that is resumed from an older checkpoint repeats the later training."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import rlsdk

pytestmark = [pytest.mark.stack, pytest.mark.slow]
SETTINGS = (
    "steps=6",
    "checkpoint.every=2",
    "checkpoint.keep=3",
    "save_rollouts=1",
    "eval.before=false",
    "eval.after=false",
    "engine=transformers",
)


def trained(runner: Any) -> list[tuple[int, str, str]]:
    """Step, task and end of each group that a step took, in order."""
    found = rlsdk.rollouts(runner.path())
    found = found[found["state"].isin(["trained", "filtered", "failed"])]
    return sorted({(int(row["step"]), row["task"], row["state"]) for _, row in found.iterrows()})


def metrics(runner: Any) -> list[dict[str, Any]]:
    """Lines of `metrics.jsonl`, without times."""
    return [{k: v for k, v in line.items() if not k.endswith("_seconds")} for line in runner.metrics()]


MODES = {"synchronous": [], "a sync every 2 steps": ["rollout.sync_interval=2"], "ahead": ["rollout.max_staleness=1"]}


@pytest.mark.parametrize("mode", MODES)
def test_no_task_is_lost_or_repeated(runner: Any, mode: str) -> None:
    settings = (*SETTINGS, *MODES[mode])
    folder = runner.path() / "checkpoints"
    runner.train(*settings)
    first, groups = metrics(runner), trained(runner)
    if mode == "synchronous":
        runner.train(*settings, "--resume=3", code=1)
        assert "has no checkpoint of step 3; there are: 2, 4, 6" in " ".join(runner.console().split())
    runner.train(*settings, "--resume=2")
    assert {path.name for path in folder.iterdir()} == {
        *("step-2", "step-4", "step-6"),
        *("step-4.superseded", "step-6.superseded"),
    }
    # Groups that waited at step 2 are kept as long as its checkpoint.
    assert "cannot be restored" not in runner.console()
    again, now = metrics(runner), trained(runner)
    assert [line["step"] for line in again] == [1, 2, 3, 4, 5, 6]
    if mode != "ahead":
        assert (again, now) == (first, groups)
    assert again[:2] == first[:2]
    assert [group for group in now if group[0] <= 2] == [group for group in groups if group[0] <= 2]
    assert Counter(step for step, *_ in now) == dict.fromkeys(range(1, 7), 4)
    assert max(Counter(task for _, task, _ in now).values()) == 1
    tasks = runner.summary()["tasks"]
    assert tasks["trained"] + tasks["filtered"] + tasks["failed"] == 6 * 4
    assert tasks["issued"] == 6 * 4 + tasks["returned"]
