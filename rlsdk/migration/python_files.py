"""Read a Python configuration by its syntax tree: assignments, literals and calls; nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlsdk.errors import ConfigError
from rlsdk.migration.python_options import (
    CLASS_PARSERS,
    OPTIONS,
    PARSERS,
    Filled,
    OptionParser,
    Unread,
    fields,
)
from rlsdk.migration.python_values import KIND, ScriptValues, is_data, last_name

MOVED = "rewards.py"
"""File that a user is told to move functions to, if their own file cannot be imported."""


@attrs.frozen
class PythonConfig:
    """A configuration that was read from a Python file.

    Attributes:
        tree: Nested values, in which a call is a mapping of its arguments.
        notes: Parts that could not be read.
        options: Flags of the command that the script declares with argparse, whose values are in the tree where the
            script uses them.
        fields: Flags that fill the script's own dataclasses.
        unused: Flags that nothing in the tree depends on.
    """

    tree: dict[str, Any]
    notes: tuple[str, ...]
    options: frozenset[str] = frozenset()
    fields: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()


def read(
    source: str,
    name: str,
    constructors: Mapping[str, Sequence[str]],
    environ: Mapping[str, str],
    flags: Mapping[str, Any] | None = None,
) -> PythonConfig:
    """Collect the arguments of the calls that configure a training run.

    Args:
        source: Python code.
        name: Its file.
        constructors: Names of classes and functions whose arguments are keys -> names of their positional arguments,
            outermost first: if an assigned value is a call of one of them, its arguments are the configuration;
            arguments of several are merged.
        environ: Environment variables, from which numbers are read.
        flags: Flags of the command that runs the file, which it reads as attributes such as `script_args.dataset_name`;
            None if the command is not known.

    Raises:
        ConfigError: It is not valid Python.
    """
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError([f"{name} is not valid Python: {str(error) or 'it is too deeply nested'}"]) from error
    derived = {each.name: base for each in module.body if isinstance(each, ast.ClassDef)
               for base in map(last_name, each.bases) if base in constructors}  # fmt: skip
    constructors = {**constructors, **{name: constructors[base] for name, base in derived.items()}}
    functions, to_move = _functions(module, Path(name), constructors)
    reader = _ScriptReader(environ, constructors, functions, flags)
    try:
        tree = reader.collected(module, derived)
    except RecursionError as error:
        raise ConfigError([f"{name} is too deeply nested to be read"]) from error
    values = [each for value in tree.values() for each in (value if isinstance(value, list) else [value])]
    if moved := [function for function in to_move if f"{MOVED}:{function}" in map(str, values)]:
        reader.notes.append(
            f"move {' and '.join(moved)}, with all that they use, to a file {MOVED}: importing {name} would start "
            "its training"
        )
    options = frozenset(
        name for parser in reader.parsers for option in parser.options.values() for name in option.names
    )
    own = frozenset(name for each, values in reader.classes.items() if each not in constructors for name in values)
    read_somewhere = reader.used | {
        name for parser in reader.parsers for key, option in parser.options.items() if key in reader.used
        for name in option.names
    }  # fmt: skip
    return PythonConfig(
        tree,
        tuple(dict.fromkeys(reader.notes)),
        options | reader.assigned.keys(),
        own,
        (options | own) - read_somewhere,
    )


def _functions(module: ast.Module, file: Path, constructors: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return the path, as in `train.py:exact`, of each function and class of a file, its imports, and those to move.

    A file that starts training as it is imported would do so when rlsdk imports the function; its
    functions are said to be in `rewards.py`, to which the user has to move them. A module beside the file is named by
    its own file: Python finds it for a script in its folder, but not for the command `rlsdk`.
    """
    guarded = not any(
        isinstance(node, ast.Call) and last_name(node.func) in constructors
        for statement in module.body
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not _is_main(statement)
        for node in ast.walk(statement)
    )
    found: dict[str, str] = {}
    to_move: list[str] = []
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    for statement in module.body:
        if isinstance(statement, functions) or (
            isinstance(statement, ast.ClassDef) and any(isinstance(each, functions) for each in statement.body)
        ):
            found[statement.name] = f"{file if guarded else MOVED}:{statement.name}"
            to_move += [] if guarded else [statement.name]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            beside = file.parent / f"{statement.module}.py"
            place = str(beside) if beside.is_file() else statement.module
            for each in statement.names:
                found[each.asname or each.name] = f"{place}:{each.name}"
    return found, to_move


