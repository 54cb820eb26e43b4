"""An expert's answer in place of a sampled one: what supervised fine-tuning trains on."""

from __future__ import annotations

import rlsdk
from rlsdk.contracts import Chat
from rlsdk.errors import DataError
from rlsdk.types import Rollout, Task


@rlsdk.workflow("demonstration")
async def demonstration(task: Task, chat: Chat) -> Rollout:
    """Take the text under `demonstration` of the task's metadata as the answer."""
    text = task.metadata.get("demonstration")
    if not isinstance(text, str):
        held = ", ".join(task.metadata) or "nothing"
        raise DataError(
            f"task {task.id!r} has no demonstration; its metadata holds: {held}. Map a column to 'demonstration', or "
            "choose an algorithm that samples"
        )
    chat.write(text)
    return chat.finish()
