"""Strict, typed options of components and runs, checked before anything starts.

An int is accepted as a float, but infinity and NaN are not; text is never accepted as a number or bool, nor a bool as a
number. Unknown keys are rejected with the nearest known one. All faults are collected and reported together.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import attrs
import cattrs
from cattrs.errors import ClassValidationError, ForbiddenExtraKeysError, StructureHandlerNotFoundError

from rlsdk.docstrings import documented
from rlsdk.errors import PluginError, defined_at, nearest
from rlsdk.limits import Limit, written

MISSING: Any = attrs.NOTHING
Fault = tuple[str, str]
"""(path below the component, message)."""

MANY = 12
"""Maximum number of names to list if the nearest one is known."""

CONTINUATION = (
    "; it looks like a shell line that lost its continuation: end each line but the last with ' \\' and nothing "
    "after it"
)


class Mismatch(ValueError):
    """A value does not match its type; the message says what was expected."""


class Mismatches(ValueError):
    """Values inside a list or a mapping do not match their types."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults
        super().__init__("; ".join(f"{path}: {text}" for path, text in faults))


@attrs.frozen
class Option:
    """An option: name, type, default (`MISSING`: required), one line of help, and whether it may be a schedule."""

    name: str
    type: Any
    default: Any = MISSING
    help: str = ""
    schedule: bool = False

    @property
    def required(self) -> bool:
        """True if the option has no default."""
        return self.default is MISSING

    @property
    def type_name(self) -> str:
        """The type in readable form."""
        return type_name(self.type)


