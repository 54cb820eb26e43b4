"""The plan of a run: a configuration with typed values, resolved components, and an algorithm's merged parts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlsdk.components import Component, Use
from rlsdk.config.schema import Config, RoleSection
from rlsdk.config.tree import Tree, current_path
from rlsdk.contracts import AlgorithmDefaults, ApartRole, DrivesOtherCode, LossSpec, Model, RewardSpec, RunFacts
from rlsdk.fields import WHOLE_GROUPS, Field
from rlsdk.kinds import COMBINED, PART_LISTS, PARTS
from rlsdk.options import CONVERTER, Fault, structure
from rlsdk.plugins import ComponentRef, Fingerprint, Plugins, short_name
from rlsdk.plugins.fingerprints import of_text
from rlsdk.schedules import Schedule
from rlsdk.storage.location import is_url, mirror_of

NORMED = "seq-mean-token-sum-norm"
"""The aggregation that divides by a fixed length."""


@attrs.frozen
class RewardPart:
    """One part of the reward: its component, and how it is combined with the others."""

    rule: RewardSpec
    reference: ComponentRef


@attrs.frozen
class TaskSource:
    """One source of tasks.

    Attributes:
        name: Unique name in metrics and checkpoints.
        reference: The component.
        weight: Share of a batch, relative to the other sources.
        renamed: True if `name` replaces the `source` of its tasks.
    """

    name: str
    reference: ComponentRef
    weight: float = 1.0
    renamed: bool = False


@attrs.frozen
class Chosen:
    """A component that a configuration chose.

    Attributes:
        path: Key in the configuration.
        component: The component.
        options: Given options; schedules are replaced by their maximum values.
    """

    path: str
    component: Component
    options: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.component.kind} {self.component.name!r}"

    @property
    def values(self) -> dict[str, Any]:
        """All options, defaults included."""
        return {option.name: option.default for option in self.component.options} | dict(self.options)

    @property
    def reweights(self) -> bool:
        """True for a correction with weights other than 0 and 1."""
        masks = self.component.masks
        return self.component.kind == "correction" and not (masks(self.values) if callable(masks) else masks)

    def faults(self, run: RunFacts) -> Iterator[str]:
        """Yield faults of options that have no effect in the run."""
        if self.component.check is None:
            return
        for option, text in self.component.check(run, self.values):
            yield f"{self.path}.{option}: {text}" if option else f"{self.path}: {text}"


def merge_parts(defaults: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Merge partial overrides into the algorithm's parts; another name, or a marked object, replaces a part.

    Args:
        defaults: The algorithm with its author's defaults.
        options: The configuration's `algorithm` section; modified and returned.
    """
    for part in PARTS:
        given, default = options.get(part), getattr(defaults, part, None)
        if part in COMBINED and isinstance(given, list | tuple) and len(given) == 1:
            options[part] = given = given[0]
        if given is None or not isinstance(default, Use):
            continue
        if isinstance(given, str) and given == default.name:
            options[part] = default
        elif isinstance(given, Mapping) and given.get("use", default.name) == default.name:
            options[part] = {"use": default.name, **default.options, **{k: v for k, v in given.items() if k != "use"}}
    for part in PART_LISTS:
        if part in options and not isinstance(options[part], list | tuple):
            options[part] = [options[part]]
    return options


def with_lengths(component: Component, options: Mapping[str, Any], max_tokens: int | None) -> dict[str, Any]:
    """Return the options with `max_tokens`, if known, for each length that is null or omitted."""
    if max_tokens is None:
        return dict(options)
    defaults = {option.name: option.default for option in component.options}
    empty = [name for name in component.lengths if options.get(name, defaults[name]) is None]
    return {**options, **dict.fromkeys(empty, max_tokens)}


def with_defaults(tree: Tree, defaults: Mapping[str, Any]) -> tuple[Tree, dict[str, Any]]:
    """Add an algorithm's defaults for missing keys to a configuration; also return the defaults that were used."""
    tree, taken = dict(tree), {}
    for name, value in defaults.items():
        path = current_path(name)
        *sections, key = path.split(".")
        node: Any = tree
        for section in sections:
            below = node.get(section)
            node[section] = below if isinstance(below, str) else dict(below or {})
            node = node[section]
            if isinstance(node, str):  # a name instead of keys: the user chose the component
                break
        if isinstance(node, dict) and key not in node:
            node[key] = taken[path] = value
    return tree, taken


