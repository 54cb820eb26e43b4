"""From a tree to a `Plan`: every value typed, every component found and its options checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

from rlsdk.components import Kind, Use, component_of
from rlsdk.config.rules import cross_checks, limits
from rlsdk.config.schema import (
    COMPONENT_KEYS,
    LISTS,
    PART_LISTS,
    PARTS,
    RewardUse,
    RunConfig,
    SourceUse,
    normalise,
)
from rlsdk.config.tree import Tree, read
from rlsdk.contracts import AlgorithmDefaults, LossSpec, Model, Rule
from rlsdk.errors import ConfigError, OptionError, PluginError
from rlsdk.options import structure
from rlsdk.plugins import Fingerprint, Plugins, Reference

T = TypeVar("T")


@attrs.frozen
class RewardPart:
    """One part of the reward: its component, and how it joins the others under its name."""

    rule: Rule
    reference: Reference


@attrs.frozen
class TaskSource:
    """One source of tasks.

    Attributes:
        name: As metrics and checkpoints call it; differs from the others'.
        reference: The component.
        weight: Its share of a batch, against the others'.
        renamed: Whether its tasks take the name as their `source`.
    """

    name: str
    reference: Reference
    weight: float = 1.0
    renamed: bool = False


@attrs.frozen(kw_only=True)
class Plan:
    """A checked configuration: nothing in it can turn out to be misspelt later.

    Attributes:
        config: The typed values.
        plugins: The plugins that were found.
        algorithm: The algorithm's parts, defaults and overrides merged.
        tasks_train: Sources of tasks to train on.
        tasks_eval: Sources of tasks to evaluate on.
        workflow: How a task becomes rollouts.
        rewards: The parts of the reward.
        shaping: In the order of application.
        advantage: How rewards become advantages.
        filters: In the order of application.
        loss: What an update minimises.
        buffer: Which groups are trained first.
        engine: Generates tokens.
        learner: Updates the model.
        stop: Which part of a batch is enough.
        trackers: Where metrics go.
        needs: Optional inputs that the parts read.
        tree: The configuration as plain values, for `config.yaml`.
    """

    config: RunConfig
    plugins: Plugins
    algorithm: AlgorithmDefaults
    tasks_train: tuple[TaskSource, ...]
    tasks_eval: tuple[TaskSource, ...]
    workflow: Reference
    rewards: tuple[RewardPart, ...]
    shaping: tuple[Reference, ...]
    advantage: Reference
    filters: tuple[Reference, ...]
    loss: LossSpec
    buffer: Reference
    engine: Reference
    learner: Reference
    stop: Reference
    trackers: tuple[Reference, ...]
    needs: frozenset[str]
    tree: Tree

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.config.out) / self.config.name

    @property
    def model(self) -> Model:
        """The model as actors read it."""
        section = attrs.asdict(self.config.model)
        section |= {key: located(section[key]) for key in ("path", "tokenizer") if section[key]}
        return Model(**{field.name: section[field.name] for field in attrs.fields(Model)})

    @property
    def reference(self) -> Model:
        """The reference model, where one is held."""
        return attrs.evolve(self.model, path=located(self.config.model.reference or self.config.model.path))

    @property
    def code(self) -> dict[str, dict[str, str]]:
        """Name -> what identifies the code of every plugin that the run uses, and of what its rewards drive."""
        found: dict[str, Fingerprint] = self.plugins.used()
        for part in self.rewards:
            found |= getattr(self.plugins.resolve(part.reference), "marks", {})
        return {name: attrs.asdict(mark) for name, mark in found.items()}

    @property
    def sampled(self) -> bool:
        """Whether any rollouts are sampled from the policy (else all are demonstrations)."""
        return self.algorithm.rollouts != "demonstrations"

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is held."""
        return "ref_logprobs" in self.needs

    @property
    def needs_engine(self) -> bool:
        """Whether anything is generated."""
        evaluates = self.config.eval.before or self.config.eval.after or self.config.eval.every
        return self.sampled or bool(self.tasks_eval and evaluates)


