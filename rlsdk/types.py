"""Values that pass between the stages of a training: frozen, checked where they are made.

Importing this module loads attrs only; numpy is loaded when the first rollout is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import attrs

from rlsdk.errors import ValueFault

if TYPE_CHECKING:
    import numpy as np

Status = Literal["finished", "truncated", "aborted", "failed"]
STATUSES: tuple[Status, ...] = ("finished", "truncated", "aborted", "failed")
Role = Literal["system", "user", "assistant", "tool"]


def _frozen_mapping(value: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return value if isinstance(value, MappingProxyType) else MappingProxyType(dict(value or {}))


class _Frozen:
    """Pickling for classes with read-only mappings (which do not pickle) and arrays (whose flag a pickle forgets)."""

    __slots__ = ()

    def __getstate__(self) -> dict[str, Any]:
        state = {}
        for field in attrs.fields(type(self)):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            state[field.name] = dict(value) if field.converter is _frozen_mapping else value
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        for field in attrs.fields(type(self)):  # type: ignore[arg-type]
            value = state[field.name]
            if field.converter in (_frozen_mapping, _int64, _bool, _float32):
                value = field.converter(value)
            object.__setattr__(self, field.name, value)


@attrs.frozen
class Message:
    """One message of a conversation; `name` is that of the tool that gave it."""

    role: Role
    content: str
    name: str = ""


def _prompt(value: str | Sequence[Message | Mapping[str, str]]) -> str | tuple[Message, ...]:
    if isinstance(value, str):
        return value
    return tuple(m if isinstance(m, Message) else Message(m["role"], m["content"]) for m in value)  # type: ignore[arg-type]


@attrs.frozen(slots=False, getstate_setstate=False)
class Task(_Frozen):
    """One problem to solve.

    Attributes:
        id: Unique within its source; the same in every run with the same seed.
        prompt: Text, or a tuple of `Message`; a last message of the assistant is a prefill (not trained on).
        answer: What a reward compares with; its form is the reward's business.
        metadata: Anything else, read-only.
        source: Name of the data source.
    """

    id: str = attrs.field(converter=str)
    prompt: str | tuple[Message, ...] = attrs.field(converter=_prompt)
    answer: Any = None
    metadata: Mapping[str, Any] = attrs.field(factory=dict, converter=_frozen_mapping)
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


def _messages(value: Iterable[Message]) -> tuple[Message, ...]:
    return tuple(value)


def _pairs(value: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    return tuple((int(position), float(number)) for position, number in value)


def _maybe_pairs(value: Iterable[tuple[int, float]] | None) -> tuple[tuple[int, float], ...] | None:
    return None if value is None else _pairs(value)


def _status(_: Any, __: Any, value: str) -> None:
    if value not in STATUSES:
        raise ValueFault(f"status {value!r} given; expected one of {', '.join(STATUSES)}")


@attrs.frozen(slots=False, getstate_setstate=False, eq=False, repr=False)
class Rollout(_Frozen):
    """What a policy did with a task: the conversation, and every token with who wrote it.

    All per-token fields have one length `T`: prompt, sampled tokens, tool results and observations in their order.

    Attributes:
        task: The task.
        messages: The whole conversation, prompt included.
        token_ids: int64 `[T]`.
        loss_mask: bool `[T]`; True exactly where the policy sampled the token.
        logprobs: float32 `[T]`, in nats, of the distribution that was sampled from; 0 where nothing was sampled.
        policy_versions: int64 `[T]`; version of the weights that sampled the token, -1 where nothing was sampled.
        status: finished, truncated (a limit was reached), aborted (stopped from outside) or failed.
        metrics: Numbers to log.
        rewards: (token position, value) pairs given by the workflow or the environment.
        trajectory: Shared by the rollouts of one step-wise trajectory.
        step: Position within the trajectory.
        state: Key of the environment state; equal states have equal keys.
    """

    task: Task
    messages: tuple[Message, ...] = attrs.field(converter=_messages)
    token_ids: np.ndarray = attrs.field(converter=_int64)
    loss_mask: np.ndarray = attrs.field(converter=_bool)
    logprobs: np.ndarray = attrs.field(converter=_float32)
    policy_versions: np.ndarray = attrs.field(converter=_int64)
    status: Status = attrs.field(default="finished", validator=_status)
    metrics: Mapping[str, float] = attrs.field(factory=dict, converter=_frozen_mapping)
    rewards: tuple[tuple[int, float], ...] = attrs.field(default=(), converter=_pairs)
    trajectory: str = ""
    step: int = 0
    state: str = ""

    def __attrs_post_init__(self) -> None:
        shape = self.token_ids.shape
        for name in ("token_ids", "loss_mask", "logprobs", "policy_versions"):
            given = getattr(self, name).shape
            if len(given) != 1 or given != shape:
                expected = f"{shape}, as token_ids" if len(shape) == 1 else "one axis"
                raise ValueFault(f"rollout of task {self.task.id!r}: {name} has shape {given}; expected {expected}")
        for position, _ in self.rewards:
            if not 0 <= position < shape[0]:
                raise ValueFault(f"rollout of task {self.task.id!r}: a reward at token {position} of {shape[0]}")

    def __repr__(self) -> str:
        sampled = int(self.loss_mask.sum())
        return f"Rollout(task={self.task.id!r}, {self.status}, {sampled} of {len(self.token_ids)} tokens sampled)"

    @property
    def text(self) -> str:
        """The text of the last assistant message; empty if there is none."""
        return next((m.content for m in reversed(self.messages) if m.role == "assistant"), "")

    @property
    def response(self) -> str:
        """All that the policy wrote, over all turns, joined by line breaks."""
        return "\n".join(m.content for m in self.messages if m.role == "assistant")

    @property
    def span(self) -> tuple[int, int]:
        """(start, end) of the response: from the first sampled token to behind the last; (T, T) if none was."""
        sampled = self.loss_mask.nonzero()[0]
        total = len(self.token_ids)
        return (int(sampled[0]), int(sampled[-1]) + 1) if len(sampled) else (total, total)

    @classmethod
    def from_text(cls, task: Task, text: str, status: Status = "finished") -> Rollout:
        """A rollout for scoring without a model: no tokens, one assistant message.

        Args:
            task: The task that was answered.
            text: What the policy is taken to have written.
            status: How the generation ended.
        """
        prompt = (Message("user", task.prompt),) if isinstance(task.prompt, str) else task.prompt
        return cls(task, (*prompt, Message("assistant", text)), (), (), (), (), status)


def _float(value: Any) -> float:
    if isinstance(value, str):
        raise ValueFault(f"score value {value!r} is text; expected a number")
    return float(value)


@attrs.frozen(slots=False, getstate_setstate=False)
class Score(_Frozen):
    """What a reward says of a rollout.

    Attributes:
        value: The reward; finite where valid.
        valid: False: the scorer failed. Such a rollout is left out of the baseline and of the loss; it is never a zero.
        metrics: Numbers to log (the parts of a sum among them).
        reason: Why it is invalid, or low.
        token_rewards: (token position, value) pairs whose sum is `value`, or None: all of it on the last sampled token.
    """

    value: float = attrs.field(converter=_float)
    valid: bool = True
    metrics: Mapping[str, float] = attrs.field(factory=dict, converter=_frozen_mapping)
    reason: str = ""
    token_rewards: tuple[tuple[int, float], ...] | None = attrs.field(default=None, converter=_maybe_pairs)

    def __attrs_post_init__(self) -> None:
        if self.valid and not math.isfinite(self.value):
            raise ValueFault(f"a valid score must be finite, got {self.value}; give valid=False and a reason")

    @classmethod
    def invalid(cls, reason: str) -> Score:
        """The score of a rollout that could not be scored."""
        return cls(0.0, valid=False, reason=reason)


def _rollouts(value: Iterable[Rollout]) -> tuple[Rollout, ...]:
    return tuple(value)


def _scores(value: Iterable[Score]) -> tuple[Score, ...]:
    return tuple(value)


@attrs.frozen(eq=False)
class Group:
    """The rollouts of one task that share a baseline, with their scores, in the same order."""

    task: Task
    rollouts: tuple[Rollout, ...] = attrs.field(converter=_rollouts)
    scores: tuple[Score, ...] = attrs.field(converter=_scores)

    def __attrs_post_init__(self) -> None:
        if len(self.rollouts) != len(self.scores):
            counts = f"{len(self.rollouts)} rollouts, {len(self.scores)} scores"
            raise ValueFault(f"group of task {self.task.id!r}: {counts}; expected as many of one as of the other")

    def __len__(self) -> int:
        return len(self.rollouts)

    @cached_property
    def oldest_version(self) -> int | None:
        """The least version of weights that sampled a trained token; None if none was sampled, as in demonstrations."""
        import numpy as np

        if not self.rollouts:
            return None
        versions = np.concatenate([r.policy_versions for r in self.rollouts])
        sampled = versions[np.concatenate([r.loss_mask for r in self.rollouts]) & (versions >= 0)]
        return int(sampled.min()) if len(sampled) else None


@attrs.frozen
class Observation:
    """What an environment shows: text, and a key that equal states share."""

    text: str
    state: str = ""


@attrs.frozen(slots=False, getstate_setstate=False)
class Step(_Frozen):
    """What an environment answers to an action."""

    observation: Observation
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    metrics: Mapping[str, float] = attrs.field(factory=dict, converter=_frozen_mapping)
