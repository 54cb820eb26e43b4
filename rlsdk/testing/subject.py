"""A component under check: instantiated for each call; its exceptions are told apart from faults of the suite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from rlsdk.components import Component
from rlsdk.errors import MissingFieldError, described
from rlsdk.options import Option
from rlsdk.plugins import CORE, Plugins
from rlsdk.testing.findings import Violated
from rlsdk.testing.show import is_batch
from rlsdk.types import Task

SUPPLIED: Mapping[str, Mapping[str, Any]] = {
    "buffer": {"step": 3, "uses": 0},
    "stop": {"available": 3, "target": 8},
}
"""Test values of the keyword arguments that rlsdk passes with each call (`components.SUPPLIED`)."""
GIVEN: Mapping[str, Mapping[str, Any]] = {"tasks": {"split": "train"}}
"""Options that every component of a kind has, where nobody chose a value."""


@attrs.frozen(eq=False, slots=False)
class Subject:
    """A component with the options it is checked with.

    Attributes:
        component: Component to check.
        given: Options to check it with; others keep their defaults.
        plugin: Name of the plugin; empty for an object that was passed directly.
        origin: Distribution and version, or file.
        plugins: Plugins in which the parts of an algorithm are looked up.
        tasks: Tasks that its rewards can score, tried before the suite's own.
        declares: True if it only reads fields that it declared; if not, one property fails, and batches for the
            others hold every field.
    """

    component: Component
    given: Mapping[str, Any] = attrs.field(factory=dict)
    plugin: str = ""
    origin: str = ""
    plugins: Plugins = attrs.field(factory=Plugins)
    tasks: Sequence[Task] = ()
    declares: bool = True

    @property
    def name(self) -> str:
        """The name that a config writes."""
        return self.component.name if self.plugin in ("", CORE) else f"{self.plugin}/{self.component.name}"

    def __str__(self) -> str:
        return f"{self.component.kind} {self.name}" + (f" ({self.origin})" if self.origin else "")

    @functools.cached_property
    def own_options(self) -> tuple[Option, ...]:
        """The options that a config may set."""
        return self.component.options

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """Options that the component is instantiated with."""
        known = {option.name for option in self.own_options if option.required}
        usual = GIVEN.get(self.component.kind, {})
        return {**{name: value for name, value in usual.items() if name in known}, **self.given}

    @functools.cached_property
    def missing(self) -> tuple[Option, ...]:
        """Options that nobody gave a value."""
        return tuple(option for option in self.own_options if option.required and option.name not in self.options)

    def make(self) -> Callable[..., Any]:
        """Instantiate the component; each call is new, so that nothing carries over between inputs.

        Raises:
            OptionError: Its options are wrong.
        """
        made = self.component.bind(self.options)
        supplied = SUPPLIED.get(self.component.kind)
        return functools.partial(made, **supplied) if supplied else made

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the component's code.

        Raises:
            Violated: It raised.
        """
        try:
            return function(*arguments)
        except Violated:
            raise
        except (Exception, SystemExit) as error:  # code of a plugin that calls sys.exit must not end the check
            raise Violated("raised", "a result", described(error)) from error

    def trimmed(self, x: Any) -> Any:
        """A batch with the optional fields that the component declared, as a training gives it."""
        if not is_batch(x):
            return x
        for i, field in enumerate(self.component.fields):  # of the token's own numbers, however a batch is divided
            if field.name in x.extra:
                continue  # a smaller input, cut from one that had them
            low, high = field.sample
            share = (x.logprobs.detach() * (0.37 + 0.11 * i)) % 1.0
            x = x.with_extra(**{field.name: low + (high - low) * share})
        if not self.declares:
            return x
        return x.only(("ref_logprobs",) if self.component.kind == "kl" else self.component.needs)


def undeclared(error: Violated) -> str:
    """The message of a read of an undeclared field; empty if the rule was broken in another way."""
    return str(error.__cause__) if isinstance(error.__cause__, MissingFieldError) else ""
