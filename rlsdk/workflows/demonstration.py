"""An expert's answers in place of sampled ones: what supervised fine-tuning trains on."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any, get_args

import rlsdk
from rlsdk.contracts import Chat
from rlsdk.errors import DataError
from rlsdk.types import Message, Role, Rollout, Task


@rlsdk.workflow("demonstration")
async def demonstration(task: Task, chat: Chat) -> Rollout:
    """Take what stands under `demonstration` of the task's metadata in place of the policy's answers.

    It is the text of one answer, or what follows the prompt as a list of messages: `{"role": "assistant", "content":
    "..."}` is an answer, which is trained on; those of other roles stand between answers, as a workflow with turns,
    tools or an environment would have had them.
    """
    for message in _messages(task):
        if message.role == "assistant":
            chat.write(message.content)
        elif message.role == "tool":
            chat.tool_result(message.content, message.name)
        else:
            chat.say(message.content, message.role)
    return chat.finish()


def _messages(task: Task) -> list[Message]:
    given = task.metadata.get("demonstration")
    if isinstance(given, str):
        return [Message("assistant", given)]
    if not isinstance(given, list | tuple):
        held = ", ".join(task.metadata) or "nothing"
        raise DataError(
            f"task {task.id!r} has no demonstration; its metadata holds: {held}. Map a column to 'demonstration', or "
            "choose an algorithm that samples"
        )
    found = [_message(task, each, index) for index, each in enumerate(given)]
    if all(message.role != "assistant" for message in found):
        raise DataError(f"task {task.id!r}: no message of its demonstration has the role assistant; nothing to learn")
    return found


def _message(task: Task, given: Any, index: int) -> Message:
    if isinstance(given, Message):
        return given
    content = given.get("content") if isinstance(given, Mapping) else None
    if not isinstance(content, str) or given.get("role") not in get_args(Role):
        raise DataError(
            f"task {task.id!r}: demonstration[{index}] is {reprlib.repr(given)}; expected a message with content and a "
            f"role, one of {', '.join(get_args(Role))}"
        )
    return Message(given["role"], content, given.get("name") or "")
