"""Batches, steps, learning rates, tasks, rewards and engines of veRL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlsdk.migration.hydra import from_environment
from rlsdk.migration.rows import changed
from rlsdk.migration.rules import Given, KeyOutcome
from rlsdk.migration.shared.choices import DTYPE, SCHEDULE
from rlsdk.migration.shared.engines import layout, layout_apart
from rlsdk.migration.shared.learner import (
    LEARNER_NOTE,
    OFFLOAD_ALL,
    OFFLOAD_OPTIMIZER,
    minibatches,
    optimizer_of,
    share_of_steps,
)
from rlsdk.migration.shared.tasks import dataset, function, likely_reward, template_variables, unshuffled
from rlsdk.migration.values import count, flag, interval, number, text, texts, whole
from rlsdk.migration.verl.algorithm import ACTOR, ROLLOUT, distillation, distills, reward_parts

BACKENDS = ("fsdp_config", "megatron", "veomni", "engine")


def total_steps(given: Given) -> int | None:
    """Trainer steps of the whole run, where they are given."""
    steps = given.whole("trainer.total_training_steps", 0)
    if asynchronous(given):
        steps = given.whole("rollout.total_rollout_steps", 0) // tasks_per_step(given)
    return steps if steps > 0 else None


def asynchronous(given: Given) -> bool:
    """True for the fully asynchronous trainer, which trains on a number of mini-batches at a time."""
    return "async_training" in given.tree or "rollout.total_rollout_steps" in given.flat


def trainer_mode(given: Given) -> str:
    """Mode of veRL's second trainer: sync, colocate_async or separate_async."""
    on = given.read("trainer.use_v1", flag, True)
    return str(given.get("trainer.v1.trainer_mode", "sync")) if on else "sync"


def tasks_per_step(given: Given) -> int:
    """Tasks in a trainer step."""
    if asynchronous(given):
        return given.whole(f"{ACTOR}.ppo_mini_batch_size") * given.whole("async_training.require_batches")
    return given.whole("data.train_batch_size")


def updates_per_step(given: Given) -> int:
    """Optimiser steps in a trainer step."""
    return minibatches(tasks_per_step(given), given.whole(f"{ACTOR}.ppo_mini_batch_size")) * given.whole(
        f"{ACTOR}.ppo_epochs"
    )


def learner_gpus(given: Given) -> int:
    return max(1, given.whole("trainer.n_gpus_per_node") * given.whole("trainer.nnodes"))


def context_length(given: Given) -> int:
    return given.whole("data.max_prompt_length") + given.whole("data.max_response_length")


def uses_megatron(given: Given) -> bool:
    """True for a learner with Megatron, whose weight decay leaves out biases and norms."""
    keys = (f"{ACTOR}.strategy", f"{ACTOR}.model_engine", "model_engine")
    named = [from_environment(str(value), {}) for key in keys if (value := given.get(key)) is not None]
    return "megatron" in named or (not named and bool(given.section(f"{ACTOR}.megatron")))


def optimizer(name: str, given: Given) -> KeyOutcome:
    """Megatron's adam has the weight decay of AdamW, torch's Adam has not."""
    if name.lower() == "adamw" or (name.lower() == "adam" and uses_megatron(given)):
        return KeyOutcome.ignored("AdamW, the default")
    return optimizer_of(name.lower())


def warmup(value: Any, given: Given) -> KeyOutcome:
    steps = whole(value)
    if steps < 0:
        return KeyOutcome.ignored("off; lr_warmup_steps_ratio takes precedence")
    return KeyOutcome(
        {"learner.warmup_steps": steps * updates_per_step(given)},
        f"in optimiser steps; a trainer step has {updates_per_step(given)} of them",
    )


def warmup_ratio(value: Any, given: Given) -> KeyOutcome:
    if given.whole(f"{ACTOR}.optim.lr_warmup_steps", -1) >= 0:
        return KeyOutcome.ignored("lr_warmup_steps takes precedence")
    steps = total_steps(given)
    return share_of_steps(steps and steps * updates_per_step(given), number(value))


def rate_decays(given: Given) -> bool:
    """True if the learning rate falls after the warm-up."""
    keys = [f"{ACTOR}.optim.{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style")]
    return any(given.read(key, SCHEDULE, "constant") != "constant" for key in keys)


def decay_style(given: Given) -> str:
    """Return the schedule of a learner with Megatron."""
    found: str = given.read(f"{ACTOR}.optim.lr_decay_style", SCHEDULE, "constant")
    return found


def decay_steps(value: int, given: Given) -> KeyOutcome:
    """Convert the end of the decay, which veRL counts from the first step."""
    style = decay_style(given)
    if style in ("constant", "inverse_sqrt"):
        return KeyOutcome.ignored("the schedule has no end")
    if style == "wsd":
        return KeyOutcome.missing("the decay ends with the run")
    steps = max(1, value - max(0, given.whole(f"{ACTOR}.optim.lr_warmup_steps", 0))) * updates_per_step(given)
    return KeyOutcome({"learner.decay_steps": steps}, "in optimiser steps, without warm-up")