@attrs.define
class _ScriptReader(ScriptValues):
    """Runs through the statements of a file, and keeps what is assigned."""

    def collected(self, module: ast.Module, derived: Mapping[str, str]) -> dict[str, Any]:
        """Return the arguments of all calls of constructors.

        Args:
            module: The file.
            derived: The file's own classes -> constructors that they are derived from.
        """
        definitions = [each for each in module.body if isinstance(each, ast.ClassDef)]
        self.environment_readers = {
            each.name: each for each in module.body if isinstance(each, ast.FunctionDef) and _reads_environment(each)
        }
        self.classes = {
            each.name: {
                key: Unread(f"line {each.lineno}: {key} has no default; give the command that runs this script")
                if node is None
                else self.kept(node)
                for key, node in fields(each).items()
            }
            for each in definitions
        }
        self.run([each for each in module.body if _parses(each)])  # functions may be called before they are defined
        makers = [each for each in module.body if isinstance(each, ast.FunctionDef) and self.configures(each)]
        if any(each.args.args or each.args.kwonlyargs for each in makers):
            self.run(module.body)
            self.bind(makers, [node for node in ast.walk(module) if isinstance(node, ast.Call)])
        self.notes.clear()
        self.run(module.body)
        tree: dict[str, Any] = {}
        for name in derived:
            tree |= self.classes[name]
        for call in (node for node in ast.walk(module) if isinstance(node, ast.Call) and node not in self.skipped):
            if last_name(call.func) in self.constructors:
                tree |= self.call(call)
        tree |= self.assigned
        if self.flags is None and any(parser.options for parser in self.parsers):
            self.notes.append("the script's own options have their defaults: if its command sets any, give the command")
        # a call of a constructor, or of a function with one, that is an argument of another one was read by itself
        return {
            key: value
            for key, value in tree.items()
            if key != KIND
            and not (isinstance(value, Mapping) and value.get(KIND) in {*self.constructors, *(m.name for m in makers)})
            and not (self.flags and isinstance(value, Unread) and key in ("args", *self.flags))  # the flags themselves
        }

    def configures(self, function: ast.FunctionDef) -> bool:
        """Return True for a function that calls a constructor."""
        return any(
            isinstance(node, ast.Call) and last_name(node.func) in self.constructors for node in ast.walk(function)
        )

    def bind(self, functions: Sequence[ast.FunctionDef], calls: Sequence[ast.Call]) -> None:
        """Keep what parameters of functions stand for: the arguments of the function's only call, else their defaults.

        Names that are assigned anywhere keep their value, and one for which two functions differ stays unknown.
        """
        found: dict[str, list[Any]] = {}
        for function in functions:
            made = [each for each in calls if isinstance(each.func, ast.Name) and each.func.id == function.name]
            if len(made) > 1:
                continue
            names, optional = [each.arg for each in function.args.args], function.args.defaults
            nodes = dict(zip(names[len(names) - len(optional) :], optional, strict=True))
            more = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
            nodes |= {each.arg: node for each, node in more if node is not None}
            for call in made:
                nodes |= dict(zip(names, call.args, strict=False))
                nodes |= {each.arg: each.value for each in call.keywords if each.arg is not None}
            for name, node in nodes.items():
                found.setdefault(name, []).append(self.kept(node))
        known = {name: values[0] for name, values in found.items() if all(each == values[0] for each in values)}
        self.names |= {name: v for name, v in known.items() if name not in self.names and type(v) is not Unread}

    def run(self, body: Sequence[ast.stmt]) -> None:
        """Keep what is assigned to names; what an `if` assigns depends on its condition, if that can be read."""
        for statement in body:
            if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                for target in targets:
                    self.assign(target, statement.value)
            elif isinstance(statement, ast.FunctionDef) or (isinstance(statement, ast.If) and _is_main(statement)):
                self.run(statement.body)
                last = statement.body[-1]
                if isinstance(statement, ast.FunctionDef) and isinstance(last, ast.Return) and _parses(statement):
                    found = self.kept(last.value) if last.value is not None else None
                    if _has_options(found):
                        self.returned[statement.name] = found
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
                self.declare(statement.value)
            elif isinstance(statement, ast.If) and (known := self.decided(statement.test)) is not None:
                self.run(statement.body if known else statement.orelse)
                for each in statement.orelse if known else statement.body:
                    self.skipped |= set(ast.walk(each))
            elif isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try):
                changed = {
                    n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
                }
                for name in changed & self.names.keys():
                    self.notes.append(f"{name} may change in line {statement.lineno}, which is not run: please check")

    def assign(self, target: ast.expr, node: ast.expr) -> None:
        """Keep a value under a name, or as an attribute of the trainer's configuration."""
        if isinstance(target, ast.Name):
            self.names[target.id] = self.kept(node)
        elif isinstance(target, ast.Tuple):
            self.names |= self.unpacked(target, self.kept(node))
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name):
            base = self.names.get(target.value.id)
            if isinstance(base, Filled) or (isinstance(base, Mapping) and base.get(KIND) in self.constructors):
                self.assigned[target.attr] = self.kept(node)

    def declare(self, call: ast.Call) -> None:
        """Keep an option that a statement adds to a parser."""
        if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument":
            parser = self.kept(call.func.value)
            if isinstance(parser, OptionParser):
                settings = {each.arg: self.kept(each.value) for each in call.keywords if each.arg is not None}
                settings |= {each.arg: last_name(each.value) or settings["action"] for each in call.keywords
                             if each.arg == "action"}  # fmt: skip
                parser.add([self.kept(each) for each in call.args], settings, call.lineno)

    def unpacked(self, target: ast.Tuple, value: Any) -> dict[str, Any]:
        """Return the values of several names; data that is loaded with a list of splits becomes several data sets."""
        if is_data(value) and isinstance(value.get("split"), list):
            value = [{**value, "split": split} for split in value["split"]]
        if not isinstance(value, list) or len(value) != len(target.elts):
            value = [Unread(f"line {target.lineno}: {ast.unparse(target)} is known only when the file runs")] * len(
                target.elts
            )
        return {name.id: each for name, each in zip(target.elts, value, strict=True) if isinstance(name, ast.Name)}


