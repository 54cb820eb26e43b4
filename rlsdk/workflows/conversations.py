"""Workflows of plain conversations, without tools or environment: one answer, several samples, several turns.

For supervised fine-tuning, expert answers take the place of sampled ones.
"""

from __future__ import annotations

import asyncio
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import attrs

import rlsdk
from rlsdk.contracts import Chat
from rlsdk.errors import DataError, OptionError
from rlsdk.limits import Count, Positive
from rlsdk.messages import QUICK_CHARACTERS
from rlsdk.types import Message, Role, Rollout, Score, Task
from rlsdk.workflows.limits import limited
from rlsdk.workflows.tools import Tools


@rlsdk.workflow("single_turn", one_answer=True)
async def single_turn(task: Task, chat: Chat) -> Rollout:
    """Prompt the policy once and take its answer."""
    await chat.sample()
    return chat.finish()


@rlsdk.workflow("best_of")
@attrs.frozen(kw_only=True)
class BestOf:
    """Samples several answers, scores each with the run's reward, and uses the best one as the rollout.

    Only the best answer is trained on. Metrics: the rewards `best`, `mean` and `first` of the answers that could be
    scored.

    Attributes:
        samples: Number of answers in a rollout.
        max_tokens: Maximum tokens of an answer; by default, the run's setting.
    """

    samples: Count = 4
    max_tokens: Count | None = None

    async def run(self, task: Task, chat: Chat) -> Rollout:
        """Sample several answers and keep the best."""
        branches = [chat.branch() for _ in range(self.samples)]

        async def score(branch: Chat) -> Score:
            await branch.sample(max_tokens=self.max_tokens)
            return await branch.score()

        scores = await asyncio.gather(*map(score, branches))
        for branch in branches:
            if branch.status == "aborted":  # stopped from outside; the best of the others may not be the best of all
                return branch.finish()
        values = [score.value for score in scores if score.valid]
        metrics = {"best": max(values), "mean": sum(values) / len(values), "first": values[0]} if values else {}
        best = max(range(len(scores)), key=lambda i: scores[i].value if scores[i].valid else -math.inf)
        return branches[best].finish(metrics=metrics)


@rlsdk.workflow("dialogue")
@attrs.frozen(kw_only=True)
class Dialogue:
    """Replies to wrong answers with feedback until one is right; the last answer counts.

    The run's reward scores each answer. An answer is right according to the reward's metric `correct` or, without that
    metric, if its value reaches `enough`. Metrics: `right_at_first` and `right`.

    Attributes:
        turns: Maximum number of answers.
        feedback: Message after a wrong answer; `{reason}` is replaced by the reward's reason.
        enough: Minimum value of a right answer.
        max_tokens: Maximum tokens of an answer; by default, the run's setting.
        timeout: Seconds after which the rollout is truncated; by default, no limit.
    """

    turns: Count = 3
    feedback: str = "That is not right. Try again."
    enough: float = 1.0
    max_tokens: Count | None = None
    timeout: Positive | None = None

    async def run(self, task: Task, chat: Chat) -> Rollout:
        """Talk until the answer is right."""
        right: list[bool] = []
        async with limited(self.timeout) as limit:
            while True:
                await chat.sample(max_tokens=self.max_tokens)
                score = await chat.score()
                right.append(score.valid and bool(score.metrics.get("correct", score.value >= self.enough)))
                if right[-1] or not score.valid or len(right) == self.turns or chat.status == "aborted":
                    break
                chat.say(self.feedback.replace("{reason}", score.reason))
        metrics = {"right_at_first": float(right[0]), "right": float(right[-1])} if right else {}
        return chat.finish(metrics=metrics, status="truncated" if limit.reached else chat.status)


@rlsdk.workflow("self_refine")
@attrs.frozen(kw_only=True)
class SelfRefine:
    """Asks for an answer, a critique of it, and a better answer; the last answer counts.

    Paper: Self-Refine, arXiv:2303.17651. Everything that the policy writes is trained on, including the critique.

    Attributes:
        rounds: Number of critiques, each followed by a new answer.
        critique: Message that asks for the critique; empty to ask for the new answer directly.
        refine: Message that asks for the new answer.
        max_tokens: Maximum tokens of a message; by default, the run's setting.
        timeout: Seconds after which the rollout is truncated; by default, no limit.
    """

    rounds: Count = 1
    critique: str = "Check your answer. What is wrong with it?"
    refine: str = "Now give your answer again, without the mistakes."
    max_tokens: Count | None = None
    timeout: Positive | None = None

    def __attrs_post_init__(self) -> None:
        if not self.refine:
            raise OptionError("workflow 'self_refine'", [("refine", "expected a text; got an empty one")])

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


@rlsdk.workflow("demonstration")
@attrs.frozen(kw_only=True)
class Demonstration:
    """Takes the answers from `demonstration` in the task's metadata instead of sampling the policy.

    A demonstration is the text of one answer, or the list of messages that follow the prompt. Messages `{"role":
    "assistant", "content": "..."}` are answers, which are trained on. Messages of other roles may come between answers,
    as in a workflow with several turns, tools or an environment.

    Attributes:
        tools: Functions and classes that the prompt describes, as in the workflow `tools`; they are not called.
        parser: Syntax of tool calls, as in the workflow `tools`.
        describe: Describe the tools in a message if the chat template does not.
    """

    tools: tuple[str, ...] = ()
    parser: str | None = None
    describe: bool = True
    _offered: Tools | None = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        try:
            offered = Tools(tools=self.tools, parser=self.parser, describe=self.describe) if self.tools else None
        except OptionError as error:
            raise OptionError("workflow 'demonstration'", error.faults) from error
        object.__setattr__(self, "_offered", offered)

    async def run(self, task: Task, chat: Chat) -> Rollout:
        """Append the messages of the demonstration."""
        if self._offered is not None:
            self._offered.offer(chat)
        await _write(chat, _messages(task, "demonstration"))
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
        await _write(other, messages)
        other.reward(value)
        found.append(other.finish())
    return found


async def _write(chat: Chat, messages: Sequence[Message]) -> None:
    """Append messages; long ones are tokenized in a thread, since other rollouts share this event loop."""
    if sum(len(message.text) for message in messages) > QUICK_CHARACTERS:
        await asyncio.to_thread(_append, chat, messages)
    else:
        _append(chat, messages)


def _append(chat: Chat, messages: Sequence[Message]) -> None:
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
