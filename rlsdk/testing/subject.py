"""A component under check: made anew for each call, with what it raises told apart from faults of the suite."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlsdk.batch import CreditInputs, LossInputs
from rlsdk.components import Component
from rlsdk.errors import MissingFieldError
from rlsdk.options import Option
from rlsdk.plugins import CORE, Plugins
from rlsdk.testing.findings import Violated
from rlsdk.types import Task

SUPPLIED: Mapping[str, Mapping[str, Any]] = {
    "buffer": {"step": 3, "uses": 0},
    "stop": {"available": 3, "target": 8},
}
"""What stands for the keyword arguments that rlsdk gives at each call (`components.SUPPLIED`)."""
GIVEN: Mapping[str, Mapping[str, Any]] = {"tasks": {"split": "train"}}
"""Options that every component of a kind has, where nobody chose a value."""


@attrs.frozen(eq=False, slots=False)
class Subject:
    """A component with the options it is checked with.

    Attributes:
        component: What is checked.
        given: Its options; what is left out keeps its default.
        plugin: The plugin's name; empty for an object that was handed over by itself.
        origin: Distribution and version, or file.
        plugins: Where the parts of an algorithm are looked for.
        tasks: Tasks that its rewards can score, tried before the suite's own.
        declares: Whether it reads no more than it declared; if not, one property says so, and batches for the others
            hold every field.
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
        """What it is made with."""
        known = {option.name for option in self.own_options if option.required}
        usual = GIVEN.get(self.component.kind, {})
        return {**{name: value for name, value in usual.items() if name in known}, **self.given}

    @functools.cached_property
    def missing(self) -> tuple[Option, ...]:
        """Options that nobody gave a value."""
        return tuple(option for option in self.own_options if option.required and option.name not in self.options)

    def make(self) -> Callable[..., Any]:
        """What is ready to run: new each time, so that nothing is remembered between two inputs.

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
        except Exception as error:
            raise raised(error, self.component.obj) from error

    def trimmed(self, x: Any) -> Any:
        """A batch with the optional fields that the component declared, as a training gives it."""
        if not (self.declares and isinstance(x, CreditInputs | LossInputs)):
            return x
        return x.only(("ref_logprobs",) if self.component.kind == "kl" else self.component.needs)


def raised(error: Exception, obj: Any) -> Violated:
    """What a component raised, and the last line of its own module that led there."""
    frames = traceback.extract_tb(error.__traceback__)
    own = getattr(sys.modules.get(obj.__module__), "__file__", None)
    last = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1] if frames else None)
    where = f" ({Path(last.filename).name}, line {last.lineno})" if last else ""
    return Violated("raised", "a result", f"{type(error).__name__}: {error}{where}")


def undeclared(error: Violated) -> str:
    """The message of a read of a field that was not declared; empty if the cause is another."""
    return str(error.__cause__) if isinstance(error.__cause__, MissingFieldError) else ""
