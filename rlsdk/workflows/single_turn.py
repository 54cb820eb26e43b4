"""Single-turn workflow: one prompt, one answer."""

from __future__ import annotations

import rlsdk
from rlsdk.contracts import Chat
from rlsdk.types import Rollout, Task


@rlsdk.workflow("single_turn", one_answer=True)
async def single_turn(task: Task, chat: Chat) -> Rollout:
    """Ask once and take the answer as it comes."""
    await chat.sample()
    return chat.finish()
