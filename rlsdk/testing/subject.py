"""A component under test: instantiated for each call, with its exceptions separated from faults of the suite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from rlsdk.components import Component
from rlsdk.errors import MissingFieldError, described
from rlsdk.options import Option
from rlsdk.plugins import CORE, Plugins
from rlsdk.testing.findings import Violated, is_batch, time_limit
from rlsdk.types import Task

SUPPLIED: Mapping[str, Mapping[str, Any]] = {
    "buffer": {"step": 3, "uses": 0},
    "stop": {"available": 3, "target": 8},
}
"""Test values of the keyword arguments that rlsdk passes with each call (`components.SUPPLIED`)."""
CALL_SECONDS = 60.0
"""Time limit in seconds of one call with a small input."""
SOURCE_SECONDS = 600.0
"""Time limit in seconds of one call of a task source, which may have to download its data."""
GIVEN: Mapping[str, Mapping[str, Any]] = {"tasks": {"split": "train"}}
"""Default options for all components of a kind."""


@attrs.frozen(eq=False, slots=False)
class Subject:
    """A component with the options for its check.

    Attributes:
        component: Component to check.
        given: Given options; others keep their defaults.
        plugin: Name of the plugin; empty for an object that was passed directly.
        origin: Distribution and version, or file.
        plugins: Plugins in which the parts of an algorithm are looked up.
        tasks: Tasks that the rewards can score, tried before the suite's own.
        declares: True if the component reads only fields that it declared; otherwise, one property fails, and batches
            for the others have all fields.
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
        """The component's name in a config."""
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
        """Required options without a value."""
        return tuple(option for option in self.own_options if option.required and option.name not in self.options)

    def make(self) -> Callable[..., Any]:
        """Create a new instance of the component, so that no state carries over between inputs.

        Raises:
            OptionError: The options are invalid.
        """
        made = self.component.bind(self.options)
        supplied = SUPPLIED.get(self.component.kind)
        return functools.partial(made, **supplied) if supplied else made

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the component's code.

        Raises:
            Violated: The code raised an exception, or did not end.
        """
        try:
            with time_limit(SOURCE_SECONDS if self.component.kind == "tasks" else CALL_SECONDS):
                return function(*arguments)
        except Violated:
            raise
        except (Exception, SystemExit) as error:  # code of a plugin that calls sys.exit must not end the check
            raise Violated("raised", "a result", described(error)) from error

    def trimmed(self, x: Any) -> Any:
        """Return a batch with only the optional fields that the component declared, as in training."""
        if not is_batch(x):
            return x
        for i, field in enumerate(self.component.fields):  # from each token's own numbers, however a batch is split
            if field.name in x.extra:
                continue  # a smaller input, taken from one that had them
            low, high = field.sample
            share = (x.logprobs.detach() * (0.37 + 0.11 * i)) % 1.0
            x = x.with_extra(**{field.name: low + (high - low) * share})
        if not self.declares:
            return x
        return x.only(("ref_logprobs",) if self.component.kind == "kl" else self.component.needs)


def undeclared(error: Violated) -> str:
    """Return the message about reading an undeclared field; empty if the rule was violated in another way."""
    return str(error.__cause__) if isinstance(error.__cause__, MissingFieldError) else ""
