"""Schema of a run's configuration: one attrs class per section, with defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import attrs

from rlsdk.components import Isolation, Use
from rlsdk.config import defaults
from rlsdk.config.rollout import ReplaySection, RolloutSection, StorageSection
from rlsdk.config.section import (
    RewardUse,
    Section,
    SourceUse,
    all_used,
    given,
    reward_uses,
    source_uses,
    used,
    used_or_none,
)
from rlsdk.contracts import DType, HeadDType, ScoringLimits
from rlsdk.kinds import Kind


@attrs.frozen(kw_only=True)
class ModelSection(Section):
    """The model that is trained.

    Attributes:
        path: Folder in transformers format, or a hub id.
        dtype: Compute dtype of the weights.
        head_dtype: Precision of the logits, in engines and learner alike: `model` computes them in `dtype`, `float32`
            in float32 from the same weights and hidden states. In bfloat16, most of the mismatch between engine and
            learner is rounding of logits; `float32` avoids it at the cost of a float32 copy of the head.
        exact: Make the logprobs of engine and learner bitwise identical, so that their gap is exactly zero. Requires a
            CPU, float32 and the engine `transformers`. Each rollout is computed alone, padded to `max_length`.
        max_length: Maximum tokens of prompt plus response.
        trust_remote_code: Run Python code shipped with the model; keep false unless you have read that code.
        tokenizer: Folder or hub id of the tokenizer; null uses the model's.
        reference: Folder or hub id of the reference model; null uses the initial model.
        critic: Folder or hub id of the model that initialises the critic; null uses the model that is trained.
        separator: Text inserted before each later message of a conversation whose prompt is plain text.
        keep_history: Keep earlier answers as sampled where the chat template would drop their thoughts. If false, such
            a conversation becomes several rollouts of one trajectory, each rendered by the template.
        renderer: Turns conversations into tokens and answers into messages; by default the tokenizer's chat template.
        tool_parser: Syntax of tool calls; null selects the parser that reads the renderer's tool calls.
    """

    path: str
    dtype: DType = "float32"
    head_dtype: HeadDType = "model"
    exact: bool = False
    max_length: int = 2048
    trust_remote_code: bool = False
    tokenizer: str | None = None
    reference: str | None = None
    critic: str | None = None
    separator: str = "\n"
    keep_history: bool = False
    renderer: Use = attrs.field(default=defaults.RENDERER, converter=used)
    tool_parser: Use | None = attrs.field(default=None, converter=used_or_none)


def _model(value: str | Path | ModelSection) -> ModelSection:
    """Return a model's section; the path alone is accepted."""
    return ModelSection(path=str(value)) if isinstance(value, str | Path) else value


@attrs.frozen(kw_only=True)
class TasksSection(Section):
    """Task sources: one source, or a list; each may have `weight` and `source` next to `use`.

    Attributes:
        train: Task sources to train on.
        eval: Task sources to evaluate on; null for no evaluation.
    """

    train: tuple[SourceUse, ...] = attrs.field(converter=source_uses)
    eval: tuple[SourceUse, ...] = attrs.field(default=(), converter=source_uses)


