"""Batches, steps and learning rates of Trinity-RFT."""

from __future__ import annotations

from typing import Any

from rlsdk.migration.rules import Given, KeyOutcome, KeyRule
from rlsdk.migration.shared.learner import minibatches, share_of_steps
from rlsdk.migration.trinity.tasksets import INPUT, TASKSET_KEYS
from rlsdk.migration.values import text

EXPERIENCE = "buffer.trainer_input.experience_buffer"
RUN_AHEAD = "engines sample this many batches in advance; Trinity's explorer has no limit"
BUFFER = "the run's own scheduler and database pass rollouts from engines to the learner"


def tasks_per_step(given: Given) -> int:
    """Tasks in a batch; a trainer without an explorer of its own gives the rollouts instead."""
    if "buffer.batch_size" not in given.flat and not learns_offline(given):
        return max(1, given.whole("buffer.train_batch_size", 0) // given.whole("algorithm.repeat_times"))
    return given.whole("buffer.batch_size")


def updates_per_step(given: Given) -> int:
    rollouts = tasks_per_step(given) * given.whole("algorithm.repeat_times")
    return minibatches(rollouts, given.whole("buffer.train_batch_size", 0) or rollouts)


def context_length(given: Given) -> int:
    explicit = given.whole("model.max_model_len", 0)
    return explicit or given.whole("model.max_prompt_tokens", 1024) + given.whole("model.max_response_tokens", 1024)


def answer_length(given: Given) -> int:
    keys = (*(f"{where}.rollout_args.max_tokens" for where in TASKSET_KEYS[1:3]), "model.max_response_tokens")
    found = next(
        (size for key in (*keys, "explorer.rollout_model.max_response_tokens") if (size := given.whole(key, 0))), 0
    )
    return found or min(context_length(given) // 2, 1024)


def learns_offline(given: Given) -> bool:
    """True for the algorithms that learn from a data set, which is then the trainer's buffer."""
    return str(given.get("algorithm.algorithm_type")) in ("sft", "dpo")


def held(key: str, sample: str, usual: str = "") -> KeyRule:
    """Return the rule of a key of the trainer's buffer, which holds data only if nothing is sampled."""

    def give(value: Any, given: Given) -> KeyOutcome:
        if not learns_offline(given):
            return KeyOutcome.ignored(BUFFER)
        if usual and value != usual:
            return KeyOutcome.missing(f"rename the column to {usual}")
        return KeyOutcome({})

    return KeyRule(f"{EXPERIENCE}.{key}", "mapped", ("tasks.train",), "", sample, text, give)


def sampled_ahead(to: str) -> Any:
    def give(value: int, given: Given) -> KeyOutcome:
        if learns_offline(given):
            return KeyOutcome.ignored("nothing is sampled")
        return KeyOutcome({to: value})

    return give


def sync_style(value: str, given: Given) -> KeyOutcome:
    """Convert the style of synchronisation, of which all but one let the explorer run ahead."""
    if value == "fixed" or learns_offline(given):
        return KeyOutcome.ignored("explorer and trainer take turns, the default")
    limits = ("algorithm.sample_strategy_args.max_staleness", "synchronizer.sync_offset")
    if any(given.whole(key, 0) > 0 for key in limits):
        return KeyOutcome({}, RUN_AHEAD)
    return KeyOutcome({"rollout.max_staleness": 1}, RUN_AHEAD)


def temperature(value: float, given: Given) -> dict[str, Any]:
    """Set the temperature of rollouts and, unless their tasks have one, of evaluations."""
    evaluates = any(key.startswith(f"{INPUT}.eval_tasksets.") for key in given.flat)
    return {"sampling.temperature": value, **({"eval.temperature": value} if evaluates and value > 0 else {})}


def epochs(value: float, given: Given) -> KeyOutcome:
    if given.whole("buffer.total_steps", 0) or given.whole("trainer.total_steps", 0):
        return KeyOutcome.ignored("total_steps takes precedence")
    return KeyOutcome({"epochs": value})


def warmup_ratio(value: float, given: Given) -> KeyOutcome:
    if given.whole("algorithm.optimizer.lr_warmup_steps", -1) >= 0:
        return KeyOutcome.ignored("lr_warmup_steps takes precedence")
    steps = given.whole("buffer.total_steps", 0) or given.whole("trainer.total_steps", 0)
    return share_of_steps(steps * updates_per_step(given) or None, value)


def placement(given: Given) -> dict[str, Any]:
    nodes, each = given.whole("cluster.node_num", 0), given.whole("cluster.gpu_per_node", 0)
    engines = given.whole("explorer.rollout_model.engine_num")
    tensor = given.whole("explorer.rollout_model.tensor_parallel_size")
    shared = str(given.get("mode", "both")) == "colocate"
    ranks = nodes * each - (0 if shared else engines * tensor)
    return {
        "placement.engines": engines,
        "placement.gpus_per_engine": tensor,
        "placement.learners": max(1, ranks),
        "placement.colocate": shared or nodes * each <= engines * tensor,
    }


def schedule(least: float) -> Any:
    """Set the schedule with its default for the least rate, as a share of the peak."""

    def give(value: str, _: Given) -> dict[str, Any]:
        return {"learner.schedule": value, **({"learner.final_ratio": least} if value != "constant" else {})}

    return give
