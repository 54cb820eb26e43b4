"""Components: marked functions and classes with options, and how a config selects them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, wraps
from typing import Any, ClassVar, Literal, ParamSpec, TypeAlias, TypeVar, get_args

import attrs

from rlsdk import calls
from rlsdk.errors import MissingFieldError, OptionError, PluginError, RlsdkError, RunError, defined_at, described
from rlsdk.fields import Field, declared_by
from rlsdk.isolation.process_settings import settings_kept, told
from rlsdk.kinds import SCHEDULED, SUPPLIED, Kind
from rlsdk.options import CONVERTER, Option, check_options, options_of, structure
from rlsdk.schedules import Schedule, Scheduled, number_of, schedules_in

Where = Literal["pool", "driver", "actor"]
WHERE: tuple[Where, ...] = get_args(Where)
Batch = bool | Literal["group"]
"""Argument of a reward: one rollout (False), any list of rollouts (True), or all rollouts of a task."""
SamplerRatio = Literal["old", "policy"]
"""Probability ratio to the sampling policy: of `old_logprobs`, or of `logprobs`."""
Check = Callable[[Any, Mapping[str, Any]], Iterable[tuple[str, str]]]
"""`(run: RunFacts, options)` -> faults: options that cannot take effect in that run, and why."""
CostlyToRead = Callable[[Mapping[str, Any]], bool]
"""`(options)` of a task source -> True if reading it downloads something or takes long."""
Isolation = Literal["thread", "lock", "process"]
ISOLATIONS: tuple[Isolation, ...] = get_args(Isolation)
T = TypeVar("T", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")
_MARK = "__rlsdk_component__"
_warned: set[str] = set()
"""Titles of components that were reported by `warn_of_changes`."""
log = logging.getLogger(__name__)


@attrs.frozen(eq=False)
class Component:
    """A marked object.

    Attributes:
        kind: Kind of component, such as `reward`.
        name: Name within its plugin.
        obj: The function or class.
        needs: Names of the optional input fields that it reads.
        fields: Those of them that plugins declare.
        batch: Argument of a reward: one rollout (False), any list of rollouts (True), or a whole group.
        runs: Process of a reward: a pool of processes that can be killed, the driver, or its own actor; or a function
            that decides from the reward and its options.
        cache: True if a reward gives equal rollouts equal scores, so that only one of them is scored.
        imports: Modules that a reward imports when it first scores; a pool imports them once for all its processes.
        reads_given: True for a reward that uses rewards from workflows and environments (`rollout.rewards`).
        whole_batch: True for a policy loss that reads `x.whole`.
        aggregates: Aggregations that a policy loss is defined for; empty: all.
        corrects: Ratio to the sampler by which a policy loss itself weights tokens.
        masks: True for a correction whose weights are 0 or 1: it drops tokens but never reweights them; or a function
            that decides from its options.
        replays_routing: True for a correction that makes the learner's actor use the experts that the engine chose.
        reads_rewards: True if an advantage, filter, buffer or sampler reads rewards; a run without such a component
            needs none.
        lengths: Options that are response lengths; null means the run's `sampling.max_tokens`.
        check: Function that reports options that cannot take effect in a run.
        rewards: True for a workflow that assigns rewards itself.
        one_answer: True for a workflow whose rollouts are a prompt and one answer of at most `sampling.max_tokens`.
        costly: Function that tells whether reading a task source with given options is costly; None: it never is.
        isolation: How calls of an environment are isolated from other environments' calls.
        whole_tensors: True for an optimiser that needs tensors in their shapes, not flattened or sharded.
        metrics: Metrics that a diagnosis reads and other components log.
    """

    kind: Kind
    name: str
    obj: Any
    needs: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()
    batch: Batch = False
    runs: Where | Callable[[Any], Where] = "pool"
    cache: bool = False
    imports: tuple[str, ...] = ()
    reads_given: bool = False
    whole_batch: bool = False
    aggregates: tuple[str, ...] = ()
    corrects: SamplerRatio | None = None
    masks: bool | Callable[[Mapping[str, Any]], bool] = False
    replays_routing: bool = False
    reads_rewards: bool = True
    lengths: tuple[str, ...] = ()
    check: Check | None = None
    rewards: bool = False
    one_answer: bool = False
    costly: CostlyToRead | None = None
    isolation: Isolation = "thread"
    whole_tensors: bool = False
    metrics: tuple[str, ...] = ()

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """The options schema, read from the signature."""
        supplied = SUPPLIED.get(self.kind, ())
        found = (option for option in options_of(self.obj) if option.name not in supplied)
        scheduled = self.kind in SCHEDULED
        return tuple(attrs.evolve(o, schedule=scheduled and number_of(o.type) is not None) for o in found)

    def named_by(self, given: Mapping[str, Any]) -> Iterator[tuple[str, Kind, Use]]:
        """Yield each given option that names a component, with its kind and selection; invalid ones are skipped."""
        for option in self.options:
            kinds = [note.kind for note in get_args(option.type)[1:] if isinstance(note, NamesKind)]
            if kinds and option.name in given:
                use, faults = structure(given[option.name], Use)
                if not faults:
                    yield option.name, kinds[0], use

    @property
    def is_async(self) -> bool:
        """True for an async function, or a class with an async call method."""
        return inspect.iscoroutinefunction(self.obj.__call__ if inspect.isclass(self.obj) else self.obj)

    @property
    def help(self) -> str:
        """The dedented docstring."""
        return inspect.getdoc(self.obj) or ""

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring as one line."""
        return " ".join(self.help.split("\n\n")[0].split())

    def bind(self, given: Mapping[str, Any] | None = None) -> Any:
        """Check options and instantiate the component: a `Bound` function, or an instance of the class.

        A class of optimisers is bound as a function is, since an optimiser needs parameters. If options are schedules,
        return a `Scheduled`, which instantiates the component for each training step. An algorithm runs nothing itself
        and takes only numbers.

        Raises:
            OptionError: An option is unknown, missing or of the wrong type; lists all faults.
            PluginError: The class raised another error.
        """
        given = given or {}
        if self.kind != "algorithm" and (schedules := self.schedules(given)):
            return Scheduled(self, lambda values: self.bind({**given, **values}), schedules)
        values, faults = check_options(self.options, given)
        if faults:
            raise OptionError(f"{self.kind} {self.name!r}", faults)
        if inspect.isclass(self.obj) and self.kind != "optimizer":
            try:
                return self.obj(**values)
            except (TypeError, ValueError) as error:
                raise OptionError(f"{self.kind} {self.name!r}", [("", str(error))]) from error
            except RlsdkError:
                raise
            except (Exception, SystemExit) as error:  # such as a missing library
                raise PluginError(f"{self.kind} {self.name!r} cannot be created: {described(error)}") from error
        return Bound(self, values)

    def schedules(self, given: Mapping[str, Any]) -> dict[str, Schedule]:
        """Return the schedules given for float options.

        Raises:
            OptionError: A schedule is invalid; lists all faults, including those of other options.
        """
        found, faults = schedules_in(self.options, given)
        if faults:
            wrong = {path.partition(".")[0] for path, _ in faults}
            others = check_options(self.options, given)[1]
            faults += [fault for fault in others if fault[0] not in {*wrong, *found}]
            raise OptionError(f"{self.kind} {self.name!r}", faults)
        return found