def default_faults(defaults: Mapping[str, Any]) -> list[Fault]:
    """Find errors in an algorithm's defaults for other sections: unknown paths, and invalid values."""
    fault = "is a part of the algorithm itself; set its field"
    faults = [(path, fault) for path in defaults if path.partition(".")[0] == "algorithm"]
    least = {"name": "run", "model": {"path": "model"}, "tasks": {"train": ["tasks"]}}
    _, wrong = structure(with_defaults(least, defaults)[0], Config)
    return faults or [(path.lstrip("."), text) for path, text in wrong]


def completed(
    config: Config, tree: Tree, algorithm: AlgorithmDefaults | None
) -> tuple[Config, Tree, dict[str, Any], list[str]]:
    """Apply an algorithm's defaults for other sections: (configuration, its tree, defaults used, faults)."""
    if algorithm is None or not algorithm.defaults:
        return config, tree, {}, []
    if wrong := default_faults(algorithm.defaults):
        return config, tree, {}, [f"algorithm.defaults: {path}: {text}" for path, text in wrong]
    tree, taken = with_defaults(tree, algorithm.defaults)
    return CONVERTER.structure(tree, Config), tree, taken, []


def located(path: str) -> str:
    """Return the absolute path of a model's folder, for processes in other folders; a hub id is unchanged."""
    folder = Path(os.path.expanduser(path))  # unlike Path's, it leaves the home of an unknown user as it is
    return str(folder.resolve()) if folder.is_dir() else path


def facts_of(
    config: Config,
    algorithm: AlgorithmDefaults,
    rewards: Sequence[RewardPart],
    chosen: Sequence[Chosen],
    *,
    one_answer: bool,
) -> RunFacts:
    """Collect the facts about the run that components' checks receive."""
    path, reference, room = config.model.path, config.model.reference, config.model.max_length - 1
    return RunFacts(
        teacher=reference is not None and located(reference) != located(path),
        max_tokens=config.sampling.max_tokens,
        longest_response=min(config.sampling.max_tokens, room) if one_answer else room,
        group_size=config.group_size,
        updates=config.updates,
        aggregate=algorithm.aggregate,
        rewards=tuple(part.rule.name for part in rewards),
        shaping=tuple(part.component.name for part in chosen if part.component.kind == "shaping"),
        rollouts=algorithm.rollouts,
        reward_parts=tuple(part.rule for part in rewards),
        sources=tuple(part.source or short_name(part.use.name) for part in config.tasks.train),
    )


def part_faults(config: Config, algorithm: AlgorithmDefaults, chosen: Sequence[Chosen], run: RunFacts) -> Iterator[str]:
    """Yield faults of parts that contradict each other or have no effect in the run."""
    for part in chosen:
        allowed = part.component.aggregates
        if allowed and run.aggregate not in allowed:
            yield f"algorithm.aggregate: {part} is defined for {' and '.join(allowed)}; got {run.aggregate!r}"
        yield from _no_effect(part, config, algorithm)
        yield from part.faults(run)
    loss = next((part for part in chosen if part.component.kind == "policy_loss"), None)
    for part in chosen:
        if part.reweights and loss and loss.component.corrects:
            yield (
                f"{part.path}: {part} weights tokens by their ratio to the sampler, and so does {loss} itself; leave "
                "the correction out (null), or use one that only masks, such as 'token_mask'"
            )
    yield from _contradictions([part for part in chosen if part.component.kind == "correction"])


