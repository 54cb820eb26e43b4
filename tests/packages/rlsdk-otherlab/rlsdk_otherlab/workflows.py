"""Workflows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import rlsdk

if TYPE_CHECKING:
    from rlsdk.contracts import Chat


@rlsdk.workflow("brief")
class Brief:
    """Ask once, and allow few tokens.

    Args:
        tokens: How many.
    """

    def __init__(self, *, tokens: int = 4) -> None:
        self.tokens = tokens

    async def run(self, task: rlsdk.Task, chat: Chat) -> rlsdk.Rollout:
        """Run one task."""
        await chat.sample(max_tokens=self.tokens)
        return chat.finish()
