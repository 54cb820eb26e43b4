"""The exception hierarchy: every error that rlsdk raises on purpose is an `RlsdkError`.

Each message states what was given, what was expected, where, and what to do.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import traceback
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from attrs.exceptions import FrozenInstanceError

__all__ = [
    "CanaryError",
    "CheckpointError",
    "ConfigError",
    "ConformanceFault",
    "DamagedCheckpointError",
    "DataError",
    "EngineError",
    "EnvironmentFault",
    "FingerprintError",
    "LearnerError",
    "MissingFieldError",
    "OptionError",
    "OutOfRoomError",
    "PluginError",
    "RefusedMessagesError",
    "RlsdkError",
    "RunError",
    "ScoringError",
    "UnknownComponentError",
    "UnreachableDataError",
    "ValueFault",
    "WorldLostError",
]
FILE_PACKAGE = "_rlsdk_files"
"""Top-level name under which single-file plugins live in `sys.modules`."""
_CALLERS = frozenset({"rlsdk", "pluggy", "ray"}) | sys.stdlib_module_names
"""Packages whose frames call a plugin's code but are not part of it."""


class RlsdkError(Exception):
    """Base of all errors raised by rlsdk."""


class EnvironmentFault(RlsdkError):
    """The machine lacks a requirement: a wrong build, no compiler, no disk space, no device."""


class ConfigError(RlsdkError):
    """A run's configuration is invalid; `faults` lists all faults, not only the first."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(faults)
        count = len(self.faults)
        head = "the configuration has a fault" if count == 1 else f"the configuration has {count} faults"
        super().__init__("\n".join([f"{head}:", *(f"  - {fault}" for fault in self.faults)]))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[str, ...]]]:
        return (type(self), (self.faults,))


class ArgumentError(ConfigError):
    """An argument of a command is wrong."""

    def __str__(self) -> str:
        return "\n".join(self.faults)


class RefusedMessagesError(ConfigError):
    """The chat template, or another renderer, rejects a conversation, such as one with two successive user messages."""


class OptionError(RlsdkError):
    """Options of a component do not match its schema; `faults` are (option path, sentence) pairs.

    The path is empty if a fault is not about a single option.
    """

    def __init__(self, component: str, faults: Iterable[tuple[str, str]]) -> None:
        self.component = component
        self.faults = tuple(faults)
        super().__init__("; ".join(": ".join(filter(None, (component, *fault))) for fault in self.faults))

    def __reduce__(self) -> tuple[type[OptionError], tuple[str, tuple[tuple[str, str], ...]]]:
        return (OptionError, (self.component, self.faults))


def option_path(component: str, option: str) -> str:
    """Return the path of an option of the component at a path; without an option, the path of the component."""
    return f"{component}.{option}" if option else component


class PluginError(RlsdkError):
    """A plugin cannot be found, imported or trusted."""


class UnknownComponentError(PluginError):
    """No component has the given kind and name."""


class FingerprintError(PluginError):
    """A worker's copy of a plugin differs from the driver's."""


class ValueFault(RlsdkError, ValueError):
    """A value does not satisfy its contract (shape, dtype, range)."""


class MissingFieldError(RlsdkError, AttributeError):
    """A component reads an optional field that it did not declare with `needs`, or that is missing from the batch."""

    def read_by(self, component: str) -> MissingFieldError:
        """Return the error with the component's name and code line."""
        place = place_of(self)
        return MissingFieldError(f"{component}: {self}" + (f" ({place})" if place else ""))


class DataError(RlsdkError):
    """A task, or a row of a data file, cannot be used."""


class UnreachableDataError(DataError):
    """Data cannot be reached from this machine, but perhaps from another."""


class ScoringError(RlsdkError):
    """Too many trajectories could not be scored."""


class EngineError(RlsdkError):
    """Generation failed."""


class OutOfRoomError(RlsdkError):
    """A conversation has reached `model.max_length`: nothing more can be sampled, and the rollout is truncated."""


