"""Feedback until the answer is right."""

from __future__ import annotations

import attrs

import rlsdk
from rlsdk.contracts import Chat
from rlsdk.errors import OptionError
from rlsdk.types import Rollout, Score, Task
from rlsdk.workflows.limits import limited


@rlsdk.workflow("dialogue")
@attrs.frozen(kw_only=True)
class Dialogue:
    """Asks, and where the answer is wrong says so and asks again; the last answer counts.

    The run's reward judges each answer: it is right if the reward's metric `correct` says so or, where there is none,
    if its value reaches `enough`. Metrics: `right_at_first` and `right`.

    Attributes:
        turns: Answers at most.
        feedback: What is said to a wrong answer; `{reason}` stands for what the reward says of it.
        enough: Value of a right answer.
        max_tokens: Of one answer; left out, the run's setting.
        timeout: Seconds until the rollout ends as truncated; left out, there is no limit.
    """

    turns: int = 3
    feedback: str = "That is not right. Try again."
    enough: float = 1.0
    max_tokens: int | None = None
    timeout: float | None = None

    def __attrs_post_init__(self) -> None:
        if self.turns < 1:
            raise OptionError("workflow 'dialogue'", [("turns", f"at least 1, got {self.turns}")])

    async def run(self, task: Task, chat: Chat) -> Rollout:
        """Talk until the answer is right."""
        right: list[bool] = []
        async with limited(self.timeout) as limit:
            await self._talk(chat, right)
        metrics = {"right_at_first": float(right[0]), "right": float(right[-1])} if right else {}
        return chat.finish(metrics=metrics, status="truncated" if limit.reached else chat.status)

    async def _talk(self, chat: Chat, right: list[bool]) -> None:
        while True:
            await chat.sample(max_tokens=self.max_tokens)
            score = await chat.score()
            right.append(self._is_right(score))
            if right[-1] or not score.valid or len(right) == self.turns or chat.status == "aborted":
                return
            chat.say(self.feedback.replace("{reason}", score.reason))

    def _is_right(self, score: Score) -> bool:
        return score.valid and bool(score.metrics.get("correct", score.value >= self.enough))
