"""A component under test, with its signature and instances, and the properties that are checked."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from rlsdk import contracts
from rlsdk.components import Component
from rlsdk.contracts.required import REQUIRED
from rlsdk.errors import MissingFieldError, definition_of, described
from rlsdk.isolation.threads import run_to_end
from rlsdk.kinds import Kind
from rlsdk.options import Option
from rlsdk.plugins import CORE, Plugins
from rlsdk.testing.findings import Case, Violated, is_batch, time_limit
from rlsdk.types import Task

SUPPLIED: Mapping[str, Mapping[str, Any]] = {
    "buffer": {"step": 3, "uses": 0},
    "stop": {"available": 3, "target": 8},
}
"""Test values of the keyword arguments that rlsdk passes with each call (`kinds.SUPPLIED`)."""
CALL_SECONDS = 60.0
"""Time limit in seconds of one call with a small input."""
SOURCE_SECONDS = 600.0
"""Time limit in seconds of one call of a task source, which may have to download its data."""
GIVEN: Mapping[str, Mapping[str, Any]] = {"tasks": {"split": "train"}}
"""Default options for all components of a kind."""
Fault = tuple[str, str]
"""(expected, found)."""
CREDIT: tuple[Kind, ...] = ("advantage", "shaping")
LOSSES: tuple[Kind, ...] = ("policy_loss", "correction", "kl")
ON_BATCHES: tuple[Kind, ...] = (*CREDIT, *LOSSES)
"""Kinds that read packed batches."""
WITH_NEEDS: tuple[Kind, ...] = (*CREDIT, "policy_loss", "correction")
"""Those of them that declare the optional fields that they read."""


@attrs.frozen(eq=False, slots=False)
class Subject:
    """A component with the options for its check.

    Attributes:
        component: Component to check.
        given: Given options; others keep their defaults.
        plugin: Name of the plugin; empty for an object that was passed directly.
        origin: Distribution and version, or file.
        plugins: Plugins in which the parts of an algorithm are looked up.
        tasks: Tasks that the rewards can score, tried before the suite's own.
        declares: True if the component reads only fields that it declared; otherwise, one property fails, and batches
            for the others have all fields.
    """

    component: Component
    given: Mapping[str, Any] = attrs.field(factory=dict)
    plugin: str = ""
    origin: str = ""
    plugins: Plugins = attrs.field(factory=Plugins)
    tasks: Sequence[Task] = ()
    declares: bool = True

    @property
    def name(self) -> str:
        """The component's name in a config."""
        return self.component.name if self.plugin in ("", CORE) else f"{self.plugin}/{self.component.name}"

    def __str__(self) -> str:
        place = definition_of(self.component.obj)
        if place and self.origin.endswith(".py"):  # a single file, as the user wrote its path
            place = f"line {place.rpartition(', line ')[2]}"
        where = ", ".join(each for each in (self.origin, place) if each)
        return f"{self.component.kind} {self.name}" + (f" ({where})" if where else "")

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """Options that the component is instantiated with."""
        known = {option.name for option in self.component.options if option.required}
        usual = GIVEN.get(self.component.kind, {})
        return {**{name: value for name, value in usual.items() if name in known}, **self.given}

    @functools.cached_property
    def missing(self) -> tuple[Option, ...]:
        """Required options without a value."""
        return tuple(option for option in self.component.options if option.required and option.name not in self.options)

    def make(self) -> Callable[..., Any]:
        """Create a new instance of the component, so that no state carries over between inputs.

        Raises:
            OptionError: The options are invalid.
        """
        made = self.component.bind(self.options)
        supplied = SUPPLIED.get(self.component.kind)
        return functools.partial(made, **supplied) if supplied else made

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the component's code, and await what an async function returns.

        Raises:
            Violated: The code raised an exception, or did not end.
        """
        try:
            with time_limit(SOURCE_SECONDS if self.component.kind == "tasks" else CALL_SECONDS):
                result = function(*arguments)
                return run_to_end(result) if inspect.isawaitable(result) else result
        except Violated:
            raise
        except (Exception, SystemExit) as error:  # code of a plugin that calls sys.exit must not end the check
            raise Violated("raised", "a result", described(error)) from error

    def restore(self, made: Any, resumed: Any) -> Any:
        """Give an instance the state of another one, as a checkpoint does, and return it.

        Raises:
            Violated: The state is not plain JSON.
        """
        state = self.call(made.state)
        try:
            travelled = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise Violated("form", "plain JSON from state()", f"{state!r} ({error})") from error
        self.call(resumed.restore, travelled)
        return state

    def trimmed(self, x: Any) -> Any:
        """Return a batch with only the optional fields that the component declared, as in training."""
        if not is_batch(x):
            return x
        for i, field in enumerate(self.component.fields):  # from each token's own numbers, however a batch is split
            if field.name in x.extra:
                continue  # a smaller input, taken from one that had them
            low, high = field.sample
            share = (x.logprobs.detach() * (0.37 + 0.11 * i)) % 1.0
            x = x.with_extra(**{field.name: low + (high - low) * share})
        if not self.declares:
            return x
        return x.only(("ref_logprobs",) if self.component.kind == "kl" else self.component.needs)


def undeclared(error: Violated) -> str:
    """Return the message about reading an undeclared field; empty if the rule was violated in another way."""
    return str(error.__cause__) if isinstance(error.__cause__, MissingFieldError) else ""


def fault_of(component: Component) -> Fault | None:
    """Return what a component lacks of its kind's contract; None if nothing.

    Of functions and called classes, the mark has checked the arguments (`rlsdk.calls`).
    """
    kind, obj = component.kind, component.obj
    if kind in REQUIRED:
        fault = _lacks(obj, REQUIRED[kind])
        if fault is not None and kind == "environment" and hasattr(obj, "action_space"):
            return fault[0], (
                f"{fault[1]}; register an environment of Gymnasium, and play it without changes as {{use: gymnasium, "
                "id: 'MODULE:NAME-v0'}, or load it in a marked class: rlsdk.load('environment', 'gymnasium', id=…)"
            )
        return fault
    if kind == "algorithm":
        return _no_algorithm(obj)
    if kind == "tasks" and inspect.isclass(obj):
        return _no_task_source(obj)
    return _no_workflow(obj) if kind == "workflow" else None


def _lacks(obj: Any, protocol: type) -> Fault | None:
    """Return the fault of a class that must have all members of a protocol."""
    if not inspect.isclass(obj):
        return f"a class with the methods of {protocol.__name__}", f"a function {obj.__name__}"
    members = {name: member for name, member in vars(protocol).items() if not name.startswith("_")}
    missing = [_described(name, member) for name, member in members.items() if _is_missing(obj, name, member)]
    if missing:
        return " and ".join(missing), "none" if len(missing) == 1 else "none of these"
    methods = {name: member for name, member in members.items() if inspect.isfunction(member)}
    return next(filter(None, (_misfits(obj, name, method) for name, method in methods.items())), None)


def _is_missing(cls: type, name: str, member: Any) -> bool:
    is_property = attrs.has(cls) and not inspect.isfunction(member)
    is_field = is_property and name in {field.name for field in attrs.fields(cls)}
    return inspect.getattr_static(cls, name, None) is None and not is_field


def _described(name: str, member: Any) -> str:
    if not inspect.isfunction(member):
        return f"a property {name}"
    return f"a method {'async ' if inspect.iscoroutinefunction(member) else ''}{_written(name, member)}"


def _misfits(cls: type, name: str, member: Callable[..., Any]) -> Fault | None:
    """Return the fault of a method that cannot be called as that of the protocol."""
    is_async, function = inspect.iscoroutinefunction(member), getattr(cls, name)
    if (
        not is_async
        and inspect.iscoroutinefunction(function)
        and member.__qualname__.partition(".")[0] != "Environment"
    ):
        return f"a method {_written(name, member)}, which is called without await", "async def"
    if is_async and not inspect.iscoroutinefunction(function):
        return _described(name, member), "one that is not async"
    parameters = inspect.signature(member).parameters.values()
    arguments = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    keywords = dict.fromkeys(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    bound = arguments if inspect.isfunction(inspect.getattr_static(cls, name)) else arguments[1:]
    signature, name = inspect.signature(function), f"{cls.__name__}.{name}"
    required = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    try:
        signature.bind(*bound, **{**dict.fromkeys(required), **keywords})
    except TypeError as error:
        called = ", ".join([*bound, *(f"{key}=…" for key in keywords)])
        return f"{name} to be callable as ({called})", f"{name}{signature}: {error}"
    return None


def _written(name: str, function: Callable[..., Any]) -> str:
    return f"{name}({', '.join(inspect.signature(function).parameters)})"


def _no_task_source(obj: type) -> Fault | None:
    lacking = [name for name in ("__len__", "__getitem__") if not hasattr(obj, name)]
    return ("a class of sized, indexable instances", f"no {' and no '.join(lacking)}") if lacking else None


def _no_workflow(obj: Any) -> Fault | None:
    if inspect.isclass(obj):
        return _lacks(obj, contracts.Workflow)
    if not inspect.iscoroutinefunction(obj):
        return f"async def {obj.__name__}(task, chat)", "a function that is not async"
    return None


def _no_algorithm(obj: Any) -> Fault | None:
    if not (inspect.isclass(obj) and attrs.has(obj)):
        return "an attrs class, such as a subclass of rlsdk.Algorithm", f"{obj!r}"
    held = {field.name for field in attrs.fields(obj)}
    lacking = [name for name in contracts.AlgorithmDefaults.__annotations__ if name not in held]
    return ("the fields of rlsdk.Algorithm", f"no {', '.join(lacking)}") if lacking else None


Rule = Callable[[Subject, Any], None]
Inputs = Callable[[Subject], Iterable[Case[Any] | None]]


def _any(_: Component) -> bool:
    return True


def no_input(_: Subject) -> Iterable[Case[Any] | None]:
    """Return the single input of rules that examine only the component."""
    return (None,)


@attrs.frozen(eq=False)
class Property:
    """A property required of components of some kinds.

    Attributes:
        name: Short name, such as `micro-batches`.
        kinds: Kinds whose components must have it.
        rule: Function that raises `Violated` on an input that violates it, `NotApplicable` on an inconclusive one.
        inputs: Inputs to test the rule on.
        remedy: Advice for a component that lacks the property.
        after: Properties that must hold for this one to be meaningful.
        makes: True if the component must be instantiated, which requires its options.
        trims: True if batches contain only fields that the component declared.
        only: Predicate that selects components among these kinds.
        starts: True if the rule needs a started engine or learner, its second argument; see `rlsdk.testing.trials`.
    """

    name: str
    kinds: tuple[Kind, ...]
    rule: Rule
    inputs: Inputs = no_input
    remedy: str = ""
    after: tuple[str, ...] = ()
    makes: bool = True
    trims: bool = True
    only: Callable[[Component], bool] = _any
    starts: bool = False

    @property
    def demand(self) -> str:
        """The requirement in one sentence: the first paragraph of the rule's docstring."""
        return " ".join((inspect.getdoc(self.rule) or "").split("\n\n")[0].split())


def holds(
    name: str,
    *kinds: Kind,
    inputs: Inputs = no_input,
    remedy: str,
    after: tuple[str, ...] = (),
    makes: bool = True,
    trims: bool = True,
    only: Callable[[Component], bool] = _any,
    starts: bool = False,
) -> Callable[[Rule], Property]:
    """Turn a rule into a property; the rule's docstring begins with the requirement."""

    def make(rule: Rule) -> Property:
        return Property(name, kinds, rule, inputs, remedy, after, makes, trims, only, starts)

    return make
