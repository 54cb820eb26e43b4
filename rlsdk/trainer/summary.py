"""The verdict on a run: steps that taught nothing, counters that checkpoints store, and the summary at its end."""

from __future__ import annotations

import logging
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from rlsdk.contracts.rollouts import RolloutSummary, TaskCounts
from rlsdk.plurals import counted
from rlsdk.rollout.generator import first_error
from rlsdk.runlog.metrics import read_metrics
from rlsdk.scoring.outcome import unscored
from rlsdk.types import Group

if TYPE_CHECKING:
    from rlsdk.contracts import TrainedRole
    from rlsdk.rollout.step_batch import StepBatch
    from rlsdk.trainer.trainer import Trainer

log = logging.getLogger(__name__)
LONGEST = 240
"""Maximum length of a reason in characters."""
MOST_REASONS = 100
"""Number of distinct reasons that a checkpoint stores; the rest are summed under `OTHER`."""
OTHER = "other reasons"
NONZERO = "advantages/nonzero"
"""Metric: share of sampled tokens with a nonzero advantage."""
EQUAL = 1e-9
"""Standard deviation up to which rewards count as equal, since means are rounded."""


@attrs.define
class LearningMonitor:
    """Count the steps that taught something, and consecutive steps that did not.

    A step teaches nothing if no rollout reached the learner, all advantages were zero, or every update was skipped.

    Attributes:
        limit: Number of consecutive steps that taught nothing after which the run ends; None for no limit.
        run: Folder of the run, for commands in messages.
        taught: Number of steps that taught something since the run began.
        empty: Number of latest consecutive steps that taught nothing.
        solved: True if the last step was empty because every rollout was right.
        why: Reason why the last step taught nothing; empty if it taught something.
        stuck: True once a step of this process reaches the limit. A resumed run trains one step first, since the cause
            may have been fixed.
        diverged: Number of steps of this process, all of them so far, in which every update was skipped; 0 once one
            was not.
    """

    limit: int | None
    run: Path
    taught: int = 0
    empty: int = 0
    solved: bool = False
    why: str = ""
    stuck: bool = False
    diverged: int = 0
    _steps: int = attrs.field(default=0, init=False)

    def note(self, metrics: Mapping[str, float], *, taught: bool, role: TrainedRole = "actor") -> None:
        """Count a step; `role` is the main model that it trained, the critic during its warm-up."""
        self.taught += taught
        self.empty = 0 if taught else self.empty + 1
        self.solved = not taught and metrics.get("accuracy/mean") == 1
        self.why = "" if taught else reason(metrics, self.run, role)
        self.stuck = self.limit is not None and self.empty >= self.limit
        self.diverged = self.diverged + 1 if skips_all(metrics, role) and self.diverged == self._steps else 0
        self._steps += 1

    def fault(self, done: int) -> str:
        """Return why a run that ended after `done` steps has failed; empty if it has not.

        A model that has learned something and now solves all its tasks has not failed.
        """
        if done and not self.taught:
            return f"nothing was learned in this run ({counted(done, 'step')}): {self.why or 'see the log'}"
        if self.diverged:
            return f"nothing was learned since the run was resumed ({counted(self.diverged, 'step')}): {self.why}"
        if self.stuck and not self.solved:
            return f"nothing was learned in the last {self._ending()}: {self.why}"
        return ""

    def warning(self) -> str:
        """Return why a run ended early without failing; empty if it did not end early."""
        return f"ended early, with nothing left to learn in the last {self._ending()}: {self.why}" if self.stuck else ""

    def _ending(self) -> str:
        return f"{counted(self.empty, 'step')} (max_empty_steps={self.limit})"

    def state(self) -> dict[str, Any]:
        """Return the counts as plain JSON, for a checkpoint."""
        return {"taught": self.taught, "empty": self.empty}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
        self.taught, self.empty = state["taught"], state["empty"]


def teaches(batch: StepBatch, metrics: Mapping[str, float], role: TrainedRole = "actor") -> bool:
    """Return True if a step's rollouts taught the model `role` anything; a critic learns from returns."""
    if skips_all(metrics, role):
        return False
    if metrics.get(f"{role}/grad_norm") == 0:  # the weights did not change, whatever the advantages are
        return False
    imitates = batch.has_experts  # expert rollouts teach without an advantage
    return imitates or role == "critic" or metrics.get(NONZERO, 1.0) > 0