def _contradictions(corrections: Sequence[Chosen]) -> Iterator[str]:
    """Yield faults of corrections that cannot be combined."""
    weighing = [part for part in corrections if part.reweights]
    for part in weighing[1:]:
        yield (
            f"{part.path}: {part} weights tokens by their ratio to the sampler, and so does {weighing[0]} "
            f"({weighing[0].path}): the ratio would count twice; keep one of them, or replace one by a correction that "
            "only masks, such as 'token_mask'"
        )

    def apart_from_limits(part: Chosen) -> tuple[Component, dict[str, Any]]:
        limits = {option.name for option in part.component.options if option.schedule}
        return part.component, {name: value for name, value in part.values.items() if name not in limits}

    for i, part in enumerate(corrections):
        same = [each for each in corrections[:i] if apart_from_limits(each) == apart_from_limits(part)]
        if same and part not in weighing[1:]:
            yield (
                f"{part.path}: {part} is also {same[0].path}, and the two differ in their limits at most; "
                "keep one of them, with the narrower limits"
            )


def reward_readers(chosen: Sequence[Chosen]) -> list[str]:
    """Return the names of the parts that read rewards."""

    def reads(component: Component) -> bool:
        if component.kind == "policy_loss":
            return "preferred" in component.needs
        return component.kind in ("advantage", "filter", "buffer", "sampler") and component.reads_rewards

    return [str(part) for part in chosen if reads(part.component)]


def _no_effect(part: Chosen, config: Config, algorithm: AlgorithmDefaults) -> Iterator[str]:
    """Yield faults of parts whose inputs this run does not have: sampled or recomputed logprobs, or rewards."""
    corrects, correction = part.component.corrects, part.component.kind == "correction"
    other = "leave it out (null)" if correction else "choose another policy loss"
    if algorithm.rollouts == "demonstrations" and (corrects == "old" or correction):
        yield f"{part.path}: {part} weights samples by their ratio to the sampler, but nothing is sampled; {other}"
    elif algorithm.rollouts == "demonstrations" and part.component.kind == "sampler" and part.component.reads_rewards:
        yield f"{part.path}: {part} reads rewards, but demonstrations get none; leave it out (null)"
    elif corrects == "old" and algorithm.rollouts == "sampled" and config.old_logprobs == "rollout":
        yield (
            f"{part.path}: {part} weights by old_logprobs over the sampler's logprobs, but with old_logprobs=rollout "
            f"both are the sampler's: every weight is 1; set old_logprobs=learner, or {other}"
        )