def wsd_steps(value: int, given: Given) -> KeyOutcome:
    if decay_style(given) != "wsd":
        return KeyOutcome.ignored("the schedule is another one")
    return KeyOutcome({"learner.decay_steps": value * updates_per_step(given)}, "in optimiser steps")


def epochs(value: Any, given: Given) -> KeyOutcome:
    if total_steps(given) is not None:
        of = "rollout.total_rollout_steps" if asynchronous(given) else "total_training_steps"
        return KeyOutcome.ignored(f"{of} takes precedence")
    return KeyOutcome({"epochs": number(value)})


def mini_batch(value: Any, given: Given) -> KeyOutcome:
    values = {"minibatches": minibatches(tasks_per_step(given), count(value))}
    values |= {"batch_size": tasks_per_step(given)} if asynchronous(given) else {}
    older = f"{ACTOR}.ppo_micro_batch_size" in given.flat and given.whole(f"{ROLLOUT}.n") > 1
    note = "; TinyZero, and veRL before 0.2, counted rollouts, which makes n times as many" if older else ""
    return KeyOutcome(values, f"rlsdk counts optimiser steps per batch, veRL the tasks in each{note}")


def train_batch(value: Any, given: Given) -> KeyOutcome:
    if asynchronous(given):
        return KeyOutcome.ignored("the trainer takes require_batches × ppo_mini_batch_size tasks")
    return KeyOutcome({"batch_size": count(value)})


def given_steps(value: int, given: Given) -> KeyOutcome:
    if asynchronous(given):
        return KeyOutcome.ignored("rollout.total_rollout_steps sets the length")
    return KeyOutcome({"steps": count(value)})


def sampled_ahead(_: str, given: Given) -> KeyOutcome:
    """Batches that the asynchronous modes of veRL's second trainer sample in advance."""
    mode = trainer_mode(given)
    if mode == "sync":
        return KeyOutcome.ignored("rollouts are those of the current weights, the default")
    batches = given.whole(f"trainer.v1.{mode}.num_warmup_batches")
    values = {"rollout.max_staleness": batches, "rollout.partial_rollouts": True}
    return KeyOutcome(values, "the batches sampled in advance; a group that becomes older is sampled again")


def oldest_age(value: Any, given: Given) -> KeyOutcome:
    if trainer_mode(given) == "sync":
        return KeyOutcome.ignored("the trainer is synchronous")
    note = "rollout.max_staleness is both the batches sampled in advance and the oldest age, after which a group is "
    return KeyOutcome({}, note + "sampled again")


def evaluation_interval(value: Any, given: Given) -> KeyOutcome:
    """Steps between evaluations; the fully asynchronous trainer counts weight syncs."""
    every = interval(value) * given.whole("async_training.trigger_parameter_sync_step", 4)
    return KeyOutcome({"eval.every": every}, "in steps; veRL counts weight syncs")


def offload(key: str) -> Any:
    def give(value: Any, given: Given) -> KeyOutcome:
        everything = any(given.read(f"{ACTOR}.{backend}.param_offload", flag, False) for backend in BACKENDS)
        if not flag(value):
            return KeyOutcome.ignored("off")
        return KeyOutcome(OFFLOAD_ALL if everything else OFFLOAD_OPTIMIZER, LEARNER_NOTE)

    return changed(key, "learner.offload learner.zero_stage", flag, True, LEARNER_NOTE, give)


