"""Learning monitor: count the steps that taught nothing; too many in a row end the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from rlsdk.plurals import counted

if TYPE_CHECKING:
    from rlsdk.rollout.step_batch import StepBatch

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
        taught: Number of steps that taught something since the run began.
        empty: Number of latest consecutive steps that taught nothing.
        solved: True if the last step was empty because every rollout was right.
        why: Reason why the last step taught nothing; empty if it taught something.
        stuck: True once a step of this process reaches the limit. A resumed run trains one step first, since the cause
            may have been fixed.
    """

    limit: int | None
    taught: int = 0
    empty: int = 0
    solved: bool = False
    why: str = ""
    stuck: bool = False

    def note(self, metrics: Mapping[str, float], *, taught: bool) -> None:
        """Count a step.

        Args:
            metrics: Metrics of the step.
            taught: True if the step taught something.
        """
        self.taught += taught
        self.empty = 0 if taught else self.empty + 1
        self.solved = not taught and metrics.get("accuracy/mean") == 1
        self.why = "" if taught else reason(metrics)
        self.stuck = self.limit is not None and self.empty >= self.limit

    def fault(self, done: int) -> str:
        """Return why a run that ended after `done` steps has failed; empty if it has not.

        A model that has learned something and now solves all its tasks has not failed.
        """
        if done and not self.taught:
            return f"nothing was learned in this run ({counted(done, 'step')}): {self.why or 'see the log'}"
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


def teaches(batch: StepBatch, metrics: Mapping[str, float]) -> bool:
    """Return True if a step's rollouts taught the learner anything.

    Args:
        batch: Rollouts that the learner trained on.
        metrics: Metrics of its updates.
    """
    if metrics.get("actor/skipped_updates") and "actor/grad_norm" not in metrics:
        return False
    if metrics.get("actor/grad_norm") == 0:  # the weights did not change, whatever the advantages are
        return False
    imitates = batch.has_experts  # expert rollouts teach without an advantage
    return imitates or metrics.get(NONZERO, 1.0) > 0


def reason(metrics: Mapping[str, float]) -> str:
    """Return why a step taught nothing, and what to do about it.

    Args:
        metrics: Metrics of the step.
    """
    if metrics.get("actor/skipped_updates"):
        return "every update was skipped, since its gradient was not finite"
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
        cut = metrics.get("rollouts/truncated", 0.0)
        return (
            f"every rollout earned {metrics['reward/mean']:g}"
            + (f", and {cut:.0%} were cut off at sampling.max_tokens" if cut > 0.5 else "")
            + "; `rlsdk rollouts RUN` shows the answers, and `rlsdk diagnose RUN` whether earlier ones were better. If "
            "none were, change the reward, use easier tasks, or sample more rollouts of each task (group_size)"
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
