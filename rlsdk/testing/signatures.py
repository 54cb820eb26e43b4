"""Check from its signature that a component can be called by its kind's convention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from rlsdk import contracts
from rlsdk.calls import ARGUMENTS
from rlsdk.components import Component
from rlsdk.kinds import Kind
from rlsdk.testing.subject import SUPPLIED

Fault = tuple[str, str]
"""(expected, found)."""

PROTOCOLS: Mapping[Kind, type] = {
    "engine": contracts.Engine,
    "learner": contracts.Learner,
    "environment": contracts.Environment,
    "tracker": contracts.Tracker,
    "renderer": contracts.Renderer,
    "tool_parser": contracts.ToolParser,
    "weight_transfer": contracts.WeightTransfer,
}


def fault_of(component: Component) -> Fault | None:
    """Return why a component cannot be called by its kind's convention; None if it can."""
    kind, obj = component.kind, component.obj
    if kind in PROTOCOLS:
        return _lacks(obj, PROTOCOLS[kind])
    if kind == "algorithm":
        return _no_algorithm(obj)
    if kind == "tasks":
        return _no_task_source(obj)
    if kind == "workflow":
        return _no_workflow(obj)
    return _uncallable(obj, ARGUMENTS[kind], SUPPLIED.get(kind, {})) or _hidden_options(obj, ARGUMENTS[kind])


def _uncallable(obj: Any, arguments: Sequence[str], keywords: Mapping[str, Any] | None = None) -> Fault | None:
    """Return the fault of a function, or of a class whose instances are called."""
    if inspect.isclass(obj):
        if not inspect.isfunction(getattr(obj, "__call__", None)):  # noqa: B004 - the method itself is looked at
            return f"a method __call__({', '.join(['self', *arguments])})", "none"
        return _unbindable(obj.__call__, ("self", *arguments), keywords, f"{obj.__name__}.__call__")
    return _unbindable(obj, arguments, keywords, obj.__name__)


def _hidden_options(obj: Any, arguments: Sequence[str]) -> Fault | None:
    """Return parameters that look like options but cannot be set, because they are not keyword-only."""
    if inspect.isclass(obj) and (attrs.has(obj) or obj.__init__ is object.__init__):
        return None
    function, count = (obj.__init__, 1) if inspect.isclass(obj) else (obj, len(arguments))
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    more = [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds][count:]
    return ("options after a '*', keyword-only", f"positional ones: {', '.join(more)}") if more else None


def _unbindable(
    function: Callable[..., Any], arguments: Sequence[str], keywords: Mapping[str, Any] | None, name: str
) -> Fault | None:
    signature = inspect.signature(function)
    required = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    try:
        signature.bind(*arguments, **{**dict.fromkeys(required), **(keywords or {})})
    except TypeError as error:
        called = ", ".join([*arguments, *(f"{key}=…" for key in keywords or {})])
        return f"{name} to be callable as ({called})", f"{name}{signature}: {error}"
    return None


def _lacks(obj: Any, protocol: type) -> Fault | None:
    """Return the fault of a class that must have all members of a protocol."""
    if not inspect.isclass(obj):
        return f"a class with the methods of {protocol.__name__}", f"a function {obj.__name__}"
    for name, member in vars(protocol).items():
        if not name.startswith("_"):
            fault = _lacks_member(obj, name, member)
            if fault is not None:
                return fault
    return None


def _lacks_member(cls: type, name: str, member: Any) -> Fault | None:
    held = inspect.getattr_static(cls, name, None)
    if not inspect.isfunction(member):
        is_field = attrs.has(cls) and name in {field.name for field in attrs.fields(cls)}
        return None if held is not None or is_field else (f"a property {name}", "none")
    prefix = "async " if inspect.iscoroutinefunction(member) else ""
    if held is None:
        return f"a method {prefix}{_written(name, member)}", "none"
    function = getattr(cls, name)
    if not prefix and inspect.iscoroutinefunction(function) and member.__qualname__.partition(".")[0] != "Environment":
        return f"a method {_written(name, member)}, which is called without await", "async def"
    if prefix and not inspect.iscoroutinefunction(function):
        return f"a method async {_written(name, member)}", "one that is not async"
    parameters = inspect.signature(member).parameters.values()
    arguments = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    keywords = dict.fromkeys(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    bound = arguments if inspect.isfunction(held) else arguments[1:]
    return _unbindable(function, bound, keywords, f"{cls.__name__}.{name}")


def _written(name: str, function: Callable[..., Any]) -> str:
    return f"{name}({', '.join(inspect.signature(function).parameters)})"


def _no_task_source(obj: Any) -> Fault | None:
    if not inspect.isclass(obj):
        return _uncallable(obj, ())
    lacking = [name for name in ("__len__", "__getitem__") if not hasattr(obj, name)]
    return ("a class of sized, indexable instances", f"no {' and no '.join(lacking)}") if lacking else None


def _no_workflow(obj: Any) -> Fault | None:
    if inspect.isclass(obj):
        return _lacks(obj, contracts.Workflow)
    if not inspect.iscoroutinefunction(obj):
        return f"async def {obj.__name__}(task, chat)", "a function that is not async"
    return _unbindable(obj, ("task", "chat"), None, obj.__name__)


def _no_algorithm(obj: Any) -> Fault | None:
    if not (inspect.isclass(obj) and attrs.has(obj)):
        return "an attrs class, such as a subclass of rlsdk.Algorithm", f"{obj!r}"
    held = {field.name for field in attrs.fields(obj)}
    lacking = [name for name in contracts.AlgorithmDefaults.__annotations__ if name not in held]
    return ("the fields of rlsdk.Algorithm", f"no {', '.join(lacking)}") if lacking else None
