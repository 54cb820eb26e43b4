"""From a tree to a `Plan`: every value typed, every component found and its options checked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlsdk.components import Kind, Use, component_of
from rlsdk.config.read import Tree, read
from rlsdk.config.schema import PART_LISTS, PARTS, RunConfig, normalise
from rlsdk.contracts import AlgorithmDefaults, LossSpec, Model
from rlsdk.errors import ConfigError, OptionError, PluginError
from rlsdk.options import structure
from rlsdk.plugins import Plugins, Reference


@attrs.frozen
class RewardPart:
    """One part of the reward: the name it is logged under, its weight and its component."""

    name: str
    weight: float
    reference: Reference


@attrs.frozen(kw_only=True)
class Plan:
    """A checked configuration: nothing in it can turn out to be misspelt later.

    Attributes:
        config: The typed values.
        plugins: The plugins that were found.
        algorithm: The algorithm's parts, defaults and overrides merged.
        tasks_train: Source of tasks to train on.
        tasks_eval: Source of tasks to evaluate on.
        workflow: How a task becomes rollouts.
        rewards: The parts of the reward.
        shaping: In the order of application.
        advantage: How rewards become advantages.
        filters: In the order of application.
        loss: What an update minimises.
        engine: Generates tokens.
        learner: Updates the model.
        trackers: Where metrics go.
        needs: Optional inputs that the parts read.
        tree: The configuration as plain values, for `config.yaml`.
    """

    config: RunConfig
    plugins: Plugins
    algorithm: AlgorithmDefaults
    tasks_train: Reference
    tasks_eval: Reference | None
    workflow: Reference
    rewards: tuple[RewardPart, ...]
    shaping: tuple[Reference, ...]
    advantage: Reference
    filters: tuple[Reference, ...]
    loss: LossSpec
    engine: Reference
    learner: Reference
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
        m = self.config.model
        return Model(
            path=m.path, dtype=m.dtype, max_length=m.max_length, trust_remote_code=m.trust_remote_code, tokenizer=m.tokenizer
        )

    @property
    def sampled(self) -> bool:
        """Whether rollouts are sampled from the policy (else they are demonstrations)."""
        return self.algorithm.rollouts == "sampled"

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
    named = tree.get("plugins", ())
    for plugin in [*files, *(named if isinstance(named, list | tuple) else ())]:
        try:
            found.activate(str(plugin))
        except PluginError as error:
            faults.append(f"plugins: {error}")
    return found


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
        """The typed values are wrong somewhere: still check the components that can be read."""
        for path, kind in (("workflow", "workflow"), ("engine", "engine"), ("learner", "learner")):
            use, wrong = structure(tree.get(path), Use) if tree.get(path) else (None, [])
            if use is not None and not wrong:
                self.reference(path, kind, use)  # type: ignore[arg-type]
        use, wrong = structure(tree.get("algorithm", "grpo"), Use)
        if not wrong:
            self.algorithm(use)

    def plan(self, config: RunConfig, tree: Tree) -> Plan | None:
        algorithm = self.algorithm(config.algorithm)
        train = self.reference("tasks.train", "tasks", config.tasks.train)
        held_out = self.reference("tasks.eval", "tasks", config.tasks.eval) if config.tasks.eval else None
        engine = self.reference("engine", "engine", config.engine)
        learner = self.reference("learner", "learner", config.learner)
        rewards = self.rewards(config)
        trackers = self.many("trackers", "tracker", config.trackers)
        if algorithm is None:
            return None
        sampled = algorithm.rollouts == "sampled"
        use = config.workflow or Use("single_turn" if sampled else "demonstration")
        workflow = self.reference("workflow", "workflow", use)
        parts = self.parts(algorithm)
        self.faults += cross_checks(config, algorithm, self.needs)
        if self.faults or train is None or engine is None or learner is None or workflow is None:
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
            engine=engine,
            learner=learner,
            trackers=trackers,
            needs=frozenset(self.needs),
            tree=tree,
        )

    def rewards(self, config: RunConfig) -> tuple[RewardPart, ...]:
        found = []
        for i, part in enumerate(config.reward):
            path = f"reward[{i}]" if len(config.reward) > 1 else "reward"
            reference = self.reference(path, "reward", part.use)
            if reference is not None:
                found.append(RewardPart(reference.name.removeprefix("core/"), part.weight, reference))
        names = [p.name for p in found]
        return tuple(
            attrs.evolve(p, name=f"{p.name}_{names[:i].count(p.name) + 1}") if p.name in names[:i] else p for i, p in enumerate(found)
        )

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
            found[part] = self.reference(f"algorithm.{part}", kind, use) if use else None  # type: ignore[arg-type]
        if algorithm.kl_coef:
            self.needs.add("ref_logprobs")
        for part, kind in PART_LISTS.items():
            found[part] = self.many(f"algorithm.{part}", kind, getattr(algorithm, part))  # type: ignore[arg-type]
        return found


def merge_parts(defaults: Any, options: dict[str, Any]) -> dict[str, Any]:
    """A partial override merges into the algorithm's own choice; another name, or a marked object, replaces it."""
    for part in PARTS:
        given, own = options.get(part), getattr(defaults, part, None)
        if own is None or given is None:
            continue
        if isinstance(given, str) and given == own.name:
            options[part] = own
        elif isinstance(given, Mapping) and given.get("use", own.name) == own.name:
            options[part] = {"use": own.name, **own.options, **{k: v for k, v in given.items() if k != "use"}}
    return options


