"""What became of every task that was issued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from rlsdk.types import Group


@attrs.frozen
class Ledger:
    """Each task that was issued ends exactly once, so that the others add up to `issued`.

    Attributes:
        issued: Tasks that steps took.
        trained: At least one rollout reached the learner.
        filtered: Rollouts could be scored, but a filter left them out, or there was no baseline or nothing sampled.
        failed: No rollout could be scored.
    """

    issued: int = 0
    trained: int = 0
    filtered: int = 0
    failed: int = 0

    def after(self, groups: Sequence[Group], trained: int) -> Ledger:
        """With the tasks of one more step.

        Args:
            groups: Its groups, one for each task, as they were produced.
            trained: How many of them had a rollout that reached the learner.
        """
        failed = sum(not any(score.valid for score in group.scores) for group in groups)
        return Ledger(
            issued=self.issued + len(groups),
            trained=self.trained + trained,
            filtered=self.filtered + len(groups) - failed - trained,
            failed=self.failed + failed,
        )

    @classmethod
    def restored(cls, state: Mapping[str, int] | None) -> Ledger:
        """As a checkpoint holds it; one from before there was a ledger begins at zero."""
        return cls(**(state or {}))