@attrs.frozen(eq=False)
class Bound:
    """A component's function bound to its options; called with the arguments of its kind."""

    component: Component
    options: Mapping[str, Any]

    def __call__(self, *args: Any, **supplied: Any) -> Any:
        """Call the function."""
        return self.component.obj(*args, **supplied, **self.options)

    @property
    def __name__(self) -> str:
        return self.component.name


@attrs.frozen(eq=False)
class Product:
    """Several corrections as one: its weights are the product of theirs."""

    component: Component
    parts: Mapping[str, Any]

    def __call__(self, x: Any) -> tuple[Any, dict[str, Any]]:
        """Return the product of the weights, and each metric under `NAME/METRIC`."""
        weights: Any = 1
        metrics: dict[str, Any] = {}
        for name, part in self.parts.items():
            found = part(x)
            given, reported = found if isinstance(found, tuple) else (found, {})
            weights = weights * given
            metrics |= {f"{name}/{metric}": value for metric, value in reported.items()}
        return weights, metrics


@attrs.frozen(init=False)
class Use:
    """Selection of a component in a config: `grpo`, `{use: mylab/soft_clip, temperature: 0.3}`, or a marked object.

    In Python: `Use("mylab/soft_clip", temperature=0.3)`, or `Use("mylab/soft_clip", {"temperature": 0.3})`.

    Attributes:
        name: `name`, `plugin/name`, or a marked object.
        options: All keys except `use`.
    """

    TYPE_NAME: ClassVar[str] = "component"

    name: Any
    options: Mapping[str, Any]

    def __init__(self, name: Any, options: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "options", {**(options or {}), **more})


