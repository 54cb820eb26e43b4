"""Resolve a tree to a `Plan`: convert every value to its type, find every component and check its options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

from rlsdk.components import Use, component_of
from rlsdk.config import defaults
from rlsdk.config.foreign import explained
from rlsdk.config.groups import learning_faults
from rlsdk.config.paths import resolve_paths
from rlsdk.config.plan import (
    NORMED,
    Chosen,
    Plan,
    RewardPart,
    TaskSource,
    completed,
    facts_of,
    merge_parts,
    part_faults,
    reward_readers,
    with_lengths,
)
from rlsdk.config.rules import compared_with_nothing, cross_checks, limits
from rlsdk.config.schema import COMPONENT_KEYS, LISTS, Config, RoleSection
from rlsdk.config.section import RULE_KEYS, SOURCE_KEYS, RewardUse, SourceUse
from rlsdk.config.tree import Source, Tree, normalise, read
from rlsdk.contracts import AlgorithmDefaults, ApartRole, LossSpec, ReplacesTemplate, batch_of, memory_of
from rlsdk.contracts.required import missing_members
from rlsdk.errors import ConfigError, OptionError, PluginError, UnknownComponentError, nearest, option_path
from rlsdk.fields import READS, Field, names
from rlsdk.kinds import PART_LISTS, PARTS, Kind
from rlsdk.options import check_options, options_of, structure, unknown
from rlsdk.plugins import CORE, ComponentRef, Plugins, short_name
from rlsdk.schedules import EntropyTarget, Schedule, Scheduled, entropy_target, with_greatest

T = TypeVar("T")
COEFFICIENTS = ("kl_coef", "entropy_coef", "norm", "value_clip")
"""Numbers that an algorithm passes to the loss."""

_NOT_A_SECTION = {"eval": "; `tasks.eval: null` switches evaluation off"}
"""Path of a section -> what to write instead of a value that is none."""


def check(source: Source, overrides: Sequence[str] = (), plugins: Sequence[str | Path] = ()) -> Plan:
    """Read and check a configuration, without starting anything.

    Args:
        source: A YAML file, a mapping, or a typed configuration. Relative paths in a file are looked up in the working
            folder, then next to the file.
        overrides: `key=value` texts.
        plugins: Plugin files, in addition to those that the configuration names.

    Raises:
        ConfigError: Lists every fault: path, value, and what was expected.
    """
    try:
        tree, faults = read(source, overrides)
    except ConfigError as error:
        raise ConfigError(explained(source, {}, error.faults)) from error
    tree = normalise(tree)
    if isinstance(source, str | Path):
        tree = resolve_paths(tree, Path(source))
    broken = {fault.partition(":")[0] for fault in faults}
    values, wrong = structure(tree, Config)
    for below, text in wrong:
        if (path := below.lstrip(".")) not in broken:
            faults.append(f"{path}: {text}{_NOT_A_SECTION.get(path, '')}")
    resolver = _Resolver(faults)
    resolver.activate([*plugins, *_items(tree.get("plugins"))])
    if values is None:
        resolver.check_loosely(tree)
        raise ConfigError(explained(source, tree, faults))
    plan = resolver.plan(values, tree)
    if plan is not None:
        faults += learning_faults(plan)
    if faults or plan is None:
        raise ConfigError(explained(source, tree, faults))
    return plan


def _items(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _at(tree: Tree, path: str) -> Any:
    """Return the value at a dotted path; None if there is none."""
    node: Any = tree
    for key in path.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def _readable(value: Any, kind: type[T]) -> T | None:
    """Convert a value to `kind`; None if it is absent or invalid (which is reported with its path elsewhere)."""
    return None if value is None else structure(value, kind)[0]


class _Resolver:
    """Resolves each `Use` to a `ComponentRef`, collecting faults by path."""

    def __init__(self, faults: list[str]) -> None:
        self.plugins = Plugins()
        self.faults = faults
        self.reported: dict[str, list[str]] = {}
        """Text of a plugin's fault -> the paths that name it."""
        self.needs: set[str] = set()
        self.fields: dict[str, Field] = {}
        self.schedules: dict[str, Schedule] = {}
        self.entropy_target: EntropyTarget | None = None
        self.chosen: list[Chosen] = []
        self.max_tokens: int | None = None

    def activate(self, plugins: Sequence[str | Path]) -> None:
        for plugin in plugins:
            try:
                self.plugins.activate(str(plugin))
            except PluginError as error:
                self.report("plugins", error)

    def report(self, path: str, error: PluginError) -> None:
        """Add a fault; a plugin that is missing or broken is one fault, which lists the components that name it."""

        def fault() -> str:
            others = places[1:] if places[0] != "plugins" else ()
            return f"{places[0]}: {error}" + (f" (also named in {', '.join(others)})" if others else "")

        places = self.reported.setdefault(str(error), [])
        at = self.faults.index(fault()) if places else len(self.faults)
        places.append(path)
        self.faults[at : at + 1] = [fault()]

    def reference(self, path: str, kind: Kind, use: Use, *, extra: Iterable[str] = ()) -> ComponentRef | None:
        """Find a component and check its options; keys in `extra` are suggested like options."""
        try:
            found = self.plugins.reference(kind, use.name, use.options)
            component = self.plugins.component(found)
            found = attrs.evolve(found, options=with_lengths(component, found.options, self.max_tokens))
            bound = self.plugins.bind(component, found.options)
        except OptionError as error:
            known = {option.name for option in component.options}
            broken = {fault.partition(":")[0] for fault in self.faults}  # an option left out for a fault is not missing
            for below, text in error.faults:
                if option_path(path, below) in broken:
                    continue
                if below in use.options and below not in known:
                    text = unknown("option", below, known.union(extra))
                self.faults.append(f"{option_path(path, below)}: {text}")
            return None
        except PluginError as error:
            builtin = defaults.DIAGNOSES.name  # stands for components, and is not among those that the error names
            if kind == "diagnosis" and nearest(str(use.name), [builtin]):
                error = UnknownComponentError(f"{error}; did you mean {builtin!r}?")
            self.report(path, error)
            return None
        if missing := missing_members(kind, bound):
            self.faults.append(
                f"{path}: {found.name!r} lacks {', '.join(missing)}, which every {kind} must have; `rlsdk check "
                f"{found.name.partition('/')[0]}` shows how they are called"
            )
            return None
        # An advantage always gets `groups`; only a loss that declares it needs whole groups.
        always = names(READS[kind], access="always") if kind in READS else ()
        self.needs |= {*component.needs}.difference(always)
        self.needs |= {"routed_experts"} if component.replays_routing else set()
        for field in component.fields:
            self.needs |= set(field.needs)
            if self.fields.setdefault(field.name, field).produce is not field.produce:
                self.faults.append(f"{path}: field {field.name!r} is declared twice, by different functions")
        schedules = bound.schedules if isinstance(bound, Scheduled) else {}
        below = path.removeprefix("algorithm.").replace("[", ".").replace("]", "")
        self.schedules |= {f"{below}.{name}": schedule for name, schedule in schedules.items()}
        self.chosen.append(Chosen(path, component, with_greatest(found.options, schedules)))
        return found

    def many(self, path: str, kind: Kind, uses: Sequence[Use]) -> tuple[ComponentRef, ...]:
        found = [self.reference(f"{path}[{i}]", kind, use) for i, use in enumerate(uses)]
        return tuple(f for f in found if f is not None)

    def check_loosely(self, tree: Tree) -> None:
        """Check the components that can be read, although other values are invalid."""
        for path, kind in COMPONENT_KEYS.items():
            use = _readable(_at(tree, path), Use)
            if use is not None and kind == "algorithm":
                algorithm = self.algorithm(use)
                if algorithm is not None:
                    self.parts(algorithm)
            elif use is not None:
                self.reference(path, kind, use)
        written: Mapping[Kind, Any] = {"tasks": SourceUse, "reward": RewardUse, "tracker": Use, "diagnosis": Use}
        for path, kind in LISTS.items():
            items = _items(_at(tree, path))
            for i, value in enumerate(items):
                part = _readable(value, written[kind])
                if part is not None and part != defaults.DIAGNOSES:
                    alone = len(items) == 1 and kind not in ("tracker", "diagnosis")
                    self.reference(path if alone else f"{path}[{i}]", kind, part if isinstance(part, Use) else part.use)

    def plan(self, config: Config, tree: Tree) -> Plan | None:
        """Resolve every component of a configuration; None if there are faults."""
        algorithm = self.algorithm(config.algorithm)
        config, tree, defaulted, wrong = completed(config, tree, algorithm)
        self.faults += wrong
        self.max_tokens = config.sampling.max_tokens
        train = self.sources("tasks.train", config.tasks.train)
        held_out = self.sources("tasks.eval", config.tasks.eval)
        single = self.single_components(config)
        chat_template = self.chat_template(single["renderer"])
        optional = self.optional_components(config)
        trackers, diagnoses = self.trackers(config.trackers), self.diagnoses(config.diagnoses)
        broken = {fault.partition(":")[0] for fault in self.faults}
        self.faults += [fault for fault in limits(config) if fault.partition(":")[0] not in broken]
        if algorithm is None:
            self.rewards(config, None)
            return None
        parts = self.parts(algorithm)
        sampled = algorithm.rollouts != "demonstrations"
        workflow, eval_workflow = self.workflows(config, sampled=sampled)
        rewards = self.rewards(config, workflow if sampled else eval_workflow)
        if algorithm.aggregate == NORMED and algorithm.norm is None:
            algorithm = attrs.evolve(algorithm, norm=float(config.sampling.max_tokens))
        self.set_field_options(config.fields)
        self.check_evaluated(config, eval_workflow, rewards)
        self.check_together(config, algorithm, workflow, rewards)
        found = {name: reference for name, reference in single.items() if reference is not None}
        apart = self.apart(config, algorithm, single["learner"])
        if self.faults or workflow is None or eval_workflow is None or len(found) < len(single):
            return None
        return Plan(
            config=config,
            plugins=self.plugins,
            algorithm=algorithm,
            tasks_train=train,
            tasks_eval=held_out,
            workflow=workflow,
            eval_workflow=eval_workflow,
            rewards=rewards,
            shaping=parts["shaping"],
            filters=parts["filters"],
            advantage=parts["advantage"],
            loss=self.loss(algorithm, parts, config.sampling.temperature if sampled else 1.0),
            **found,
            **optional,
            chat_template=chat_template,
            apart=apart,
            trackers=trackers,
            diagnoses=diagnoses,
            needs=frozenset(self.needs),
            fields=tuple(self.fields.values()),
            schedules=self.schedules,
            defaulted=defaulted,
            tree=tree,
        )

    def set_field_options(self, given: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the options of the batch fields that the run's components read."""
        for name, options in given.items():
            path = f"fields.{name}"
            if name not in self.fields:
                text = unknown("field", name, self.fields)
                self.faults.append(f"{path}: {text}; only fields of plugins that a component reads are computed")
                continue
            try:
                values, faults = check_options(options_of(self.fields[name].produce), options)
            except PluginError as error:  # an annotation that cannot be evaluated
                self.report(path, error)
                continue
            self.faults += [f"{option_path(path, below)}: {text}" for below, text in faults]
            self.fields[name] = attrs.evolve(self.fields[name], options=values)

    def workflows(self, config: Config, *, sampled: bool) -> tuple[ComponentRef | None, ComponentRef | None]:
        """Resolve the workflows of training and of evaluation, which always samples."""
        demonstration = defaults.PAIRS if "pairs" in self.needs else defaults.DEMONSTRATION
        use = config.workflow or (defaults.WORKFLOW if sampled else demonstration)
        workflow = self.reference("workflow", "workflow", use)
        evaluating = config.eval.workflow or (None if sampled else defaults.WORKFLOW)
        return workflow, self.reference("eval.workflow", "workflow", evaluating) if evaluating else workflow

    def single_components(self, config: Config) -> dict[str, ComponentRef | None]:
        """Resolve the components that every run has exactly one of, by their names in `Plan`."""
        return {
            "engine": self.reference("engine", "engine", config.engine),
            "learner": self.reference("learner", "learner", config.learner),
            "renderer": self.reference("model.renderer", "renderer", config.model.renderer),
            "stop": self.reference("rollout.stop", "stop", config.rollout.stop),
            "buffer": self.reference("rollout.buffer", "buffer", config.rollout.buffer),
            "weight_transfer": self.reference(
                "rollout.weight_transfer", "weight_transfer", config.rollout.weight_transfer
            ),
        }

    def optional_components(self, config: Config) -> dict[str, Any]:
        """Resolve the components that a run may have one of, by their names in `Plan`; None for those left out."""
        sampler, parser = config.rollout.sampler, config.model.tool_parser
        return {
            "sampler": None if sampler is None else self.reference("rollout.sampler", "sampler", sampler),
            "tool_parser": None if parser is None else self.reference("model.tool_parser", "tool_parser", parser),
        }

    def chat_template(self, renderer: ComponentRef | None) -> str | None:
        """Read the chat template that a renderer uses in place of the tokenizer's; None for the tokenizer's own."""
        made = None if renderer is None else self.plugins.resolve(renderer)
        try:
            return made.read_template() if isinstance(made, ReplacesTemplate) else None
        except OptionError as error:
            self.faults += [f"{option_path('model.renderer', below)}: {text}" for below, text in error.faults]
            return None

    def apart(
        self, config: Config, algorithm: AlgorithmDefaults, learner: ComponentRef | None
    ) -> dict[ApartRole, ComponentRef]:
        """Resolve the learners of the roles with dedicated processes."""
        found: dict[ApartRole, ComponentRef] = {}
        wanted: list[tuple[ApartRole, RoleSection, bool]] = [
            ("critic", config.critic, algorithm.critic),
            ("reference", config.reference, "ref_logprobs" in self.needs),
        ]
        for role, section, needed in wanted:
            own = learner
            if section.learner is not None:
                own = self.reference(f"{role}.learner", "learner", section.learner)
            if section.ranks and needed and own is not None:
                found[role] = own
        return found

    def loss(self, algorithm: AlgorithmDefaults, parts: Mapping[str, Any], temperature: float) -> LossSpec:
        coefficients = {n: self.schedules.get(n, getattr(algorithm, n)) for n in COEFFICIENTS}
        return LossSpec(
            policy_loss=parts["policy_loss"],
            correction=parts["correction"],
            kl=parts["kl"] if algorithm.kl_coef else None,
            aggregate=algorithm.aggregate,
            **{**coefficients, **({"entropy_coef": self.entropy_target} if self.entropy_target else {})},
            temperature=temperature,
        )

    def check_evaluated(
        self, config: Config, eval_workflow: ComponentRef | None, rewards: Sequence[RewardPart]
    ) -> None:
        """Find an evaluation whose workflow gives no rewards, though the run has no others."""
        if rewards and not config.reward and eval_workflow and not self.plugins.component(eval_workflow).rewards:
            self.faults.append(
                f"eval.workflow: {eval_workflow.name!r} gives no rewards, unlike the workflow of the training, and "
                "`reward` names none"
            )

    def check_together(
        self,
        config: Config,
        algorithm: AlgorithmDefaults,
        workflow: ComponentRef | None,
        rewards: Sequence[RewardPart],
    ) -> None:
        """Find faults of values and components that are valid alone, but not together."""
        readers = [] if config.reward or rewards or workflow is None else reward_readers(self.chosen)
        self.faults += cross_checks(config, algorithm, self.needs, unrewarded=readers)
        one_answer = workflow is not None and self.plugins.component(workflow).one_answer
        facts = facts_of(config, algorithm, rewards, self.chosen, one_answer=one_answer)
        self.faults += part_faults(config, algorithm, self.chosen, facts)
        comparing = [p.rule.name for p in rewards if batch_of(self.plugins.resolve(p.reference)) == "group"]
        self.faults += compared_with_nothing(comparing, self.needs)
        if config.rollout.workers:
            self.faults += [
                f"rollout.workers: the reward {p.rule.name!r} keeps state, which rollout workers would not share; set "
                "rollout.workers=0"
                for p in rewards
                if memory_of(self.plugins.resolve(p.reference)) is not None
            ]

    def trackers(self, uses: Sequence[Use]) -> tuple[ComponentRef, ...]:
        """Resolve the trackers that a run names, without a second one that would write its metrics.jsonl."""
        own = f"{CORE}/{defaults.TRACKER.name}"
        return tuple(each for each in self.many("trackers", "tracker", uses) if each.name != own)

    def diagnoses(self, uses: Sequence[Use]) -> tuple[ComponentRef, ...]:
        """Resolve the diagnoses of a run: those named and, in place of `builtin`, all other built-in ones."""
        if defaults.DIAGNOSES not in uses:
            return self.many("diagnoses", "diagnosis", uses)
        named = [use for use in uses if use != defaults.DIAGNOSES]
        found = self.many("diagnoses", "diagnosis", named)
        known = {short_name(reference.name) for reference in found}
        others = [Use(name) for name in self.plugins.names("diagnosis") if name not in known]
        return (*found, *self.many("diagnoses", "diagnosis", others))

    def sources(self, path: str, uses: Sequence[SourceUse]) -> tuple[TaskSource, ...]:
        found: list[TaskSource] = []
        for i, part in enumerate(uses):
            where = f"{path}[{i}]" if len(uses) > 1 else path
            reference = self.reference(where, "tasks", part.use, extra=SOURCE_KEYS)
            if reference is None:
                continue
            name = part.source or short_name(reference.name)
            if any(name == other.name for other in found):
                self.faults.append(
                    f"{where}: another source is also called {name!r}; tell them apart with `source: NAME`"
                )
            found.append(TaskSource(name, reference, part.weight, renamed=bool(part.source)))
        return tuple(found)

    def rewards(self, config: Config, workflow: ComponentRef | None) -> tuple[RewardPart, ...]:
        given = config.reward
        if not given and workflow is not None:
            component = component_of(workflow.obj) or self.plugins.find("workflow", workflow.name)[1]
            given = (RewardUse(defaults.REWARD),) if component.rewards else ()
        found: list[RewardPart] = []
        for i, part in enumerate(given):
            path = f"reward[{i}]" if len(given) > 1 else "reward"
            reference = self.reference(path, "reward", part.use, extra=RULE_KEYS)
            if reference is not None:
                name = short_name(reference.name)
                taken = sum(other.reference.name == reference.name and not other.rule.metric for other in found)
                name = part.rule.metric or (f"{name}_{taken + 1}" if taken else name)
                if any(other.rule.name == name for other in found):
                    self.faults.append(
                        f"{path}: another part is also called {name!r}; tell them apart with `metric: NAME`"
                    )
                found.append(RewardPart(attrs.evolve(part.rule, name=name), reference))
        if given and given[-1].rule.gate is not None:
            path = f"reward[{len(given) - 1}]" if len(given) > 1 else "reward"
            text = f"{given[-1].rule.gate:g}, but there is no later part to gate; list the parts that it gates after it"
            self.faults.append(f"{path}.gate: {text}")
        return tuple(found)

    def algorithm(self, use: Use) -> Any:
        """Resolve the algorithm with overrides merged into its defaults; schedules are replaced by their maxima."""
        try:
            reference = self.plugins.reference("algorithm", use.name)
            required = {option.name for option in self.plugins.component(reference).options if option.required}
            given = {name: value for name, value in use.options.items() if name in required}
            defaults = self.plugins.resolve(attrs.evolve(reference, options=given))
            merged = merge_parts(defaults, dict(use.options))
            self.entropy_target, faults = entropy_target(merged.get("entropy_coef"))
            self.faults += [f"algorithm.{below}: {text}" for below, text in faults]
            if faults or self.entropy_target is not None:
                merged["entropy_coef"] = self.entropy_target.max if self.entropy_target else 0.0
            self.schedules |= (schedules := self.plugins.component(reference).schedules(merged))
            return self.plugins.resolve(attrs.evolve(reference, options=with_greatest(merged, schedules)))
        except OptionError as error:
            for below, text in error.faults:
                part = self._part_with(use, below) if text.startswith("unknown option") else ""
                hint = f"the algorithm's {part} has it: algorithm.{part}.{below}"
                text = f"unknown option {below!r}; {hint}" if part else text
                self.faults.append(f"{option_path('algorithm', below)}: {text}")
        except PluginError as error:
            self.report("algorithm", error)
        return None

    def _part_with(self, use: Use, option: str) -> str:
        """Return the name of the algorithm's part that has an option; empty if none has."""
        try:
            defaults = self.plugins.resolve(self.plugins.reference("algorithm", use.name))
            for part, kind in PARTS.items():
                own = getattr(defaults, part) if part not in use.options else None
                own = own if isinstance(own, Use) else None
                options = self.plugins.component(self.plugins.reference(kind, own.name)).options if own else ()
                if any(each.name == option for each in options):
                    return part
        except (PluginError, OptionError):
            pass
        return ""

    def parts(self, algorithm: AlgorithmDefaults) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part, kind in PARTS.items():
            use = getattr(algorithm, part)
            if part == "kl" and not algorithm.kl_coef:
                found[part] = None  # not used, so that no reference model is loaded for it
                continue
            if isinstance(use, tuple):
                several = self.many(f"algorithm.{part}", kind, use)
                found[part] = ComponentRef.combined(several) if several else None
            else:
                found[part] = self.reference(f"algorithm.{part}", kind, use) if use else None
        if algorithm.kl_coef:
            self.needs.add("ref_logprobs")
        if algorithm.top_entropy_quantile is not None:
            self.needs.add("entropy")
        for part, kind in PART_LISTS.items():
            found[part] = self.many(f"algorithm.{part}", kind, getattr(algorithm, part))
        return found
