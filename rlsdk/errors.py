"""The exception tree: every error that rlsdk raises on purpose is an `RlsdkError`.

A message says what was given, what was expected, where, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any


class RlsdkError(Exception):
    """Base of all errors raised by rlsdk."""


class EnvironmentFault(RlsdkError):
    """The machine cannot run what was asked: a wrong build, no compiler, no space, no device."""


class ConfigError(RlsdkError):
    """A run's configuration is wrong; `faults` holds every fault found, not only the first."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        count = len(self.faults)
        head = "the configuration has a fault" if count == 1 else f"the configuration has {count} faults"
        super().__init__("\n".join([f"{head}:", *(f"  - {fault}" for fault in self.faults)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return (ConfigError, (self.faults,))


class OptionError(RlsdkError):
    """Options of a component do not fit its schema; `faults` are (option path, sentence) pairs."""

    def __init__(self, component: str, faults: Iterable[tuple[str, str]]) -> None:
        self.component = component
        self.faults = tuple(faults)
        super().__init__("; ".join(f"{component}: {path}: {text}" for path, text in self.faults))

    def __reduce__(self) -> tuple[type[OptionError], tuple[str, tuple[tuple[str, str], ...]]]:
        return (OptionError, (self.component, self.faults))


class PluginError(RlsdkError):
    """A plugin cannot be found, imported or trusted."""


class UnknownComponentError(PluginError):
    """No component of that kind bears that name."""


class FingerprintError(PluginError):
    """A worker's copy of a plugin differs from the driver's."""


class ValueFault(RlsdkError, ValueError):
    """A value does not satisfy its contract (shape, dtype, range)."""


class MissingFieldError(RlsdkError, AttributeError):
    """A component reads an optional field that it did not declare with `needs`, or that nobody gave."""


class DataError(RlsdkError):
    """A task or a row of a data file cannot be used."""


class ScoringError(RlsdkError):
    """Too many rollouts could not be scored."""


class EngineError(RlsdkError):
    """Generation failed."""


class OutOfRoomError(RlsdkError):
    """A conversation fills the model's length: nothing more can be sampled, and the rollout ends as truncated."""


class WorldLostError(RlsdkError):
    """The worker that held a rollout's environment is gone; the rollout begins anew in another."""


class LearnerError(RlsdkError):
    """The learner failed."""


class CanaryError(RlsdkError):
    """Engine and learner disagree on the logprobs of the same tokens under the same weights."""


class CheckpointError(RlsdkError):
    """A checkpoint cannot be written, found or trusted."""


class RunError(RlsdkError):
    """A run failed; the message names the culprit (actor, step, task, plugin)."""


class ConformanceFault(RlsdkError):
    """A component lacks a property that its kind promises.

    Attributes:
        component: Kind, name and distribution.
        broken: Name of the property.
        demand: What the property demands.
        given: The input that shows it; empty where none is needed.
        expected: On that input.
        got: On that input.
        remedy: What to do.
    """

    def __init__(
        self, component: str, broken: str, *, demand: str, given: str, expected: str, got: str, remedy: str
    ) -> None:
        self.component, self.broken, self.demand = component, broken, demand
        self.given, self.expected, self.got, self.remedy = given, expected, got, remedy
        parts = {"input": given, "expected": expected, "got": got, "what to do": remedy}
        shown = [f"  {name}: {_indented(text)}" for name, text in parts.items() if text]
        super().__init__("\n".join([f"{component} breaks {broken}: {demand}", *shown]))

    def __reduce__(self) -> tuple[Any, ...]:
        named = {name: getattr(self, name) for name in ("demand", "given", "expected", "got", "remedy")}
        return (partial(ConformanceFault, **named), (self.component, self.broken))


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")
