"""Options that a Python script declares with argparse, or as dataclasses that a parser of transformers or TRL fills."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import attrs

OPTIONS = "Namespace"
"""Kind of a mapping with the values of a script's options by name."""
PARSERS = ("ArgumentParser",)
CLASS_PARSERS = ("HfArgumentParser", "TrlParser", "H4ArgumentParser")
"""Classes of transformers, TRL and the alignment handbook that fill dataclasses from a command."""
GROUPS = ("add_argument_group", "add_mutually_exclusive_group")


@attrs.frozen
class Unread:
    """Stands for a value that only a run of the file would tell."""

    why: str

    def __str__(self) -> str:
        return f"not read: {self.why}"


@attrs.frozen
class Filled(Unread):
    """Stands for an object of the trainer's own class that a parser fills from the command."""


@attrs.frozen
class Omitted(Unread):
    """Stands for a value of such an object that the command does not set: the default of the trainer's own class."""


@attrs.frozen
class ScriptOption:
    """An option of argparse.

    Attributes:
        names: Names on the command line, with underscores.
        default: Value if it is not given, or a mark for one that must be given.
        action: Name of the action; empty for an option with a value.
    """

    names: tuple[str, ...]
    default: Any
    action: str = ""

    def value(self, flags: Mapping[str, Any]) -> Any:
        """Return the value in a command, or the default."""
        for name in self.names:
            if name in flags:
                return not flags[name] if self.action == "store_false" else flags[name]
            if self.action == "BooleanOptionalAction" and f"no_{name}" in flags:
                return False
        return self.default


@attrs.define
class OptionParser:
    """A parser of a script.

    Attributes:
        options: Name of the attribute that holds an option's value -> the option.
        classes: Names of the dataclasses that it fills.
    """

    options: dict[str, ScriptOption] = attrs.field(factory=dict)
    classes: tuple[str, ...] = ()

    def add(self, words: list[Any], settings: Mapping[str, Any], line: int) -> None:
        """Add an option.

        Args:
            words: Names of the option, as in `--learning-rate`.
            settings: Further arguments of `add_argument`.
            line: Line of the call.
        """
        names = [str(word).lstrip("-").replace("-", "_") for word in words if isinstance(word, str)]
        long = [name for name, word in zip(names, words, strict=False) if str(word).startswith("--")]
        if not names:
            return
        action = str(settings.get("action", ""))
        default = settings.get("default", {"store_true": False, "store_false": True}.get(action))
        required = settings.get("required") is True or not str(words[0]).startswith("-")
        if required and default is None:
            default = Unread(f"line {line}: {words[0]} has no default; give the command that runs this script")
        self.options[str(settings.get("dest", (long or names)[0]))] = ScriptOption(tuple(names), default, action)

    def parsed(self, flags: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of all options in a command, or their defaults."""
        return {"class": OPTIONS} | {name: option.value(flags) for name, option in self.options.items()}


def fields(definition: ast.ClassDef) -> dict[str, ast.expr | None]:
    """Return the expressions of the defaults of a dataclass's fields; None for a field that has no default."""
    found: dict[str, ast.expr | None] = {}
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found[statement.target.id] = _default(statement.value)
    return found


def _default(node: ast.expr | None) -> ast.expr | None:
    """Return the expression of a default, which may be within a call of `field`."""
    if not isinstance(node, ast.Call) or not (isinstance(node.func, ast.Name | ast.Attribute)):
        return node
    name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
    if name not in ("field", "Field"):
        return node
    given = {each.arg: each.value for each in node.keywords}
    factory = given.get("default_factory")
    return given.get("default", factory.body if isinstance(factory, ast.Lambda) else None)