def skips_all(metrics: Mapping[str, float], role: TrainedRole) -> bool:
    """Return True if every update of a step was skipped, since no gradient was finite."""
    return bool(metrics.get(f"{role}/skipped_updates")) and f"{role}/grad_norm" not in metrics


def reason(metrics: Mapping[str, float], run: Path, role: TrainedRole = "actor") -> str:
    """Return why a step of the run in a folder taught nothing, and what to do about it."""
    if metrics.get(f"{role}/skipped_updates"):
        return (
            "every update was skipped, since its loss or gradient was not finite; look for a division by zero, a "
            "logarithm of 0 or an overflow in the policy loss, advantages and rewards, or lower learner.lr"
        )
    if metrics.get("rollouts/tokens") == 0:
        full = (
            "the prompts, with what the workflow adds to them (such as descriptions of tools), leave no room for an "
            "answer; raise model.max_length"
        )
        asked = "does the workflow await chat.sample() before it returns?"
        return f"no rollout has a sampled token; {full if metrics.get('rollouts/truncated', 0.0) > 0 else asked}"
    if metrics.get("accuracy/mean") == 1:
        return (
            "every rollout was right, so the model solves these tasks already; train on harder ones (right is a reward "
            "of at least 1, unless the reward gives a metric `correct`)"
        )
    if "reward/mean" in metrics and metrics["reward/std"] < EQUAL:
        cut, folder = metrics.get("rollouts/truncated", 0.0), shlex.quote(str(run))
        return (
            f"every rollout earned {metrics['reward/mean']:g}"
            + (f", and {cut:.0%} were cut off at sampling.max_tokens" if cut > 0.5 else "")
            + f"; `rlsdk rollouts {folder}` shows the answers, and `rlsdk diagnose {folder}` whether earlier ones were "
            "better. If none were, change the reward, use easier tasks, or sample more rollouts of each (group_size)"
        )
    if metrics.get(NONZERO, 0.0) > 0 and metrics.get("actor/grad_norm") == 0:
        return (
            "the gradient was 0 although advantages were not: the policy loss does not depend on x.logprobs (due to "
            "detach(), no_grad or numpy; `rlsdk check` finds it), or clips or masks every token"
        )
    if "reward/mean" in metrics and metrics.get("groups/trained") == 0:
        return "algorithm.filters left out every group; rewards within a task may be equal, or the filters too strict"
    if "reward/mean" in metrics:
        return "all advantages were 0: the rollouts of each task earned the same; sample more of each (group_size)"
    return "no rollout with a valid score and a sampled token was left"


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
    """Return the summary of an ended run, before its callbacks add to it."""
    plan, counters, times = trainer.plan, trainer.counters, trainer.times
    export = trainer.checkpoints.path(trainer.version) / "export"
    interrupted = trainer.interrupted and trainer.version < trainer.steps
    fault = "" if interrupted else trainer.monitor.fault(trainer.version)
    warnings = [] if interrupted or fault else [trainer.monitor.warning()]
    for role, count in counters.skipped_updates.items():
        warnings.append(f"skipped {counted(count, 'update')} of the {role}: the loss or gradient was not finite")
    return {
        "name": plan.config.name,
        "status": "interrupted" if interrupted else "failed" if fault else "finished",
        **({"error": fault} if fault else {}),
        "warnings": [warning for warning in warnings if warning],
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
    done = {name: sum(getattr(c, name) for c in sources.values()) for name in ("trained", "filtered", "failed")}
    left = sum(c.available + c.scheduled + c.waiting for c in sources.values())
    expired = sum(c.expired for c in sources.values())
    return {"issued": sum(done.values()) + left, **done, "returned": left, "expired": expired}


def accuracy_at(folder: Path, step: int) -> dict[str, float | None] | None:
    """Return the evaluation metrics of a step from `metrics.jsonl`; None if it has none."""
    lines = [line for line in read_metrics(folder) if line["step"] == step and "eval/sampled" in line]
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
