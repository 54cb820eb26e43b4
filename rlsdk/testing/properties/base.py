"""What a property is: a rule with a name, the kinds that it is for, and the inputs that it is tried on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from rlsdk.components import Component, Kind
from rlsdk.testing.inputs import Case
from rlsdk.testing.subject import Subject

Rule = Callable[[Subject, Any], None]
Inputs = Callable[[Subject], Iterable[Case[Any] | None]]
CREDIT: tuple[Kind, ...] = ("advantage", "shaping")
LOSSES: tuple[Kind, ...] = ("policy_loss", "correction", "kl")


def _any(_: Component) -> bool:
    return True


def no_input(_: Subject) -> Iterable[Case[Any] | None]:
    """For rules that look at the component alone."""
    return (None,)


@attrs.frozen(eq=False)
class Property:
    """A property that components of some kinds have.

    Attributes:
        name: Short, such as `micro-batches`.
        kinds: Whose components have it.
        rule: Raises `Violated` where an input shows that a component lacks it, `NotApplicable` where it says nothing.
        inputs: What it is tried on.
        remedy: What to do about a component that lacks it.
        after: Properties without which this one says nothing.
        makes: Whether the component must be made, and so needs its options.
        trims: Whether batches hold only the fields that the component declared.
        only: Which components of these kinds it is for.
    """

    name: str
    kinds: tuple[Kind, ...]
    rule: Rule
    inputs: Inputs = no_input
    remedy: str = ""
    after: tuple[str, ...] = ()
    makes: bool = True
    trims: bool = True
    only: Callable[[Component], bool] = _any

    @property
    def demand(self) -> str:
        """What it demands, in one sentence."""
        return " ".join((inspect.getdoc(self.rule) or "").split("\n\n")[0].split())


def holds(
    name: str,
    *kinds: Kind,
    inputs: Inputs = no_input,
    remedy: str,
    after: tuple[str, ...] = (),
    makes: bool = True,
    trims: bool = True,
    only: Callable[[Component], bool] = _any,
) -> Callable[[Rule], Property]:
    """Make a rule a property; its docstring begins with what it demands."""

    def make(rule: Rule) -> Property:
        return Property(name, kinds, rule, inputs, remedy, after, makes, trims, only)

    return make
