"""The plan of a run: a configuration with typed values and resolved components."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from rlsdk.config.parts import RewardPart, TaskSource, located
from rlsdk.config.schema import Config, RoleSection
from rlsdk.config.tree import Tree
from rlsdk.contracts import AlgorithmDefaults, ApartRole, DrivesOtherCode, LossSpec, Model
from rlsdk.fields import Field
from rlsdk.plugins import ComponentRef, Fingerprint, Plugins
from rlsdk.schedules import Schedule
from rlsdk.storage.location import is_url, mirror_of


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
        engine: Generates tokens.
        learner: Updates the model.
        apart: Learners of the roles with dedicated processes: critic and reference model.
        renderer: Turns conversations into tokens, and answers into messages.
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
    engine: ComponentRef
    learner: ComponentRef
    apart: Mapping[ApartRole, ComponentRef]
    renderer: ComponentRef
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
        """Name -> fingerprint, of every plugin that the run uses and of other code that its rewards call."""
        found: dict[str, Fingerprint] = self.plugins.used()
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
