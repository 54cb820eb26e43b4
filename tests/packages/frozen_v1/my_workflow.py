"""A plugin of rlsdk in one file."""

from __future__ import annotations

import attrs
import rlsdk
from rlsdk.contracts import Chat
from rlsdk.limits import Count


@rlsdk.workflow("my_workflow")
@attrs.frozen(kw_only=True)
class MyWorkflow:
    """Ask, and have the answer revised: a conversation of several turns.

    Attributes:
        turns: Most answers.
        request: What is said between two answers.
    """

    turns: Count = 2
    request: str = "="

    async def run(self, task: rlsdk.Task, chat: Chat) -> rlsdk.Rollout:
        """Run one task; the chat begins with its prompt."""
        await chat.sample()
        for _ in range(self.turns - 1):
            chat.say(self.request)
            if chat.room() == 0:
                break
            await chat.sample()
        return chat.finish(metrics={"turns": float(chat.turns)})
