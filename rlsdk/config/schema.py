"""Schema of a run's configuration: one attrs class per section, with defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs

from rlsdk.components import Isolation, Use
from rlsdk.config import defaults
from rlsdk.config.rollout import ReplaySection, RolloutSection, StorageSection
from rlsdk.config.section import Section, all_used, used, used_or_none
from rlsdk.config.uses import RewardUse, SourceUse, reward_uses, source_uses
from rlsdk.contracts import DType, HeadDType, ScoringLimits
from rlsdk.kinds import Kind


@attrs.frozen(kw_only=True)
class ModelSection(Section):
    """The model that is trained.

    Attributes:
        path: Folder that transformers opens, or a hub id.
        dtype: Dtype of the weights in computations.
        head_dtype: Precision of the logits, in engines and learner alike: `model` computes them in `dtype`, `float32`
            in float32 from the same weights and hidden states. In bfloat16 most of the difference between engine and
            learner is rounding of logits; float32 costs a copy of the head in float32.
        exact: Compute the logprobs of engine and learner bit for bit alike, so that their gap is exactly zero; on a CPU
            in float32 with the engine `transformers`. Each rollout is read alone, padded to `max_length`.
        max_length: Tokens of prompt and response together.
        trust_remote_code: Run code that comes with the model; false unless you read that code.
        tokenizer: Folder or hub id of the tokenizer; null takes the model's.
        reference: Folder or hub id of the reference model; null takes the model as it is at the start.
        critic: Folder or hub id of the model that the critic starts from; null takes the model that is trained.
        separator: Text before every later message of a conversation whose prompt is text, not messages.
        keep_history: Where the chat template drops the thoughts of earlier answers, keep the tokens as they were
            sampled; false trains such a conversation as several rollouts of one trajectory, each as the template
            renders it.
        renderer: Turns conversations into tokens and answers into messages; by default the tokenizer's chat template.
        tool_parser: How tool calls are written; null takes the first parser that reads what the renderer writes.
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
    """Return the section of a model that may be given by its path alone."""
    return ModelSection(path=str(value)) if isinstance(value, str | Path) else value


@attrs.frozen(kw_only=True)
class TasksSection(Section):
    """Where tasks come from: one source, or a list, each with its `weight` and `source` beside `use`.

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
        temperature: Softmax temperature, above 0; the learner divides its logits by the same.
        top_p: Must be 1 (off) in training: the learner does not know which part of the vocabulary was kept.
        top_k: Must be 0 (off) in training, for the same reason.
        max_tokens: Most tokens of one response.
        stop: Strings that end a response; they stay in it.
        seeds: One seed per request (`request`: the same samples on any number of engines) or one per step (`step`:
            faster, the same samples with one engine).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seeds: Literal["step", "request"] = "step"


@attrs.frozen(kw_only=True)
class EnvironmentsSection(Section):
    """The workers that host environments; they start when a workflow first asks for one.

    Attributes:
        workers: Processes.
        per_worker: Environments at once in each worker; further rollouts wait for a slot, first come, first served.
        threads: Concurrent calls in each worker; `async` environments need none.
        isolation: How environments are isolated, overriding what each declares: `thread`, `lock` (one call at a time
            in each worker) or `process` (one for each environment); null: as they declare.
    """

    workers: int = 1
    per_worker: int = 1024
    threads: int = 64
    isolation: Isolation | None = None


@attrs.frozen(kw_only=True)
class EvalSection(Section):
    """Evaluation on held-out tasks: greedy once, and sampled at temperature 1.

    Attributes:
        every: Steps between evaluations, each at a step that publishes weights (`rollout.sync_interval`); 0 for none in
            between.
        before: Evaluate before the first step.
        after: Evaluate after the last step.
        samples: Sampled answers per task; above 1, pass@k is reported for k = 1, 2, 4, … up to it.
        limit: Tasks of each source to evaluate on; null for all.
        max_tokens: Most tokens of one response; null takes the training's.
        workflow: Turns a held-out task into rollouts; null takes the training's, or one that asks once for a training
            on demonstrations.
        environments: Separate environment workers for evaluation; null shares those of the training.
    """

    every: int = 0
    before: bool = True
    after: bool = True
    samples: int = 1
    limit: int | None = None
    max_tokens: int | None = None
    workflow: Use | None = attrs.field(default=None, converter=used_or_none)
    environments: EnvironmentsSection | None = None


@attrs.frozen(kw_only=True)
class CheckpointSection(Section):
    """Checkpoints and exports.

    Attributes:
        every: Steps between checkpoints, each written at a step that publishes weights (`rollout.sync_interval`); 0 for
            one at the end only.
        keep: Number of checkpoints to keep; older ones are deleted.
        export: When to write a folder that transformers opens: with the last checkpoint, with every one, or never.
    """

    every: int = 0
    keep: int = 2
    export: Literal["last", "every", "never"] = "last"


@attrs.frozen(kw_only=True)
class PlacementSection(Section):
    """Counts and devices only.

    Attributes:
        engines: Engine actors.
        learners: Ranks of the learner.
        engine_threads: CPU threads of each engine; 0 divides the cores among the engines.
        learner_threads: CPU threads of each rank; 0 divides the cores among the ranks.
        device: auto takes CUDA where Ray finds GPUs.
        gpus_per_engine: GPUs of each engine actor (tensor parallelism).
        colocate: Engines and learner share the devices, one sleeping while the other works.
        ray: Address of a running Ray cluster; null takes the environment's RAY_ADDRESS and, without one, starts Ray for
            this run on this machine.
        runtime_env: Ray's runtime environment of all actors: `env_vars`, `pip`, `working_dir`, `py_modules` and others.
        engine_resources: Ray resources reserved for each engine besides cores and GPUs, by name: custom resources
            select the nodes of a cluster that run engines.
        learner_resources: Ray resources reserved likewise for each rank of the learner.
        engine_restarts: Most restarts of the same engine, or of the same rollout worker, after its process died; one
            more death fails the run.
        partner_timeout: Seconds that explorer and trainer, if they are separate programs, wait for each other, and for
            the replacement of an explorer that died.
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