def options_of(obj: Any) -> tuple[Option, ...]:
    """Return the options declared by `obj`: keyword-only parameters of a function or `__init__`, or attrs fields.

    Returns:
        Options in the order of declaration; help comes from the docstring's `Args:` or `Attributes:`.

    Raises:
        PluginError: The annotation of an option cannot be evaluated at run time.
    """
    if inspect.isclass(obj) and attrs.has(obj):
        return _fields(obj)
    notes = documented(inspect.getdoc(obj) or "")
    target = obj.__init__ if inspect.isclass(obj) else obj
    if inspect.isclass(obj) and hasattr(obj, "__signature__"):
        target = obj  # a pydantic model: its `__init__` takes anything
    if target is object.__init__:
        return ()
    if inspect.isclass(obj):
        notes = {**documented(inspect.getdoc(target) or ""), **notes}
    keyword = [p for p in inspect.signature(target).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return tuple(
        Option(p.name, _hint(target, p), MISSING if p.default is p.empty else p.default, notes.get(p.name, ""))
        for p in keyword
    )


def _hint(function: Any, parameter: inspect.Parameter) -> Any:
    """Return the type of one parameter; other annotations may use names imported only for type checkers."""
    if parameter.annotation is parameter.empty:
        return Any
    if inspect.isclass(function):
        return parameter.annotation
    alone = types.SimpleNamespace(__annotations__={parameter.name: parameter.annotation})
    try:
        hints = typing.get_type_hints(alone, globalns=inspect.unwrap(function).__globals__, include_extras=True)
        return hints[parameter.name]
    except Exception as error:  # an annotation is code, and may raise anything
        raise _unreadable(function, error) from error


def _fields(cls: type) -> tuple[Option, ...]:
    """Return the options of an attrs class; inherited ones come first, with inherited help unless overridden."""
    try:
        attrs.resolve_types(cls)
    except Exception as error:  # as above
        raise _unreadable(cls, error) from error
    bases = [base for base in reversed(cls.__mro__) if attrs.has(base)]
    notes = {name: text for base in bases for name, text in documented(base.__doc__ or "").items()}
    order = list(dict.fromkeys(f.name for base in bases for f in attrs.fields(base)))
    fields = sorted((f for f in attrs.fields(cls) if f.init), key=lambda f: order.index(f.name))
    return tuple(Option(f.alias or f.name, f.type or Any, _default(f.default), notes.get(f.name, "")) for f in fields)


def _unreadable(obj: Any, error: Exception) -> PluginError:
    cause = f"{type(error).__name__}: {error}"
    return PluginError(
        f"the annotations of the options of {defined_at(obj)} cannot be read ({cause}); import the names they use at "
        "run time, not under TYPE_CHECKING"
    )


def _default(value: Any) -> Any:
    if isinstance(value, attrs.Factory):  # type: ignore[arg-type]
        return Computed() if value.takes_self else value.factory()
    return value


@attrs.frozen
class Computed:
    """Placeholder for a default that depends on other options."""

    def __str__(self) -> str:
        return "computed"


def check_options(options: Iterable[Option], given: Mapping[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """Check and convert the values given for `options`.

    Returns:
        Values of the given options (defaults stay with the component), and all faults.
    """
    known = {o.name: o for o in options}
    values: dict[str, Any] = {}
    faults: list[Fault] = []
    for name, value in given.items():
        if name not in known:
            faults.append((str(name), unknown("option", str(name), known)))
            continue
        values[name], found = structure(value, known[name].type)
        faults += [(f"{name}{path}", text) for path, text in found]
    faults += [(o.name, f"is required ({o.type_name})") for o in known.values() if o.required and o.name not in given]
    return values, faults


def structure(value: Any, kind: Any) -> tuple[Any, list[Fault]]:
    """Convert `value` to type `kind`, or return the faults with their paths (`.field`, `[index]`)."""
    try:
        return CONVERTER.structure(value, kind), []
    except Exception as error:  # noqa: BLE001 - cattrs raises groups of anything: all of it becomes text, none is lost
        return None, list(_flatten(error, ""))


def _flatten(error: BaseException, path: str) -> Iterable[Fault]:
    if isinstance(error, Mismatches):
        yield from ((path + below, text) for below, text in error.faults)
    elif isinstance(error, ClassValidationError):
        noted, plain = error.group_exceptions()
        for inner, note in noted:
            absent = isinstance(inner, KeyError) and inner.args == (note.name,)
            yield from _flatten(inner, path if absent else f"{path}.{note.name}")
        for inner in plain:
            yield from _flatten(inner, path)
    elif isinstance(error, ForbiddenExtraKeysError):
        known = _keys(error.cl)
        for name in sorted(map(str, error.extra_fields)):  # YAML also allows numbers as keys
            yield f"{path}.{name}", unknown("key", name, known)
    elif isinstance(error, KeyError):
        yield f"{path}.{error.args[0]}", "is required"
    elif isinstance(error, StructureHandlerNotFoundError):
        kind = type_name(error.type_)
        yield path, f"rlsdk cannot check values of type {kind}; annotate with plain types or attrs classes"
    else:
        yield path, str(error)


def _keys(cls: Any) -> list[str]:
    """Return the keys of a dataclass or an attrs class, required ones first."""
    if dataclasses.is_dataclass(cls):
        fields = [
            (f.default is f.default_factory is dataclasses.MISSING, f.name) for f in dataclasses.fields(cls) if f.init
        ]
    else:
        fields = [(f.default is attrs.NOTHING, f.alias or f.name) for f in attrs.fields(cls) if f.init]
    return [name for _, name in sorted(fields, key=lambda field: not field[0])]


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name, with the nearest known one, and all known names unless there are many."""
    names = sorted(known)
    guess = did_you_mean(name, names, ", ")
    if guess and len(names) > MANY:
        return f"unknown {what} {name!r}{guess}"
    listing = f"known: {', '.join(names)}" if names else "there are none"
    return f"unknown {what} {name!r}{guess}; {listing}"


def did_you_mean(name: str | PurePath, known: Iterable[str], lead: str = "; ") -> str:
    """Return the end of a message on an unknown name or a missing file that names the nearest; empty if none is near.

    Args:
        name: The unknown name or the missing file.
        known: All names or, of a file, those in its folder.
        lead: What precedes the question.
    """
    near = nearest(name if isinstance(name, str) else name.name, known)
    if near is None:
        return ""
    return f"{lead}did you mean {repr(near) if isinstance(name, str) else name.with_name(near)}?"


def type_name(kind: Any) -> str:
    """Return a type in readable form: `float | None`, `'a' | 'b'`, `list of str`."""
    if kind is Any or kind is MISSING:
        return "anything"
    if kind is type(None) or kind is None:
        return "null"
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        names = [str(note.TYPE_NAME) for note in args[1:] if hasattr(note, "TYPE_NAME")]
        return written(names[0] if names else type_name(args[0]), _limits(kind))
    if origin in (Union, types.UnionType):
        return " | ".join(type_name(a) for a in args)
    if origin is Literal or _is_a(kind, enum.Enum):
        return " | ".join(repr(each) for each in args or [member.value for member in kind])
    if origin in (list, tuple) or (isinstance(origin, type) and issubclass(origin, Sequence)):
        return f"list of {type_name(args[0])}" if args else "list"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "mapping"
    return str(getattr(kind, "TYPE_NAME", None) or getattr(kind, "__name__", kind))


def _mismatch(value: Any, kind: Any) -> Mismatch:
    text = f"expected {type_name(kind)}, got {value!r}"
    return Mismatch(text + _help(value, kind))


def _help(value: Any, kind: Any) -> str:
    """Return a hint for common mistakes in shells and YAML."""
    if value is None:
        return (
            ": null, or nothing after the colon or equals sign; give a value, or leave the line out if it has a default"
        )
    if not isinstance(value, str):
        return " (quote it to make it text)" if kind is str else ""
    if value.strip() != value or "\n" in value or value.endswith("\\"):
        return CONTINUATION
    if re.fullmatch(r"[-+]?\d[\d_.]*\s*([kKmMgGtT]i?[bB]?|ms|s|min|h|%)", value) and kind in (int, float):
        return "; write the plain number without a unit"
    if kind in (int, float) and re.fullmatch(r"[-+]?\d[\d.,_]*(e[-+]?\d+)?", value, re.IGNORECASE):
        return "; it is text: write the number without quotes, digits only, with '.' for decimals"
    if value[:1] in "[{" or value[-1:] in "]}":
        return "; a list or mapping in the wrong quotes: in a shell write 'key=[a,b]', all of it in single quotes"
    if kind is bool:
        return "; write true or false without quotes"
    return ""


def _strict(kind: type, accepts: Callable[[Any], bool]) -> Callable[[Any, Any], Any]:
    def hook(value: Any, _: Any) -> Any:
        if not accepts(value):
            raise _mismatch(value, kind)
        return kind(value)

    return hook


def _finite(value: Any, _: Any) -> float:
    if type(value) not in (int, float):
        raise _mismatch(value, float)
    if not math.isfinite(value):
        raise Mismatch(f"expected a finite number, got {value!r}")
    return float(value)


def _union(value: Any, kind: Any) -> Any:
    arms = get_args(kind)
    exact = [a for a in arms if isinstance(a, type) and type(value) is a]
    if value is None and type(None) in arms:
        return None
    faults: list[Fault] = []
    for arm in [*exact, *(a for a in arms if a not in exact and a is not type(None))]:
        structured, found = structure(value, arm)
        if not found:
            return structured
        faults += found
    if len([a for a in arms if a is not type(None)]) == 1:  # its faults are more specific, with paths
        raise Mismatches([(path, text if path else text.replace(", got", " or null, got", 1)) for path, text in faults])
    raise _mismatch(value, kind)


def _annotated(value: Any, kind: Any) -> Any:
    """Convert the value to the annotated type within its limits; other annotations are ignored."""
    if type(value) is float and value in {limit.number for limit in _limits(kind)} & {math.inf, -math.inf}:
        structured: Any = value  # the limit allows infinity
    else:
        structured, faults = structure(value, get_args(kind)[0])
        if faults:
            raise Mismatches(faults)
    if not all(limit.admits(structured) for limit in _limits(kind)):
        raise _mismatch(value, kind)
    return structured


def _limits(kind: Any) -> tuple[Limit, ...]:
    return tuple(note for note in get_args(kind)[1:] if isinstance(note, Limit))


def _literal(value: Any, kind: Any) -> Any:
    for choice in get_args(kind):
        if type(choice) is type(value) and choice == value:
            return choice
    texts = [choice for choice in get_args(kind) if isinstance(choice, str)]
    hint = did_you_mean(value, texts) if isinstance(value, str) else ""
    raise Mismatch(f"expected {type_name(kind)}, got {value!r}{hint}")


def _enum(value: Any, kind: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        return _literal(value, Literal[tuple(member.value for member in kind)])


def _sequence(value: Any, kind: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise _mismatch(value, kind)
    origin, args = get_origin(kind) or kind, get_args(kind) or (Any, ...)
    if origin is tuple and args[-1] is not Ellipsis:
        if len(value) != len(args):
            raise Mismatch(f"expected {len(args)} values ({', '.join(map(type_name, args))}), got {value!r}")
        types_ = args
    else:
        types_ = (args[0],) * len(value)
    items = _collect((f"[{i}]", v, t) for i, (v, t) in enumerate(zip(value, types_, strict=True)))
    return items if origin is list else tuple(items)


def _mapping(value: Any, kind: Any) -> Any:
    if not isinstance(value, Mapping):
        raise _mismatch(value, kind)
    key, item = get_args(kind) or (str, Any)
    keys = _collect(("", k, key) for k in value)
    return dict(zip(keys, _collect((f".{k}", v, item) for k, v in value.items()), strict=True))


def _collect(parts: Iterable[tuple[str, Any, Any]]) -> list[Any]:
    values, faults = [], []
    for path, value, kind in parts:
        structured, found = structure(value, kind)
        values.append(structured)
        faults += [(path + below, text) for below, text in found]
    if faults:
        raise Mismatches(faults)
    return values


def _record(from_mapping: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a hook that accepts an instance as is, such as a default or one given in Python, or a mapping."""

    def hook(value: Any, kind: Any) -> Any:
        if type(value) is kind:
            return value
        if not isinstance(value, Mapping):
            form = f"{{{', '.join(f'{n}: …' for n in _keys(kind)[:3])}}}"
            raise Mismatch(f"expected a mapping such as {form}, got {value!r}{_help(value, kind)}")
        return from_mapping(value, kind)

    return hook


def _origin(kind: Any) -> Any:
    return get_origin(kind)  # as Any: mypy would refuse to compare its type with `Literal` and others


def _is_a(kind: Any, base: Any) -> bool:
    """Return whether an annotation, such as `list[int]`, is of a subclass of `base`."""
    origin = _origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, base)


def _make_converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, use_alias=True)
    converter.register_structure_hook_factory(
        lambda k: isinstance(k, type) and (attrs.has(k) or dataclasses.is_dataclass(k)),
        lambda k: _record(converter.gen_structure_attrs_fromdict(k)),
    )
    converter.register_structure_hook_func(lambda k: _is_a(k, Sequence) and not _is_a(k, str | bytes), _sequence)
    converter.register_structure_hook_func(lambda k: _is_a(k, Mapping), _mapping)
    converter.register_structure_hook_func(lambda k: _origin(k) in (Union, types.UnionType), _union)
    converter.register_structure_hook_func(lambda k: _origin(k) is Literal, _literal)
    converter.register_structure_hook_func(lambda k: _is_a(k, enum.Enum), _enum)
    converter.register_structure_hook_func(lambda k: _origin(k) is Annotated, _annotated)
    converter.register_structure_hook(int, _strict(int, lambda v: type(v) is int))
    converter.register_structure_hook(float, _finite)
    converter.register_structure_hook(bool, _strict(bool, lambda v: type(v) is bool))
    converter.register_structure_hook(str, _strict(str, lambda v: type(v) is str))
    return converter


CONVERTER = _make_converter()
