"""Values passed between the stages of training: frozen, and checked when created.

Importing this module loads only attrs; numpy is loaded when the first rollout is created.
"""

from __future__ import annotations

import reprlib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import attrs

from rlsdk.errors import ValueFault
from rlsdk.messages import (
    Content,
    Frozen,
    Image,
    Message,
    Role,
    ToolCall,
    frozen_mapping,
    frozen_numbers,
    message_values,
    number,
    restored_message,
)
from rlsdk.plurals import counted

if TYPE_CHECKING:
    import numpy as np

Status = Literal["finished", "truncated", "aborted", "failed"]
__all__ = [
    "REWARD_LIMIT",
    "STATUSES",
    "Content",
    "Group",
    "Image",
    "Message",
    "Observation",
    "Role",
    "Rollout",
    "Score",
    "Status",
    "Step",
    "Task",
    "ToolCall",
    "is_reward",
]
STATUSES: tuple[Status, ...] = ("finished", "truncated", "aborted", "failed")


def _prompt(value: str | Sequence[Message | Mapping[str, Any]]) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return value
    if not isinstance(value, Iterable):
        raise ValueFault(f"the prompt of a task is {reprlib.repr(value)}; expected text or a list of messages")
    return tuple(m if isinstance(m, Message) else Message.from_json(m) for m in value)


@attrs.frozen(slots=False, getstate_setstate=False)
class Task(Frozen):
    """One problem to solve.

    Attributes:
        id: Unique id within its source, equal in all runs with the same seed.
        prompt: Text, or a tuple of `Message`; a final assistant message is a prefill (not trained on).
        answer: Reference answer, in the form expected by the reward.
        metadata: Additional data, read-only.
        source: Name of the data source.
    """

    id: str = attrs.field(converter=str)
    prompt: str | tuple[Message, ...] = attrs.field(converter=_prompt)
    answer: Any = None
    metadata: Mapping[str, Any] = attrs.field(factory=dict, converter=frozen_mapping)
    source: str = ""


def _array(value: Any, dtype: str) -> np.ndarray:
    import numpy as np

    if isinstance(value, np.ndarray) and value.dtype == dtype and not value.flags.writeable:
        return value
    array = np.array(value, dtype=dtype)
    array.setflags(write=False)
    return array


def _int64(value: Any) -> np.ndarray:
    return _array(value, "int64")


def _bool(value: Any) -> np.ndarray:
    return _array(value, "bool")


def _float32(value: Any) -> np.ndarray:
    return _array(value, "float32")


def _routing(value: Any) -> np.ndarray | None:
    return None if value is None else _array(value, "int16")


def _messages(value: Iterable[Message]) -> tuple[Message, ...]:
    return tuple(value)


def _attributed(messages: tuple[Message, ...], prompt: str | tuple[Message, ...]) -> tuple[Message, ...]:
    """Decide which assistant messages belong to the prompt.

    An unmarked message belongs to it if the task's prompt has the same message after the same predecessor, and no
    message of the policy precedes it. The order of the prompt matters, but parts of it may be missing (a trimmed
    history) or changed (a system message with tools added).
    """
    if all(m.role != "assistant" or m.prompt is not None for m in messages):
        return messages
    given = [] if isinstance(prompt, str) else [*zip((None, *prompt), prompt, strict=False)]
    settled: list[Message] = []
    for turn in zip((None, *messages), messages, strict=False):
        message = turn[1]
        if message.role == "assistant" and message.prompt is None:
            message = attrs.evolve(message, prompt=turn in given)
            given = given[given.index(turn) + 1 :] if message.prompt else given
        if message.role == "assistant" and not message.prompt:
            given = []
        settled.append(message)
    return tuple(settled)