def _structure_use(value: Any, _: Any) -> Use:
    if isinstance(value, Use):
        return value
    if isinstance(value, str) and value:
        return Use(value)
    if isinstance(value, Mapping):
        if not value.get("use"):
            raise ValueError(f"does not name a component: write {{use: NAME, …}}; got {dict(value)!r}")
        return Use(value["use"], {k: v for k, v in value.items() if k != "use"})
    if isinstance(value, Bound):
        return Use(value.component.obj, value.options)
    if component_of(value) is not None:
        return Use(value)
    raise ValueError(f"expected the name of a component, {{use: NAME, …}} or a marked object; got {value!r}")


CONVERTER.register_structure_hook(Use, _structure_use)


@attrs.frozen
class NamesKind:
    """Annotation of an option that names a component: `optimizer: Annotated[Use, NamesKind("optimizer")]`.

    Attributes:
        kind: Kind of the named component.
    """

    kind: Kind

    @property
    def TYPE_NAME(self) -> str:  # noqa: N802 - as the constant of other types
        """The kind, as the name of the option's type."""
        return self.kind


OneOrMore: TypeAlias = Use | tuple[Use, ...] | None
"""A component, or a list of components that act as one; a list of one is that one."""


def _structure_one_or_more(value: Any, _: Any) -> Any:
    several = isinstance(value, list | tuple)
    kind: Any = tuple[Use, ...] if several else Use | None
    found = CONVERTER.structure(value, kind)
    return next(iter(found), None) if several and len(found) < 2 else found


CONVERTER.register_structure_hook_func(lambda kind: kind == OneOrMore, _structure_one_or_more)


def component_of(obj: Any) -> Component | None:
    """Return the component that `obj` is, was bound from, or is an instance of; None for anything else.

    Inherited marks do not count.
    """
    if isinstance(obj, Component):
        return obj
    if isinstance(obj, Bound | Scheduled | Product):
        return obj.component
    return own_mark(obj) or own_mark(type(obj))


def needs_of(part: Any) -> tuple[str, ...]:
    """Return the batch fields that a component reads; none for a plain function."""
    component = component_of(part)
    return component.needs if component else ()


def title_of(part: Any) -> str:
    """Return the kind and name of a component: `advantage 'grpo'`."""
    component = component_of(part)
    return f"{component.kind} {component.name!r}" if component else repr(part)


def see_definition(part: Any) -> str:
    """Return where a component is defined, to end a message about its result: `; see col (lab.py, line 7)`."""
    component = component_of(part)
    return f"; see {defined_at(component.obj)}" if component else ""


@contextmanager
def naming(part: Any) -> Iterator[None]:
    """Name a component in an error that it raises in this block, as a `RunError`; an `RlsdkError` keeps its type."""
    try:
        yield
    except MissingFieldError as error:
        raise error.read_by(title_of(part)) from error
    except RlsdkError:
        raise
    except (Exception, SystemExit) as error:  # `sys.exit` in it would end the run without a word
        raise RunError(f"{title_of(part)} failed: {described(error)}") from error


