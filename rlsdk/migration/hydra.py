"""Read YAML as Hydra does, with references such as `${key}` and `${oc.env:NAME}`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import yaml

from rlsdk.errors import ConfigError
from rlsdk.yaml_values import load_value

MOST = 20_000
"""Maximum values in a configuration: nested anchors could make a file hold any number."""


def parse_yaml(content: str, name: str) -> dict[str, Any]:
    """Parse a file.

    Raises:
        ConfigError: It is not YAML, too large, or no mapping.
    """
    try:
        found = load_value(content)
        size = _size(found)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = (
            "its values are too deeply nested" if isinstance(error, RecursionError) else " ".join(str(error).split())
        )
        raise ConfigError([f"{name} is not valid YAML: {reason}"]) from error
    if size > MOST:
        raise ConfigError([f"{name} holds more than {MOST:,} values, which no configuration does"])
    if not isinstance(found, dict):
        held = "is empty" if found is None else f"holds a value of type {type(found).__name__}"
        raise ConfigError([f"{name} {held}; expected a mapping at the top level"])
    return {str(key): value for key, value in found.items()}


def _size(value: Any, seen: int = 0, depth: int = 0) -> int:
    """Count values, those of anchors each time they are used; counting ends above the limit."""
    if depth > 100:
        raise RecursionError
    if isinstance(value, Mapping | list):
        for below in value.values() if isinstance(value, Mapping) else value:
            seen = _size(below, seen, depth + 1)
            if seen > MOST:
                break
        return seen
    return seen + 1


def parse_value(written: str) -> Any:
    """Parse a value as Hydra does: as YAML if possible."""
    written = written.strip()
    if "${" in written and not written.startswith(("[", "{")):
        return written
    try:
        found = load_value(written)
    except (yaml.YAMLError, ValueError, RecursionError):
        return written
    if isinstance(found, dict) and all(value is None for value in found.values()) and found:
        return written  # a placeholder such as {token}
    return found if isinstance(found, bool | int | float | list | dict) or found is None else written


LONGEST = 10_000
"""Maximum characters of a text in which references are resolved: nested references could make it endless."""
ENVIRONMENT = re.compile(r"\$\{oc\.env:(\w+)(?:,\s*(['\"]?)([^{}]*?)\2\s*)?\}")
"""A reference to an environment variable, perhaps with a fallback."""
_INNER = re.compile(r"\$\{([^${}]*)\}")


@attrs.define
class ReferenceResolver:
    """Fills in references `${key}` in a configuration.

    Attributes:
        tree: Configuration that references are looked up in.
        environ: Environment variables; those that hold numbers or flags are filled in, others keep their names.
        notes: References that could not be resolved.
        referred: Top-level keys that references name.
    """

    tree: Mapping[str, Any]
    environ: Mapping[str, str]
    notes: list[str] = attrs.field(factory=list)
    referred: set[str] = attrs.field(factory=set)

    def walk(self, value: Any, below: Sequence[str], inside: frozenset[str] = frozenset()) -> Any:
        """Return a value with its references filled in; `inside`: the references that are being resolved."""
        if isinstance(value, Mapping):
            return {key: self.walk(each, (*below, str(key)), inside) for key, each in value.items()}
        if isinstance(value, list):
            return [self.walk(each, (*below, str(index)), inside) for index, each in enumerate(value)]
        while isinstance(value, str) and len(value) < LONGEST and (match := _INNER.search(value)):
            try:
                found = self._value_of(match[1], below, inside)
            except KeyError:
                if inside:
                    raise
                self.notes.append(f"{'.'.join(below)}: {match[0]} cannot be resolved and is kept unchanged")
                found = f"\ue001{match[1]}\ue002"
            if match[0] == value:
                value = found
            else:
                text = found if isinstance(found, str) else json.dumps(found, default=str)
                value = value[: match.start()] + text + value[match.end() :]
        return value

    def _value_of(self, expression: str, below: Sequence[str], inside: frozenset[str]) -> Any:
        """Return what `${expression}` stands for; for a variable with text, rlsdk's own reference to it."""
        kind, _, argument = expression.partition(":")
        name, comma, fallback = argument.partition(",")
        if kind.strip() in ("oc.env", "env") and argument:
            read = parse_value(self.environ.get(name.strip(), fallback))
            if isinstance(read, bool | int | float):
                return read
            return f"\ue001oc.env:{name.strip()}{',' + fallback.strip() if comma else ''}\ue002"
        if kind.strip() == "oc.select" and argument:
            try:
                return self._referred(name.strip(), below, inside)
            except KeyError:
                return parse_value(fallback) if comma else None
        if argument:
            raise KeyError(expression)
        return self._referred(expression.strip(), below, inside)

    def _referred(self, path: str, below: Sequence[str], inside: frozenset[str]) -> Any:
        """Return the value at a path; leading dots make it relative to the section `below`."""
        if path in inside or len(inside) > 20:
            raise KeyError(path)  # it refers to itself
        up = len(path) - len(path.lstrip("."))
        node: Any = self.tree
        for part in [*(below[: len(below) - up] if up else []), *path.strip(".").split(".")]:
            if isinstance(node, Mapping) and part in node:
                node = node[part]
            elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
                node = node[int(part)]
            else:
                raise KeyError(path)
        if not up:
            self.referred.add(path.partition(".")[0])
        return self.walk(node, below, inside | {path})


def restored(value: Any) -> Any:
    """Turn the placeholders of unresolved references back into `${...}`."""
    if isinstance(value, Mapping):
        return {key: restored(below) for key, below in value.items()}
    if isinstance(value, list):
        return [restored(below) for below in value]
    return value.replace("\ue001", "${").replace("\ue002", "}") if isinstance(value, str) else value


def from_environment(text: str, environ: Mapping[str, str]) -> str:
    """Fill in references to environment variables, or their fallbacks; those without either are kept."""
    for _ in range(10):
        filled = ENVIRONMENT.sub(lambda match: environ.get(match[1], match[0] if match[3] is None else match[3]), text)
        if filled == text:
            break
        text = filled
    return text