@attrs.frozen(kw_only=True)
class SamplingSection(Section):
    """Sampling of rollouts.

    Attributes:
        temperature: Softmax temperature, above 0; the learner divides its logits by the same value.
        top_p: Must be 1 (off) in training: the learner does not know which tokens were kept.
        top_k: Must be 0 (off) in training, for the same reason.
        max_tokens: Maximum tokens of one response.
        stop: Stop strings; they are kept in the response.
        seeds: `request`: one seed per request, so that samples do not depend on the number of engines. `step`: one seed
            per step, which is faster; samples are reproducible with one engine only.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seeds: Literal["step", "request"] = "step"


@attrs.frozen(kw_only=True)
class EnvironmentsSection(Section):
    """Worker processes that host environments; they start when a workflow first needs one.

    Attributes:
        workers: Number of worker processes.
        per_worker: Maximum concurrent environments per worker; further rollouts wait for a slot in FIFO order.
        threads: Maximum concurrent calls per worker; `async` environments use no threads.
        isolation: Overrides the isolation that each environment declares: `thread`, `lock` (one call at a time per
            worker) or `process` (one per environment); null keeps the declared one.
    """

    workers: int = 1
    per_worker: int = 1024
    threads: int = 64
    isolation: Isolation | None = None


@attrs.frozen(kw_only=True)
class EvalSection(Section):
    """Evaluation on held-out tasks: one greedy answer, and sampled ones.

    Attributes:
        every: Steps between evaluations, each at a step that syncs weights (`rollout.sync_interval`); 0 for none in
            between.
        before: Evaluate before the first step.
        after: Evaluate after the last step.
        samples: Sampled answers per task; if above 1, pass@k is reported for k = 1, 2, 4, … up to this number.
        greedy: Also take one greedy answer per task; if false, `eval/greedy` is not reported.
        temperature: Softmax temperature of sampled answers, above 0.
        top_p: Sample only from the likeliest tokens that together have this share of the probability; 1 is off.
        top_k: Sample only from this number of likeliest tokens; 0 is off.
        limit: Maximum tasks per source; null for all.
        max_tokens: Maximum tokens of one response; null uses `sampling.max_tokens`.
        workflow: Turns a held-out task into rollouts; null uses the training's, or `single_turn` if training on
            demonstrations.
        environments: Separate environment workers for evaluation; null shares those of training.
    """

    every: int = 0
    before: bool = True
    after: bool = True
    samples: int = 1
    greedy: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    limit: int | None = None
    max_tokens: int | None = None
    workflow: Use | None = attrs.field(default=None, converter=used_or_none)
    environments: EnvironmentsSection | None = None


@attrs.frozen(kw_only=True)
class CheckpointSection(Section):
    """Checkpoints and exports.

    Attributes:
        every: Steps between checkpoints, each written at a step that syncs weights (`rollout.sync_interval`); 0 for one
            at the end only.
        keep: Number of checkpoints to keep; older ones are deleted.
        export: When to export the model in transformers format: with the last checkpoint, with every one, or never.
    """

    every: int = 0
    keep: int = 2
    export: Literal["last", "every", "never"] = "last"


@attrs.frozen(kw_only=True)
class PlacementSection(Section):
    """Number of processes, and the devices they use.

    Attributes:
        engines: Number of engine actors.
        learners: Number of learner ranks.
        engine_threads: CPU threads per engine; 0 divides the cores among the engines.
        learner_threads: CPU threads per rank; 0 divides the cores among the ranks.
        device: `auto` uses CUDA if Ray finds GPUs and, on this machine, torch can use them.
        gpus_per_engine: GPUs per engine actor (tensor parallelism).
        colocate: Share devices between engines and learner; one sleeps while the other works.
        ray: Address of a running Ray cluster; null uses the environment variable RAY_ADDRESS or, if it is unset, starts
            Ray on this machine for this run.
        runtime_env: Ray runtime environment for all actors: `env_vars`, `pip`, `working_dir`, `py_modules` and others.
        engine_resources: Ray resources, by name, that each engine reserves besides cores and GPUs. Custom resources
            select the cluster nodes that run engines.
        learner_resources: Ray resources that each learner rank reserves besides cores and GPUs.
        engine_restarts: Maximum restarts of one engine or rollout worker after its process died; one more death fails
            the run.
        partner_timeout: Seconds that explorer and trainer, run as separate programs, wait for each other, and for the
            replacement of a dead explorer.
        peak_tflops: Peak of one learner rank's device in TFLOP/s, for `time/update_mfu`; null: the peak in bfloat16 of
            a GPU that rlsdk knows.
    """

    engines: int = 1
    learners: int = 1
    engine_threads: int = 0
    learner_threads: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus_per_engine: int = 1
    colocate: bool = True
    ray: str | None = None
    runtime_env: Mapping[str, Any] = {}
    engine_resources: Mapping[str, float] = {}
    learner_resources: Mapping[str, float] = {}
    engine_restarts: int = 3
    partner_timeout: float = 600.0
    peak_tflops: float | None = None


@attrs.frozen(kw_only=True)
class RoleSection(Section):
    """How the critic or reference model runs: by default in the learner's processes.

    Attributes:
        dtype: Compute dtype of its weights; null uses `model.dtype`.
        ranks: Number of dedicated processes, which run concurrently with the learner; 0 runs the model in the learner's
            processes.
        threads: CPU threads per process; 0 divides the cores among them.
        resources: Ray resources that each process reserves besides one core and, if the run has GPUs, one GPU.
        learner: Learner that runs the model in its dedicated processes; null uses the run's, with its options.
    """

    dtype: DType | None = None
    ranks: int = 0
    threads: int = 0
    resources: Mapping[str, float] = {}
    learner: Use | None = attrs.field(default=None, converter=used_or_none)


@attrs.frozen(kw_only=True)
class CriticSection(RoleSection):
    """How the critic runs, and how long it is trained before the actor.

    Attributes:
        warmup_steps: Number of first steps that train the critic alone. The actor takes no optimiser step in them: its
            weights, optimiser state and learning-rate schedule do not change.
    """

    warmup_steps: int = 0


@attrs.frozen(kw_only=True)
class ReferenceSection(RoleSection):
    """How the reference model runs, and whether it follows the policy.

    Attributes:
        update_every: Steps between moves of the reference model towards the policy, so that a KL penalty does not hold
            a long run back; 0 for none.
        mix: Share of the policy's weights in each move, `mix · policy + (1 - mix) · reference`: 1 replaces the
            reference model by the policy; with `update_every: 1`, a small share makes it a moving average.
    """

    update_every: int = 0
    mix: float = 1.0


RoleT = TypeVar("RoleT", CriticSection, ReferenceSection)


def _of_role(value: RoleSection, kind: type[RoleT]) -> RoleT:
    """Return the section of one role; a `RoleSection` is accepted in its place."""
    if type(value) is not RoleSection:
        return cast("RoleT", value)  # `check` reports anything else with its path
    return kind(**{name: getattr(value, name) for name in given(value)})


def _critic(value: RoleSection) -> CriticSection:
    return _of_role(value, CriticSection)


def _reference(value: RoleSection) -> ReferenceSection:
    return _of_role(value, ReferenceSection)


@attrs.frozen(kw_only=True)
class CanarySection(Section):
    """Comparison of engine and learner logprobs on fixed tokens after every weight sync.

    Attributes:
        tokens: Number of tokens to compare.
        tolerance: Maximum difference of a logprob in nats; null means 1e-3 for float32, 0.15 for bfloat16, 0.05 for
            float16. In a 16-bit mixture of experts, a tenth of the tokens may exceed it, since another expert may be
            chosen. With `model.exact` it is always 0.
    """

    tokens: int = 32
    tolerance: float | None = None


@attrs.frozen(kw_only=True)
class WatchdogSection(Section):
    """Time limits after which the watchdog reports a silent process, and ends the run.

    A process is silent if it is stopped, or uses neither CPU nor disk and does not respond.

    Attributes:
        warn: Seconds of silence after which the log names the process, the stage of the run and the log file.
        end: Seconds of silence after which the run ends, or, for an engine or environment worker, the process is
            replaced; null for never.
        busy: Seconds that an engine, a rollout worker or an environment worker may work without responding, since they
            respond after each decode step; then it is replaced; null for any time. Includes loading a model.
        learner_busy: Seconds that a learner rank may work on one call, such as loading its models, an update or a
            checkpoint; then it is killed and the run ends; null for any time.
    """

    warn: float = 60.0
    end: float | None = 1800.0
    busy: float | None = 7200.0
    learner_busy: float | None = 21_600.0


@attrs.frozen(kw_only=True)
class ProfileSection(Section):
    """Training steps in which torch's profiler records the learner.

    Attributes:
        steps: Steps to record, counted from 1; each writes a Chrome trace per rank to `profiles` in the run's folder.
        ranks: Learner ranks to record.
        details: Also record shapes, memory and Python stacks, which makes traces several times as large.
    """

    steps: tuple[int, ...] = ()
    ranks: tuple[int, ...] = (0,)
    details: bool = False


@attrs.frozen(kw_only=True)
class Config(Section):
    """Configuration of a run.

    Attributes:
        name: Name of the run; its folder is `out/name`.
        out: Folder of runs, or an fsspec URL such as s3://BUCKET/runs: the run then works in a local mirror, which is
            uploaded after each checkpoint and downloaded to resume elsewhere.
        mirror: Folder of local mirrors if `out` is a URL; null uses `rlsdk/runs` in the platform's cache folder.
        seed: Random seed of the whole run.
        log_level: Level of the run's own log.
        plugins: Plugins to load that no other key names, such as observers; each is a name or a file.
        model: The model, or its path alone.
        tasks: Task sources for training and evaluation.
        max_prompt_tokens: Maximum prompt length.
        long_prompts: `drop` skips and counts longer prompts; `error` fails the run.
        workflow: Turns a task into rollouts.
        environments: Workers that run the environments of workflows.
        reward: One reward, or a list with weights.
        scoring: Resource limits of rewards.
        max_invalid: Maximum share of unscored rollouts in a step or an evaluation; above it, the run stops.
        max_empty_steps: Consecutive steps with nothing to learn from (no rollout left, or all advantages zero) after
            which the run ends; null for no limit.
        algorithm: The algorithm; any of its parts may be replaced.
        fields: Options of the batch fields that plugins declare, by name of the field.
        sampling: Sampling of rollouts.
        rollout: Scheduling of rollouts: staleness, replay, storage, weight transfer.
        engine: Generates tokens.
        learner: Updates the model.
        critic: How the critic runs, if the algorithm uses one, and how long it is trained before the actor.
        reference: How the reference or teacher model runs, if the algorithm uses one.
        steps: Length of the run in trainer steps; an alternative to `epochs`.
        epochs: Length of the run in passes over the tasks: `epochs` times the tasks of all sources are trained, the
            next ones in place of dropped and replaced ones; an alternative to `steps`.
        batch_size: Tasks per step.
        group_size: Rollouts per task.
        minibatches: Optimiser steps per pass over a batch.
        passes: Passes (epochs) over each batch.
        old_logprobs: `learner` recomputes them; `rollout` uses the engine's, which saves a forward pass but needs an
            engine that matches the learner.
        eval: Evaluation.
        checkpoint: Checkpoints.
        trackers: Metric destinations besides `metrics.jsonl`, which is always written.
        diagnoses: Rules that watch the metrics for problems during training; `builtin` stands for all built-in rules
            not listed explicitly, [] for none.
        save_rollouts: Steps between saved batches of rollouts; 0 for none. A checkpoint also saves groups not yet
            trained, so that a resumed run need not sample them again.
        canary: Comparison of engine and learner logprobs after every weight sync.
        placement: Number of processes, and their devices.
        watchdog: Time limits after which a silent process is reported, and the run ends.
        profile: Steps in which torch's profiler records the learner; by default, none.
    """

    Model = ModelSection
    Tasks = TasksSection
    Source = SourceUse
    Environments = EnvironmentsSection
    Reward = RewardUse
    Scoring = ScoringLimits
    Sampling = SamplingSection
    Rollout = RolloutSection
    Replay = ReplaySection
    Storage = StorageSection
    Eval = EvalSection
    Checkpoint = CheckpointSection
    Canary = CanarySection
    Placement = PlacementSection
    Role = RoleSection
    Critic = CriticSection
    Reference = ReferenceSection
    Watchdog = WatchdogSection

    name: str
    model: ModelSection = attrs.field(converter=_model)
    tasks: TasksSection
    out: str = "runs"
    mirror: str | None = None
    seed: int = 0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    plugins: tuple[Any, ...] = ()
    max_prompt_tokens: int = 512
    long_prompts: Literal["drop", "error"] = "drop"
    workflow: Use | None = attrs.field(default=None, converter=used_or_none)
    environments: EnvironmentsSection = EnvironmentsSection()
    reward: tuple[RewardUse, ...] = attrs.field(default=(), converter=reward_uses)
    scoring: ScoringLimits = ScoringLimits()
    max_invalid: float = 0.2
    max_empty_steps: int | None = 10
    algorithm: Use = attrs.field(default=defaults.ALGORITHM, converter=used)
    fields: Mapping[str, Mapping[str, Any]] = {}
    sampling: SamplingSection = SamplingSection()
    rollout: RolloutSection = RolloutSection()
    engine: Use = attrs.field(default=defaults.ENGINE, converter=used)
    learner: Use = attrs.field(default=defaults.LEARNER, converter=used)
    critic: CriticSection = attrs.field(default=CriticSection(), converter=_critic)
    reference: ReferenceSection = attrs.field(default=ReferenceSection(), converter=_reference)
    steps: int | None = None
    epochs: float | None = None
    batch_size: int = 64
    group_size: int = 8
    minibatches: int = 1
    passes: int = 1
    old_logprobs: Literal["learner", "rollout"] = "learner"
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    trackers: tuple[Use, ...] = attrs.field(default=(), converter=all_used)
    diagnoses: tuple[Use, ...] = attrs.field(default=(defaults.DIAGNOSES,), converter=all_used)
    save_rollouts: int = 1
    canary: CanarySection = CanarySection()
    placement: PlacementSection = PlacementSection()
    watchdog: WatchdogSection = WatchdogSection()
    profile: ProfileSection = ProfileSection()

    @property
    def updates(self) -> int:
        """Number of optimiser steps per batch."""
        return self.minibatches * self.passes


COMPONENT_KEYS: Mapping[str, Kind] = {
    "workflow": "workflow",
    "eval.workflow": "workflow",
    "algorithm": "algorithm",
    "engine": "engine",
    "learner": "learner",
    "critic.learner": "learner",
    "reference.learner": "learner",
    "model.renderer": "renderer",
    "model.tool_parser": "tool_parser",
    "rollout.sampler": "sampler",
    "rollout.buffer": "buffer",
    "rollout.stop": "stop",
    "rollout.weight_transfer": "weight_transfer",
}
"""Path of a single component -> its kind; lists and the parts of an algorithm are separate."""

LISTS: Mapping[str, Kind] = {
    "tasks.train": "tasks",
    "tasks.eval": "tasks",
    "reward": "reward",
    "trackers": "tracker",
    "diagnoses": "diagnosis",
}
"""Path of a list of components -> their kind; a single component needs no list."""
