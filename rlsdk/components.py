"""The marks: decorators that attach a `Component` to a function or class and touch nothing else.

    @rlsdk.reward("exact")
    def exact(rollout, *, ignore_case: bool = False) -> float:
        '''1.0 if the answer is the task's, else 0.0.'''

The mark is the outermost decorator. Collecting marks, and choosing among them by name, is the work of `rlsdk.plugins`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeVar, get_args

import attrs

from rlsdk.errors import OptionError, PluginError
from rlsdk.options import CONVERTER, Option, check_options, options_of

Kind = Literal[
    "reward",
    "shaping",
    "advantage",
    "policy_loss",
    "correction",
    "kl",
    "algorithm",
    "filter",
    "buffer",
    "stop",
    "workflow",
    "environment",
    "tasks",
    "engine",
    "learner",
    "tracker",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
Where = Literal["pool", "driver", "actor"]
WHERE: tuple[Where, ...] = get_args(Where)
Isolation = Literal["thread", "lock", "process"]
ISOLATIONS: tuple[Isolation, ...] = get_args(Isolation)
SUPPLIED: Mapping[str, tuple[str, ...]] = {"buffer": ("step", "uses"), "stop": ("available", "target")}
"""Kind -> keywords that rlsdk gives at each call: no options."""
T = TypeVar("T", bound=Callable[..., Any])
_MARK = "__rlsdk_component__"


@attrs.frozen(eq=False)
class Component:
    """A marked object.

    Attributes:
        kind: What it is.
        name: Its name within its plugin.
        obj: The function or class.
        needs: Optional fields of its inputs that it reads.
        batch: A reward that takes and returns lists.
        runs: Where a reward runs: in a pool of processes that can be killed, in the driver, or in an actor of its own.
        cache: Whether a reward gives equal rollouts equal scores, so that one of them is enough.
        imports: Modules that a reward imports when it first scores, and a pool beforehand, once for all its processes.
        whole_batch: A policy loss that reads `x.whole`.
        rewards: A workflow that gives rewards itself.
        isolation: What keeps the calls of an environment apart from those of others.
    """

    kind: Kind
    name: str
    obj: Any
    needs: tuple[str, ...] = ()
    batch: bool = False
    runs: Where = "pool"
    cache: bool = False
    imports: tuple[str, ...] = ()
    whole_batch: bool = False
    rewards: bool = False
    isolation: Isolation = "thread"

    @property
    def options(self) -> tuple[Option, ...]:
        """The options schema, read from the signature."""
        supplied = SUPPLIED.get(self.kind, ())
        return tuple(option for option in options_of(self.obj) if option.name not in supplied)

    @property
    def help(self) -> str:
        """The docstring, without indentation."""
        return inspect.getdoc(self.obj) or ""

    @property
    def summary(self) -> str:
        """The first paragraph of the docstring on one line."""
        return " ".join(self.help.split("\n\n")[0].split())

    def bind(self, given: Mapping[str, Any] | None = None) -> Any:
        """Check options and make what is ready to run: a `Bound` function, or an instance of the class.

        Raises:
            OptionError: An option is unknown, missing or of the wrong type; all faults at once.
        """
        values, faults = check_options(self.options, given or {})
        if faults:
            raise OptionError(f"{self.kind} {self.name!r}", faults)
        if inspect.isclass(self.obj):
            try:
                return self.obj(**values)
            except (TypeError, ValueError) as error:
                raise OptionError(f"{self.kind} {self.name!r}", [("options", str(error))]) from error
        return Bound(self, values)


@attrs.frozen(eq=False)
class Bound:
    """A component's function with its options; called with the arguments of its kind."""

    component: Component
    options: Mapping[str, Any]

    def __call__(self, *args: Any, **supplied: Any) -> Any:
        """Call the function."""
        return self.component.obj(*args, **supplied, **self.options)

    @property
    def __name__(self) -> str:
        return self.component.name


@attrs.frozen
class Use:
    """A choice of a component in a config: `grpo`, `{use: mylab/soft_clip, temperature: 0.3}`, or a marked object.

    Attributes:
        name: `name`, `plugin/name`, or a marked object.
        options: Everything beside `use`.
    """

    TYPE_NAME: ClassVar[str] = "component"

    name: Any
    options: Mapping[str, Any] = attrs.field(factory=dict)


def _structure_use(value: Any, _: Any) -> Use:
    if isinstance(value, Use):
        return value
    if isinstance(value, str) and value:
        return Use(value)
    if isinstance(value, Mapping):
        if not value.get("use"):
            raise ValueError(f"names no component: write {{use: NAME, …}}; got {dict(value)!r}")
        return Use(value["use"], {k: v for k, v in value.items() if k != "use"})
    if component_of(value) is not None:
        return Use(value)
    raise ValueError(f"expected the name of a component, {{use: NAME, …}} or a marked object; got {value!r}")


CONVERTER.register_structure_hook(Use, _structure_use)


def component_of(obj: Any) -> Component | None:
    """The component that `obj` is, was bound from or is an instance of; None for anything else.

    Inherited marks do not count.
    """
    if isinstance(obj, Component):
        return obj
    if isinstance(obj, Bound):
        return obj.component
    return own_mark(obj) or own_mark(type(obj))


def own_mark(obj: Any) -> Component | None:
    """The component in the object's own mark; an inherited mark does not count."""
    mark = getattr(obj, "__dict__", {}).get(_MARK)
    return mark if isinstance(mark, Component) else None