def check(
    source: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), plugins: Sequence[str | Path] = ()
) -> Plan:
    """Read and check a configuration; nothing is started.

    Args:
        source: A YAML file, or a mapping.
        overrides: `key=value` texts.
        plugins: Files of plugins, beside those that the configuration names.

    Raises:
        ConfigError: With every fault: its path, the value, what was expected.
    """
    tree, faults = read(source, overrides)
    tree = normalise(tree)
    broken = {fault.partition(":")[0] for fault in faults}
    values, wrong = structure(tree, RunConfig)
    faults += [f"{path.lstrip('.')}: {text}" for path, text in wrong if path.lstrip(".") not in broken]
    resolver = _Resolver(_plugins(plugins, tree, faults), faults)
    if values is None:
        resolver.check_loosely(tree)
        raise ConfigError(faults)
    plan = resolver.plan(values, tree)
    if faults or plan is None:
        raise ConfigError(faults)
    return plan


def _plugins(files: Sequence[str | Path], tree: Tree, faults: list[str]) -> Plugins:
    found = Plugins()
    for plugin in [*files, *_items(tree.get("plugins"))]:
        try:
            found.activate(str(plugin))
        except PluginError as error:
            faults.append(f"plugins: {error}")
    return found


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def located(path: str) -> str:
    """A model's folder so that processes in other working directories find it; a hub id as it is."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else path


def _at(tree: Tree, path: str) -> Any:
    """The value under a dotted path; None if there is none."""
    node: Any = tree
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _readable(value: Any, kind: type[T]) -> T | None:
    """A value as `kind`; None if it is absent or does not fit (which is reported with its path elsewhere)."""
    return None if value is None else structure(value, kind)[0]


class _Resolver:
    """Turns each `Use` into a `Reference`, collecting faults under their paths."""

    def __init__(self, plugins: Plugins, faults: list[str]) -> None:
        self.plugins = plugins
        self.faults = faults
        self.needs: set[str] = set()

    def reference(self, path: str, kind: Kind, use: Use) -> Reference | None:
        try:
            found = self.plugins.reference(kind, use.name, use.options)
            bound = self.plugins.resolve(found)
        except OptionError as error:
            self.faults += [f"{path}.{below}: {text}" for below, text in error.faults]
            return None
        except PluginError as error:
            self.faults.append(f"{path}: {error}")
            return None
        component = component_of(bound)
        self.needs |= set(component.needs) if component else set()
        return found

    def many(self, path: str, kind: Kind, uses: Sequence[Use]) -> tuple[Reference, ...]:
        found = [self.reference(f"{path}[{i}]", kind, use) for i, use in enumerate(uses)]
        return tuple(f for f in found if f is not None)

    def check_loosely(self, tree: Tree) -> None:
        """The typed values are wrong somewhere: check the components that can be read all the same."""
        for path, kind in COMPONENT_KEYS.items():
            use = _readable(_at(tree, path), Use)
            if use is not None and kind == "algorithm":
                algorithm = self.algorithm(use)
                if algorithm is not None:
                    self.parts(algorithm)
            elif use is not None:
                self.reference(path, kind, use)
        written: Mapping[Kind, Any] = {"tasks": SourceUse, "reward": RewardUse, "tracker": Use}
        for path, kind in LISTS.items():
            items = _items(_at(tree, path))
            for i, value in enumerate(items):
                part = _readable(value, written[kind])
                if part is not None:
                    alone = len(items) == 1 and kind != "tracker"
                    self.reference(path if alone else f"{path}[{i}]", kind, part if isinstance(part, Use) else part.use)

    def plan(self, config: RunConfig, tree: Tree) -> Plan | None:
        algorithm = self.algorithm(config.algorithm)
        train = self.sources("tasks.train", config.tasks.train)
        held_out = self.sources("tasks.eval", config.tasks.eval)
        engine = self.reference("engine", "engine", config.engine)
        learner = self.reference("learner", "learner", config.learner)
        stop = self.reference("production.stop", "stop", config.production.stop)
        trackers = self.many("trackers", "tracker", config.trackers)
        buffer = self.reference("production.buffer", "buffer", config.production.buffer)
        self.faults += limits(config)
        if algorithm is None:
            self.rewards(config, None)
            return None
        sampled = algorithm.rollouts != "demonstrations"
        use = config.workflow or Use("single_turn" if sampled else "demonstration")
        workflow = self.reference("workflow", "workflow", use)
        rewards = self.rewards(config, workflow)
        parts = self.parts(algorithm)
        rewarded = bool(config.reward or rewards or workflow is None)
        self.faults += cross_checks(config, algorithm, self.needs, rewarded=rewarded)
        if self.faults or engine is None or learner is None or workflow is None or buffer is None or stop is None:
            return None
        return Plan(
            config=config,
            plugins=self.plugins,
            algorithm=algorithm,
            tasks_train=train,
            tasks_eval=held_out,
            workflow=workflow,
            rewards=rewards,
            shaping=parts["shaping"],
            filters=parts["filters"],
            advantage=parts["advantage"],
            loss=LossSpec(
                policy_loss=parts["policy_loss"],
                correction=parts["correction"],
                kl=parts["kl"] if algorithm.kl_coef else None,
                kl_coef=algorithm.kl_coef,
                entropy_coef=algorithm.entropy_coef,
                aggregate=algorithm.aggregate,
                norm=algorithm.norm,
                value_clip=algorithm.value_clip,
                temperature=config.sampling.temperature if sampled else 1.0,
            ),
            buffer=buffer,
            engine=engine,
            learner=learner,
            stop=stop,
            trackers=trackers,
            needs=frozenset(self.needs),
            tree=tree,
        )

    def sources(self, path: str, uses: Sequence[SourceUse]) -> tuple[TaskSource, ...]:
        found: list[TaskSource] = []
        for i, part in enumerate(uses):
            where = f"{path}[{i}]" if len(uses) > 1 else path
            reference = self.reference(where, "tasks", part.use)
            if reference is None:
                continue
            name = part.source or reference.name.removeprefix("core/")
            if any(name == other.name for other in found):
                self.faults.append(
                    f"{where}: another source is called {name!r}, too; tell them apart by `source: NAME`"
                )
            found.append(TaskSource(name, reference, part.weight, renamed=bool(part.source)))
        return tuple(found)

    def rewards(self, config: RunConfig, workflow: Reference | None) -> tuple[RewardPart, ...]:
        given = config.reward
        if not given and workflow is not None:
            component = component_of(workflow.obj) or self.plugins.find("workflow", workflow.name)[1]
            given = (RewardUse(Use("environment")),) if component.rewards else ()
        found: list[RewardPart] = []
        for i, part in enumerate(given):
            path = f"reward[{i}]" if len(given) > 1 else "reward"
            reference = self.reference(path, "reward", part.use)
            if reference is not None:
                name = reference.name.removeprefix("core/")
                taken = sum(part.reference.name == reference.name for part in found)
                rule = attrs.evolve(part.rule, name=f"{name}_{taken + 1}" if taken else name)
                found.append(RewardPart(rule, reference))
        return tuple(found)

    def algorithm(self, use: Use) -> Any:
        """The algorithm with overrides merged into its defaults."""
        try:
            _, component = self._component("algorithm", use)
            merged = merge_parts(component.obj(), dict(use.options))
            return component.bind(merged)
        except OptionError as error:
            self.faults += [f"algorithm.{below}: {text}" for below, text in error.faults]
        except PluginError as error:
            self.faults.append(f"algorithm: {error}")
        return None

    def _component(self, kind: Kind, use: Use) -> tuple[Reference, Any]:
        reference = self.plugins.reference(kind, use.name)
        return reference, component_of(use.name) or self.plugins.find(kind, use.name)[1]

    def parts(self, algorithm: AlgorithmDefaults) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part, kind in PARTS.items():
            use = getattr(algorithm, part)
            if part == "kl" and not algorithm.kl_coef:
                found[part] = None  # not used: a reference model is not held for it
                continue
            found[part] = self.reference(f"algorithm.{part}", kind, use) if use else None
        if algorithm.kl_coef:
            self.needs.add("ref_logprobs")
        for part, kind in PART_LISTS.items():
            found[part] = self.many(f"algorithm.{part}", kind, getattr(algorithm, part))
        return found


def merge_parts(defaults: Any, options: dict[str, Any]) -> dict[str, Any]:
    """A partial override merges into the algorithm's own choice; another name, or a marked object, replaces it.

    Args:
        defaults: The algorithm as its author made it.
        options: What a configuration gives under `algorithm`; changed and returned.
    """
    for part in PARTS:
        given, own = options.get(part), getattr(defaults, part, None)
        if own is None or given is None:
            continue
        if isinstance(given, str) and given == own.name:
            options[part] = own
        elif isinstance(given, Mapping) and given.get("use", own.name) == own.name:
            options[part] = {"use": own.name, **own.options, **{k: v for k, v in given.items() if k != "use"}}
    for part in PART_LISTS:
        if part in options and not isinstance(options[part], list | tuple):
            options[part] = [options[part]]
    return options
