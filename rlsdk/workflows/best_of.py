"""Best-of-n sampling: several answers, with the best one as the rollout."""

from __future__ import annotations

import asyncio
import math

import attrs

import rlsdk
from rlsdk.contracts import Chat
from rlsdk.errors import OptionError
from rlsdk.types import Rollout, Score, Task


@rlsdk.workflow("best_of")
@attrs.frozen(kw_only=True)
class BestOf:
    """Samples several answers, has the run's reward judge each, and gives the best one as the rollout.

    Trained on, it raises what the best of several answers is worth. The others are not trained on. Metrics: the rewards
    `best`, `mean` and `first` of the answers that could be scored.

    Attributes:
        samples: Answers of one rollout.
        max_tokens: Of one answer; left out, the run's setting.
    """

    samples: int = 4
    max_tokens: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.samples < 1:
            raise OptionError("workflow 'best_of'", [("samples", f"at least 1, got {self.samples}")])

    async def run(self, task: Task, chat: Chat) -> Rollout:
        """Answer several times, keep the best."""
        branches = [chat.branch() for _ in range(self.samples)]
        scores = await asyncio.gather(*(self._answered(branch) for branch in branches))
        values = [score.value for score in scores if score.valid]
        metrics = {"best": max(values), "mean": sum(values) / len(values), "first": values[0]} if values else {}
        best = max(range(len(scores)), key=lambda i: scores[i].value if scores[i].valid else -math.inf)
        return branches[best].finish(metrics=metrics)

    async def _answered(self, branch: Chat) -> Score:
        await branch.sample(max_tokens=self.max_tokens)
        return await branch.score()
