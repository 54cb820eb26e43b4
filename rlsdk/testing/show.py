"""Format inputs and results for messages."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from rlsdk.plurals import counted
from rlsdk.testing.findings import Case
from rlsdk.types import Group, Rollout

if TYPE_CHECKING:
    from torch import Tensor

    from rlsdk.batch import CreditInputs, LossInputs

MANY = 16
"""Maximum number of values shown in full; texts are shown in full up to four times as many characters."""
_SINGULAR = {"rewards": "reward", "groups": "group", "pairs": "pair", "trajectories": "trajectory"}


def show(case: Case[Any] | None) -> str:
    """Describe an input; empty if there is none."""
    if case is None:
        return ""
    return "\n".join(filter(None, [case.title, content(case.value)]))


def content(value: Any) -> str:
    """Format a value without its title."""
    if is_batch(value):
        return _batch(value)
    if isinstance(value, Group):
        return _group(value)
    if isinstance(value, Rollout):
        return f"task with answer {value.task.answer!r}, response {text(value.text)}"
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Sequence):
        return "\n".join(content(each) for each in value)
    return ""  # the title is enough


def text(value: str) -> str:
    """Format a text like Python; a long repetition becomes the repeated part and its count."""
    if len(value) <= 4 * MANY:
        return repr(value)
    for size in range(1, 4 * MANY):
        times = len(value) // size
        if value == value[:size] * times:
            return f"{value[:size]!r} × {times:,}"
    return f"{value[: 2 * MANY]!r}… ({len(value):,} characters)"


def numbers(values: Tensor) -> str:
    """Format a tensor with its dtype, abbreviated if long."""
    dtype = str(values.dtype).removeprefix("torch.")
    return f"{_row(values.detach())} ({dtype})" if values.dim() else f"{_number(values.item())} ({dtype})"


def is_batch(value: Any) -> TypeGuard[CreditInputs | LossInputs]:
    """Return True for packed tensors, without importing torch, which checks of rewards and workflows do not need."""
    batch = sys.modules.get("rlsdk.batch")
    return batch is not None and isinstance(value, batch.CreditInputs | batch.LossInputs)


def _is_tensor(value: Any) -> TypeGuard[Tensor]:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _batch(x: CreditInputs | LossInputs) -> str:
    from rlsdk.batch import CreditInputs
    from rlsdk.testing.parts import lengths_of

    lengths = lengths_of(x)
    starts = (lengths.cumsum(0) - lengths).tolist()
    floats = x.rewards if isinstance(x, CreditInputs) else x.logprobs
    dtype = str(floats.dtype).removeprefix("torch.")
    fields = {name: value for name, value in vars(x).items() if not name.startswith("_")}
    lines = [f"{type(x).__name__}: {counted(len(lengths), 'rollout')}, {counted(len(x.loss_mask), 'token')}, {dtype}"]
    for row, (start, length) in enumerate(zip(starts, lengths.tolist(), strict=True)):
        shown = [_field(name, value, x, row, slice(start, start + length)) for name, value in fields.items()]
        lines.append(f"rollout {row}: {', '.join(filter(None, shown))}")
    return "\n".join(lines)


def _field(name: str, value: Any, x: CreditInputs | LossInputs, row: int, span: slice) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}[{key!r}] {_number(part[row].item())}" for key, part in value.items())
    from rlsdk.testing.parts import PER_ROLLOUT

    if not _is_tensor(value) or name in ("segments", "lengths"):
        return ""
    if name in PER_ROLLOUT:
        return f"{_SINGULAR.get(name, name)} {_number(value[row].item())}"
    return f"{name} {_row(value[span])}"


def _group(group: Group) -> str:
    scores = [f"{s.value:g}" if s.valid else "invalid" for s in group.scores]
    statuses = [rollout.status for rollout in group.rollouts]
    lines = [f"rollout {i}: score {s}, {status}" for i, (s, status) in enumerate(zip(scores, statuses, strict=True))]
    return "\n".join([f"Group: {counted(len(group), 'rollout')}", *lines])


def _row(values: Tensor) -> str:
    listed = [_number(value) for value in values[:MANY].flatten().tolist()]
    more = f" … {len(values):,} in total" if len(values) > MANY else ""
    return f"[{' '.join(listed)}{more}]"


def _number(value: float | bool) -> str:
    return str(int(value)) if isinstance(value, bool) else f"{value:.4g}"


def shape(value: Any) -> str:
    """Describe a result: a tensor's shape and dtype, or a type."""
    if _is_tensor(value):
        held = "" if str(value.layout) == "torch.strided" else "sparse "
        there = "" if value.device.type == "cpu" else f" on {value.device}, not on the inputs' cpu"
        return f"a {held}tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}{there}"
    if isinstance(value, tuple):
        return f"({', '.join(shape(each) for each in value)})"
    return f"{value!r}" if isinstance(value, str | bool | int | float | None) else f"a {type(value).__name__}"
