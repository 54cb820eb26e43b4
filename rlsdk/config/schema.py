"""What a run's configuration holds: one attrs class per section, defaults included."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import attrs

from rlsdk.components import Isolation, Kind, Use
from rlsdk.config.production import ProductionSection
from rlsdk.contracts import DType, Rule, ScoringLimits
from rlsdk.options import CONVERTER, Mismatches, structure


@attrs.frozen(kw_only=True)
class ModelSection:
    """The model that is trained.

    Attributes:
        path: Folder that transformers opens, or a hub id.
        dtype: Of the weights while computing.
        max_length: Tokens of prompt and response together.
        trust_remote_code: Run code that comes with the model; false unless you read that code.
        tokenizer: Folder or hub id of the tokenizer; null takes the model's.
        reference: Folder or hub id of the reference model; null takes the model as it is at the start.
        separator: Stands before what is said later in a conversation whose prompt is text, not messages.
        keep_history: Where the chat template would rewrite earlier answers (drop their thoughts), go on with the tokens
            as they were sampled; false stops the run.
    """

    path: str
    dtype: DType = "float32"
    max_length: int = 2048
    trust_remote_code: bool = False
    tokenizer: str | None = None
    reference: str | None = None
    separator: str = "\n"
    keep_history: bool = False


@attrs.frozen
class SourceUse:
    """One source of tasks.

    Attributes:
        use: The component.
        source: What metrics, checkpoints and `sources` of rewards call it; left out, the component's name, and its
            tasks keep the source that they come with.
        weight: Its share of every batch, against the weights of the other sources; to evaluate, all are taken whole.
    """

    use: Use
    source: str = ""
    weight: float = 1.0


@attrs.frozen(kw_only=True)
class TasksSection:
    """Where tasks come from: one source, or a list, each with its `weight` and `source` beside `use`.

    Attributes:
        train: Task sources to train on.
        eval: Task sources to evaluate on; null for no evaluation.
    """

    train: tuple[SourceUse, ...]
    eval: tuple[SourceUse, ...] = ()


@attrs.frozen
class RewardUse:
    """One part of the reward.

    Attributes:
        use: The reward component.
        rule: How it joins the other parts: `weight`, `gate`, `multiply`, `range` and `sources`, beside `use`.
    """

    use: Use
    rule: Rule = Rule()


@attrs.frozen(kw_only=True)
class SamplingSection:
    """How rollouts are sampled.

    Attributes:
        temperature: Above 0; the learner divides its logits by the same.
        top_p: 1 is off; below, the learner cannot reproduce the distribution, and a warning says so.
        top_k: 0 is off; the same warning.
        max_tokens: Of one response.
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
class EnvironmentsSection:
    """The workers that host environments; they start when a workflow first asks for one.

    Attributes:
        workers: Processes.
        per_worker: Environments at once in each; further rollouts wait in line for a place, the first come first.
        threads: Calls that run at once in each; `async` environments need none.
        isolation: What keeps environments apart, in place of what each declares: `thread`, `lock` (one call at a time
            in each worker) or `process` (one for each environment); null: as they declare.
    """

    workers: int = 1
    per_worker: int = 1024
    threads: int = 64
    isolation: Isolation | None = None


@attrs.frozen(kw_only=True)
class EvalSection:
    """Evaluation on held-out tasks: greedy once, and sampled at temperature 1.

    Attributes:
        every: Steps between evaluations; 0 for none in between.
        before: Evaluate before the first step.
        after: Evaluate after the last step.
        samples: Sampled answers per task; above 1, pass@k is reported for k = 1, 2, 4, … up to it.
        limit: Tasks of each source to evaluate on; null for all.
        max_tokens: Of one response; null takes the training's.
        environments: Workers of its own for environments; null shares those of the training.
    """

    every: int = 0
    before: bool = True
    after: bool = True
    samples: int = 1
    limit: int | None = None
    max_tokens: int | None = None
    environments: EnvironmentsSection | None = None


