"""The policy criticises its own answer and answers again."""

from __future__ import annotations

import attrs

import rlsdk
from rlsdk.contracts import Chat
from rlsdk.errors import OptionError
from rlsdk.types import Rollout, Task
from rlsdk.workflows.limits import limited


@rlsdk.workflow("self_refine")
@attrs.frozen(kw_only=True)
class SelfRefine:
    """Asks for an answer, for what is wrong with it, and for a better one; the last answer counts.

    Paper: Self-Refine, arXiv:2303.17651. Everything that the policy writes is trained on, critique included.

    Attributes:
        rounds: Critiques and new answers.
        critique: What asks for the critique; empty text asks for the new answer at once.
        refine: What asks for the new answer.
        max_tokens: Of one message; left out, the run's setting.
        timeout: Seconds until the rollout ends as truncated; left out, there is no limit.
    """

    rounds: int = 1
    critique: str = "Check your answer. What is wrong with it?"
    refine: str = "Now give your answer again, without the mistakes."
    max_tokens: int | None = None
    timeout: float | None = None

    def __attrs_post_init__(self) -> None:
        if self.rounds < 1:
            raise OptionError("workflow 'self_refine'", [("rounds", f"at least 1, got {self.rounds}")])
        if not self.refine:
            raise OptionError("workflow 'self_refine'", [("refine", "it asks for the new answer; it cannot be empty")])

    async def run(self, task: Task, chat: Chat) -> Rollout:
        """Answer, criticise, answer again."""
        asked = [text for text in (self.critique, self.refine) if text] * self.rounds
        async with limited(self.timeout) as limit:
            await chat.sample(max_tokens=self.max_tokens)
            for text in asked:
                if chat.status == "aborted":
                    break
                chat.say(text)
                await chat.sample(max_tokens=self.max_tokens)
        status = "truncated" if limit.reached else chat.status
        return chat.finish(status=status)
