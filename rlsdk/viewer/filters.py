"""Filters for lists of stored rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from rlsdk.errors import ValueFault

Order = Literal["newest", "oldest", "lowest", "highest", "longest", "shortest"]
ORDERS: tuple[Order, ...] = ("newest", "oldest", "lowest", "highest", "longest", "shortest")
_TEXT = 300
"""Maximum length of a search text."""


@attrs.frozen(kw_only=True)
class Filter:
    """Conditions on rollouts; omitted ones always hold.

    Attributes:
        kind: Training rollouts or evaluation rollouts.
        source: Name of the task source.
        task: Id of the task.
        state: State of the group, such as `trained`.
        status: Status of the rollout, such as `truncated`.
        step_from: Minimum step.
        step_to: Maximum step.
        reward_from: Minimum reward.
        reward_to: Maximum reward.
        invalid: True to list only rollouts without a valid score.
        text: Text in prompt or response, ignoring case.
        order: Order of the list.
    """

    kind: Literal["train", "eval"] = "train"
    source: str = ""
    task: str = ""
    state: str = ""
    status: str = ""
    step_from: int | None = None
    step_to: int | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    invalid: bool = False
    text: str = ""
    order: Order = "newest"

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Filter:
        """Read the parameters of a URL.

        Raises:
            ValueFault: A parameter is invalid.
        """
        read: dict[str, Any] = {name: given[name] for name in ("source", "task", "state", "status") if given.get(name)}
        for names, kind in ((("step_from", "step_to"), int), (("reward_from", "reward_to"), float)):
            for name in names:
                if text := given.get(name, "").strip():
                    read[name] = _number(name, text, kind)
        if given.get("kind") == "eval":
            read["kind"] = "eval"
        order = given.get("order") or "newest"
        if order not in ORDERS:
            raise ValueFault(f"order is {order!r}; expected one of {', '.join(ORDERS)}")
        return cls(**read, order=order, invalid=given.get("invalid") == "1", text=given.get("text", "")[:_TEXT])


def _number(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        expected = "a whole number" if kind is int else "a number"
        raise ValueFault(f"{name} is {text!r}; expected {expected}") from error