class WorldLostError(RlsdkError):
    """The worker that hosted a rollout's environment died; the rollout is restarted in another worker."""


class LearnerError(RlsdkError):
    """The learner failed."""


class TransferError(RlsdkError):
    """A weight transfer failed: a member died, disconnected, or kept the others waiting for too long."""


class CanaryError(RlsdkError):
    """Engine and learner disagree on the logprobs of the same tokens with the same weights."""


class CheckpointError(RlsdkError):
    """A checkpoint cannot be written, found or trusted."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, or differs from what was written."""


class RunError(RlsdkError):
    """A run failed; the message names the cause (actor, step, task, plugin)."""


class ConformanceFault(RlsdkError):
    """A component violates a property of its kind's contract.

    Attributes:
        component: Kind, name and distribution.
        broken: Name of the property.
        demand: Requirement of the property.
        given: Input that demonstrates the violation; empty if none is needed.
        expected: Expected result on that input.
        got: Actual result on that input.
        remedy: Advice on what to do.
    """

    def __init__(
        self, component: str, broken: str, *, demand: str, given: str, expected: str, got: str, remedy: str
    ) -> None:
        self.component, self.broken, self.demand = component, broken, demand
        self.given, self.expected, self.got, self.remedy = given, expected, got, remedy
        parts = {"input": given, "expected": expected, "got": got, "what to do": remedy}
        indented = {name: text.replace("\n", "\n    ") for name, text in parts.items() if text}
        shown = [f"  {name}: {text}" for name, text in indented.items()]
        super().__init__("\n".join([f"{component} breaks {broken}: {demand}", *shown]))

    def __reduce__(self) -> tuple[Any, ...]:
        named = {name: getattr(self, name) for name in ("demand", "given", "expected", "got", "remedy")}
        return (partial(ConformanceFault, **named), (self.component, self.broken))


LONGEST = 2_000
"""Maximum characters shown of a plugin's message, which may quote a whole model answer."""


def visible(text: str, keep: str = "") -> str:
    r"""Replace terminal control characters by their escapes, such as `\x1b`.

    Args:
        text: Any text, such as a model's.
        keep: Characters to leave unchanged, such as line breaks.
    """
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def other_format(what: str, written: int, read: int) -> str:
    """Return the message about something that another version of rlsdk has written.

    Args:
        what: What has the format, such as a checkpoint with its path.
        written: Its format.
        read: The only format that this version reads.
    """
    which = "newer" if written > read else "older"
    return f"{what} has format {written}; this rlsdk reads {read}: use the {which} rlsdk that wrote it"


def first_line(error: BaseException | None) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def described(error: BaseException) -> str:
    """Describe a plugin's exception: type, message, and the plugin's own line, such as `(lab.py, line 12)`.

    Advice follows for what is often done wrong: a package of one of rlsdk's extras is missing, a file that has no
    package imports relatively, an attribute is misspelt, a frozen value is assigned to.
    """
    place = place_of(error)
    try:
        text = error.msg if isinstance(error, SyntaxError) and place else str(error)
    except (Exception, SystemExit) as failure:  # noqa: BLE001 - a plugin's exception may fail to write its own message
        text = f"(its message cannot be shown: {type(failure).__name__})"
    remedy = install_command(error) or _relative_import(error) or _frozen(error) or _did_you_mean(error)
    said = visible(f"{type(error).__name__}: {text}"[:LONGEST], "\n\t")
    return said + (f" ({place})" if place else "") + (remedy and f"; {remedy}")


EXTRAS: Mapping[str, str] = {
    "aiohttp": "train",
    "datasets": "data",
    "deepspeed": "deepspeed",
    "latex2sympy2_extended": "math",
    "math_verify": "math",
    "matplotlib": "train",
    "mcp": "mcp",
    "mlflow": "mlflow",
    "mpmath": "math",
    "opentelemetry": "otel",
    "peft": "lora",
    "psutil": "train",
    "psycopg": "postgres",
    "pyarrow": "data",
    "ray": "train",
    "s3fs": "s3",
    "safetensors": "train",
    "sqlalchemy": "train",
    "swanlab": "swanlab",
    "sympy": "math",
    "tensorboard": "tensorboard",
    "tokenizers": "train",
    "torch": "algorithms",
    "trackio": "trackio",
    "transformers": "train",
    "wandb": "wandb",
}
"""Optional package -> the extra of rlsdk that installs it."""


