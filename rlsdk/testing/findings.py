"""Results of conformance checks, one per property and component, collected in a report; how inputs are shown."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeGuard, TypeVar

import attrs

from rlsdk.errors import ConformanceFault
from rlsdk.kinds import Kind
from rlsdk.plurals import counted
from rlsdk.types import Group, Rollout

if TYPE_CHECKING:
    from torch import Tensor

    from rlsdk.batch import CreditInputs, LossInputs

Outcome = Literal["passed", "failed", "skipped"]
T = TypeVar("T")


@attrs.frozen(eq=False)
class Case(Generic[T]):
    """An input with a title that describes it."""

    title: str
    value: T


class Violated(Exception):
    """A rule does not hold on an input.

    Attributes:
        sort: raised, form, value or changed; inputs are only shrunk to ones that violate the rule in the same way.
        expected: Expected result.
        got: Actual result.
    """

    def __init__(self, sort: str, expected: str, got: str) -> None:
        super().__init__(f"expected {expected}; got {got}")
        self.sort, self.expected, self.got = sort, expected, got


class NotApplicable(Exception):
    """A rule does not apply to this component, for the reason in the message."""


@attrs.frozen
class PropertyResult:
    """Outcome of one property of one component.

    Attributes:
        kind: Kind of the component.
        component: Name of the component as in a config.
        rule: Name of the property.
        outcome: passed, failed or skipped.
        reason: Reason for skipping the property.
        fault: The failure, with an input that shows it.
    """

    kind: Kind
    component: str
    rule: str
    outcome: Outcome
    reason: str = ""
    fault: ConformanceFault | None = None

    def describe(self) -> dict[str, Any]:
        """Convert the result to plain values."""
        held = {"kind": self.kind, "component": self.component, "property": self.rule, "outcome": self.outcome}
        if self.fault is None:
            return {**held, **({"reason": self.reason} if self.reason else {})}
        parts = ("demand", "given", "expected", "got", "remedy")
        return {**held, **{name: getattr(self.fault, name) for name in parts}}


@attrs.frozen
class Report:
    """Results for all components of a plugin.

    Attributes:
        plugin: Name of the plugin.
        origin: Distribution and version, or file.
        findings: Results, component by component.
        broken: Kinds whose modules cannot be imported -> the cause.
    """

    plugin: str
    origin: str
    findings: tuple[PropertyResult, ...]
    broken: dict[str, str] = attrs.field(factory=dict)

    @property
    def failed(self) -> tuple[PropertyResult, ...]:
        """The results that failed."""
        return tuple(finding for finding in self.findings if finding.outcome == "failed")

    @property
    def conforms(self) -> bool:
        """True if nothing failed; skipped properties do not count as failures."""
        return not self.failed and not self.broken

    def counts(self) -> dict[Outcome, int]:
        """Number of results per outcome."""
        counted = Counter(finding.outcome for finding in self.findings)
        return {outcome: counted[outcome] for outcome in ("passed", "failed", "skipped")}

    def by_component(self) -> dict[tuple[Kind, str], tuple[PropertyResult, ...]]:
        """Results by (kind, name), in order."""
        keys = dict.fromkeys((f.kind, f.component) for f in self.findings)
        return {key: tuple(f for f in self.findings if (f.kind, f.component) == key) for key in keys}

    def describe(self) -> dict[str, Any]:
        """Convert the report to plain values."""
        return {
            "plugin": self.plugin,
            "origin": self.origin,
            "conforms": self.conforms,
            "counts": self.counts(),
            "broken": self.broken,
            "findings": [finding.describe() for finding in self.findings],
        }


class _OutOfTime(BaseException):
    """Not an `Exception`, so that the interrupted code cannot catch it and continue."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt a block after a number of seconds, unless an enclosing limit ends sooner.

    Where signals cannot do that (outside the main thread, on Windows), only report afterwards that it was too slow.

    Raises:
        Violated: The block took longer.
    """
    can_interrupt = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    nested = can_interrupt and signal.getsignal(signal.SIGALRM) is _ring
    if nested and 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= seconds:
        yield  # the enclosing limit ends the block
        return
    begun = time.monotonic()
    late = Violated("late", f"an answer within {seconds:g} s", "none")
    try:
        with _alarm(seconds) if can_interrupt else contextlib.nullcontext():
            yield
    except _OutOfTime:
        raise late from None
    except BaseExceptionGroup as error:  # the alarm rang in a task of a TaskGroup
        if error.subgroup(_OutOfTime) is None:
            raise
        raise late from None
    if time.monotonic() - begun > seconds:
        raise late


def _ring(_: int, __: FrameType | None) -> None:
    raise _OutOfTime


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise after `seconds`; an alarm that was already set rings afterwards."""
    before = signal.signal(signal.SIGALRM, _ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    begun = time.monotonic()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - begun), 0.001), interval)


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
    from rlsdk.testing.inputs import lengths_of

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
    from rlsdk.testing.inputs import PER_ROLLOUT

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
