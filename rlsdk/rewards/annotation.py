"""Rewards that were given: by the workflow or environment that produced the rollout, or by people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

import rlsdk
from rlsdk.annotations import Annotation, AnnotationFile, rollout_id
from rlsdk.errors import ValueFault
from rlsdk.types import Rollout, Score, is_reward


@rlsdk.reward("annotation", batch=True, runs="driver")
@attrs.frozen(kw_only=True, eq=False)
class AnnotationReward:
    """The score given to the rollout on the Annotate page of `rlsdk view`, averaged over people.

    A rollout is identified by its task's id and its whole conversation, so the same answer to the same task has the
    same score in any run. The file is reread when it grows: scores given while a run trains take effect at once. A
    rollout without a score is invalid, and excluded from baseline and loss, unless `default` is set.

    Attributes:
        path: A run's folder, or a file `annotations.jsonl`; it may be created later.
        default: Value of rollouts without a score; null makes them invalid.
        labels: Value of each label, such as `{wrong: 0, right: 1}`, if scores are labels.
        by: Names of the people whose scores count; by default, all.
    """

    path: str
    default: float | None = None
    labels: Mapping[str, float] = attrs.field(factory=dict)
    by: tuple[str, ...] = ()
    _file: AnnotationFile = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        if wrong := [
            value for value in (self.default, *self.labels.values()) if value is not None and not is_reward(value)
        ]:
            raise ValueFault(f"default and labels must be finite and within ±1e18; got {wrong[0]}")
        object.__setattr__(self, "_file", AnnotationFile(Path(self.path).expanduser()))

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Score rollouts.

        Returns:
            The mean score, with the metrics `annotated` (1, or 0 for the default) and `annotators` (their number).

        Raises:
            DataError: A score is a label that `labels` does not have.
        """
        known: dict[str, dict[str, Annotation]] = {}
        for each in self._file.read():
            if each.kind == "score" and (not self.by or each.by in self.by):
                known.setdefault(each.rollouts[0].id, {})[each.by] = each  # the last score of each person
        return [self._score(known.get(rollout_id(rollout), {})) for rollout in rollouts]

    def _score(self, given: Mapping[str, Annotation]) -> Score:
        if given:
            values = [annotation.number(self.labels) for annotation in given.values()]
            mean = sum(values) / len(values)
            listed = ", ".join(f"{name}: {annotation.value}" for name, annotation in given.items())
            return Score(mean, metrics={"annotated": 1.0, "annotators": float(len(values))}, reason=listed)
        if self.default is None:
            return Score.invalid(
                f"no one has scored this rollout in {self._file.path}; `default` would give it a value"
            )
        return Score(self.default, metrics={"annotated": 0.0, "annotators": 0.0}, reason="no one has scored it")


@rlsdk.reward("environment", runs="driver", reads_given=True)
def environment(rollout: Rollout) -> Score:
    """Sum of the rewards given by workflow or environment, each on the token that earned it.

    It is the default if the workflow gives rewards and no reward is named. The metrics are the rollout's; `success`, if
    present, also becomes `correct`. A rollout without a reward is invalid.
    """
    if not rollout.rewards:
        return Score.invalid(f"neither workflow nor environment gave a reward ({rollout.status})")
    correct = {"correct": rollout.metrics["success"]} if "success" in rollout.metrics else {}
    total = sum(value for _, value in rollout.rewards)
    return Score(total, metrics={**correct, **rollout.metrics}, token_rewards=rollout.rewards)
