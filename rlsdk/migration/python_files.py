"""Read a Python configuration by its syntax tree: assignments, literals and calls; nothing is executed."""

from __future__ import annotations

import ast
import builtins
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlsdk.errors import ConfigError
from rlsdk.migration.shell import from_environment

_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_CASTS: Mapping[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str, "Path": str, "bool": bool}
_GREATEST = 10**15
KIND = "class"
"""Key under which a mapping that was made by a call holds the name of what was called."""

MOVED = "rewards.py"
"""File that a user is told to move functions to, if their own file cannot be imported."""
_CHANGES = ("map", "filter", "select", "rename_column", "rename_columns", "train_test_split", "add_column")
"""Methods of a data set that change what is trained on."""
LOADERS = ("load_dataset", "load_from_disk", "from_json", "from_parquet")
"""Functions of the package datasets whose data a task source reads."""


class _UnknownError(Exception):
    """The value is known only to whoever runs the file."""


def read(
    source: str,
    name: str,
    constructors: Mapping[str, Sequence[str]],
    environ: Mapping[str, str],
    flags: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], tuple[str, ...]]:
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

    Returns:
        Nested values, in which a call is a mapping of its arguments; and what could not be read.

    Raises:
        ConfigError: It is not valid Python.
    """
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError([f"{name} is not valid Python: {str(error) or 'it is too deeply nested'}"]) from error
    functions, to_move = _functions(module, Path(name), constructors)
    reader = _Reader(environ, constructors, functions, flags)
    try:
        reader.run(module.body)
        tree: dict[str, Any] = {}
        for call in (node for node in ast.walk(module) if isinstance(node, ast.Call)):
            if _name(call.func) in constructors:
                tree |= reader.call(call)
        # a call of a constructor that is an argument of another one was read by itself
        tree = {
            key: value
            for key, value in tree.items()
            if key != KIND
            and not (isinstance(value, Mapping) and value.get(KIND) in constructors)
            and not (flags and isinstance(value, Unread) and key in ("args", *flags))  # the flags themselves
        }
    except RecursionError as error:
        raise ConfigError([f"{name} is too deeply nested to be read"]) from error
    values = [each for value in tree.values() for each in (value if isinstance(value, list) else [value])]
    if moved := [function for function in to_move if f"{MOVED}:{function}" in map(str, values)]:
        reader.notes.append(
            f"move {' and '.join(moved)}, with all that they use, to a file {MOVED}: importing {name} would start "
            "its training"
        )
    return tree, tuple(dict.fromkeys(reader.notes))


def _functions(module: ast.Module, file: Path, constructors: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return the path, as in `train.py:exact`, of each function that a file defines or imports; and those to move.

    A file that starts training as it is imported would do so when rlsdk imports the function; its
    functions are said to be in `rewards.py`, to which the user has to move them. A module beside the file is named by
    its own file: Python finds it for a script in its folder, but not for the command `rlsdk`.
    """
    guarded = not any(
        isinstance(node, ast.Call) and _name(node.func) in constructors
        for statement in module.body
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not _is_main(statement)
        for node in ast.walk(statement)
    )
    found: dict[str, str] = {}
    to_move: list[str] = []
    for statement in module.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            found[statement.name] = f"{file if guarded else MOVED}:{statement.name}"
            to_move += [] if guarded else [statement.name]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            beside = file.parent / f"{statement.module}.py"
            place = str(beside) if beside.is_file() else statement.module
            for each in statement.names:
                found[each.asname or each.name] = f"{place}:{each.name}"
    return found, to_move