def _mark(kind: Kind, name: str, **extra: Any) -> Callable[[T], T]:
    if not isinstance(name, str) or not name:
        raise PluginError(f"@rlsdk.{kind} takes a name, @rlsdk.{kind}('my_{kind}'); got {name!r}")
    if "/" in name:
        raise PluginError(f"@rlsdk.{kind}({name!r}): the plugin's prefix is added by itself; give the name without '/'")

    def mark(obj: T) -> T:
        if not (inspect.isfunction(obj) or inspect.isclass(obj)):
            raise PluginError(
                f"@rlsdk.{kind}({name!r}) marks a function or a class; got {obj!r}; wrap it in a function"
            )
        existing = own_mark(obj)
        if existing is not None and existing.obj is obj:
            both = f"{existing.kind} {existing.name!r} and {kind} {name!r}"
            raise PluginError(f"{obj!r} is marked twice, as {both}; mark a wrapper")
        setattr(obj, _MARK, Component(kind, name, obj, **extra))
        return obj

    return mark


def reward(
    name: str, *, batch: bool = False, runs: Where = "pool", cache: bool = False, imports: tuple[str, ...] = ()
) -> Callable[[T], T]:
    """Mark a reward: `(rollout, *, …) -> float | Score`, sync or async; with `batch`, lists of both.

    Args:
        name: Its name within its plugin.
        batch: It takes and returns lists.
        runs: `pool`: in one of several processes, which is killed when a call takes too long. `driver`: in the driver's
            event loop, for what is over in an instant whatever the model wrote; what is async, or has a `state()`,
            always runs there. `actor`: in an actor of its own, for what holds a model.
        cache: Equal rollouts get equal scores: one that was scored is not scored again.
        imports: Heavy modules that it imports when it first scores; a pool imports them once for all its processes.
    """
    if runs not in WHERE:
        raise PluginError(f"@rlsdk.reward({name!r}): runs is one of {', '.join(WHERE)}; got {runs!r}")
    return _mark("reward", name, batch=batch, runs=runs, cache=cache, imports=tuple(imports))


def shaping(name: str, *, needs: tuple[str, ...] = ()) -> Callable[[T], T]:
    """Mark a shaping: `(x: CreditInputs, *, …) -> Tensor[n] | Tensor[t]`, new rewards, before the advantage."""
    return _mark("shaping", name, needs=tuple(needs))


def advantage(name: str, *, needs: tuple[str, ...] = ()) -> Callable[[T], T]:
    """Mark an advantage: `(x: CreditInputs, *, …) -> Tensor[n] | Tensor[t] | Credit`."""
    return _mark("advantage", name, needs=tuple(needs))


def policy_loss(name: str, *, needs: tuple[str, ...] = (), whole_batch: bool = False) -> Callable[[T], T]:
    """Mark a policy loss: `(x: LossInputs, *, …) -> Tensor[t] | (Tensor[t], metrics)`, per token, never a mean."""
    return _mark("policy_loss", name, needs=tuple(needs), whole_batch=whole_batch)


def correction(name: str, *, needs: tuple[str, ...] = ()) -> Callable[[T], T]:
    """Mark a correction: `(x: LossInputs, *, …) -> Tensor[t] | (Tensor[t], metrics)`, detached weights."""
    return _mark("correction", name, needs=tuple(needs))


def kl(name: str) -> Callable[[T], T]:
    """Mark a KL estimator: `(logprobs[t], ref_logprobs[t]) -> Tensor[t]`."""
    return _mark("kl", name)


def algorithm(name: str) -> Callable[[T], T]:
    """Mark an algorithm: an attrs class of defaults that names its parts."""
    return _mark("algorithm", name)


def filter(name: str) -> Callable[[T], T]:  # noqa: A001 - the contract's name
    """Mark a filter: `(group: Group, *, …) -> bool | Group`, whether, or which part, to train on."""
    return _mark("filter", name)


def buffer(name: str) -> Callable[[T], T]:
    """Mark a buffer policy: `(group, *, step, uses, …) -> priority | None`; None drops."""
    return _mark("buffer", name)


def stop(name: str) -> Callable[[T], T]:
    """Mark a stop rule: `(*, available, target, …) -> bool`, may production for this step end."""
    return _mark("stop", name)


def workflow(name: str, *, rewards: bool = False) -> Callable[[T], T]:
    """Mark a workflow: a class with `async run(self, task, chat) -> Rollout | Sequence[Rollout]`, or a function.

    Args:
        name: Its name within its plugin.
        rewards: It gives rewards itself (`chat.reward`): where a configuration names no reward, these count.
    """
    return _mark("workflow", name, rewards=rewards)


def environment(name: str, *, isolation: Isolation = "thread") -> Callable[[T], T]:
    """Mark an environment: a class with `reset(seed) -> Observation` and `step(text) -> Step`, sync or async.

    Args:
        name: Its name within its plugin.
        isolation: `thread`: calls of several instances run at once, in threads of one process. `lock`: one after the
            other, for what has state that instances share. `process`: each instance has a process of its own, which
            is killed when a call takes too long.
    """
    if isolation not in ISOLATIONS:
        raise PluginError(
            f"@rlsdk.environment({name!r}): isolation is one of {', '.join(ISOLATIONS)}; got {isolation!r}"
        )
    return _mark("environment", name, isolation=isolation)


def tasks(name: str) -> Callable[[T], T]:
    """Mark a task source: `(*, split, …) -> Sequence[Task]`, sized, indexable, deterministic by seed."""
    return _mark("tasks", name)


def engine(name: str) -> Callable[[T], T]:
    """Mark an engine: generates tokens with logprobs and takes weights with a version."""
    return _mark("engine", name)


def learner(name: str) -> Callable[[T], T]:
    """Mark a learner: logprobs, values, update, export of weights, save, load."""
    return _mark("learner", name)


def tracker(name: str) -> Callable[[T], T]:
    """Mark a tracker: `open(run)`, `log(step, metrics)`, `close()`."""
    return _mark("tracker", name)
