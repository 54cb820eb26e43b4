"""Values of expressions in Python files, which are read from their syntax trees."""

from __future__ import annotations

import ast
import builtins
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from rlsdk.migration.hydra import from_environment
from rlsdk.migration.python_options import (
    CLASS_PARSERS,
    GROUPS,
    OPTIONS,
    PARSERS,
    Filled,
    Omitted,
    OptionParser,
    Unread,
)

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
_CHANGES = ("map", "filter", "select", "rename_column", "rename_columns", "train_test_split", "add_column")
"""Methods of a data set that change what is trained on."""
LOADERS = ("load_dataset", "load_from_disk", "from_json", "from_parquet")
"""Functions of the package datasets whose data a task source reads."""
_WITH_DEFAULTS = (*LOADERS, "from_pretrained")
"""Functions whose arguments have the defaults of the trainer's own flags."""


class UnknownValueError(Exception):
    """The value is known only to whoever runs the file."""

    def __init__(self, why: str, kind: type[Unread] = Unread) -> None:
        super().__init__(why)
        self.unread = kind(why)


def last_name(node: ast.expr) -> str:
    """The last part of a dotted name; empty for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@attrs.define
class ScriptValues:
    """Values of expressions of a file, as far as they can be known without running it."""

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

    def decided(self, test: ast.expr) -> bool | None:
        """Return whether a condition holds; None if only a run would tell."""
        try:
            return bool(known_now(self.value(test), test))
        except (UnknownValueError, TypeError, ValueError, ArithmeticError, KeyError, IndexError):
            return None

    def kept(self, node: ast.expr) -> Any:
        """A value, or a mark for one that cannot be read."""
        try:
            return self.value(node)
        except UnknownValueError as error:
            return error.unread
        except (TypeError, ValueError, ArithmeticError, KeyError, IndexError) as error:
            return Unread(f"line {node.lineno}: {error}")

    def value(self, node: ast.expr) -> Any:  # noqa: PLR0911, PLR0912 - one line for each kind of expression
        """The value of an expression.

        Raises:
            UnknownValueError: It is known only at run time.
        """
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in self.names:
            if isinstance(found := self.names[node.id], Unread):
                raise UnknownValueError(found.why, type(found))
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
            return not known_now(self.value(node.operand), node)
        if isinstance(node, ast.Attribute) and isinstance(base := self.kept(node.value), Mapping) and node.attr in base:
            self.used.add(node.attr)
            if isinstance(found := base[node.attr], Unread):
                raise UnknownValueError(found.why)
            return found
        if isinstance(node, ast.Attribute) and node.attr in (self.flags or {}) and isinstance(base, Unread):
            self.used.add(node.attr)
            return (self.flags or {})[node.attr]
        if isinstance(node, ast.Attribute) and self.flags is not None and isinstance(base, Filled):
            raise UnknownValueError(f"line {node.lineno}: the command does not set {node.attr}", Omitted)
        if isinstance(node, ast.Attribute) and last_name(node.value) == "torch":  # a dtype
            return f"torch.{node.attr}"
        raise UnknownValueError(f"line {node.lineno}: {ast.unparse(node)[:60]} is known only when the file runs")

    def truth(self, node: ast.expr) -> bool:
        """Return whether a condition holds; one that only a run would tell is taken to be true, and noted."""
        try:
            return bool(self.value(node))
        except UnknownValueError:
            self.notes.append(f"line {node.lineno}: {ast.unparse(node)[:60]} is taken to be true: please check")
            return True

    def combined(self, node: ast.BoolOp) -> Any:
        """Return the operand that `and` or `or` yields."""
        found: Any = None
        for each in node.values:
            found = known_now(self.value(each), each)
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
        raise UnknownValueError(f"line {node.lineno}: {ast.unparse(node)[:60]} is known only when the file runs")

    def item(self, node: ast.Subscript) -> Any:
        """Return an item of a list, a split of data, or an environment variable."""
        if is_data(base := self.kept(node.value)):
            split = self.kept(node.slice)
            return base if self.omitted(node.slice, split) else {**base, "split": self.value(node.slice)}
        if isinstance(base, list) and isinstance(index := self.kept(node.slice), int):
            return base[index]
        return self.environment(node.value, [node.slice])

    def omitted(self, node: ast.expr, value: Any) -> bool:
        """Return True for a flag that the known command does not give, so that the file's own default applies."""
        return self.flags is not None and isinstance(value, Unread) and isinstance(node, ast.Attribute)

    def arithmetic(self, node: ast.BinOp) -> Any:
        """Compute with numbers, and join texts."""
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.Pow) and isinstance(left, int) and isinstance(right, int) and 0 <= right < 64:
            return left**right if abs(left) <= 1024 else _too_much(node)
        if isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Div):  # of a Path
            return f"{left}/{right}"
        plain = isinstance(left, int | float) and isinstance(right, int | float)
        texts = isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add)
        if type(node.op) not in _OPERATORS or not (plain or texts):
            raise UnknownValueError(f"line {node.lineno}: {ast.unparse(node)[:60]} is known only when the file runs")
        found = _OPERATORS[type(node.op)](left, right)
        return _too_much(node) if plain and abs(found) > _GREATEST else found

    def environment(self, base: ast.expr, arguments: Sequence[ast.expr]) -> Any:
        """`os.environ["NAME"]` and its relatives, as an rlsdk config writes them."""
        if last_name(base) in ("environ", "getenv") and arguments:
            name = self.value(arguments[0])
            if isinstance(name, str) and name.isidentifier():
                fallback = self.value(arguments[1]) if len(arguments) > 1 else None
                found = self.environ.get(name, fallback)
                if re.fullmatch(r"-?\d{1,15}", str(found)):
                    return int(str(found))
                return f"${{oc.env:{name}}}" if fallback is None else f"${{oc.env:{name},{fallback}}}"
        raise UnknownValueError(f"line {base.lineno}: {ast.unparse(base)[:60]} is known only when the file runs")

    def read_variable(self, node: ast.Call, function: ast.FunctionDef) -> Any:
        """Return the variable that a function of the file reads, which is named by its first argument."""
        optional = [each.value for each in node.keywords if each.arg != function.args.args[0].arg]
        fallback = [*node.args[1:2], *optional[:1], *function.args.defaults[-1:]][:1]
        return self.environment(ast.Name("environ", lineno=node.lineno, col_offset=0), [node.args[0], *fallback])

    def called(self, node: ast.Call) -> Any:
        """Return what a call returns, or the call as a mapping of its arguments."""
        name = last_name(node.func)
        if name == "getenv" or (
            name == "get" and isinstance(node.func, ast.Attribute) and last_name(node.func.value) == "environ"
        ):
            return self.environment(ast.Name("environ", lineno=node.lineno, col_offset=0), node.args)
        if name in _CASTS and len(node.args) == 1 and not node.keywords:
            value = self.value(node.args[0])
            if isinstance(value, str) and value.startswith("${oc.env:"):
                return value  # read where the environment is known
            return _CASTS[name](value)
        if isinstance(node.func, ast.Attribute) and is_data(base := self.kept(node.func.value)):
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
            raise UnknownValueError(f"line {node.lineno}: {ast.unparse(node)[:60]} is known only when the file runs")
        return self.call(node)

    def computed(self, node: ast.Call, name: str) -> Any:
        """Return a length, or the result of a method of a text; None for other calls."""
        if name == "len" and len(node.args) == 1 and isinstance(base := self.value(node.args[0]), list | str):
            return len(known_now(base, node))
        base = self.kept(node.func.value) if isinstance(node.func, ast.Attribute) and name in _TEXT_METHODS else None
        if isinstance(base, str):
            return getattr(known_now(base, node), name)(*(self.value(each) for each in node.args))
        return None

    def options(self, node: ast.Call, name: str) -> Any:
        """Return a parser of options, its groups, or the values that it reads from the command; None for others."""
        if name in PARSERS or name in CLASS_PARSERS:
            given = [*node.args[:1], *(each.value for each in node.keywords if each.arg == "dataclass_types")]
            first = given[0] if given and name in CLASS_PARSERS else None
            classes = first.elts if isinstance(first, ast.Tuple | ast.List) else [first] if first is not None else []
            self.parsers.append(OptionParser(classes=tuple(map(last_name, classes))))
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
        found: dict[str, Any] = {} if last_name(node.func) == "dict" else {KIND: last_name(node.func)}
        names = self.constructors.get(last_name(node.func), ())
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


def known_now(value: Any, node: ast.expr) -> Any:
    """Return a value, unless the environment decides about it."""
    if isinstance(value, str) and "${" in value:
        raise UnknownValueError(f"line {node.lineno}: {ast.unparse(node)[:60]} is known only when the file runs")
    return value


def _too_much(node: ast.expr) -> Any:
    raise UnknownValueError(f"line {node.lineno}: the number is too large for a configuration")


def is_data(value: Any) -> bool:
    """True for a call of `load_dataset` or a similar function."""
    return isinstance(value, Mapping) and value.get(KIND) in LOADERS
