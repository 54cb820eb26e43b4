"""Expert answers in place of sampled ones, for supervised fine-tuning."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import attrs

import rlsdk
from rlsdk.contracts import Chat
from rlsdk.errors import DataError
from rlsdk.types import Message, Role, Rollout, Task


@rlsdk.workflow("demonstration")
async def demonstration(task: Task, chat: Chat) -> Rollout:
    """Take the answers from `demonstration` in the task's metadata instead of sampling the policy.

    A demonstration is the text of one answer, or the list of messages that follow the prompt. Messages `{"role":
    "assistant", "content": "..."}` are answers, which are trained on. Messages of other roles may come between answers,
    as in a workflow with several turns, tools or an environment.
    """
    _write(chat, _messages(task, "demonstration"))
    return chat.finish()


@rlsdk.workflow("chosen_rejected")
async def chosen_rejected(task: Task, chat: Chat) -> list[Rollout]:
    """Take the answers `chosen` and `rejected` from the task's metadata, as a pair whose first answer is better.

    It is the default of `algorithm: {use: dpo, rollouts: demonstrations}`. Each answer is text or a list of messages,
    as in the workflow `demonstration`. The rewards are 1 and 0; only their order matters.
    """
    answers = [(_messages(task, "chosen"), 1.0), (_messages(task, "rejected"), 0.0)]
    found = []
    for messages, value in answers:
        other = chat.branch()
        _write(other, messages)
        other.reward(value)
        found.append(other.finish())
    return found


def _write(chat: Chat, messages: Sequence[Message]) -> None:
    for message in messages:
        if message.role == "assistant":
            chat.write(message.text)
        elif message.role == "tool":
            chat.tool_result(message.text, message.name)
        else:
            chat.say(message.content, message.role)


def _messages(task: Task, name: str) -> list[Message]:
    given = task.metadata.get(name)
    if isinstance(given, str):
        return [Message("assistant", given)]
    if not isinstance(given, list | tuple):
        held = ", ".join(task.metadata) or "nothing"
        raise DataError(
            f"task {task.id!r} has no {name}; its metadata holds: {held}. Map a column to {name!r}, or "
            "choose an algorithm that needs none"
        )
    found = [_message(task, name, each, index) for index, each in enumerate(given)]
    if all(message.role != "assistant" for message in found):
        raise DataError(f"task {task.id!r}: no message of its {name} has the role assistant; nothing to learn")
    return found


def _message(task: Task, name: str, given: Any, index: int) -> Message:
    fields: Mapping[str, Any] = {}
    if isinstance(given, Mapping | Message):
        fields = attrs.asdict(given, recurse=False) if isinstance(given, Message) else given
    left_out = [key for key in ("reasoning", "reasoning_content", "thinking", "tool_calls") if fields.get(key)]
    if left_out and fields.get("role") == "assistant":
        raise DataError(
            f"task {task.id!r}: {name}[{index}] holds {' and '.join(left_out)} besides its content, but only that is "
            "trained on; write them into it, as the model should write them"
        )
    if isinstance(given, Message):
        return given
    content = given.get("content") if isinstance(given, Mapping) else None
    if not isinstance(content, str) or given.get("role") not in get_args(Role):
        raise DataError(
            f"task {task.id!r}: {name}[{index}] is {reprlib.repr(given)}; expected a message with content and a "
            f"role, one of {', '.join(get_args(Role))}"
        )
    return Message(given["role"], content, given.get("name") or "")