def cross_checks(config: RunConfig, algorithm: AlgorithmDefaults, needs: set[str]) -> list[str]:
    """What no single value shows."""
    sampled = algorithm.rollouts == "sampled"
    rules = [
        ((config.steps is None) == (config.epochs is None), "steps: give either steps or epochs"),
        (sampled and not config.reward, "reward: none given; name one, such as 'countdown'"),
        (algorithm.kl_coef > 0 and algorithm.kl is None, "algorithm.kl: kl_coef is above 0, name an estimator such as 'k3'"),
        (
            algorithm.aggregate == "seq-mean-token-sum-norm" and not algorithm.norm,
            "algorithm.norm: 'seq-mean-token-sum-norm' divides by a length; give it, such as sampling.max_tokens",
        ),
        ("values" in needs and not algorithm.critic, "algorithm.critic: the advantage reads the critic's values; set it true"),
        (sampled and config.sampling.temperature <= 0, "sampling.temperature: must be above 0 to learn from samples"),
        (
            sampled and config.sampling.max_tokens + 1 > config.model.max_length,
            f"model.max_length: {config.model.max_length} tokens cannot hold a prompt and sampling.max_tokens={config.sampling.max_tokens}",
        ),
        (
            config.minibatches > config.batch_size * config.group_size,
            f"minibatches: {config.minibatches} of {config.batch_size * config.group_size} rollouts leaves some empty",
        ),
        (not 0 <= config.max_invalid <= 1, f"max_invalid: a share between 0 and 1, got {config.max_invalid}"),
        (not _model_exists(config.model.path), f"model.path: there is no folder {config.model.path!r} with a config.json"),
    ]
    positive = ("batch_size", "group_size", "minibatches", "passes", "max_prompt_tokens")
    rules += [(getattr(config, key) < 1, f"{key}: at least 1, got {getattr(config, key)}") for key in positive]
    rules += [(config.steps is not None and config.steps < 1, f"steps: at least 1, got {config.steps}")]
    counts = ("engines", "learners")
    rules += [(getattr(config.placement, k) < 1, f"placement.{k}: at least 1, got {getattr(config.placement, k)}") for k in counts]
    return [text for wrong, text in rules if wrong]


def _model_exists(path: str) -> bool:
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not Path(path).exists() and not path.startswith("."):
        return True  # reads as a hub id: only the hub can tell
    return (Path(path).expanduser() / "config.json").is_file()
