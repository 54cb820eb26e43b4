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
from rlsdk.migration.python_options import (
    CLASS_PARSERS,
    GROUPS,
    OPTIONS,
    PARSERS,
    Filled,
    Omitted,
    OptionParser,
    Unread,
    fields,
)
from rlsdk.migration.shell import from_environment

_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_TEXT_METHODS = ("split", "lower", "upper", "strip", "lstrip", "rstrip", "replace", "removeprefix", "removesuffix")
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
_WITH_DEFAULTS = (*LOADERS, "from_pretrained")
"""Functions whose arguments have the defaults of the trainer's own flags."""


class _UnknownError(Exception):
    """The value is known only to whoever runs the file."""

    def __init__(self, why: str, kind: type[Unread] = Unread) -> None:
        super().__init__(why)
        self.unread = kind(why)


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
               for base in map(_name, each.bases) if base in constructors}  # fmt: skip
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
        isinstance(node, ast.Call) and _name(node.func) in constructors
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


def _name(node: ast.expr) -> str:
    """The last part of a dotted name; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@attrs.define
class _ScriptReader:
    environ: Mapping[str, str]
    constructors: Mapping[str, Sequence[str]]
    names: dict[str, Any]
    flags: Mapping[str, Any] | None = None
    notes: list[str] = attrs.field(factory=list)
    parsers: list[OptionParser] = attrs.field(factory=list)
    classes: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    returned: dict[str, Any] = attrs.field(factory=dict)
    assigned: dict[str, Any] = attrs.field(factory=dict)
    used: set[str] = attrs.field(factory=set)
    skipped: set[ast.AST] = attrs.field(factory=set)
    environment_readers: dict[str, ast.FunctionDef] = attrs.field(factory=dict)

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
            if _name(call.func) in self.constructors:
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
        return any(isinstance(node, ast.Call) and _name(node.func) in self.constructors for node in ast.walk(function))

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
                settings |= {each.arg: _name(each.value) or settings["action"] for each in call.keywords
                             if each.arg == "action"}  # fmt: skip
                parser.add([self.kept(each) for each in call.args], settings, call.lineno)

    def decided(self, test: ast.expr) -> bool | None:
        """Return whether a condition holds; None if only a run would tell."""
        try:
            return bool(_known(self.value(test), test))
        except (_UnknownError, TypeError, ValueError, ArithmeticError, KeyError, IndexError):
            return None

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
            return error.unread
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
                raise _UnknownError(found.why, type(found))
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
        if isinstance(node, ast.BoolOp):
            return self.combined(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return not _known(self.value(node.operand), node)
        if isinstance(node, ast.Attribute) and isinstance(base := self.kept(node.value), Mapping) and node.attr in base:
            self.used.add(node.attr)
            if isinstance(found := base[node.attr], Unread):
                raise _UnknownError(found.why)
            return found
        if isinstance(node, ast.Attribute) and node.attr in (self.flags or {}) and isinstance(base, Unread):
            self.used.add(node.attr)
            return (self.flags or {})[node.attr]
        if isinstance(node, ast.Attribute) and self.flags is not None and isinstance(base, Filled):
            raise _UnknownError(f"line {node.lineno}: the command does not set {node.attr}", Omitted)
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

    def combined(self, node: ast.BoolOp) -> Any:
        """Return the operand that `and` or `or` yields."""
        found: Any = None
        for each in node.values:
            found = _known(self.value(each), each)
            if bool(found) == isinstance(node.op, ast.Or):
                return found
        return found

    def compared(self, node: ast.Compare) -> bool:
        """Compare two values; a number from the environment equals its text."""
        sides = [self.value(each) for each in (node.left, *node.comparators)]
        sides = [from_environment(each, self.environ) if isinstance(each, str) else each for each in sides]
        comparison = node.ops[0]
        if len(sides) == 2 and not any("${" in str(side) for side in sides):
            left, right = sides
            if isinstance(comparison, ast.Eq | ast.NotEq):
                return (str(left) == str(right)) == isinstance(comparison, ast.Eq)
            if isinstance(comparison, ast.Is | ast.IsNot) and any(side in (None, True, False) for side in sides):
                return (left is right) == isinstance(comparison, ast.Is)
            if isinstance(comparison, ast.In | ast.NotIn) and isinstance(right, str | list | Mapping):
                return (left in right) == isinstance(comparison, ast.In)
            if type(comparison) in _COMPARISONS:
                return bool(_COMPARISONS[type(comparison)](left, right))
        raise _UnknownError(f"line {node.lineno}: {ast.unparse(node)[:60]} is known only when the file runs")

    def item(self, node: ast.Subscript) -> Any:
        if _is_data(base := self.kept(node.value)):
            split = self.kept(node.slice)
            return base if self.omitted(node.slice, split) else {**base, "split": self.value(node.slice)}
        if isinstance(base, list) and isinstance(index := self.kept(node.slice), int):
            return base[index]
        return self.environment(node.value, [node.slice])

    def omitted(self, node: ast.expr, value: Any) -> bool:
        """Return True for a flag that the known command does not give, so that the file's own default applies."""
        return self.flags is not None and isinstance(value, Unread) and isinstance(node, ast.Attribute)

    def arithmetic(self, node: ast.BinOp) -> Any:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.Pow) and isinstance(left, int) and isinstance(right, int) and 0 <= right < 64:
            return left**right if abs(left) <= 1024 else _too_much(node)
        if isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Div):  # of a Path
            return f"{left}/{right}"
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

    def read_variable(self, node: ast.Call, function: ast.FunctionDef) -> Any:
        """Return the variable that a function of the file reads, which is named by its first argument."""
        optional = [each.value for each in node.keywords if each.arg != function.args.args[0].arg]
        fallback = [*node.args[1:2], *optional[:1], *function.args.defaults[-1:]][:1]
        return self.environment(ast.Name("environ", lineno=node.lineno, col_offset=0), [node.args[0], *fallback])

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
        if (found := self.computed(node, name)) is not None or (found := self.options(node, name)) is not None:
            return found
        if node.args and name in self.environment_readers:
            return self.read_variable(node, self.environment_readers[name])
        if name != "dict" and hasattr(builtins, name):
            raise _UnknownError(f"line {node.lineno}: {ast.unparse(node)[:60]} is known only when the file runs")
        return self.call(node)

    def computed(self, node: ast.Call, name: str) -> Any:
        """Return a length, or the result of a method of a text; None for other calls."""
        if name == "len" and len(node.args) == 1 and isinstance(base := self.value(node.args[0]), list | str):
            return len(_known(base, node))
        base = self.kept(node.func.value) if isinstance(node.func, ast.Attribute) and name in _TEXT_METHODS else None
        if isinstance(base, str):
            return getattr(_known(base, node), name)(*(self.value(each) for each in node.args))
        return None

    def options(self, node: ast.Call, name: str) -> Any:
        """Return a parser of options, its groups, or the values that it reads from the command; None for others."""
        if name in PARSERS or name in CLASS_PARSERS:
            given = [*node.args[:1], *(each.value for each in node.keywords if each.arg == "dataclass_types")]
            first = given[0] if given and name in CLASS_PARSERS else None
            classes = first.elts if isinstance(first, ast.Tuple | ast.List) else [first] if first is not None else []
            self.parsers.append(OptionParser(classes=tuple(map(_name, classes))))
            return self.parsers[-1]
        if isinstance(node.func, ast.Name):
            return self.returned.get(name)
        if not isinstance(node.func, ast.Attribute) or not (name in GROUPS or name.startswith("parse_")):
            return None
        if not isinstance(parser := self.kept(node.func.value), OptionParser):
            return None
        if name in GROUPS:
            return parser
        if parser.classes:
            return [self.filled(each, node) for each in parser.classes]
        parsed = parser.parsed(self.flags or {})
        return [parsed, []] if name == "parse_known_args" else parsed

    def filled(self, name: str, node: ast.Call) -> Any:
        """Return the values of a dataclass that a parser fills; for a class of the trainer, a mark."""
        if name not in self.classes or name in self.constructors:
            return Filled(f"line {node.lineno}: the command sets {name}")
        given = self.flags or {}
        values = {key: given.get(key, value) for key, value in self.classes[name].items()}
        return {KIND: OPTIONS, **values}

    def call(self, node: ast.Call) -> dict[str, Any]:
        """A call as a mapping of its arguments, with the name of what is called."""
        found: dict[str, Any] = {} if _name(node.func) == "dict" else {KIND: _name(node.func)}
        names = self.constructors.get(_name(node.func), ())
        for position, argument in enumerate(node.args):
            found[names[position] if position < len(names) else f"argument_{position + 1}"] = self.kept(argument)
        for keyword in node.keywords:
            if keyword.arg is not None:
                value = self.kept(keyword.value)
                unset = isinstance(value, Omitted) or self.omitted(keyword.value, value)
                if not (unset and found.get(KIND) in _WITH_DEFAULTS):
                    found[keyword.arg] = value
            elif isinstance(spread := self.kept(keyword.value), Mapping):
                found |= {key: value for key, value in spread.items() if not isinstance(value, Omitted)}
        return found


def _known(value: Any, node: ast.expr) -> Any:
    """Return a value, unless the environment decides about it."""
    if isinstance(value, str) and "${" in value:
        raise _UnknownError(f"line {node.lineno}: {ast.unparse(node)[:60]} is known only when the file runs")
    return value


def _reads_environment(function: ast.FunctionDef) -> bool:
    """True for a function that reads the environment variable that its first parameter names."""
    name = function.args.args[0].arg if function.args.args else None
    for node in ast.walk(function):
        if isinstance(node, ast.Subscript):
            place, keys = _name(node.value), [node.slice]
        elif isinstance(node, ast.Call):
            of = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "get" else node.func
            place, keys = _name(of), node.args[:1]
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
    names = {_name(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call)}
    return any(name in (*PARSERS, *CLASS_PARSERS) or name.startswith("parse_") for name in names)


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
