"""Calling conventions of components, and the checks of arguments, options and fields when one is marked."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from rlsdk import fields
from rlsdk.errors import PluginError
from rlsdk.kinds import SUPPLIED
from rlsdk.options import unknown

ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "reward": ("rollout",),
    "shaping": ("x",),
    "advantage": ("x",),
    "policy_loss": ("x",),
    "correction": ("x",),
    "kl": ("logprobs", "ref_logprobs"),
    "filter": ("group",),
    "buffer": ("group",),
    "stop": (),
    "tasks": (),
    "workflow": ("task", "chat"),
    "diagnosis": ("history",),
    "optimizer": ("groups",),
    "lr_schedule": ("step", "steps"),
}
"""Kind -> positional arguments that rlsdk passes to a function, or to `__call__` or `run` of a class's instance."""
NOT_AWAITED = (
    "policy_loss",
    "correction",
    "kl",
    "filter",
    "buffer",
    "stop",
    "tasks",
    "diagnosis",
    "optimizer",
    "lr_schedule",
)
"""Kinds that rlsdk calls without await."""
NOT_CALLED = ("tasks", "workflow")
"""Kinds whose classes rlsdk does not call: a sequence of tasks, an object with the method `run`."""
_LIST = re.compile(r"(?:\w+\.)*(?:list|List|tuple|Tuple|Sequence|Iterable)\b")


def fault_of(kind: str, obj: Any, *, lists: bool, apart: bool = False) -> str:
    """Describe why the kind cannot call an object, or why options cannot be set; empty if there is no fault.

    Args:
        kind: Kind of the component.
        obj: A function, or a class whose `__init__` takes the options.
        lists: True for a reward called with lists.
        apart: True for a reward marked to run in an actor.
    """
    is_async = inspect.iscoroutinefunction(obj.__call__ if inspect.isclass(obj) else obj)
    if kind in NOT_AWAITED and is_async:
        return f"{obj.__name__} is async def, but is called without await; write def"
    if apart and is_async:
        return f"{obj.__name__} is async def, but an actor calls it without await; write def, or leave runs='actor' out"
    if apart and hasattr(obj, "state") and hasattr(obj, "restore"):
        return f"{obj.__name__} has state(), but checkpoints hold no state of an actor; leave runs='actor' out"
    if uncallable := _uncallable(kind, obj):
        return uncallable
    if hidden := _hidden_options(kind, obj):
        names = ", ".join(option.name for option in hidden)
        written = _with_keywords(obj.__init__ if inspect.isclass(obj) else obj, hidden)
        if inspect.isclass(obj) and dataclasses.is_dataclass(obj):
            written = f"@dataclass(kw_only=True) above class {obj.__name__}"
        return f"no config can set {names}, since options are keyword-only; write {written}"
    if kind == "reward" and not lists and _takes_list(obj):
        return f"{obj.__name__} takes a list, but gets one rollout; mark it with batch=True, or take one rollout"
    return ""


def known_fields(kind: str, name: str, needs: Iterable[Any]) -> tuple[str, ...]:
    """Return `needs` as a tuple of field names that the kind may read.

    Raises:
        PluginError: A name is not a field, or this kind cannot read it.
    """
    head = f"@rlsdk.{kind}({name!r}, needs={needs!r})"
    if isinstance(needs, str):
        raise PluginError(f"{head}: needs must be a list of names; write needs=({needs!r},)")
    readable = fields.names(fields.READS[kind])
    found = []
    for field in needs:
        declared = fields.declared_by(field)
        found.append(field if declared is None else declared.name)
        if field in readable or declared is not None:
            continue
        if callable(field):
            raise PluginError(f"{head}: {field!r} does not declare a field; mark it with @rlsdk.field")
        if others := fields.readers(field):
            raise PluginError(f"{head}: only {' and '.join(others)} can read {field!r}; known: {', '.join(readable)}")
        own = f"; for a field of a plugin, give the function marked @rlsdk.field({field!r}) in place of its name"
        raise PluginError(f"{head}: {unknown('field', str(field), readable)}{own}")
    return tuple(found)


