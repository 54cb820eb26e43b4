"""Read another trainer's configuration from a YAML file, shell script, command or Python file; nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlsdk.errors import ConfigError
from rlsdk.migration import python_files, shell
from rlsdk.migration.hydra import ReferenceResolver, from_environment, parse_value, parse_yaml, restored
from rlsdk.migration.python_files import PythonConfig
from rlsdk.migration.rules import Framework, Given, KeyRule
from rlsdk.migration.values import text, texts

LARGEST = 1_000_000
"""Maximum bytes of a file; configurations have a hundredth of that."""
_DEEPEST = 5
"""Maximum depth of files that name files."""
_LAUNCHERS = ("python", "python3", "accelerate", "torchrun", "deepspeed")
_FLAG = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_OVERRIDE = re.compile(r"(~|\+{0,2})([A-Za-z_][\w.@/-]*)(?:=(.*))?", re.DOTALL)
_KEY = re.compile(r"--?[A-Za-z]|[~+]*[A-Za-z_][\w.]*=")
"""Beginning of a flag or an override, as opposed to a value of the flag before it."""


@attrs.frozen
class ForeignConfig:
    """A configuration that was read.

    Attributes:
        tree: Nested values, with interpolations resolved.
        notes: Parts that could not be read, and why.
        command: Words that start the training, or the classes that a Python file calls.
        environ: Environment variables, from which names such as that of an algorithm are read.
        variables: Top-level keys that other keys refer to.
    """

    tree: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    command: str = ""
    environ: Mapping[str, str] = {}
    variables: frozenset[str] = frozenset()


def read(framework: Framework, arguments: Sequence[str], environ: Mapping[str, str]) -> ForeignConfig:
    """Read what was given to `rlsdk migrate`.

    Args:
        framework: Trainer that the configuration was written for.
        arguments: A file and overrides, a command in words, or a whole command in one text.
        environ: Environment variables; those that hold numbers and flags are filled in, texts keep their names.

    Raises:
        ConfigError: It cannot be read, or holds nothing.
    """
    first = arguments[0]
    path = Path(first).expanduser()
    notes: tuple[str, ...] = ()
    command = ""
    script: PythonConfig | None = None
    if _is_file(path):
        text = read_text(path)
        kind = _kind(path, text)
        if kind == "yaml":
            tree, notes = _with_defaults(parse_yaml(text, str(path)), path.parent)
        elif kind == "python":
            flags = _from_words(framework, arguments[1:], Path(), environ)[0]
            known = dict(flattened(flags)) if flags else None
            script = python_files.read(text, str(path), framework.constructors, environ, known)
            tree, notes = script.tree, script.notes
            command = _classes(framework, text)
        else:
            tree, notes, command = _from_script(framework, text, path.parent, environ, str(path))
        more, found, _ = _from_words(framework, arguments[1:], Path(), environ)
        if script is not None:
            more, unused = _keys_of_the_trainer(framework, more, script)
            notes += unused
        notes += found
        tree = _with_files(_merged(tree, more), framework.files, path.parent)
    elif len(arguments) > 1 or " " in first or "=" in first or first.startswith("-"):
        if len(arguments) == 1:  # a whole command in one text; several words were split by a shell already
            tree, notes, command = _from_script(framework, first, Path(), environ)
        else:
            tree, notes, command = _from_words(framework, arguments, Path(), environ)
        tree = _with_files(tree, framework.files, Path())
    else:
        raise ConfigError([f"{first}: there is no such file (working folder: {Path.cwd().name}/)"])
    command = from_environment(command, environ)
    if other := next(
        (
            part
            for part in framework.others
            if part in tree or re.search(rf"(?<!\w){re.escape(part)}(?![^\s'\"}}])", command)
        ),
        None,
    ):
        instead = framework.others[other]
        raise ConfigError(
            [
                f"{framework.title}'s {other} cannot be converted; in rlsdk, set {instead}: write this config by hand "
                "(docs/howto/learn_from.md, docs/algorithms)"
            ]
        )
    if not tree:
        raise ConfigError([f"{first}: no keys of a {framework.title} configuration were found in it"])
    resolver = ReferenceResolver(tree, environ)
    resolved = restored(resolver.walk(tree, ()))
    notes = (*notes, *dict.fromkeys(resolver.notes))
    return ForeignConfig(resolved, notes, command, environ, frozenset(resolver.referred))


def given(source: ForeignConfig, framework: Framework) -> Given:
    """Return the values of a configuration by dotted path; older names of keys are replaced by current ones."""
    flat: dict[str, Any] = {}
    written: dict[str, str] = {}
    for key, value in flattened(source.tree, whole=framework.whole):
        current = framework.current(key)
        flat[current] = value
        written |= {current: key} if current != key else {}
    for key, value in flat.items():
        if isinstance(value, str) and "${oc.env:" in value and _is_setting(framework.row(key)):
            flat[key] = from_environment(value, source.environ) or value
    variant = next((defaults for name, defaults in framework.variants.items() if name in source.command), {})
    return Given(flat, source.tree, {**framework.defaults, **variant}, written)


def _is_setting(row: KeyRule | None) -> bool:
    """True for numbers, choices and the like; texts in an rlsdk config may refer to the environment themselves."""
    read = getattr(row, "read", text)
    return read not in (text, texts) and getattr(read, "__name__", "") != "<lambda>"


def flattened(value: Any, path: str = "", *, whole: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Iterate over path and value of everything but mappings with named keys and lists of them.

    Args:
        value: Nested values.
        path: Path of these values.
        whole: Paths whose values are not divided.
    """
    if path in whole:
        yield path, value
    elif isinstance(value, Mapping) and value and all(isinstance(key, str) for key in value):
        for key, below in value.items():
            yield from flattened(below, f"{path}.{key}" if path else key, whole=whole)
    elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        for index, below in enumerate(value):
            yield from flattened(below, f"{path}.{index}", whole=whole)
    else:
        yield path, value


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Convert dotted paths to nested mappings; a value that conflicts with a deeper path is replaced."""
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
    """Return the text of a file.

    Raises:
        ConfigError: The file is too large, or is not text.
    """
    try:
        if path.stat().st_size > LARGEST:
            raise ConfigError(
                [f"{path}: {path.stat().st_size:,} bytes are too many for a configuration; the limit is {LARGEST:,}"]
            )
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path} cannot be read as text: {error}"]) from error
    if "\0" in content:
        raise ConfigError([f"{path} cannot be read as text: it contains a null character"])
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


def _with_defaults(tree: dict[str, Any], folder: Path, depth: int = 0) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Merge the files that Hydra's list `defaults` names by a path under a configuration; note those not found."""
    listed = tree.get("defaults")
    merged: dict[str, Any] = {}
    notes: list[str] = []
    own = False
    for entry in listed if isinstance(listed, list) else []:
        if entry == "_self_":
            merged, own = _merged(merged, tree), True
            continue
        name, _, package = str(entry).partition("@")
        if not isinstance(entry, str) or "/" not in name:  # the trainer's own file, or a choice of a group
            continue
        place = folder / f"{name.removesuffix('.yaml')}.yaml"
        if place.is_file() and depth < _DEEPEST:
            content = read_text(place)
            empty = all(not line.strip() or line.lstrip().startswith("#") for line in content.splitlines())
            found = {} if empty else parse_yaml(content, str(place))
            under, more = _with_defaults(found, place.parent, depth + 1)
            under.pop("defaults", None)
            merged = _merged(merged, under if package in ("", "_here_", "_global_") else nested({package: under}))
            notes += more
        elif "deepspeed" not in name:
            notes.append(f"defaults: {name}.yaml was not found: what it sets is not converted")
    return (merged if own else _merged(merged, tree)), tuple(notes)