def _reads_environment(function: ast.FunctionDef) -> bool:
    """True for a function that reads the environment variable that its first parameter names."""
    name = function.args.args[0].arg if function.args.args else None
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript):
            place, keys = last_name(node.value), [node.slice]
        elif isinstance(node, ast.Call):
            of = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "get" else node.func
            place, keys = last_name(of), node.args[:1]
        else:
            continue
        if place in ("environ", "getenv") and any(isinstance(key, ast.Name) and key.id == name for key in keys):
            return True
    return False


def _has_options(value: Any) -> bool:
    """True for a parser, and for what one reads."""
    values = value if isinstance(value, list) and value else [value]
    return any(
        isinstance(each, OptionParser | Filled) or (isinstance(each, Mapping) and each.get(KIND) == OPTIONS)
        for each in values
    )


def _parses(statement: ast.stmt) -> bool:
    """True for a function that returns a parser or what it reads, and for the script's main block if it parses."""
    if not isinstance(statement, ast.FunctionDef) and not _is_main(statement):
        return False
    if isinstance(statement, ast.FunctionDef) and not isinstance(statement.body[-1], ast.Return):
        return False
    names = {last_name(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)}
    return any(name in (*PARSERS, *CLASS_PARSERS) or name.startswith("parse_") for name in names)


def _is_main(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.If)
        and isinstance(statement.test, ast.Compare)
        and last_name(statement.test.left) == "__name__"
    )