@attrs.frozen(kw_only=True)
class RoleSection(Section):
    """How a model beside the policy runs: by default as the learner's, in its processes.

    Attributes:
        dtype: Dtype of its weights in computations; null takes `model.dtype`.
        ranks: Processes of its own, which work beside the learner's; 0 holds it in those of the learner.
        threads: CPU threads of each; 0 divides the cores among them.
        resources: Ray resources reserved for each besides a core and, where the run has GPUs, one of them.
        learner: Learner that runs it in processes of its own; null takes the run's, with its options.
    """

    dtype: DType | None = None
    ranks: int = 0
    threads: int = 0
    resources: Mapping[str, float] = {}
    learner: Use | None = attrs.field(default=None, converter=used_or_none)


@attrs.frozen(kw_only=True)
class CanarySection(Section):
    """The comparison of engine and learner on fixed tokens after every weight sync.

    Attributes:
        tokens: Number of tokens to compare.
        tolerance: Largest difference of a logprob in nats; null takes 1e-3 for float32, 0.15 for 16-bit types. In a
            mixture of experts of 16 bits, a tenth of the tokens may differ by more, where another expert was chosen.
    """

    tokens: int = 32
    tolerance: float | None = None


@attrs.frozen(kw_only=True)
class WatchdogSection(Section):
    """Limits after which the watchdog of a run says that a process is silent, and ends it.

    A process is silent if it is stopped, or uses neither CPU nor a disk and does not answer. One that works is never
    ended, however long it takes.

    Attributes:
        warn: Seconds of silence after which the log names the process, the stage of the run and the log file.
        end: Seconds of silence after which the run ends; engines and workers of environments are replaced instead. Null
            for never.
    """

    warn: float = 60.0
    end: float | None = 1800.0


@attrs.frozen(kw_only=True)
class Config(Section):
    """A whole run.

    Attributes:
        name: Name of the run; its folder is `out/name`.
        out: Folder of runs, or its URL for fsspec, such as s3://BUCKET/runs: the run then works in a local mirror,
            which is uploaded after each checkpoint, and downloaded to resume elsewhere.
        mirror: Folder of local mirrors where `out` is a URL; null takes `rlsdk/runs` in the platform's cache folder.
        seed: Random seed of the whole run.
        log_level: Level of the run's own log.
        plugins: Plugins that only observe, by name or file.
        model: The model, or its path alone.
        tasks: Task sources for training and evaluation.
        max_prompt_tokens: Longest prompt.
        long_prompts: Treatment of longer prompts: dropped and counted, or an error.
        workflow: Turns a task into rollouts.
        environments: Workers that run the environments of workflows.
        reward: One component, or a list with weights.
        scoring: Resource limits of rewards.
        max_invalid: Share of rollouts of a step, or of an evaluation, that may fail to be scored before the run stops.
        max_empty_steps: Steps in a row with nothing to learn from (no rollout left, or all advantages zero) that end
            the run; null for any number.
        algorithm: Name of the algorithm, with any part replaced.
        sampling: Sampling of rollouts.
        rollout: How far rollouts may run ahead of training.
        engine: Generates tokens.
        learner: Updates the model.
        critic: How the critic runs, if the algorithm has one.
        reference: How the reference model, or the teacher, runs, if the algorithm needs one.
        steps: Length of the run in trainer steps; an alternative to `epochs`.
        epochs: Length of the run in passes over the tasks; an alternative to `steps`.
        batch_size: Tasks per step.
        group_size: Rollouts per task.
        minibatches: Optimiser steps that one pass over a batch is divided into.
        passes: Passes over each batch.
        old_logprobs: Recomputed by the learner, or those of the rollout (saves a forward pass; needs an engine that
            agrees).
        eval: Evaluation.
        checkpoint: Checkpoints.
        trackers: Destinations of metrics besides `metrics.jsonl`, which is always written.
        diagnoses: Rules that look for trouble in the metrics while the run trains; `builtin` stands for all built-in
            ones that the list does not name itself, [] for none.
        save_rollouts: Steps between saved batches of rollouts; 0 for none. A checkpoint also saves groups that wait to
            be trained, so that a resumed run need not sample them again.
        canary: Comparison of engine and learner after every weight sync.
        placement: Counts and devices.
        watchdog: Time limits after which a silent process is reported, and after which it ends the run.
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
    sampling: SamplingSection = SamplingSection()
    rollout: RolloutSection = RolloutSection()
    engine: Use = attrs.field(default=defaults.ENGINE, converter=used)
    learner: Use = attrs.field(default=defaults.LEARNER, converter=used)
    critic: RoleSection = RoleSection()
    reference: RoleSection = RoleSection()
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
    "rollout.buffer": "buffer",
    "rollout.stop": "stop",
    "rollout.weight_transfer": "weight_transfer",
}
"""Path of a single component -> its kind; lists and the parts of an algorithm come beside."""

LISTS: Mapping[str, Kind] = {
    "tasks.train": "tasks",
    "tasks.eval": "tasks",
    "reward": "reward",
    "trackers": "tracker",
    "diagnoses": "diagnosis",
}
"""Path of a list of components -> their kind; one alone needs no list."""
