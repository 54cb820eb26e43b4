"""Read another trainer's configuration: a YAML file, a shell script, a command or a Python file; nothing is run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import yaml

from rlsdk.errors import ConfigError
from rlsdk.migration import python_files, shell
from rlsdk.migration.rows import Framework, Given

LARGEST = 1_000_000
"""Bytes of a file; configurations are a hundredth of it."""
LONGEST = 10_000
"""Characters of a text in which references are resolved; references that multiply could make any number."""
MOST = 20_000
"""Values in a configuration; a file with anchors that multiply could hold any number."""
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"(~|\+{0,2})([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)


@attrs.frozen
class ForeignConfig:
    """A configuration as it was read.

    Attributes:
        tree: Its values, nested, with interpolations resolved.
        notes: What could not be read, and why.
    """

    tree: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def read(framework: Framework, arguments: Sequence[str], environ: Mapping[str, str]) -> ForeignConfig:
    """Read what was given to `rlsdk migrate`.

    Args:
        framework: Whose configuration it is.
        arguments: A file and overrides, a command in words, or a whole command in one text.
        environ: Environment variables; numbers and flags are read from them, texts keep their names.

    Raises:
        ConfigError: It cannot be read, or holds nothing.
    """
    first = arguments[0]
    path = Path(first).expanduser()
    notes: tuple[str, ...] = ()
    if _is_file(path):
        text = read_text(path)
        kind = _kind(path, text)
        if kind == "yaml":
            tree = _yaml(text, str(path))
        elif kind == "python":
            tree, notes = python_files.read(text, str(path), framework.constructors, environ)
        else:
            tree, notes = _from_script(framework, text, path.parent)
        more, found = _from_words(framework, arguments[1:], Path())
        notes += found
        tree = _merged(tree, more)
    elif len(arguments) > 1 or " " in first or "=" in first or first.startswith("-"):
        if len(arguments) == 1:  # as written in a shell; several words were split by one already
            tree, notes = _from_script(framework, first, Path())
        else:
            tree, notes = _from_words(framework, arguments, Path())
    else:
        raise ConfigError([f"{first}: there is no such file (working folder: {Path.cwd().name}/)"])
    if not tree:
        raise ConfigError([f"{first}: no keys of a {framework.title} configuration were found in it"])
    resolved, unresolved = _resolved(tree, environ)
    return ForeignConfig(resolved, (*notes, *unresolved))


def given(source: ForeignConfig, framework: Framework) -> Given:
    """The values of a configuration by dotted path; older names of keys become today's."""
    flat = {framework.renamed.get(key, key): value for key, value in flattened(source.tree)}
    return Given(flat, source.tree, framework.defaults)