def _pairs(value: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    return tuple((int(position), float(number)) for position, number in value)


def _status(_: Any, __: Any, value: str) -> None:
    if value not in STATUSES:
        raise ValueFault(f"status {value!r} given; expected one of {', '.join(STATUSES)}")


_ARRAYS = {
    "token_ids": "int64",
    "loss_mask": "bool",
    "logprobs": "float32",
    "policy_versions": "int64",
    "image_positions": "int64",
}
"""Fields of a rollout that are arrays with one axis."""
_PICKLED = "_pickled_messages"
"""Attribute of a rollout that was pickled: the values of its messages."""


@attrs.frozen(slots=False, getstate_setstate=False, eq=False, repr=False)
class Rollout(Frozen):
    """A policy's attempt at a task: the conversation, and all tokens with their origins.

    All per-token fields have length `T`: prompt, sampled tokens, tool results and observations, in order.

    Attributes:
        task: The task.
        messages: The whole conversation, including the prompt. `Message.prompt` says which assistant messages belong to
            the prompt; where it is None, those do that the task's prompt has in the same place.
        token_ids: int64 `[T]`.
        loss_mask: bool `[T]`; True exactly where the policy sampled the token, or an expert wrote it.
        logprobs: float32 `[T]`, in nats, under the sampling distribution; 0 if the token was not sampled.
        policy_versions: int64 `[T]`; version of the weights that sampled the token, -1 if it was not sampled.
        routed_experts: int16 `[T, layers, k]`; experts chosen for the token in the engine, -1 if unknown and in layers
            without experts. None unless the run replays them.
        status: finished, truncated (hit a limit), aborted (stopped from outside) or failed.
        metrics: Numbers to log.
        rewards: (token position, value) pairs assigned by the workflow or the environment.
        trajectory: Label shared by the rollouts of one step-wise trajectory.
        step: Position within the trajectory.
        state: Key of the environment state; equal states have equal keys. Empty: unknown, never equal to another.
        image_positions: int64 `[k]`, ascending positions of the tokens that represent the messages' images.
    """

    task: Task
    messages: tuple[Message, ...] = attrs.field(converter=_messages)
    token_ids: np.ndarray = attrs.field(converter=_int64)
    loss_mask: np.ndarray = attrs.field(converter=_bool)
    logprobs: np.ndarray = attrs.field(converter=_float32)
    policy_versions: np.ndarray = attrs.field(converter=_int64)
    status: Status = attrs.field(default="finished", validator=_status)
    metrics: Mapping[str, float] = attrs.field(factory=dict, converter=frozen_numbers)
    rewards: tuple[tuple[int, float], ...] = attrs.field(default=(), converter=_pairs)
    trajectory: str = ""
    step: int = 0
    state: str = ""
    routed_experts: np.ndarray | None = attrs.field(default=None, converter=_routing)
    image_positions: np.ndarray = attrs.field(default=(), converter=_int64)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "messages", _attributed(self.messages, self.task.prompt))
        shape = self.token_ids.shape
        for name in ("token_ids", "loss_mask", "logprobs", "policy_versions"):
            given = getattr(self, name).shape
            if len(given) != 1 or given != shape:
                expected = f"{shape}, as token_ids" if len(shape) == 1 else "one axis"
                raise ValueFault(f"rollout of task {self.task.id!r}: {name} has shape {given}; expected {expected}")
        routing = self.routed_experts
        if routing is not None and (routing.ndim != 3 or len(routing) != len(self.token_ids)):
            raise ValueFault(
                f"rollout of task {self.task.id!r}: routed_experts has shape {routing.shape}; expected "
                f"({len(self.token_ids)}, layers, k), the first axis as token_ids"
            )
        if len(self.image_positions) and not 0 <= self.image_positions.min() <= self.image_positions.max() < shape[0]:
            raise ValueFault(
                f"rollout of task {self.task.id!r}: image_positions from {self.image_positions.min()} to "
                f"{self.image_positions.max()}; it has {shape[0]} tokens"
            )
        for position, _ in self.rewards:
            if not 0 <= position < shape[0]:
                raise ValueFault(f"rollout of task {self.task.id!r}: a reward at token {position} of {shape[0]}")

    # A driver gets thousands of rollouts a second from its workers, and reads the messages of few of them. So messages
    # are pickled as plain values, which become messages when they are first read, and arrays as bytes.

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        messages = state.pop("messages", ())
        if _PICKLED not in state:
            state[_PICKLED] = tuple([message_values(message) for message in messages])
        for name in _ARRAYS:
            state[name] = state[name].tobytes()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        import numpy as np

        for name, dtype in _ARRAYS.items():
            state[name] = np.frombuffer(state[name], dtype)  # read-only, as bytes are
        if state["routed_experts"] is not None:
            state["routed_experts"].setflags(write=False)
        state["metrics"] = MappingProxyType(state["metrics"])
        self.__dict__.update(state)

    def __getattr__(self, name: str) -> Any:
        if name != "messages" or (pickled := self.__dict__.get(_PICKLED)) is None:
            raise AttributeError(f"a rollout has no attribute {name!r}", name=name, obj=self)
        messages = self.__dict__["messages"] = tuple([restored_message(*values) for values in pickled])
        return messages

    def __repr__(self) -> str:
        sampled = int(self.loss_mask.sum())
        return f"Rollout(task={self.task.id!r}, {self.status}, {sampled} of {len(self.token_ids)} tokens sampled)"

    @property
    def answers(self) -> tuple[Message, ...]:
        """Messages written by the policy, in order; a prefill that it continued is part of its message."""
        return tuple([m for m in self.messages if m.role == "assistant" and not m.prompt])

    @property
    def text(self) -> str:
        """Text of the last message written by the policy; empty if there is none."""
        return next((m.text for m in reversed(self.answers)), "")

    @property
    def response(self) -> str:
        """Text written by the policy in all turns, joined by line breaks; of the prompt, only a prefill is included."""
        return "\n".join([m.text for m in self.answers])

    @property
    def images(self) -> tuple[Image, ...]:
        """Images of all messages, in order; those of a final message without an answer have no tokens."""
        return tuple(image for message in self.messages for image in message.images)

    @property
    def span(self) -> tuple[int, int]:
        """Half-open range of the response, from the first sampled token to the last; (T, T) if none was sampled."""
        sampled = self.loss_mask.nonzero()[0]
        total = len(self.token_ids)
        return (int(sampled[0]), int(sampled[-1]) + 1) if len(sampled) else (total, total)

    @classmethod
    def from_text(cls, task: Task, text: str, status: Status = "finished") -> Rollout:
        """Build a rollout for scoring without a model: no tokens, one message of the policy.

        Args:
            task: The task that was answered.
            text: Text of the policy. The task's prefill is prepended unless the text already begins with it.
            status: How the generation ended.
        """
        prompt = (Message("user", task.prompt),) if isinstance(task.prompt, str) else task.prompt
        if prompt and prompt[-1].role == "assistant":
            prompt, prefill = prompt[:-1], prompt[-1].text
            text = text if text.startswith(prefill) else prefill + text
        return cls(task, (*prompt, Message("assistant", text, prompt=False)), (), (), (), (), status)


def _float(value: Any) -> float:
    if isinstance(value, str):
        raise ValueFault(f"score value {value!r} is text; expected a number")
    if value is None:
        raise ValueFault("score value None; expected a number, or Score.invalid(REASON) if there is none")
    return float(value)


def _flag(value: Any, what: str) -> bool:
    if isinstance(value, bool):
        return value
    with suppress(ValueFault):
        if (found := number(value, what)) in (0, 1):
            return bool(found)
    raise ValueFault(f"{what} is {reprlib.repr(value)}; expected True or False")


def _reason(value: Any) -> str:
    return value if type(value) is str else _text_of_score(value, "reason")


def _answer(value: Any) -> str:
    return value if type(value) is str else _text_of_score(value, "answer")


def _text_of_score(value: Any, what: str) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueFault(f"the {what} of a score is {reprlib.repr(value)}; expected text")
    return value or ""


def _valid(value: Any) -> bool:
    return value if type(value) is bool else _flag(value, "`valid` of a score")


def _terminated(value: Any) -> bool:
    return _flag(value, "`terminated` of a step")


def _truncated(value: Any) -> bool:
    return _flag(value, "`truncated` of a step")


REWARD_LIMIT = 1e18
"""Maximum absolute reward: its square, and sums of such squares, are finite in float32."""


def is_reward(value: float) -> bool:
    """Return whether a number can be a reward: finite, and within ±1e18."""
    return abs(value) <= REWARD_LIMIT


@attrs.frozen(slots=False, getstate_setstate=False)
class Score(Frozen):
    """Result of scoring a rollout.

    Attributes:
        value: The reward; if valid, a number within ±1e18.
        valid: False if the scorer failed. Such a rollout is excluded from baseline and loss; it never counts as zero.
        metrics: Numbers to log, including the parts of a sum.
        reason: Reason for an invalid or low score.
        token_rewards: (token position, value) pairs with sum `value`; None puts all of it on the last sampled token.
        shared: True for a rollout that has no score of its own, but that of the last rollout of its trajectory.
        answer: The final answer that was scored, in the form in which equal ones are spelled alike; evaluations count
            the votes of several rollouts by it (maj@k). Empty if there is none, or if the scorer does not tell.
    """

    value: float = attrs.field(converter=_float)
    valid: bool = attrs.field(default=True, converter=_valid)
    metrics: Mapping[str, float] = attrs.field(factory=dict, converter=frozen_numbers)
    reason: str = attrs.field(default="", converter=_reason)
    token_rewards: tuple[tuple[int, float], ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(_pairs)
    )
    shared: bool = False
    answer: str = attrs.field(default="", converter=_answer, kw_only=True)

    def __attrs_post_init__(self) -> None:
        given = [value for _, value in self.token_rewards] if self.token_rewards else []
        for value in (self.value, *given):
            if self.valid and not is_reward(value):
                raise ValueFault(
                    f"a valid score must be finite and within ±{REWARD_LIMIT:g}, got {value}; give valid=False and a "
                    "reason"
                )

    @classmethod
    def invalid(cls, reason: str) -> Score:
        """Return the score of a rollout that could not be scored."""
        return cls(0.0, valid=False, reason=reason)


