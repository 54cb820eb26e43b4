"""Properties of every component, whatever its kind: how it is found, sent, documented and made."""

from __future__ import annotations

import pickle
from typing import Any

import attrs

from rlsdk.errors import OptionError
from rlsdk.kinds import KINDS
from rlsdk.options import Computed, structure
from rlsdk.testing.findings import Violated
from rlsdk.testing.properties.base import holds
from rlsdk.testing.signatures import fault_of
from rlsdk.testing.subject import Subject


@holds(
    "picklable-by-reference",
    *KINDS,
    remedy="define it at the top level of its module, under the name that its def or class statement gives it",
    makes=False,
)
def picklable(subject: Subject, _: Any) -> None:
    """A pickle holds its name alone, and gives the object itself back in every process."""
    obj = subject.component.obj
    where = f"{obj.__module__}.{obj.__qualname__}"
    try:
        found = pickle.loads(pickle.dumps(obj))  # noqa: S301 - our own bytes
    except Exception as error:  # pickle raises whatever the objects do
        raise Violated("form", f"{where}, found by its name", f"{type(error).__name__}: {error}") from error
    if found is not obj:
        raise Violated("form", f"{where}, found by its name", f"another object: {found!r}")


@holds(
    "options-documented",
    *KINDS,
    remedy="write what comes out in the docstring's first line, and a line `NAME: …` for each option under `Args:` "
    "(or under `Attributes:` of a class)",
    makes=False,
)
def documented(subject: Subject, _: Any) -> None:
    """The docstring says what it is, and explains each option."""
    if not subject.component.summary:
        raise Violated("form", "a docstring", "none")
    bare = [option.name for option in subject.own_options if not option.help]
    if bare:
        raise Violated("form", "a line for each option", f"none for {', '.join(bare)}")


@holds(
    "defaults-valid",
    *KINDS,
    remedy="make each default a value of the type that the option is annotated with, and all of them together "
    "something that the component accepts",
    makes=False,
)
def defaults_valid(subject: Subject, _: Any) -> None:
    """Each default has its option's type, and with the defaults it can be made."""
    for option in subject.own_options:
        if option.required or isinstance(option.default, Computed) or attrs.has(type(option.default)):
            continue  # a value object: its class checked it when it was made
        _, faults = structure(option.default, option.type)
        if faults:
            text = "; ".join(f"{option.name}{path}: {sentence}" for path, sentence in faults)
            raise Violated("form", f"{option.name}: {option.type_name}", text)
    if subject.missing:
        return
    try:
        subject.make()
    except OptionError as error:
        raise Violated("form", "something ready to run", str(error)) from error
    except Exception as error:
        raise Violated("form", "something ready to run", f"{type(error).__name__}: {error}") from error


@holds(
    "contract",
    *KINDS,
    remedy="see the table of kinds in the documentation (design, kinds and their contracts) for what is called, and "
    "with what",
    makes=False,
)
def contract(subject: Subject, _: Any) -> None:
    """It has what its kind is called by: its parameters, or its methods."""
    fault = fault_of(subject.component)
    if fault:
        raise Violated("form", *fault)