def install_command(error: BaseException) -> str:
    """Return `pip install 'rlsdk[EXTRA]'` if an import failed because that extra is missing, else an empty text."""
    extra = EXTRAS.get((error.name or "").partition(".")[0]) if isinstance(error, ModuleNotFoundError) else None
    return f"pip install 'rlsdk[{extra}]'" if extra else ""


def _relative_import(error: BaseException) -> str:
    """Return advice if a file that was loaded by its path, and so belongs to no package, imports relatively."""
    if not isinstance(error, ImportError):
        return ""
    if "relative import" not in str(error) and (error.name or "").partition(".")[0] != FILE_PACKAGE:
        return ""
    return (
        "a file given by its path belongs to no package: write `import NAME` for a file beside it, not "
        "`from .NAME import …`, or install its package and name that"
    )


def _frozen(error: BaseException) -> str:
    """Return advice if code assigns to an attribute of a frozen value, as `x.rewards -= 1` also does."""
    if not isinstance(error, FrozenInstanceError):
        return ""
    return "the value is frozen: assign to a name of your own, rewards = x.rewards - 1 instead of x.rewards -= 1"


def _did_you_mean(error: BaseException) -> str:
    """Return the nearest name if code reads an attribute that rlsdk or an object of it does not have; else nothing."""
    if not isinstance(error, AttributeError) or not error.name or "did you mean" in str(error):
        return ""
    home = error.obj.__name__ if inspect.ismodule(error.obj) else type(error.obj).__module__
    if package(str(home)) != "rlsdk":
        return ""
    near = nearest(error.name, dir(error.obj))
    return f"did you mean {near!r}?" if near else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name closest to `name`, or None."""
    lower = {k.lower(): k for k in known}
    found = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    return lower[found[0]] if found else None


def place_of(error: BaseException) -> str:
    """Return the last line of a plugin's own code in the traceback of an error.

    The plugin is the first package in the traceback other than rlsdk and the packages that call plugins. A failure in a
    library is reported at the plugin's line that called the library.

    Returns:
        `FILE, line N`, with the file relative to the working folder if it is below it; empty if only rlsdk's code ran.
    """
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{_shown(error.filename)}, line {error.lineno}"
    return place_in(traceback.walk_tb(error.__traceback__))


def place_in(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the last line of a plugin's own code among the frames of a call with their lines, the outermost first."""
    named = [(package(str(frame.f_globals.get("__name__"))), frame, line) for frame, line in frames]
    frames_of_users = [each for each in named if each[0] not in _CALLERS]
    if not frames_of_users:
        return ""
    _, frame, line = [each for each in frames_of_users if each[0] == frames_of_users[0][0]][-1]
    return f"{_shown(frame.f_code.co_filename)}, line {line}"


def defined_at(obj: Any) -> str:
    """Return a function's or class's name with the file and line of its definition: `exact (lab.py, line 3)`."""
    place = definition_of(obj)
    return f"{obj.__qualname__} ({place})" if place else str(obj.__qualname__)


def definition_of(obj: Any) -> str:
    """Return file and line of the definition of a function or class: `lab.py, line 3`; empty if there is no file."""
    try:
        lines, number = inspect.getsourcelines(obj)
        return f"{_shown(inspect.getsourcefile(obj) or '')}, line {number}" if lines else ""
    except (OSError, TypeError):  # defined in an interactive interpreter
        return ""
    except SystemError:  # a fault of CPython 3.11 and 3.12.0 in parsing the file of a class: python/cpython#106905
        return ""


def package(module: str) -> str:
    """Return the top-level package of a module; a single-file plugin counts as its own package."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == FILE_PACKAGE else parts[0]


def _shown(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
