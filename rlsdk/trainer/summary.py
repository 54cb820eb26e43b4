"""The run summary, and its counters that checkpoints store."""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from rlsdk.contracts.rollouts import RolloutSummary, TaskCounts
from rlsdk.rollout.generator import first_error
from rlsdk.runlog.metrics import read_metrics
from rlsdk.scoring.scorer import unscored
from rlsdk.types import Group

if TYPE_CHECKING:
    from rlsdk.trainer.trainer import Trainer

log = logging.getLogger(__name__)
LONGEST = 240
"""Maximum length of a reason in characters."""
MOST_REASONS = 100
"""Number of distinct reasons that a checkpoint stores; the rest are summed under `OTHER`."""
OTHER = "other reasons"


@attrs.define
class RunCounters:
    """Counters over all resumes of a run.

    Attributes:
        scored: Number of trajectories passed to the reward.
        unscored: Number of trajectories that it could not score, by reason.
        reused: Number of rollouts that were trained on again.
        skipped_updates: Number of updates without a finite gradient, by role.
    """

    scored: int = 0
    unscored: Counter[str] = attrs.field(factory=Counter)
    reused: int = 0
    skipped_updates: Counter[str] = attrs.field(factory=Counter)

    def note(self, groups: Sequence[Group]) -> None:
        """Count the trajectories of a batch."""
        self.scored += sum(len(group.trajectories) for group in groups)
        self.unscored.update(reason[:LONGEST] for group in groups for reason in unscored(group))

    def state(self) -> dict[str, Any]:
        """Return the counters as plain JSON of bounded size."""
        often = dict(self.unscored.most_common(MOST_REASONS))
        rest = self.unscored.total() - sum(often.values())
        reasons = {**often, OTHER: often.get(OTHER, 0) + rest} if rest else often
        counts = {"scored": self.scored, "reused": self.reused, "skipped_updates": dict(self.skipped_updates)}
        return {**counts, "unscored": reasons}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore from `state()`; counters that an earlier version's checkpoint lacks start at zero."""
        self.scored, self.reused = state.get("scored", 0), state.get("reused", 0)
        self.unscored = Counter(state.get("unscored", {}))
        self.skipped_updates = Counter(state.get("skipped_updates", {}))


def summarise(trainer: Trainer, rollouts: RolloutSummary) -> dict[str, Any]:
    """Return the summary of an ended run, before its callbacks add to it.

    Args:
        trainer: Trainer of the run.
        rollouts: Final summary of its rollouts.
    """
    plan, counters, times = trainer.plan, trainer.counters, trainer.times
    export = trainer.checkpoints.path(trainer.version) / "export"
    interrupted = trainer.interrupted and trainer.version < trainer.steps
    fault = "" if interrupted else trainer.monitor.fault(trainer.version)
    warning = "" if interrupted or fault else trainer.monitor.warning()
    return {
        "name": plan.config.name,
        "status": "interrupted" if interrupted else "failed" if fault else "finished",
        **({"error": fault} if fault else {}),
        "warnings": [warning] if warning else [],
        "steps": trainer.version,
        "eval_tasks": trainer.rollouts.eval_tasks,
        "accuracy_before": accuracy_at(plan.folder, 0),
        "accuracy_after": accuracy_at(plan.folder, trainer.version),
        "invalid": {
            "rollouts": counters.unscored.total(),
            "share": counters.unscored.total() / max(counters.scored, 1),
            "reasons": dict(counters.unscored.most_common(5)),
        },
        "tasks": task_counts(rollouts.sources),
        "rollouts_reused": counters.reused,
        "skipped_updates": dict(counters.skipped_updates),
        "environments": rollouts.environments,
        "engines": rollouts.engines,
        "rollout_workers": {"lost": 0, "reasons": [], **rollouts.rollout_workers},
        "explorers_lost": list(rollouts.explorers_lost),
        "seconds": {**times.seconds, **times.phases},
        "tokens_per_second": times.tokens / max(times.generating, 1e-9),
        "export": str(export) if export.is_dir() else None,
    }


def task_counts(sources: Mapping[str, TaskCounts]) -> dict[str, int]:
    """Count the tasks of a run by their final status.

    `trained`, `filtered`, `failed` and `returned` add up to `issued`. `expired` counts groups that became too old to
    train on; their tasks were sampled again or count as filtered.
    """
    ends = {name: sum(getattr(c, name) for c in sources.values()) for name in ("trained", "filtered", "failed")}
    left = sum(c.available + c.scheduled + c.waiting for c in sources.values())
    expired = sum(c.expired for c in sources.values())
    return {"issued": sum(ends.values()) + left, **ends, "returned": left, "expired": expired}


def accuracy_at(folder: Path, step: int) -> dict[str, float | None] | None:
    """Return the evaluation metrics of a step from `metrics.jsonl`; None if it has none."""
    lines = [line for line in read_metrics(folder) if line["step"] == step and "eval/greedy" in line]
    if not lines:
        return None
    return {
        k.removeprefix("eval/"): v for k, v in lines[-1].items() if re.fullmatch(r"eval/(greedy|sampled|pass@\d+)", k)
    }


def log_background_failure(failure: BaseException | None) -> None:
    """Log a background failure, unless it is the one that ended the run."""
    if failure is not None and failure is not sys.exception():
        cause = first_error(failure)
        log.error("a task failed after the last batch was taken: %s: %s", type(cause).__name__, cause, exc_info=failure)
