"""Results of conformance checks, one per property and component, collected in a report; and their time limit."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any, Generic, Literal, TypeVar

import attrs

from rlsdk.errors import ConformanceFault
from rlsdk.kinds import Kind

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