@attrs.frozen(kw_only=True)
class Plan:
    """A checked configuration: every value is valid and every name is resolved.

    Attributes:
        config: The typed values.
        plugins: Loaded plugins.
        algorithm: The algorithm's parts, defaults and overrides merged.
        tasks_train: Sources of tasks to train on.
        tasks_eval: Sources of tasks to evaluate on.
        workflow: Turns a task into rollouts.
        eval_workflow: Turns a held-out task into rollouts.
        rewards: The parts of the reward.
        shaping: Reward shapings, in order of application.
        advantage: Turns rewards into advantages.
        filters: Group filters, in order of application.
        loss: Objective of an update.
        buffer: Order in which groups are trained.
        sampler: Chooses the tasks; None: each epoch in a new random order, or in that of the data.
        engine: Generates tokens.
        learner: Updates the model.
        apart: Learners of the roles with dedicated processes: critic and reference model.
        renderer: Turns conversations into tokens, and answers into messages.
        chat_template: Chat template that the renderer uses in place of the tokenizer's; None: the tokenizer's own.
        tool_parser: Reads and writes tool calls; None: chosen to match the renderer.
        stop: Rule that decides when enough of a batch is complete.
        weight_transfer: Sends weights from the learner to the engines.
        trackers: Destinations of metrics.
        diagnoses: Rules that watch the metrics for problems.
        needs: Optional inputs that the parts read.
        fields: Those of them that plugins declare.
        schedules: Options that change during training, by their path below `algorithm`, such as
            `policy_loss.clip_high`. For a field of `algorithm` itself, such as `kl_coef`, `algorithm` holds the maximum
            of the schedule.
        defaulted: Values of other sections, by path, that the algorithm set because the configuration did not.
        tree: The configuration as plain values, for `config.yaml`; with the algorithm's defaults.
    """

    config: Config
    plugins: Plugins
    algorithm: AlgorithmDefaults
    tasks_train: tuple[TaskSource, ...]
    tasks_eval: tuple[TaskSource, ...]
    workflow: ComponentRef
    eval_workflow: ComponentRef
    rewards: tuple[RewardPart, ...]
    shaping: tuple[ComponentRef, ...]
    advantage: ComponentRef
    filters: tuple[ComponentRef, ...]
    loss: LossSpec
    buffer: ComponentRef
    sampler: ComponentRef | None
    engine: ComponentRef
    learner: ComponentRef
    apart: Mapping[ApartRole, ComponentRef]
    renderer: ComponentRef
    chat_template: str | None
    tool_parser: ComponentRef | None
    stop: ComponentRef
    weight_transfer: ComponentRef
    trackers: tuple[ComponentRef, ...]
    diagnoses: tuple[ComponentRef, ...]
    needs: frozenset[str]
    fields: tuple[Field, ...]
    schedules: Mapping[str, Schedule]
    defaulted: Mapping[str, Any]
    tree: Tree

    @property
    def folder(self) -> Path:
        """The run's local folder; if `out` is a URL, the mirror of `location`."""
        out = self.config.out
        return (mirror_of(out, self.config.mirror) if is_url(out) else Path(out)) / self.config.name

    @property
    def location(self) -> str:
        """Folder or URL of the run."""
        out = self.config.out
        return f"{out.rstrip('/')}/{self.config.name}" if is_url(out) else str(self.folder)

    @property
    def model(self) -> Model:
        """The model, as passed to actors."""
        section = attrs.asdict(self.config.model)
        section |= {key: located(section[key]) for key in ("path", "tokenizer") if section[key]}
        section["chat_template"] = self.chat_template
        return Model(**{field.name: section[field.name] for field in attrs.fields(Model)})

    @property
    def reference(self) -> Model:
        """The reference model, if the run needs one."""
        return self._role_model(self.config.model.reference, self.config.reference)

    @property
    def critic(self) -> Model:
        """The model that initialises the critic, if there is a critic."""
        return self._role_model(self.config.model.critic, self.config.critic)

    def _role_model(self, path: str | None, role: RoleSection) -> Model:
        dtype = role.dtype or self.config.model.dtype
        return attrs.evolve(self.model, path=located(path or self.config.model.path), dtype=dtype)

    @property
    def code(self) -> dict[str, dict[str, str]]:
        """Name -> fingerprint, of every plugin of the run, its chat template from a file, code that rewards call."""
        found: dict[str, Fingerprint] = self.plugins.used()
        if self.chat_template is not None:
            found["chat template"] = of_text(self.chat_template)
        for part in self.rewards:
            reward = self.plugins.resolve(part.reference)
            found |= reward.marks if isinstance(reward, DrivesOtherCode) else {}
        return {name: attrs.asdict(mark) for name, mark in found.items()}

    @property
    def sampled(self) -> bool:
        """True if any rollouts are sampled from the policy (otherwise all are demonstrations)."""
        return self.algorithm.rollouts != "demonstrations"

    @property
    def scored(self) -> bool:
        """True if sampled rollouts get rewards."""
        return self.sampled and bool(self.rewards)

    @property
    def separate_rewards(self) -> frozenset[str]:
        """Parts of the reward that the algorithm reads one by one; empty if it reads their sum."""
        parts = self.rewards if "reward_parts" in self.needs else ()
        return frozenset(part.rule.name for part in parts if part.rule.weight)

    @property
    def whole_groups(self) -> bool:
        """True if the loss compares the rollouts of a group, which must then be in one micro-batch."""
        return not self.needs.isdisjoint(WHOLE_GROUPS)

    @property
    def needs_reference(self) -> bool:
        """True if a reference model is loaded."""
        return "ref_logprobs" in self.needs

    @property
    def replays_routing(self) -> bool:
        """True if engines return the experts chosen for each token, and the learner uses them."""
        return "routed_experts" in self.needs

    @property
    def needs_engine(self) -> bool:
        """True if the run generates anything, in training or evaluation."""
        evaluates = self.config.eval.before or self.config.eval.after or self.config.eval.every
        return self.sampled or bool(self.tasks_eval and evaluates)