def new_field(name: str, needs: Iterable[str]) -> tuple[str, ...]:
    """Return the fields that the producer of a new field reads.

    Raises:
        PluginError: The name is taken or invalid, or its producer reads a field that does not exist before the update.
    """
    if isinstance(marked := getattr(name, "__name__", None), str):  # a mark without brackets
        raise PluginError(f"@rlsdk.field takes a name; write @rlsdk.field({marked!r}) above {marked}")
    head = f"@rlsdk.field({name!r})"
    if isinstance(needs, str):
        raise PluginError(f"{head}: needs must be a list of names; write needs=({needs!r},)")
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise PluginError(f"{head}: the name must be an identifier without leading underscore, such as 'surprise'")
    if any(field.name == name for field in fields.FIELDS):
        raise PluginError(f"{head}: the core already has a field of this name; choose another")
    if name in fields.HELPERS:
        raise PluginError(f"{head}: the inputs of components have a method or attribute of this name; choose another")
    for field in needs:
        if field not in fields.FORWARD:
            raise PluginError(f"{head}: {unknown('field', str(field), fields.FORWARD)}")
    return tuple(needs)


def check_producer(name: str, function: Any) -> None:
    """Check the signature of the function of a new field: the batch, then keyword-only options; `_cache={}` is exempt.

    Raises:
        PluginError: It takes no batch, or an option that no configuration could set or leave out.
    """
    signature = inspect.signature(function)
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    others = [p for p in list(signature.parameters.values())[1:] if p.kind not in variable and p.name[0] != "_"]
    if not signature.parameters or any(p.kind is not p.KEYWORD_ONLY or p.default is p.empty for p in others):
        plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        raise PluginError(
            f"@rlsdk.field({name!r}): it is called as {name}(batch), but is defined as {inspect.Signature(plain)}; "
            f"options follow a *, each with a default: def {name}(batch, *, scale=1.0)"
        )


def _uncallable(kind: str, obj: Any) -> str:
    """Describe a function or method that does not accept the arguments of its kind; empty if it does."""
    arguments, supplied, name = ARGUMENTS.get(kind, ()), SUPPLIED.get(kind, ()), obj.__name__
    function = obj
    if inspect.isclass(obj):
        if kind not in ARGUMENTS or kind in NOT_CALLED:
            return ""
        method = "__init__" if kind == "optimizer" else "__call__"
        function, name = inspect.getattr_static(obj, method, None), f"{name}.{method}"
        if not any(method in vars(base) for base in obj.__mro__):
            return f"{obj.__name__} has no method {method}({', '.join(('self', *arguments, *supplied))})"
    if not (arguments or supplied) or not inspect.isfunction(function):
        return ""
    signature = inspect.signature(function)
    options = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    if inspect.isclass(obj) and kind != "optimizer":
        options = []  # those of a class are parameters of its `__init__`
    owner = ("self",) if inspect.isclass(obj) else ()
    try:
        signature.bind(*owner, *arguments, **dict.fromkeys((*options, *supplied)))
    except TypeError:
        plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        given = ", ".join((*arguments, *(f"{key}=…" for key in supplied)))
        called = f"it is called as {name}({given}), but is defined as {name}{inspect.Signature(plain)}"
        if owner:
            return called
        if next(iter(signature.parameters), "") == "self":
            return f"{called}; mark a function outside of a class, or the class"
        if kind == "reward":
            return f"{called}; a reward of another trainer runs unchanged as {{use: foreign, path: 'FILE.py:NAME'}}"
        return called
    return ""


def _hidden_options(kind: str, obj: Any) -> list[inspect.Parameter]:
    """Return positional parameters that rlsdk does not pass; a leading underscore exempts one.

    Of the kinds without `ARGUMENTS`, one without a default may be an argument, too.
    """
    if inspect.isclass(obj):
        function, given = obj.__init__, 2 if kind == "optimizer" else 1
        if attrs.has(obj) or not inspect.isfunction(function):
            return []
    elif kind in ARGUMENTS:
        function, given = obj, len(ARGUMENTS[kind])
    else:
        return []
    beyond = [p for p in _positional(function)[given:] if not p.name.startswith("_")]
    return [p for p in beyond if kind in ARGUMENTS or p.default is not p.empty]


def _takes_list(function: Any) -> bool:
    """Return whether the first parameter is annotated as a list or named `rollouts`."""
    if not inspect.isfunction(function) or not (positional := _positional(function)):
        return False
    first = positional[0]
    annotation = first.annotation if isinstance(first.annotation, str) else inspect.formatannotation(first.annotation)
    return first.name == "rollouts" or _LIST.match(annotation) is not None


def _with_keywords(function: Any, options: Sequence[inspect.Parameter]) -> str:
    """Return the signature with these parameters after a `*`, as its author should write it."""
    names = {option.name for option in options}
    shown = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    before = [str(p) for p in shown if p.name not in names and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    after = [str(p) for p in shown if p.name in names or p.kind is p.KEYWORD_ONLY]
    return f"def {function.__name__}({', '.join([*before, '*', *after])})"


def _positional(function: Any) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in inspect.signature(function).parameters.values() if parameter.kind in kinds]