@contextmanager
def calling(part: Any) -> Iterator[None]:
    """Do what `naming` does, and undo changes of a component to settings of the process, with a warning."""
    with naming(part), settings_kept() as changes:
        yield
    warn_of_changes(part, changes)


def warn_of_changes(part: Any, changes: Mapping[str, tuple[Any, Any]]) -> None:
    """Log a warning about settings of the process that a component changed, once for each component."""
    if changes and (title := title_of(part)) not in _warned:
        _warned.add(title)
        log.warning(
            "%s changes settings of the whole process: %s; they are changed back after each call%s",
            title, told(changes), see_definition(part),
        )  # fmt: skip


def own_mark(obj: Any) -> Component | None:
    """Return the component in the object's own mark; inherited marks do not count."""
    mark = getattr(obj, "__dict__", {}).get(_MARK)
    return mark if isinstance(mark, Component) else None


def named(make: Callable[P, R]) -> Callable[P, R]:
    """Explain a mark that is called without a name; Python would only say that an argument is missing."""

    @wraps(make)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not args and "name" not in kwargs:
            kind = make.__name__
            raise PluginError(f"@rlsdk.{kind} takes a name; write @rlsdk.{kind}('my_{kind}')")
        return make(*args, **kwargs)

    return checked


def mark(kind: Kind, name: str, **extra: Any) -> Callable[[T], T]:
    """Return the decorator that makes a function or class a component of a kind.

    Raises:
        PluginError: The name, the needed fields, or the marked object is invalid.
    """
    if isinstance(marked := getattr(name, "__name__", None), str):  # a mark without brackets
        raise PluginError(f"@rlsdk.{kind} takes a name; write @rlsdk.{kind}({marked!r}) above {marked}")
    if not isinstance(name, str) or not name:
        raise PluginError(f"@rlsdk.{kind} takes a name, @rlsdk.{kind}('my_{kind}'); got {name!r}")
    if "/" in name:
        raise PluginError(f"@rlsdk.{kind}({name!r}): the plugin's prefix is added for you; give the name without '/'")
    if not name.isprintable() or len(name.split()) > 1 or name != name.strip():
        raise PluginError(
            f"@rlsdk.{kind}({name!r}): a name has no spaces, line breaks or control characters; join its words by _"
        )
    if "needs" in extra:
        declared = [declared_by(each) for each in extra["needs"]]
        extra["needs"] = calls.known_fields(kind, name, extra["needs"])
        extra["fields"] = tuple(field for field in declared if field is not None)

    def attach(obj: T) -> T:
        if not (inspect.isfunction(obj) or inspect.isclass(obj)):
            raise PluginError(
                f"@rlsdk.{kind}({name!r}) marks a function or a class; got {obj!r}; wrap it in a function"
            )
        existing = own_mark(obj)
        if existing is not None and existing.obj is obj:
            both = f"{existing.kind} {existing.name!r} and {kind} {name!r}"
            raise PluginError(f"{obj!r} is marked twice, as {both}; mark a wrapper")
        if fault := calls.fault_of(kind, obj, lists=bool(extra.get("batch")), apart=extra.get("runs") == "actor"):
            raise PluginError(f"@rlsdk.{kind}({name!r}): {fault}")
        setattr(obj, _MARK, Component(kind, name, obj, **extra))
        return obj

    return attach


def brief(value: Any) -> str:
    """Return a default in readable form: `ppo(clip_low=0.2)`, `none`, `0.04`."""
    if isinstance(value, Use):
        component = component_of(value.name)
        name = component.name if component else str(value.name)
        options = ", ".join(f"{k}={brief(v)}" for k, v in value.options.items())
        return f"{name}({options})" if options else name
    if isinstance(value, list | tuple):
        return f"[{', '.join(brief(v) for v in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{k}: {brief(v)}' for k, v in value.items())}}}"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