def _name(node: ast.expr) -> str:
    """The last part of a dotted name; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@attrs.define
class _Reader:
    environ: Mapping[str, str]
    constructors: Mapping[str, Sequence[str]]
    names: dict[str, Any]
    flags: Mapping[str, Any] | None = None
    notes: list[str] = attrs.field(factory=list)

    def run(self, body: Sequence[ast.stmt]) -> None:
        """Keep what is assigned to names; what an `if` assigns depends on its run."""
        for statement in body:
            if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        self.names[target.id] = self.kept(statement.value)
                    elif isinstance(target, ast.Tuple):
                        self.names |= self.unpacked(target, self.kept(statement.value))
            elif isinstance(statement, ast.FunctionDef) or (isinstance(statement, ast.If) and _is_main(statement)):
                self.run(statement.body)
            elif isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try):
                changed = {
                    n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
                }
                for name in changed & self.names.keys():
                    self.notes.append(f"{name} may change in line {statement.lineno}, which is not run: please check")

    def unpacked(self, target: ast.Tuple, value: Any) -> dict[str, Any]:
        """Return the values of several names; data that is loaded with a list of splits becomes several data sets."""
        if _is_data(value) and isinstance(value.get("split"), list):
            value = [{**value, "split": split} for split in value["split"]]
        if not isinstance(value, list) or len(value) != len(target.elts):
            value = [Unread(f"line {target.lineno}: {ast.unparse(target)} is known only when the file runs")] * len(
                target.elts
            )
        return {name.id: each for name, each in zip(target.elts, value, strict=True) if isinstance(name, ast.Name)}

    def kept(self, node: ast.expr) -> Any:
        """A value, or a mark for one that cannot be read."""
        try:
            return self.value(node)
        except _UnknownError as error:
            return Unread(str(error))
        except (TypeError, ValueError, ArithmeticError, KeyError, IndexError) as error:
            return Unread(f"line {node.lineno}: {error}")

    def value(self, node: ast.expr) -> Any:  # noqa: PLR0911, PLR0912 - one line for each kind of expression
        """The value of an expression.

        Raises:
            _UnknownError: It is known only at run time.
        """
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in self.names:
            if isinstance(found := self.names[node.id], Unread):
                raise _UnknownError(found.why)
            return found
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return [self.value(each) for each in node.elts]
        if isinstance(node, ast.Dict):
            return {self.value(k): self.kept(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.value(node.operand)
        if isinstance(node, ast.BinOp):
            return self.arithmetic(node)
        if isinstance(node, ast.Subscript):
            return self.item(node)
        if isinstance(node, ast.Call):
            return self.called(node)
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self.value(p.value if isinstance(p, ast.FormattedValue) else p)) for p in node.values)
        if isinstance(node, ast.IfExp):
            return self.value(node.body if self.truth(node.test) else node.orelse)
        if isinstance(node, ast.Compare):
            return self.compared(node)
        if isinstance(node, ast.Attribute) and isinstance(base := self.kept(node.value), Mapping) and node.attr in base:
            return base[node.attr]
        if isinstance(node, ast.Attribute) and node.attr in (self.flags or {}) and isinstance(base, Unread):
            return (self.flags or {})[node.attr]
        if isinstance(node, ast.Attribute) and _name(node.value) == "torch":  # a dtype
            return f"torch.{node.attr}"
        raise _UnknownError(f"line {node.lineno}: {ast.unparse(node)[:60]} is known only when the file runs")

    def truth(self, node: ast.expr) -> bool:
        """Return whether a condition holds; one that only a run would tell is taken to be true, and noted."""
        try:
            return bool(self.value(node))
        except _UnknownError:
            self.notes.append(f"line {node.lineno}: {ast.unparse(node)[:60]} is taken to be true: please check")
            return True

    def compared(self, node: ast.Compare) -> bool:
        """Compare two values with `==` or `!=`; a number from the environment equals its text."""
        sides = [self.value(each) for each in (node.left, *node.comparators)]
        sides = [from_environment(each, self.environ) if isinstance(each, str) else each for each in sides]
        if len(sides) != 2 or not isinstance(node.ops[0], ast.Eq | ast.NotEq) or any("${" in str(s) for s in sides):
            raise _UnknownError(f"line {node.lineno}: {ast.unparse(node)[:60]} is known only when the file runs")
        return (str(sides[0]) == str(sides[1])) == isinstance(node.ops[0], ast.Eq)

    def item(self, node: ast.Subscript) -> Any:
        if _is_data(base := self.kept(node.value)):
            split = self.kept(node.slice)
            return base if self.omitted(node.slice, split) else {**base, "split": self.value(node.slice)}
        return self.environment(node.value, [node.slice])

    def omitted(self, node: ast.expr, value: Any) -> bool:
        """Return True for a flag that the known command does not give, so that the file's own default applies."""
        return self.flags is not None and isinstance(value, Unread) and isinstance(node, ast.Attribute)

    def arithmetic(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.Pow) and isinstance(left, int) and isinstance(right, int) and 0 <= right < 64:
            return left**right if abs(left) <= 1024 else _too_much(node)
        plain = isinstance(left, int | float) and isinstance(right, int | float)
        texts = isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add)
        if type(node.op) not in _OPERATORS or not (plain or texts):
            raise _UnknownError(f"line {node.lineno}: {ast.unparse(node)[:60]} is known only when the file runs")
        found = _OPERATORS[type(node.op)](left, right)
        return _too_much(node) if plain and abs(found) > _GREATEST else found

    def environment(self, base: ast.expr, arguments: Sequence[ast.expr]) -> Any:
        """`os.environ["NAME"]` and its relatives, as an rlsdk config writes them."""
        if _name(base) in ("environ", "getenv") and arguments:
            name = self.value(arguments[0])
            if isinstance(name, str) and name.isidentifier():
                fallback = self.value(arguments[1]) if len(arguments) > 1 else None
                found = self.environ.get(name, fallback)
                if re.fullmatch(r"-?\d{1,15}", str(found)):
                    return int(str(found))
                return f"${{oc.env:{name}}}" if fallback is None else f"${{oc.env:{name},{fallback}}}"
        raise _UnknownError(f"line {base.lineno}: {ast.unparse(base)[:60]} is known only when the file runs")

    def called(self, node: ast.Call) -> Any:
        name = _name(node.func)
        if name == "getenv" or (
            name == "get" and isinstance(node.func, ast.Attribute) and _name(node.func.value) == "environ"
        ):
            return self.environment(ast.Name("environ", lineno=node.lineno, col_offset=0), node.args)
        if name in _CASTS and len(node.args) == 1 and not node.keywords:
            value = self.value(node.args[0])
            if isinstance(value, str) and value.startswith("${oc.env:"):
                return value  # read where the environment is known
            return _CASTS[name](value)
        if isinstance(node.func, ast.Attribute) and _is_data(base := self.kept(node.func.value)):
            if name in _CHANGES:
                self.notes.append(
                    f"line {node.lineno}: {ast.unparse(node)[:40]}… is not converted: set the columns in "
                    "tasks.train.columns, or save its result, dataset.to_json('train.jsonl'), and name that file"
                )
            return base
        if name in ("copy", "deepcopy") and len(node.args) == 1:
            return self.value(node.args[0])
        if name != "dict" and hasattr(builtins, name):
            raise _UnknownError(f"line {node.lineno}: {ast.unparse(node)[:60]} is known only when the file runs")
        return self.call(node)

    def call(self, node: ast.Call) -> dict[str, Any]:
        """A call as a mapping of its arguments, with the name of what is called."""
        found: dict[str, Any] = {} if _name(node.func) == "dict" else {KIND: _name(node.func)}
        names = self.constructors.get(_name(node.func), ())
        for position, argument in enumerate(node.args):
            found[names[position] if position < len(names) else f"argument_{position + 1}"] = self.kept(argument)
        for keyword in node.keywords:
            if keyword.arg is not None:
                value = self.kept(keyword.value)
                if not (self.omitted(keyword.value, value) and found.get(KIND) in LOADERS):
                    found[keyword.arg] = value
            elif isinstance(spread := self.kept(keyword.value), Mapping):
                found |= spread
        return found


@attrs.frozen
class Unread:
    """Stands for a value that only a run of the file would tell."""

    why: str

    def __str__(self) -> str:
        return f"not read: {self.why}"


def _too_much(node: ast.expr) -> Any:
    raise _UnknownError(f"line {node.lineno}: the number is too large for a configuration")


def _is_main(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.If)
        and isinstance(statement.test, ast.Compare)
        and _name(statement.test.left) == "__name__"
    )


def _is_data(value: Any) -> bool:
    """True for a call of `load_dataset` or a similar function."""
    return isinstance(value, Mapping) and value.get(KIND) in LOADERS
