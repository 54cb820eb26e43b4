"""Training on pairs that a person compared: the chosen answers become likelier than the rejected ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlsdk.annotations import Annotation, AnnotationFile, annotated, task_json
from rlsdk.sources.countdown import countdown
from rlsdk.types import Rollout

pytestmark = [pytest.mark.stack, pytest.mark.slow]
SMALL = {"numbers": 3, "number_range": (1, 20), "target_range": (1, 100), "operators": "+-", "template": "compact"}


def test_dpo_learns_from_annotated_pairs(runner: Any, tmp_path: Path) -> None:
    tasks = countdown(size=16, demonstrations=1.0, **SMALL)
    for i in range(16):
        right = tasks[i].metadata["demonstration"]
        good, bad = (Rollout.from_text(tasks[i], text) for text in (right, right[::-1]))
        seen = [annotated(rollout, i, at) for at, rollout in enumerate((good, bad))]
        made = Annotation(kind="pair", value="first", by="ann", rollouts=seen, task=task_json(good))  # type: ignore[arg-type]
        AnnotationFile(tmp_path).append(made)
    source = f"{{use: annotations, path: {tmp_path}, take: pairs}}"
    learning = ("algorithm={use: dpo, rollouts: demonstrations}", "learner.lr=3e-4", "batch_size=16", "group_size=1")
    runner.train(f"tasks.train={source}", *learning, "steps=4", "engine=transformers", "eval.limit=4")
    lines = runner.metrics()[1:]
    assert len(lines) == 4
    assert lines[0]["actor/pair_margin"] == pytest.approx(0, abs=1e-5)  # policy and reference are one model yet
    assert lines[-1]["actor/pair_margin"] > 0.05
    assert runner.summary()["status"] == "finished"