def _rollouts(value: Iterable[Rollout]) -> tuple[Rollout, ...]:
    return tuple(value)


def _scores(value: Iterable[Score]) -> tuple[Score, ...]:
    return tuple(value)


@attrs.frozen(eq=False)
class Group:
    """The rollouts of one task that share a baseline, and their scores in the same order.

    Attributes:
        task: The task that was drawn. A workflow may return rollouts of a changed copy of it.
        rollouts: The rollouts.
        scores: The score of each rollout.
        uid: Key in the ledger, equal for all copies of the group: by `attrs.evolve`, in another process, or from the
            store. A run derives it from the number of the task record, so that a resumed run gives the same uids; a
            group built by hand gets a random one.
    """

    task: Task
    rollouts: tuple[Rollout, ...] = attrs.field(converter=_rollouts)
    scores: tuple[Score, ...] = attrs.field(converter=_scores)
    uid: str = attrs.field(factory=lambda: uuid.uuid4().hex, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if len(self.rollouts) != len(self.scores):
            counts = f"{counted(len(self.rollouts), 'rollout')}, {counted(len(self.scores), 'score')}"
            raise ValueFault(f"group of task {self.task.id!r}: {counts}; expected equal numbers of both")

    def __len__(self) -> int:
        return len(self.rollouts)

    @cached_property
    def trajectories(self) -> tuple[tuple[int, ...], ...]:
        """Positions of the rollouts of each trajectory, by step; a rollout without a label is its own trajectory."""
        found: dict[str, list[int]] = {}
        for i, rollout in enumerate(self.rollouts):
            found.setdefault(rollout.trajectory or f"\0{i}", []).append(i)
        return tuple(tuple(sorted(each, key=lambda i: self.rollouts[i].step)) for each in found.values())

    @cached_property
    def scored_trajectories(self) -> tuple[tuple[int, ...], ...]:
        """Trajectories whose scores are all valid; the value of the others is unknown."""
        return tuple(each for each in self.trajectories if all(self.scores[i].valid for i in each))

    @cached_property
    def oldest_version(self) -> int | None:
        """Oldest version of weights that sampled a trained token; None if none was sampled, as in demonstrations."""
        import numpy as np

        if not self.rollouts:
            return None
        versions = np.concatenate([r.policy_versions for r in self.rollouts])
        sampled = versions[np.concatenate([r.loss_mask for r in self.rollouts]) & (versions >= 0)]
        return int(sampled.min()) if len(sampled) else None


def _text(_: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueFault(f"the {attribute.name} of an observation is {reprlib.repr(value)}; expected text")


def _observation(_: Any, __: Any, value: Any) -> None:
    if not isinstance(value, Observation):
        raise ValueFault(f"the observation of a step is {reprlib.repr(value)}; expected an rlsdk.Observation")


def _reward(value: Any) -> float:
    found = float(number(value, "the reward of a step"))
    if not is_reward(found):
        raise ValueFault(f"the reward of a step must be finite and within ±{REWARD_LIMIT:g}; got {found}")
    return found


@attrs.frozen
class Observation:
    """Output of an environment.

    Attributes:
        text: Text for the policy.
        state: Key of the state; equal states have equal keys.
        image: Picture for the policy, in any form that `Image` accepts.
    """

    text: str = attrs.field(validator=_text)
    state: str = ""
    image: Image | None = attrs.field(default=None, converter=attrs.converters.optional(Image))

    @property
    def content(self) -> Content:
        """Content of the message to the policy: the text, preceded by the picture if there is one."""
        if self.image is None:
            return self.text
        return (self.image, self.text) if self.text else (self.image,)


@attrs.frozen(slots=False, getstate_setstate=False)
class Step(Frozen):
    """Response of an environment to an action."""

    observation: Observation = attrs.field(validator=_observation)
    reward: float = attrs.field(default=0.0, converter=_reward)
    terminated: bool = attrs.field(default=False, converter=_terminated)
    truncated: bool = attrs.field(default=False, converter=_truncated)
    metrics: Mapping[str, float] = attrs.field(factory=dict, converter=frozen_numbers)
