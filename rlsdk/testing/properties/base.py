"""Definition of a property: a named rule, the kinds it applies to, and its inputs."""

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
    """Return the single input of rules that examine only the component."""
    return (None,)


@attrs.frozen(eq=False)
class Property:
    """A property required of components of some kinds.

    Attributes:
        name: Short name, such as `micro-batches`.
        kinds: Kinds whose components must have it.
        rule: Function that raises `Violated` on an input that violates it, `NotApplicable` on an inconclusive one.
        inputs: Inputs to test the rule on.
        remedy: Advice for a component that lacks the property.
        after: Properties that must hold for this one to be meaningful.
        makes: True if the component must be instantiated, which requires its options.
        trims: True if batches contain only fields that the component declared.
        only: Predicate that selects components among these kinds.
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
        """The requirement in one sentence: the first paragraph of the rule's docstring."""
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
    """Turn a rule into a property; the rule's docstring begins with the requirement."""

    def make(rule: Rule) -> Property:
        return Property(name, kinds, rule, inputs, remedy, after, makes, trims, only)

    return make