def flattened(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over path and value of everything but mappings with named keys and lists of them."""
    if isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        for key, below in value.items():
            yield from flattened(below, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        for index, below in enumerate(value):
            yield from flattened(below, f"{path}.{index}")
    else:
        yield path, value


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted paths as nested mappings; a value that stands in the way of a deeper path is replaced."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        node = tree
        *sections, last = path.split(".")
        for section in sections:
            below = node.get(section)
            node[section] = below if isinstance(below, dict) else {}
            node = node[section]
        node[last] = value
    return tree


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        ConfigError: It is too large, or holds no text.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise ConfigError([f"{path}: {path.stat().st_size:,} bytes are too many for a configuration"])
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path} cannot be read as text: {error}"]) from error
    if "\0" in content:
        raise ConfigError([f"{path} cannot be read as text: it holds a null character"])
    return content


def _is_file(path: Path) -> bool:
    try:
        if path.is_dir():
            raise ConfigError([f"{path} is a folder; give the configuration in it"])
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or holds a null character: a command
        return False


def _kind(path: Path, content: str) -> str:
    known = {".yaml": "yaml", ".yml": "yaml", ".json": "yaml", ".py": "python", ".sh": "shell", ".bash": "shell"}
    if path.suffix.lower() in known:
        return known[path.suffix.lower()]
    return "shell" if content.startswith("#!") or re.search(r"^\s*(python3?|torchrun|trl) ", content, re.M) else "yaml"


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-6 is a number, as in Hydra's."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+"), list("-+0123456789")
)


def _yaml(content: str, name: str) -> dict[str, Any]:
    try:
        found = yaml.load(content, _Loader)
        size = _size(found)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        told = "its values are nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise ConfigError([f"{name} is no valid YAML: {told}"]) from error
    if size > MOST:
        raise ConfigError([f"{name} holds more than {MOST:,} values, which no configuration does"])
    if not isinstance(found, dict):
        raise ConfigError([f"{name} holds a {type(found).__name__}; expected keys with values at the top"])
    return {str(key): value for key, value in found.items()}


def _size(value: Any, seen: int = 0, depth: int = 0) -> int:
    """Count values, those of anchors wherever they are used; counting ends above the limit."""
    if depth > 100:
        raise RecursionError
    if isinstance(value, Mapping | list):
        for below in value.values() if isinstance(value, Mapping) else value:
            seen = _size(below, seen, depth + 1)
            if seen > MOST:
                break
        return seen
    return seen + 1


def _from_script(framework: Framework, script: str, folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Keys of the command that starts a training; the one with most keys, where none is known by its name."""
    found = shell.commands(script)
    if not found:
        raise ConfigError(["there is no command in it"])
    starts = [command for command in found if any(entry in " ".join(command.words) for entry in framework.entries)]
    read = [(*_from_words(framework, command.words, folder), command) for command in starts or found]
    tree, notes, command = max(read, key=lambda each: len([*flattened(each[0])]))
    if len(starts) > 1:
        notes += (f"the script starts {len(starts)} trainings; this is the one with most keys",)
    return tree, (*notes, *command.notes)


def _from_words(framework: Framework, words: Sequence[str], folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Overrides and flags among the words of a command, over the file that a flag names."""
    flat: dict[str, Any] = {}
    notes: list[str] = []
    words = _after_entry(framework, words)
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        flag, override = _FLAG.fullmatch(word), _OVERRIDE.fullmatch(word)
        if flag:
            values = [] if flag[2] is None else [flag[2]]
            while flag[2] is None and position < len(words) and not _is_key(words[position]):
                values.append(words[position])
                position += 1
            key = flag[1] if "." in flag[1] else flag[1].replace("-", "_")
            flat[key] = True if not values else _value(values[0]) if len(values) == 1 else [*map(_value, values)]
        elif override and override[1] == "~":
            flat.pop(override[2], None)
        elif override and override[3] is not None:
            flat[override[2].replace("/", ".")] = _value(override[3])
    file = next((flat.pop(name) for name in ("config", "config_file") if isinstance(flat.get(name), str)), None)
    file = file or _hydra_file(flat)
    under: dict[str, Any] = {}
    if file is not None:
        place = next((each for each in (folder / file, Path(file)) if each.is_file()), None)
        if place is None:
            notes.append(f"{file}, which the command names, is not here: give that file and the overrides")
        else:
            under = _yaml(read_text(place), str(place))
    return _merged(under, nested(flat)), tuple(notes)


def _hydra_file(flat: dict[str, Any]) -> str | None:
    """The file that `--config-path` and `--config-name` name; None for the trainer's own."""
    folder, name = flat.pop("config_path", None), flat.pop("config_name", None)
    if not isinstance(folder, str) or not isinstance(name, str):
        return None
    return f"{folder}/{name.removesuffix('.yaml')}.yaml"


def _after_entry(framework: Framework, words: Sequence[str]) -> list[str]:
    """The words behind what starts the training: launchers before it have flags of their own."""
    for index, word in enumerate(words):
        if any(entry in f"{words[index - 1]} {word}" if index else entry in word for entry in framework.entries):
            return list(words[index + 1 :])
    return list(words)


def _is_key(word: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]", word)) or bool(re.match(r"[~+]*[A-Za-z_][\w.]*=", word))


def _value(written: str) -> Any:
    """A value as Hydra reads it: YAML, where that is possible."""
    written = written.strip()
    if "${" in written and not written.startswith(("[", "{")):
        return written
    try:
        found = yaml.load(written, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError):
        return written
    return found if isinstance(found, bool | int | float | list | dict) or found is None else written


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


_INNER = re.compile(r"\$\{([^${}]*)\}")


def _resolved(tree: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fill in `${key}`; environment variables that hold numbers or flags are read, others keep their names."""
    notes: list[str] = []

    def look_up(path: str, below: Sequence[str]) -> Any:
        up = len(path) - len(path.lstrip("."))
        parts = [*(below[: len(below) - up] if up else []), *path.strip(".").split(".")]
        node: Any = tree
        for part in parts:
            if isinstance(node, Mapping) and part in node:
                node = node[part]
            elif isinstance(node, list) and part.isdigit() and int(part) < len(node):
                node = node[int(part)]
            else:
                raise KeyError(path)
        return node

    def referred(path: str, below: Sequence[str], inside: frozenset[str]) -> Any:
        if path in inside or len(inside) > 20:
            raise KeyError(path)  # it refers to itself
        return walk(look_up(path, below), below, inside | {path})

    def substitute(expression: str, below: Sequence[str], inside: frozenset[str]) -> Any:
        """The value of what stands between `${` and `}`; text in the form of rlsdk for environment variables."""
        kind, _, argument = expression.partition(":")
        name, comma, fallback = argument.partition(",")
        if kind.strip() in ("oc.env", "env") and argument:
            read = _value(environ.get(name.strip(), fallback))
            if isinstance(read, bool | int | float):
                return read
            return f"\ue001oc.env:{name.strip()}{',' + fallback.strip() if comma else ''}\ue002"
        if kind.strip() == "oc.select" and argument:
            try:
                return referred(name.strip(), below, inside)
            except KeyError:
                return _value(fallback) if comma else None
        if argument:
            raise KeyError(expression)
        return referred(expression.strip(), below, inside)

    def walk(value: Any, below: Sequence[str], inside: frozenset[str] = frozenset()) -> Any:
        if isinstance(value, Mapping):
            return {key: walk(each, (*below, str(key)), inside) for key, each in value.items()}
        if isinstance(value, list):
            return [walk(each, (*below, str(index)), inside) for index, each in enumerate(value)]
        while isinstance(value, str) and len(value) < LONGEST and (match := _INNER.search(value)):
            try:
                found = substitute(match[1], below, inside)
            except KeyError:
                if inside:
                    raise
                notes.append(f"{'.'.join(below)}: {match[0]} cannot be resolved here and stays as it is")
                found = f"\ue001{match[1]}\ue002"
            value = found if match[0] == value else value[: match.start()] + _written(found) + value[match.end() :]
        return value

    resolved = _restored(walk(tree, ()))
    return resolved, tuple(dict.fromkeys(notes))


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _restored(value: Any) -> Any:
    """Put the marks of references that stay into the form `${...}`."""
    if isinstance(value, Mapping):
        return {key: _restored(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_restored(below) for below in value]
    return value.replace("\ue001", "${").replace("\ue002", "}") if isinstance(value, str) else value