def micro_batch(key: str, *, whole_cluster: bool) -> Any:
    note = "rlsdk counts tokens, padding included: sequences × (longest prompt + longest response)"

    def give(value: int, given: Given) -> KeyOutcome:
        if given.read(f"{ACTOR}.use_dynamic_bsz", flag, False):
            return KeyOutcome.ignored("use_dynamic_bsz counts tokens: ppo_max_token_len_per_gpu")
        share = -(-value // learner_gpus(given)) if whole_cluster else value
        ranks = f", here {value} over {learner_gpus(given)} ranks" if whole_cluster else ""
        tokens = max(1, share) * context_length(given)
        return KeyOutcome({"learner.micro_batch_tokens": tokens}, note + ranks)

    return changed(key, "learner.micro_batch_tokens", count, 8, note, give)


def dynamic_micro_batch(value: int, given: Given) -> KeyOutcome:
    if not given.read(f"{ACTOR}.use_dynamic_bsz", flag, False):
        return KeyOutcome.ignored("use_dynamic_bsz is off")
    return KeyOutcome({"learner.micro_batch_tokens": value}, "includes padding, which veRL does not count")


MODEL = "actor_rollout_ref.model"
PROFILER = "profile.steps records the learner with torch's profiler; metrics.jsonl has the time of each stage"


def profile(value: list[float], given: Given) -> KeyOutcome:
    if str(given.get("global_profiler.tool")) != "torch":
        return KeyOutcome.ignored(PROFILER)
    return KeyOutcome({"profile.steps": [int(step) for step in value]}, "of the learner; engines are not recorded")


def run_name(value: str, given: Given) -> KeyOutcome:
    """Convert the name of a run, without the time at which a script was started."""
    name = re.sub(r"[-_]?\$\(date\b[^)]*\)", "", value) or value
    note = "without the time: a run that is started again under its name needs --resume" if name != value else ""
    return KeyOutcome({"name": name}, note)


def out_folder(value: Any, given: Given) -> KeyOutcome:
    name = str(given.get("trainer.experiment_name", ""))
    folder = text(value)
    if name and folder.rstrip("/").endswith(f"/{name}"):
        folder = folder.rstrip("/")[: -len(name) - 1]
    return KeyOutcome({"out": folder}, "a run's folder is out/name")


def engine(name: str, given: Given) -> KeyOutcome:
    if name in ("vllm", "transformers"):
        return KeyOutcome({"engine.use": name})
    return KeyOutcome({"engine.use": "vllm"}, f"there is no engine {name}; vLLM is used instead", "missing")


def engine_dtype(value: str, given: Given) -> KeyOutcome:
    """Engines compute in the learner's precision, which is bfloat16 in veRL whatever that of its engines is."""
    keys = (f"{ACTOR}.fsdp_config.dtype", f"{ACTOR}.fsdp_config.mixed_precision.param_dtype")
    trained = next((found for key in keys if (found := given.read(key, DTYPE))), "bfloat16")
    if value == trained:
        return KeyOutcome({"model.dtype": trained})
    note = f"engines compute in model.dtype, as the learner does, which is {trained} in this file"
    return KeyOutcome({"model.dtype": trained}, note, "missing")


def excluded(value: list[str], given: Given) -> KeyOutcome:
    if not given.whole(f"{MODEL}.lora_rank", 0):
        return KeyOutcome.ignored("lora_rank is 0")
    if all(re.search("visual|vision|lm_head", each) for each in value):
        return KeyOutcome.ignored("neither the output head nor modules that read images are adapted")
    return KeyOutcome.missing("name the layers to train in learner.lora.targets")


def truncation(value: Any, given: Given) -> KeyOutcome:
    if given.read("data.filter_overlong_prompts", flag, False):
        return KeyOutcome.ignored("filter_overlong_prompts drops longer prompts first")
    if str(value) == "error":
        return KeyOutcome({"long_prompts": "error"})
    return KeyOutcome({"long_prompts": "drop"}, "rlsdk never truncates prompts: longer ones are dropped")


def data_files(value: Any, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a source of files, which are parquet unless their names say otherwise."""
    source = dataset(value, "train", columns)
    if any("json" in from_environment(name, {}).rpartition(".")[2] for name in texts(value)):
        return source
    more = {"columns": dict(columns)} if columns else {}
    return {"use": "parquet", "path": source.get("path", source.get("name")), **more}


def _tasks(given: Given) -> dict[str, Any]:
    prompt = given.get("data.prompt_key")
    columns = {"prompt": str(prompt)} if prompt not in (None, "prompt") else {}
    found: dict[str, Any] = {
        "model.max_length": context_length(given),
        **template_variables(given, "data.apply_chat_template_kwargs"),
    }
    for key, to in (("data.train_files", "tasks.train"), ("data.val_files", "tasks.eval")):
        if given.get(key) is not None:
            found[to] = given.read(key, lambda value: data_files(value, columns))
    if not given.read("data.shuffle", flag, True):
        found["tasks.train"] = unshuffled(found.get("tasks.train"))
    return {key: value for key, value in found.items() if value is not None}


def _reward(given: Given) -> dict[str, Any]:
    path = given.read("custom_reward_function.path", text)
    if path is not None:
        places = ("custom_reward_function.reward_kwargs", "reward.custom_reward_function.reward_kwargs")
        arguments = {name: value for place in places for name, value in given.section(place).items()}
        reward = function(path, given.read("custom_reward_function.name", text, "compute_score"), "auto", arguments)
        return {"reward": reward_parts(reward, given) or reward}
    if given.read("reward_model.enable", flag, False) and given.get("reward_model.model.path") is not None:
        return {"reward": {"use": "reward_model", "path": str(given.get("reward_model.model.path"))}}
    return likely_reward(
        *(given.get(key) for key in ("data.train_files", "trainer.project_name", "trainer.experiment_name"))
    )


def _gpus(given: Given) -> dict[str, Any]:
    transformers = str(given.get(f"{ROLLOUT}.name")) == "hf"
    per_engine = 1 if transformers else given.whole(f"{ROLLOUT}.tensor_model_parallel_size")
    if trainer_mode(given) == "separate_async":
        apart = given.whole(f"{ROLLOUT}.nnodes") * given.whole(f"{ROLLOUT}.n_gpus_per_node", 8)
        return layout_apart(apart, per_engine, learner_gpus(given))
    if "rollout" not in given.tree:
        return layout(learner_gpus(given), per_engine)
    apart = given.whole("rollout.nnodes") * given.whole("rollout.n_gpus_per_node", 8)
    one_step_off = {} if asynchronous(given) else {"rollout.max_staleness": 1}
    return {**layout_apart(apart, per_engine, learner_gpus(given)), **one_step_off}


def _distilled(given: Given) -> dict[str, Any]:
    return distillation(given) if distills(given) else {}


FINISH = (_tasks, _reward, _gpus, _distilled)
