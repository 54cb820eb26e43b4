"""Definition of a property: a named rule, the kinds that it applies to, and the inputs that it is tried on."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import attrs

from rlsdk.components import Component
from rlsdk.kinds import Kind
from rlsdk.testing.findings import Case
from rlsdk.testing.subject import Subject

Rule = Callable[[Subject, Any], None]
Inputs = Callable[[Subject], Iterable[Case[Any] | None]]
CREDIT: tuple[Kind, ...] = ("advantage", "shaping")
LOSSES: tuple[Kind, ...] = ("policy_loss", "correction", "kl")


def _any(_: Component) -> bool:
    return True


def no_input(_: Subject) -> Iterable[Case[Any] | None]:
    """Return the single input of rules that look only at the component."""
    return (None,)


@attrs.frozen(eq=False)
class Property:
    """A property that components of some kinds have.

    Attributes:
        name: Short name, such as `micro-batches`.
        kinds: Kinds whose components must have it.
        rule: Function that raises `Violated` on an input that breaks it, `NotApplicable` on one that cannot tell.
        inputs: Inputs that it is tried on.
        remedy: Advice for a component that lacks it.
        after: Properties that must hold first for this one to mean anything.
        makes: True if the component must be instantiated, and so needs its options.
        trims: True if batches hold only the fields that the component declared.
        only: Predicate that selects the components of these kinds it applies to.
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
        """The demand in one sentence: the first paragraph of the rule's docstring."""
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