def _with_files(tree: dict[str, Any], files: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Add the contents of files that keys name, by a path below the folder of the configuration or one above it."""
    flat = dict(flattened(tree))
    for key, section in files.items():
        above = [Path(), folder, *folder.resolve().parents] if isinstance(flat.get(key), str) and flat[key] else []
        if place := next((each / flat[key] for each in above if (each / flat[key]).is_file()), None):
            tree = _merged(nested({section: parse_yaml(read_text(place), str(place))}), tree)
    return tree


def _from_script(
    framework: Framework, script: str, folder: Path, environ: Mapping[str, str], place: str = ""
) -> tuple[dict[str, Any], tuple[str, ...], str]:
    """Read the command that starts the training, and its words; if none is recognised, the one with the most keys."""
    found = shell.commands(script, environ, place)
    quoted = [word for command in found for word in command.words if " " in word.strip()]
    found += [
        inner for word in quoted if _starts(framework, word) for inner in shell.commands(word, environ, place)
    ]  # bash -c
    if not found:
        raise ConfigError(["expected a script with a command that starts training; found no command"])
    starts = [command for command in found if _starts(framework, " ".join(command.words))]
    read = [(*_from_words(framework, command.words, folder, environ), command) for command in starts or found]
    tree, notes, started, command = max(read, key=lambda each: len([*flattened(each[0])]))
    with_keys = sum(bool(each[0]) for each in read) if starts else 0
    if with_keys > 1:
        notes += (f"the script starts {with_keys} training runs; the one with the most keys is converted",)
    return tree, (*notes, *command.notes), started


def _starts(framework: Framework, words: str) -> bool:
    return any(entry in words for entry in framework.entries)


def _from_words(
    framework: Framework, words: Sequence[str], folder: Path, environ: Mapping[str, str]
) -> tuple[dict[str, Any], tuple[str, ...], str]:
    """Read the flags of a command, and below them the file that a flag names, and the script that it runs.

    Returns:
        Nested values; what could not be read; and the words, with the trainer's classes that the script calls.
    """
    notes: list[str] = []
    started = " ".join(words)
    launched, words = words, _after_entry(framework, words)
    flat = _launcher(launched[: len(launched) - len(words)], folder, notes) if framework.row("num_processes") else {}
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        flag, override = _FLAG.fullmatch(word), _OVERRIDE.fullmatch(word)
        if flag:
            values = [] if flag[2] is None else [flag[2]]
            while flag[2] is None and position < len(words) and not _KEY.match(words[position]):
                values.append(words[position])
                position += 1
            key = flag[1] if "." in flag[1] else flag[1].replace("-", "_")
            flat[key] = (
                True if not values else parse_value(values[0]) if len(values) == 1 else [*map(parse_value, values)]
            )
        elif override and override[1] == "~":
            flat.pop(override[2], None)
        elif override and override[3] is not None:
            flat[override[2].replace("/", ".")] = parse_value(override[3])
    file = next((flat.pop(name) for name in ("config", "config_file") if isinstance(flat.get(name), str)), None)
    if file is None:
        below, name = flat.pop("config_path", None), flat.pop("config_name", None)
        if isinstance(below, str) and isinstance(name, str):  # otherwise the trainer's own file
            file = f"{below}/{name.removesuffix('.yaml')}.yaml".replace("${oc.env:PWD}", ".")
    under: dict[str, Any] = {}
    if file is not None:
        place = _file_of(file, folder)
        if place is None:
            notes.append(f"the file {file} in the command was not found: give that file and the overrides")
        else:
            under, more = _with_defaults(parse_yaml(read_text(place), str(place)), place.parent)
            notes += more
    tree = _merged(under, nested(flat))
    script = next((word for word in launched[: len(launched) - len(words)] if word.endswith(".py")), "")
    place = _file_of(script, folder)
    if place is not None and framework.constructors:
        content = read_text(place)
        inner = python_files.read(content, str(place), framework.constructors, environ, dict(flattened(tree)))
        started = f"{_classes(framework, content)} {started}"
        tree, unused = _keys_of_the_trainer(framework, tree, inner)
        tree, notes = _merged(inner.tree, tree), [*notes, *inner.notes, *unused]
    return tree, tuple(notes), started


def _file_of(name: str, folder: Path) -> Path | None:
    """Return a file that a command names, below its script's folder or the working folder; None if there is none."""
    return next((each for each in (folder / name, Path(name)) if name and each.is_file()), None)


def _classes(framework: Framework, content: str) -> str:
    """Return the names of the trainer's classes that a Python file calls; others only if there are none of these."""
    known = [name for name in framework.constructors if re.search(rf"\b{name}\(", content)]
    others = [name for name in framework.others if name.isidentifier() and re.search(rf"\b{name}\(", content)]
    return " ".join(known or others)


def _keys_of_the_trainer(
    framework: Framework, flags: Mapping[str, Any], script: PythonConfig
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the flags of a command that are the trainer's keys, and a note on those that only the script uses."""
    own = script.options | {name for name in script.fields if framework.row(framework.current(name)) is None}
    unused = [f"--{name}" for name in flags if name in own & script.unused]
    note = f"{', '.join(unused)}: used by the script alone, and not converted"
    return {key: value for key, value in flags.items() if key not in own}, (note,) if unused else ()


def _launcher(words: Sequence[str], folder: Path, notes: list[str]) -> dict[str, Any]:
    """Read the number of processes, and how they share a model, from the flags of a launcher."""
    flags: dict[str, str] = {}
    for index, word in enumerate(words):
        if match := _FLAG.fullmatch(word):
            name = match[1].replace("-", "_")
            flags[name] = match[2] if match[2] is not None else words[index + 1] if index + 1 < len(words) else ""
    found: dict[str, Any] = {}
    if "config_file" in flags:
        place = _file_of(flags["config_file"], folder)
        if place is None:
            notes.append(f"accelerate's file {flags['config_file']} was not found: add num_processes=N for N processes")
        else:
            accelerate = parse_yaml(read_text(place), str(place))
            found = {"num_processes": accelerate["num_processes"]} if "num_processes" in accelerate else {}
            sharding = accelerate.get("deepspeed_config")
            if isinstance(sharding, dict) and "zero_stage" in sharding:
                found["deepspeed_config.zero_stage"] = sharding["zero_stage"]
    if count := flags.get("num_processes") or flags.get("nproc_per_node") or flags.get("num_gpus"):
        nodes = parse_value(flags.get("nnodes", "1")) if "num_processes" not in flags else 1
        each = parse_value(count)
        found["num_processes"] = each * nodes if isinstance(each, int) and isinstance(nodes, int) else each
    return found


def _after_entry(framework: Framework, words: Sequence[str]) -> list[str]:
    """Return the words after the one that starts the training, since launchers before it have their own flags."""
    for index, word in enumerate(words):
        if any(entry in f"{words[index - 1]} {word}" if index else entry in word for entry in framework.entries):
            return list(words[index + 1 :])
    module = words.index("-m") + 2 if "-m" in words else 0  # python -m MODULE
    started = next((i for i, word in enumerate(words) if word.rpartition("/")[2] in _LAUNCHERS), len(words))
    script = next((i + 1 for i, word in enumerate(words) if i > started and word.endswith(".py")), 0)
    return list(words[max(module, script) :])


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged
