"""Schedules: numbers that change over the training, in place of any float option of a part that learns.

`clip_high: {from: 0.4, to: 0.2, over: 100}` is 0.4 at the first training step, 0.2 from the 101st on, and linear in
between. A schedule depends only on the training step, so that a resumed run continues where it stopped.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import attrs

from rlsdk.errors import OptionError, PluginError
from rlsdk.limits import Count, NonNegative, Positive
from rlsdk.options import MISSING, Fault, Option, check_options, options_of

if TYPE_CHECKING:
    from rlsdk.components import Component

Shape = Literal["linear", "cosine"]


@attrs.frozen
class Schedule:
    """A number that changes over the training.

    Attributes:
        start: Value at the first training step; `from` in a configuration.
        to: Value after `over` training steps and later.
        over: Number of training steps for the change.
        shape: linear, or cosine: half a cosine wave, slow at both ends.
    """

    start: float
    to: float
    over: int
    shape: Shape = "linear"

    def at(self, train_step: int) -> float:
        """Return the value after this number of training steps."""
        share = min(train_step / self.over, 1.0)
        if self.shape == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        return self.to if share == 1 else self.start + share * (self.to - self.start)

    def __str__(self) -> str:
        shape = "" if self.shape == "linear" else f", {self.shape}"
        return f"{self.start:g} to {self.to:g} over {self.over} steps{shape}"


@attrs.frozen(kw_only=True)
class EntropyTarget:
    """A weight of the entropy bonus that follows the measured entropy, in place of a number or a schedule.

    After each optimiser step it rises by `delta` if the entropy was at most the target, and else falls by it. The bonus
    is left out of the loss while the entropy is above the target, and in the first optimiser step, before it is known.
    Paper: Skywork-OR1, arXiv:2505.22312 (adaptive entropy control); as in TRL, updated per optimiser step.
    Formula: `c ← clip(c + δ, min, max)` if `H ≤ target`, else `clip(c - δ, min, max)`; `α = c` if `H ≤ target`, else 0;
    `loss - α · H`. `H` is the mean entropy of the trained tokens of the optimiser step before.

    Attributes:
        target: Entropy to hold, in nats per token.
        delta: Change of the weight per optimiser step.
        initial: Weight before the first optimiser step.
        min: Minimum weight.
        max: Maximum weight.
    """

    target: Positive
    delta: Positive = 0.005
    initial: NonNegative = 0.0
    min: NonNegative = 0.0
    max: Positive = 1.0

    def __attrs_post_init__(self) -> None:
        if not self.min <= self.initial <= self.max:
            bounds = f"min={self.min:g} to max={self.max:g}"
            raise ValueError(f"expected a weight from {bounds}, got {self.initial:g}")

    def __str__(self) -> str:
        return (
            f"{self.min:g} to {self.max:g}, from {self.initial:g} in steps of {self.delta:g}, for an entropy of "
            f"{self.target:g} nats"
        )


def at(value: Any, train_step: int) -> Any:
    """Evaluate a `Schedule`, or a component with scheduled options, at a training step; other values are unchanged."""
    return value.at(train_step) if isinstance(value, Schedule | Scheduled) else value


def number_of(kind: Any) -> Any:
    """Return the float in an option's type, with its limits, that a schedule may replace; None if there is none."""
    arms = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    plain = [get_args(arm)[0] if get_origin(arm) is Annotated else arm for arm in arms]
    if not set(plain) <= {float, int, type(None)}:
        return None
    return next((arm for arm, bare in zip(arms, plain, strict=True) if bare is float), None)


def schedules_in(options: Iterable[Option], given: Mapping[str, Any]) -> tuple[dict[str, Schedule], list[Fault]]:
    """Return the schedules among the given option values, and their faults."""
    numbers = {option.name: number_of(option.type) for option in options if option.schedule}
    found: dict[str, Schedule] = {}
    faults: list[Fault] = []
    for name, value in given.items():
        if name not in numbers or not isinstance(value, Mapping):
            continue
        keys = (
            *(Option(end, numbers[name], MISSING) for end in ("from", "to")),
            Option("over", Count, MISSING),
            Option("shape", Shape, "linear"),
        )
        values, wrong = check_options(keys, value)
        ends = {end: values[end] for end in ("from", "to") if isinstance(values.get(end), float)}
        wrong += [(end, f"expected a finite number, got {v}") for end, v in ends.items() if not math.isfinite(v)]
        if wrong:
            faults += [(f"{name}.{below}", text) for below, text in wrong]
        else:
            found[name] = Schedule(values.pop("from"), **values)
    return found, faults


def entropy_target(given: Any) -> tuple[EntropyTarget | None, list[Fault]]:
    """Return the target in an algorithm's `entropy_coef`, and its faults; neither for a number or a schedule."""
    options = options_of(EntropyTarget)
    if not (isinstance(given, Mapping) and any(option.name in given for option in options)):
        return None, []
    values, faults = check_options(options, given)
    if not faults:
        try:
            return EntropyTarget(**values), []
        except ValueError as error:
            faults = [("initial", str(error))]
    return None, [(f"entropy_coef.{below}", text) for below, text in faults]


def with_greatest(options: Mapping[str, Any], schedules: Mapping[str, Schedule]) -> dict[str, Any]:
    """Return the options with each schedule replaced by its maximum, to check whether an option ever takes effect."""
    return {**options, **{name: max(each.start, each.to) for name, each in schedules.items()}}


class Scheduled:
    """A component with scheduled options, recreated for each training step with its state preserved.

    It reads the training step from its inputs. Other attributes, such as `state` and `restore`, are those of the most
    recently created component.
    """

    def __init__(
        self, component: Component, make: Callable[[Mapping[str, float]], Any], schedules: Mapping[str, Schedule]
    ) -> None:
        """Create the component for the first training step.

        Raises:
            OptionError: The component rejects one of the values, or a scheduled option sets its initial state.
        """
        self.component = component
        self.schedules = dict(schedules)
        self._make, self._train_step = make, 0
        self._made = self._values_at(0)
        if remembered := [name for name in schedules if self._remembers(name)]:
            cause = "only sets the component's initial state, so a schedule would change nothing; give a number"
            raise OptionError(f"{component.kind} {component.name!r}", [(name, cause) for name in remembered])

    def _remembers(self, name: str) -> bool:
        """Return whether the scheduled option changes the component's initial state."""
        last = self._make({n: each.to if n == name else each.start for n, each in self.schedules.items()})
        return hasattr(last, "state") and last.state() != self._made.state()

    def at(self, train_step: int) -> Any:
        """Return the component for a training step, ready to run."""
        if train_step != self._train_step:
            made = self._values_at(train_step)
            if hasattr(made, "restore"):
                made.restore(self._made.state())
            self._made, self._train_step = made, train_step
        return self._made

    def _values_at(self, train_step: int) -> Any:
        return self._make({name: each.at(train_step) for name, each in self.schedules.items()})

    def __call__(self, x: Any, **supplied: Any) -> Any:
        """Call the component for the training step of `x`.

        Raises:
            PluginError: `x` has no training step (a KL estimator gets plain tensors).
        """
        if not hasattr(x, "train_step"):
            what = f"{self.component.kind} {self.component.name!r}"
            raise PluginError(f"{what} has scheduled options; give the training step: .at(train_step)(…)")
        return self.at(x.train_step)(x, **supplied)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._made, name)