@attrs.frozen(kw_only=True)
class CheckpointSection:
    """Checkpoints and exports.

    Attributes:
        every: Steps between checkpoints; 0 for one at the end only.
        keep: How many to keep; older ones are deleted.
        export: When to write a folder that transformers opens: with the last checkpoint, with every one, or never.
    """

    every: int = 0
    keep: int = 2
    export: Literal["last", "every", "never"] = "last"


@attrs.frozen(kw_only=True)
class PlacementSection:
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
        engine_resources: What Ray sets aside for each engine beside cores and GPUs, by name: custom resources say
            which nodes of a cluster have engines.
        learner_resources: Likewise, for each rank of the learner.
        engine_restarts: How often the process of one and the same engine may die and be started anew; one time more
            fails the run.
        partner_timeout: Seconds that explorer and trainer, where they are programs of their own, wait for each other;
            also for an explorer in the place of one that died.
    """

    engines: int = 1
    learners: int = 1
    engine_threads: int = 0
    learner_threads: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus_per_engine: int = 1
    colocate: bool = True
    ray: str | None = None
    engine_resources: Mapping[str, float] = {}
    learner_resources: Mapping[str, float] = {}
    engine_restarts: int = 3
    partner_timeout: float = 600.0


@attrs.frozen(kw_only=True)
class CanarySection:
    """The comparison of engine and learner on fixed tokens after every weight sync.

    Attributes:
        tokens: How many tokens.
        tolerance: Largest gap of a logprob in nats; null takes 1e-3 for float32, 0.15 for 16-bit types.
    """

    tokens: int = 32
    tolerance: float | None = None


@attrs.frozen(kw_only=True)
class RunConfig:
    """A whole run.

    Attributes:
        name: Of the run; its folder is `out/name`.
        out: Folder of runs.
        seed: Of everything random.
        log_level: Of the run's own log.
        plugins: Plugins that only observe, by name or file.
        model: The model, or its path alone.
        tasks: Task sources for training and evaluation.
        max_prompt_tokens: Longest prompt.
        long_prompts: What becomes of longer ones: dropped and counted, or an error.
        workflow: How a task becomes rollouts.
        environments: Where the environments of workflows run.
        reward: One component, or a list with weights.
        scoring: What rewards may take.
        max_invalid: Share of rollouts of a step that may fail to be scored before the run stops.
        algorithm: By name, with any part replaced.
        sampling: Of rollouts.
        production: How far they may run ahead of training.
        engine: Generates tokens.
        learner: Updates the model.
        steps: How long the run lasts, in trainer steps; or
        epochs: in passes over the tasks.
        batch_size: Tasks per step.
        group_size: Rollouts per task.
        minibatches: Optimiser steps that one pass over a batch is divided into.
        passes: Passes over each batch.
        old_logprobs: Recomputed by the learner, or those of the rollout (saves a forward pass; needs an engine that
            agrees).
        eval: Evaluation.
        checkpoint: Checkpoints.
        trackers: Where metrics go, beside `metrics.jsonl`, which is always written.
        save_rollouts: Steps between saved batches of rollouts; 0 for none. A checkpoint also saves what waits to be
            trained, so that a resumed run need not make it again.
        canary: Engine against learner.
        placement: Counts and devices.
    """

    name: str
    model: ModelSection
    tasks: TasksSection
    out: str = "runs"
    seed: int = 0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    plugins: tuple[Any, ...] = ()
    max_prompt_tokens: int = 512
    long_prompts: Literal["drop", "error"] = "drop"
    workflow: Use | None = None
    environments: EnvironmentsSection = EnvironmentsSection()
    reward: tuple[RewardUse, ...] = ()
    scoring: ScoringLimits = ScoringLimits()
    max_invalid: float = 0.2
    algorithm: Use = Use("grpo")
    sampling: SamplingSection = SamplingSection()
    production: ProductionSection = ProductionSection()
    engine: Use = Use("vllm")
    learner: Use = Use("deepspeed")
    steps: int | None = None
    epochs: float | None = None
    batch_size: int = 64
    group_size: int = 8
    minibatches: int = 1
    passes: int = 1
    old_logprobs: Literal["learner", "rollout"] = "learner"
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    trackers: tuple[Use, ...] = ()
    save_rollouts: int = 1
    canary: CanarySection = CanarySection()
    placement: PlacementSection = PlacementSection()


COMPONENT_KEYS: Mapping[str, Kind] = {
    "workflow": "workflow",
    "algorithm": "algorithm",
    "engine": "engine",
    "learner": "learner",
    "production.buffer": "buffer",
    "production.stop": "stop",
}
"""Path of a single component -> its kind; lists and the parts of an algorithm come beside."""

LISTS: Mapping[str, Kind] = {"tasks.train": "tasks", "tasks.eval": "tasks", "reward": "reward", "trackers": "tracker"}
"""Path of a list of components -> their kind; one alone needs no list."""

PARTS: Mapping[str, Kind] = {
    "advantage": "advantage",
    "policy_loss": "policy_loss",
    "correction": "correction",
    "kl": "kl",
}
"""Single parts of an algorithm -> their kind."""

PART_LISTS: Mapping[str, Kind] = {"shaping": "shaping", "filters": "filter"}
"""Parts of an algorithm that are lists -> their kind."""


def _parted(value: Any, keys: Iterable[str]) -> tuple[dict[str, Any], Any]:
    """What stands beside a component under `keys`, and the component with its options."""
    if not isinstance(value, Mapping):
        return {}, value
    beside = {k: v for k, v in value.items() if k in keys}
    return beside, {k: v for k, v in value.items() if k not in keys}


_RULE_KEYS = frozenset(field.name for field in attrs.fields(Rule)) - {"name"}


def _structure_reward(value: Any, _: Any) -> RewardUse:
    if isinstance(value, RewardUse):
        return value
    given, component = _parted(value, _RULE_KEYS)
    if isinstance(given.get("sources"), str):
        given["sources"] = [given["sources"]]
    rule, faults = structure(given, Rule)
    if rule is None:
        raise Mismatches(faults)
    return RewardUse(CONVERTER.structure(component, Use), rule)


@attrs.frozen
class _Share:
    source: str = ""
    weight: float = 1.0


def _structure_source(value: Any, _: Any) -> SourceUse:
    if isinstance(value, SourceUse):
        return value
    given, component = _parted(value, ("source", "weight"))
    share, faults = structure(given, _Share)
    if share is None:
        raise Mismatches(faults)
    return SourceUse(CONVERTER.structure(component, Use), share.source, share.weight)


CONVERTER.register_structure_hook(SourceUse, _structure_source)
CONVERTER.register_structure_hook(RewardUse, _structure_reward)


def normalise(tree: dict[str, Any]) -> dict[str, Any]:
    """Spell out the short forms: a model's path alone, one source of tasks, reward or tracker without a list."""
    tree = dict(tree)
    if isinstance(tree.get("tasks"), Mapping):
        tree["tasks"] = _with_lists(tree["tasks"], tree["tasks"])
    if isinstance(tree.get("model"), str):
        tree["model"] = {"path": tree["model"]}
    tree = _with_lists(tree, ("reward", "trackers", "plugins"))
    defaults = {"engine": "vllm", "learner": "deepspeed", "algorithm": "grpo", "workflow": "single_turn"}
    for key, default in defaults.items():
        if isinstance(tree.get(key), Mapping) and "use" not in tree[key]:
            tree[key] = {"use": default, **tree[key]}  # options alone: of the default component
    return tree


def _with_lists(tree: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """What stands alone under one of the keys becomes a list of one; nothing is left out."""
    out = dict(tree)
    for key in keys:
        if tree.get(key) is None:
            out.pop(key, None)
        elif not isinstance(tree[key], list | tuple):
            out[key] = [tree[key]]
    return out
