"""Keys of veRL (verl.trainer.main_ppo), TinyZero's older names among them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from rlsdk.migration.parts import (
    ATTENTION,
    CRITIC_WARMUP_NOTE,
    DECAY_SHAPE,
    DTYPE,
    EVALUATION_NOTE,
    KL,
    LEARNER_NOTE,
    OPTIMIZER_OPTIONS_NOTE,
    SCHEDULE,
    TEMPLATE_NOTE,
    checkpoints_kept,
    critic_warmup,
    dataset,
    eval_sampling,
    experts_sharded,
    function,
    layout,
    layout_apart,
    likely_reward,
    lora_of,
    minibatches,
    no_cut,
    of_critic,
    of_vllm,
    optimizer_of,
    routing_replay,
    share_of_steps,
    switched,
    template_variables,
    trackers_with,
    unshuffled,
    weight_decay,
)
from rlsdk.migration.rows import (
    Choice,
    Framework,
    Given,
    KeyOutcome,
    KeyRule,
    changed,
    choice,
    count,
    flag,
    ignored,
    interval,
    missing,
    number,
    numbers,
    only_with,
    part,
    same,
    text,
    texts,
    unless,
    whole,
)
from rlsdk.migration.shell import from_environment
from rlsdk.migration.verl_loss import ACTOR, LOSSES, policy_loss, sampled_first
from rlsdk.migration.verl_loss import ROWS as ROWS_OF_CORRECTION

ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
MODEL = "actor_rollout_ref.model"
MEGATRON = f"{ACTOR}.megatron.override_transformer_config"

ESTIMATORS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gae": ("ppo", {"use": "gae"}),
    "grpo": ("grpo", {"use": "grpo"}),
    "grpo_vectorized": ("grpo", {"use": "grpo"}),
    "grpo_passk": ("grpo", {"use": "pass_at_k"}),
    "rloo": ("rloo", {"use": "rloo"}),
    "rloo_vectorized": ("rloo", {"use": "rloo"}),
    "reinforce_plus_plus": ("reinforce_plus_plus", {"use": "reinforce_plus_plus"}),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", {"use": "reinforce_plus_plus_baseline"}),
    "remax": ("remax", {"use": "remax"}),
    "opo": ("opo", {"use": "opo"}),
    "gpg": ("gpg", {"use": "gpg"}),
    "gdpo": ("gdpo", {"use": "gdpo"}),
    "optimal_token_baseline": ("grpo", {"use": "optimal_token_baseline"}),
    "tir_optimal_token_baseline": ("grpo", {"use": "optimal_token_baseline"}),
}
"""Estimator -> the algorithm whose other parts are replaced, and the advantage."""
MANAGERS = ("naive", "batch", "prime", "dapo", "gdpo")
BACKENDS = ("fsdp_config", "megatron", "veomni", "engine")
KL_IN_LOSS = Choice({**KL.known, **{f"{name}+": "k2" for name in KL.known}}, KL.what)
"""Estimators of the KL in the loss; with a plus, veRL shows the value of one, but has the gradient of k2."""


def _steps(given: Given) -> int | None:
    """Trainer steps of the whole run, where they are given."""
    steps = given.whole("trainer.total_training_steps", 0)
    if _asynchronous(given):
        steps = given.whole("rollout.total_rollout_steps", 0) // _batch(given)
    return steps if steps > 0 else None


def _asynchronous(given: Given) -> bool:
    """True for the fully asynchronous trainer, which trains on a number of mini-batches at a time."""
    return "async_training" in given.tree or "rollout.total_rollout_steps" in given.flat


def _mode(given: Given) -> str:
    """Mode of veRL's second trainer: sync, colocate_async or separate_async."""
    on = given.read("trainer.use_v1", flag, True)
    return str(given.get("trainer.v1.trainer_mode", "sync")) if on else "sync"


def _batch(given: Given) -> int:
    """Tasks in a trainer step."""
    if _asynchronous(given):
        return given.whole(f"{ACTOR}.ppo_mini_batch_size") * given.whole("async_training.require_batches")
    return given.whole("data.train_batch_size")


def _updates(given: Given) -> int:
    """Optimiser steps in a trainer step."""
    return minibatches(_batch(given), given.whole(f"{ACTOR}.ppo_mini_batch_size")) * given.whole(f"{ACTOR}.ppo_epochs")


def _gpus(given: Given) -> int:
    return max(1, given.whole("trainer.n_gpus_per_node") * given.whole("trainer.nnodes"))


def _length(given: Given) -> int:
    return given.whole("data.max_prompt_length") + given.whole("data.max_response_length")


def _estimator(name: str, given: Given) -> Mapping[str, Any] | KeyOutcome:
    if name == "gdpo":
        return _gdpo(given)
    algorithm, advantage = ESTIMATORS[name]
    options: dict[str, Any] = {}
    if name == "gae":
        options = {key: given.read(f"algorithm.{key}", number, 1.0) for key in ("gamma", "lam")}
    elif name == "reinforce_plus_plus":
        options = {"gamma": given.read("algorithm.gamma", number, 1.0)}
    elif name in ("grpo", "grpo_vectorized", "grpo_passk"):
        options = {"std_normalize": given.read("algorithm.norm_adv_by_std_in_grpo", flag, True)}
    return {
        "algorithm.use": algorithm,
        "algorithm.advantage": {**advantage, **options},
        "algorithm.critic": name == "gae",
        "algorithm.value_clip": given.read("critic.cliprange_value", number, 0.5) if name == "gae" else None,
        "algorithm.shaping": [*_overlong(given), *_kl_in_reward(given)],
    }


def _gdpo(given: Given) -> KeyOutcome:
    """GDPO, which veRL normalises over tokens last; without deviations, or with one part, that is GRPO."""
    parts = _parts({}, given)
    if not parts or given.read("custom_reward_function.path", text) is None:
        note = "GDPO needs gdpo_reward_keys, and the function that returns these numbers: custom_reward_function.path"
        return KeyOutcome({"algorithm.use": "grpo"}, note, "missing")
    normalises = given.read("algorithm.norm_adv_by_std_in_grpo", flag, True)
    alone = {"use": "grpo", "std_normalize": normalises}
    advantage = {"use": "gdpo"} if normalises and len(parts) > 1 else alone
    values = {"algorithm.use": "gdpo", "algorithm.advantage": advantage, "algorithm.whiten_advantages": True}
    return KeyOutcome(values)


def _parts(reward: Mapping[str, Any], given: Given) -> list[dict[str, Any]]:
    """Return a reward once for each number of its function that GDPO normalises; empty for other estimators."""
    if str(given.get("algorithm.adv_estimator")) != "gdpo":
        return []
    keys = given.read("algorithm.gdpo_reward_keys", texts, [])
    weights = given.read("algorithm.gdpo_reward_weights", numbers, [1.0] * len(keys))
    return [{**reward, "key": key, "weight": weight} for key, weight in zip(keys, weights, strict=False)]


def _overlong(given: Given) -> list[dict[str, Any]]:
    """DAPO's penalty of long answers, whose options have had two places."""
    for where in OVERLONG:
        if given.read(f"{where}.enable", flag, False):
            limit = given.whole("reward_model.reward_kwargs.max_resp_len", 0) or given.whole("data.max_response_length")
            penalty = given.read(f"{where}.penalty_factor", number, 1.0)
            return [{"use": "overlong", "max_length": limit, "buffer": given.whole(f"{where}.len"), "penalty": penalty}]
    return []


def _kl_in_reward(given: Given) -> list[dict[str, Any]]:
    """KL in the reward; before veRL had `use_kl_in_reward`, a coefficient without `use_kl_loss` meant this."""
    explicit = given.flat.get("algorithm.use_kl_in_reward")
    older = "algorithm.kl_ctrl.kl_coef" in given.flat and not given.read(f"{ACTOR}.use_kl_loss", flag, False)
    wanted = older if explicit is None else given.read("algorithm.use_kl_in_reward", flag, False)
    coefficient = given.read("algorithm.kl_ctrl.kl_coef", number, 0.001)
    if not wanted or coefficient == 0:
        return []
    part = {"use": "kl_penalty", "coef": coefficient, "estimator": given.read("algorithm.kl_penalty", KL, "k1")}
    if str(given.get("algorithm.kl_ctrl.type")) == "adaptive":
        part["target"] = given.read("algorithm.kl_ctrl.target_kl", number, 0.1)
        part["horizon"] = given.whole("algorithm.kl_ctrl.horizon", 10000)
    return [part]


def _aggregation(name: str, given: Given) -> KeyOutcome:
    note = "veRL adds up the sequences of a micro-batch; rlsdk takes their mean" if name == SUM_NORM else ""
    return KeyOutcome({"algorithm.aggregate": name}, note)


def _kl_loss(wanted: bool, given: Given) -> dict[str, Any]:
    if not wanted:
        return {"algorithm.kl_coef": 0.0}
    return {
        "algorithm.kl_coef": given.read(f"{ACTOR}.kl_loss_coef", number, 0.001),
        "algorithm.kl": given.read(f"{ACTOR}.kl_loss_type", KL_IN_LOSS, "low_var"),
    }


def _reference(value: str, given: Given) -> KeyOutcome:
    if not given.read(f"{ACTOR}.use_kl_loss", flag, False) and not _kl_in_reward(given):
        return KeyOutcome.ignored("there is neither KL in the loss nor in the reward")
    return KeyOutcome({"model.reference": value})


def _router_loss(value: float, given: Given) -> KeyOutcome:
    """Weight of the load-balancing loss of a learner with Megatron."""
    kind = str(given.get(f"{MEGATRON}.moe_router_load_balancing_type", "aux_loss")).strip("\\\"'")
    if kind == "none":
        return KeyOutcome({"learner.router_loss_coef": 0.0})
    note = "over all rollouts of an optimiser step"
    if kind != "aux_loss":
        return KeyOutcome.missing(f"the only load-balancing loss is learner.router_loss_coef, {note}")
    return KeyOutcome({"learner.router_loss_coef": value}, note)


def _uses_megatron(given: Given) -> bool:
    """True for a learner with Megatron, whose weight decay leaves out biases and norms."""
    keys = (f"{ACTOR}.strategy", f"{ACTOR}.model_engine", "model_engine")
    named = [from_environment(str(value), {}) for key in keys if (value := given.get(key)) is not None]
    return "megatron" in named or (not named and bool(given.section(f"{ACTOR}.megatron")))


def _optimizer(name: str, given: Given) -> KeyOutcome:
    """Megatron's adam has the weight decay of AdamW, torch's Adam has not."""
    if name.lower() == "adamw" or (name.lower() == "adam" and _uses_megatron(given)):
        return KeyOutcome.ignored("AdamW, the default")
    return optimizer_of(name.lower())


def _warmup(value: Any, given: Given) -> KeyOutcome:
    steps = whole(value)
    if steps < 0:
        return KeyOutcome.ignored("off; lr_warmup_steps_ratio takes precedence")
    return KeyOutcome(
        {"learner.warmup_steps": steps * _updates(given)},
        f"in optimiser steps; a trainer step has {_updates(given)} of them",
    )


def _warmup_ratio(value: Any, given: Given) -> KeyOutcome:
    if given.whole(f"{ACTOR}.optim.lr_warmup_steps", -1) >= 0:
        return KeyOutcome.ignored("lr_warmup_steps takes precedence")
    steps = _steps(given)
    return share_of_steps(steps and steps * _updates(given), number(value))


def _profile(value: list[float], given: Given) -> KeyOutcome:
    if str(given.get("global_profiler.tool")) != "torch":
        return KeyOutcome.ignored(_PROFILER)
    return KeyOutcome({"profile.steps": [int(step) for step in value]}, "of the learner; engines are not recorded")


def _decays(given: Given) -> bool:
    """True if the learning rate falls after the warm-up."""
    keys = [f"{ACTOR}.optim.{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style")]
    return any(given.read(key, SCHEDULE, "constant") != "constant" for key in keys)


def _name(value: str, given: Given) -> KeyOutcome:
    """Convert the name of a run, without the time at which a script was started."""
    name = re.sub(r"[-_]?\$\(date\b[^)]*\)", "", value) or value
    note = "without the time: a run that is started again under its name needs --resume" if name != value else ""
    return KeyOutcome({"name": name}, note)


def _style(given: Given) -> str:
    """Return the schedule of a learner with Megatron."""
    found: str = given.read(f"{ACTOR}.optim.lr_decay_style", SCHEDULE, "constant")
    return found


def _decay_steps(value: int, given: Given) -> KeyOutcome:
    """Convert the end of the decay, which veRL counts from the first step."""
    style = _style(given)
    if style in ("constant", "inverse_sqrt"):
        return KeyOutcome.ignored("the schedule has no end")
    if style == "wsd":
        return KeyOutcome.missing("the decay ends with the run")
    steps = max(1, value - max(0, given.whole(f"{ACTOR}.optim.lr_warmup_steps", 0))) * _updates(given)
    return KeyOutcome({"learner.decay_steps": steps}, "in optimiser steps, without warm-up")


def _wsd_steps(value: int, given: Given) -> KeyOutcome:
    if _style(given) != "wsd":
        return KeyOutcome.ignored("the schedule is another one")
    return KeyOutcome({"learner.decay_steps": value * _updates(given)}, "in optimiser steps")


def _as_actor(name: str, of_actor: str, sample: Any) -> KeyRule:
    """Return the rule of a setting that rlsdk's critic shares with the actor."""

    def give(value: Any, given: Given) -> KeyOutcome:
        if str(given.get("algorithm.adv_estimator")) != "gae":
            return KeyOutcome.ignored("the algorithm has no critic")
        if str(value) == str(given.get(of_actor, value)):
            return KeyOutcome.ignored(_CRITIC_NOTE)
        return KeyOutcome.missing(f"cannot differ: {_CRITIC_NOTE}, {of_actor}")

    return KeyRule(f"critic.{name}", "ignored", (), _CRITIC_NOTE, sample, give=give)


def _out(value: Any, given: Given) -> KeyOutcome:
    name = str(given.get("trainer.experiment_name", ""))
    folder = text(value)
    if name and folder.rstrip("/").endswith(f"/{name}"):
        folder = folder.rstrip("/")[: -len(name) - 1]
    return KeyOutcome({"out": folder}, "a run's folder is out/name")


def _rounds(value: Any, given: Given) -> KeyOutcome:
    if _steps(given) is not None:
        of = "rollout.total_rollout_steps" if _asynchronous(given) else "total_training_steps"
        return KeyOutcome.ignored(f"{of} takes precedence")
    return KeyOutcome({"epochs": number(value)})


def _mini(value: Any, given: Given) -> KeyOutcome:
    values = {"minibatches": minibatches(_batch(given), count(value))}
    values |= {"batch_size": _batch(given)} if _asynchronous(given) else {}
    older = f"{ACTOR}.ppo_micro_batch_size" in given.flat and given.whole(f"{ROLLOUT}.n") > 1
    note = "; TinyZero, and veRL before 0.2, counted rollouts, which makes n times as many" if older else ""
    return KeyOutcome(values, f"rlsdk counts optimiser steps per batch, veRL the tasks in each{note}")


def _train_batch(value: Any, given: Given) -> KeyOutcome:
    if _asynchronous(given):
        return KeyOutcome.ignored("the trainer takes require_batches × ppo_mini_batch_size tasks")
    return KeyOutcome({"batch_size": count(value)})


def _total(value: int, given: Given) -> KeyOutcome:
    if _asynchronous(given):
        return KeyOutcome.ignored("rollout.total_rollout_steps sets the length")
    return KeyOutcome({"steps": count(value)})


def _ahead(_: str, given: Given) -> KeyOutcome:
    """Batches that the asynchronous modes of veRL's second trainer sample in advance."""
    mode = _mode(given)
    if mode == "sync":
        return KeyOutcome.ignored("rollouts are those of the current weights, the default")
    batches = given.whole(f"trainer.v1.{mode}.num_warmup_batches")
    values = {"rollout.max_staleness": batches, "rollout.partial_rollouts": True}
    return KeyOutcome(values, "the batches sampled in advance; a group that becomes older is sampled again")


def _oldest(value: Any, given: Given) -> KeyOutcome:
    if _mode(given) == "sync":
        return KeyOutcome.ignored("the trainer is synchronous")
    note = "rollout.max_staleness is both the batches sampled in advance and the oldest age, after which a group is "
    return KeyOutcome({}, note + "sampled again")


def _tested(value: Any, given: Given) -> KeyOutcome:
    """Steps between evaluations; the fully asynchronous trainer counts weight syncs."""
    every = interval(value) * given.whole("async_training.trigger_parameter_sync_step", 4)
    return KeyOutcome({"eval.every": every}, "in steps; veRL counts weight syncs")


def _engine(name: str, given: Given) -> KeyOutcome:
    if name in ("vllm", "transformers"):
        return KeyOutcome({"engine.use": name})
    return KeyOutcome({"engine.use": "vllm"}, f"there is no engine {name}; vLLM is used instead", "missing")


def _offload(key: str) -> Any:
    def give(value: Any, given: Given) -> KeyOutcome:
        everything = any(given.read(f"{ACTOR}.{backend}.param_offload", flag, False) for backend in BACKENDS)
        if not flag(value):
            return KeyOutcome.ignored("off")
        stage = {"learner.zero_stage": 3, "learner.offload": "all"} if everything else {"learner.offload": "optimizer"}
        return KeyOutcome(stage, LEARNER_NOTE)

    return changed(key, "learner.offload learner.zero_stage", flag, True, LEARNER_NOTE, give)


DISTILLATION = "distillation.distillation_loss"


def _distills(given: Given) -> bool:
    """True if veRL trains on the log-ratio of one teacher alone, by a policy gradient, as rlsdk's opd does."""
    kind = from_environment(str(given.get(f"{DISTILLATION}.loss_mode", "k3")), {})
    alone = not given.read(f"{DISTILLATION}.use_task_rewards", flag, True)
    gradient = given.read(f"{DISTILLATION}.use_policy_gradient", flag, False)
    one = len(given.section("distillation.teacher_models")) == 1
    return bool(given.read("distillation.enabled", flag, False) and kind in ("k1", "kl") and alone and gradient and one)


def _teacher(value: str, given: Given) -> KeyOutcome:
    if _distills(given):
        return KeyOutcome({"model.reference": value})
    return _distilled(value, given)


def _distilled(_: Any, given: Given) -> KeyOutcome:
    if _distills(given):
        return KeyOutcome.ignored("algorithm: opd; the teacher runs with the learner")
    if not given.read("distillation.enabled", flag, False):
        return KeyOutcome.ignored("distillation.enabled is off")
    note = "algorithm: opd, whose teacher is model.reference, is veRL's loss_mode k1 with use_policy_gradient and no task rewards"
    return KeyOutcome.missing(note)


def _distillation(given: Given) -> dict[str, Any]:
    ends = {f"clip_{end}": given.read(f"{DISTILLATION}.clip_ratio_{end}", number, 0.2) for end in ("low", "high")}
    return {
        "algorithm.use": "opd",
        "algorithm.advantage": {"use": "on_policy_distill", "coef": 1.0},
        "algorithm.clip_advantages": given.read(f"{DISTILLATION}.loss_max_clamp", number),
        "algorithm.policy_loss": {"use": "ppo", **ends, "dual_clip": 3.0},
        "algorithm.critic": False,
    }


def _engine_dtype(value: str, given: Given) -> KeyOutcome:
    """Engines compute in the learner's precision, which is bfloat16 in veRL whatever that of its engines is."""
    keys = (f"{ACTOR}.fsdp_config.dtype", f"{ACTOR}.fsdp_config.mixed_precision.param_dtype")
    trained = next((found for key in keys if (found := given.read(key, DTYPE))), "bfloat16")
    if value == trained:
        return KeyOutcome({"model.dtype": trained})
    note = f"engines compute in model.dtype, as the learner does, which is {trained} in this file"
    return KeyOutcome({"model.dtype": trained}, note, "missing")


def _excluded(value: list[str], given: Given) -> KeyOutcome:
    if not given.whole(f"{MODEL}.lora_rank", 0):
        return KeyOutcome.ignored("lora_rank is 0")
    if all(re.search("visual|vision|lm_head", each) for each in value):
        return KeyOutcome.ignored("neither the output head nor modules that read images are adapted")
    return KeyOutcome.missing("name the layers to train in learner.lora.targets")


def _truncation(value: Any, given: Given) -> KeyOutcome:
    if given.read("data.filter_overlong_prompts", flag, False):
        return KeyOutcome.ignored("filter_overlong_prompts drops longer prompts first")
    if str(value) == "error":
        return KeyOutcome({"long_prompts": "error"})
    return KeyOutcome({"long_prompts": "drop"}, "rlsdk never truncates prompts: longer ones are dropped")


def _rank_arithmetic(key: str, *, whole_cluster: bool) -> Any:
    note = "rlsdk counts tokens, padding included: sequences × (longest prompt + longest response)"

    def give(value: int, given: Given) -> KeyOutcome:
        if given.read(f"{ACTOR}.use_dynamic_bsz", flag, False):
            return KeyOutcome.ignored("use_dynamic_bsz counts tokens: ppo_max_token_len_per_gpu")
        share = -(-value // _gpus(given)) if whole_cluster else value
        ranks = f", here {value} over {_gpus(given)} ranks" if whole_cluster else ""
        tokens = max(1, share) * _length(given)
        return KeyOutcome({"learner.micro_batch_tokens": tokens}, note + ranks)

    return changed(key, "learner.micro_batch_tokens", count, 8, note, give)


def _dynamic(value: int, given: Given) -> KeyOutcome:
    if not given.read(f"{ACTOR}.use_dynamic_bsz", flag, False):
        return KeyOutcome.ignored("use_dynamic_bsz is off")
    return KeyOutcome({"learner.micro_batch_tokens": value}, "includes padding, which veRL does not count")


def _files(value: Any, columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a source of files, which are parquet unless their names say otherwise."""
    source = dataset(value, "train", columns)
    if any("json" in from_environment(name, {}).rpartition(".")[2] for name in texts(value)):
        return source
    more = {"columns": dict(columns)} if columns else {}
    return {"use": "parquet", "path": source.get("path", source.get("name")), **more}


def _finish(given: Given) -> dict[str, Any]:
    """Tasks, rewards and the context length, which many keys make together."""
    columns = (
        {"prompt": str(given.get("data.prompt_key"))} if given.get("data.prompt_key") not in (None, "prompt") else {}
    )
    found: dict[str, Any] = {
        "model.max_length": _length(given),
        **template_variables(given, "data.apply_chat_template_kwargs"),
    }
    for key, to in (("data.train_files", "tasks.train"), ("data.val_files", "tasks.eval")):
        if given.get(key) is not None:
            found[to] = given.read(key, lambda value: _files(value, columns))
    if not given.read("data.shuffle", flag, True):
        found["tasks.train"] = unshuffled(found.get("tasks.train"))
    path = given.read("custom_reward_function.path", text)
    if path is not None:
        arguments = {
            **given.section("custom_reward_function.reward_kwargs"),
            **given.section("reward.custom_reward_function.reward_kwargs"),
        }
        name = given.read("custom_reward_function.name", text, "compute_score")
        reward = function(path, name, "auto", arguments)
        found["reward"] = _parts(reward, given) or reward
    elif given.read("reward_model.enable", flag, False) and given.get("reward_model.model.path") is not None:
        found["reward"] = {"use": "reward_model", "path": str(given.get("reward_model.model.path"))}
    else:
        hints = [given.get(key) for key in ("data.train_files", "trainer.project_name", "trainer.experiment_name")]
        found |= likely_reward(*hints)
    per_engine = (
        1 if str(given.get(f"{ROLLOUT}.name")) == "hf" else given.whole(f"{ROLLOUT}.tensor_model_parallel_size")
    )
    if _mode(given) == "separate_async":
        apart = given.whole(f"{ROLLOUT}.nnodes") * given.whole(f"{ROLLOUT}.n_gpus_per_node", 8)
        found |= layout_apart(apart, per_engine, _gpus(given))
    elif "rollout" in given.tree:  # engines on GPUs of their own
        apart = given.whole("rollout.nnodes") * given.whole("rollout.n_gpus_per_node", 8)
        found |= layout_apart(apart, per_engine, _gpus(given))
        if not _asynchronous(given):
            found["rollout.max_staleness"] = 1  # one step off
    else:
        found |= layout(_gpus(given), per_engine)
    found = {key: value for key, value in found.items() if value is not None}
    return found | _distillation(given) if _distills(given) else found


OVERLONG = ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg")
SUM_NORM = "seq-mean-token-sum-norm"
ENGINE = Choice({"vllm": "vllm", "hf": "transformers", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}, "the engine")
_GPU_NOTE = "engines and ranks share the GPUs: placement.engines × gpus_per_engine, placement.learners"
_LOGPROB_NOTE = "forward passes use learner.micro_batch_tokens, too"
_CRITIC_NOTE = "the critic uses the actor's setting"
_RANKS_APART = "each of its ranks becomes an engine of its own, with engine.tensor_parallel_size GPUs"
_PROFILER = "profile.steps records the learner with torch's profiler; metrics.jsonl has the time of each stage"

ROWS = (
    ignored("**._target_", "Hydra's class of a section", "x"),
    # Data
    part("data.train_files", "tasks.train", texts, "data/train.parquet", "becomes a task source"),
    part("data.val_files", "tasks.eval", texts, "data/test.parquet", "becomes a task source"),
    same("data.train_batch_size", "batch_size", whole, 64, _train_batch),
    ignored("data.val_batch_size", "an evaluation runs all tasks, as many at once as the engines take", 1312),
    same("data.max_prompt_length", "max_prompt_tokens", count, 256),
    changed("data.max_response_length", "sampling.max_tokens model.max_length", count, 1024,
            "model.max_length counts prompt and response together", lambda v, given: {"sampling.max_tokens": v}),
    part("data.prompt_key", "tasks.train.columns.prompt", text, "prompt", "the prompt column"),
    ignored("data.reward_fn_key", "rewards read the source of a task, the column data_source", "data_source"),
    same("data.truncation", "long_prompts", text, "error", _truncation),
    same("data.filter_overlong_prompts", "long_prompts", flag, True,
             lambda v, _: {"long_prompts": "drop"} if v else {}),
    ignored("data.filter_overlong_prompts_workers", "prompts are measured on demand"),
    part("data.shuffle", "tasks.train.shuffle", flag, False),
    changed("data.seed", "seed", whole, 1, "rlsdk has one seed for everything"),
    same("data.trust_remote_code", "model.trust_remote_code", flag, False),
    same("data.tokenizer", "model.tokenizer", text, "org/tokenizer"),
    unless("data.train_max_samples", (-1,), "use part of the data: split train[:1000] of the source hub", 1000),
    ignored("data.gen_batch_size", "rollout.dynamic_sampling samples as many tasks as a batch lacks", 64),
    changed("data.val_max_samples", "eval.limit", whole, 500, "tasks per source",
            lambda v, given: {"eval.limit": v} if v > 0 else {}),
    ignored("data.return_raw_input_ids", "tasks keep their messages"),
    ignored("data.return_raw_chat", "tasks keep their messages"),
    ignored("data.return_full_prompt", "tasks keep their messages"),
    ignored("data.dataloader_num_workers", "one process reads tasks in advance"),
    ignored("data.validation_shuffle", "evaluations run all tasks, in order"),
    ignored("data.use_shm", "models are read from their folder"),
    unless("data.image_key", ("images",), "images are parts of a prompt's messages, not a column: docs/howto/vision.md", "x"),
    unless("data.video_key", ("videos",), "rlsdk trains on text and images", "x"),
    unless("data.audio_key", ("audios",), "rlsdk trains on text and images", "x"),
    ignored("data.image_patch_size", "defined by the model's image processor", 14),
    ignored("data.return_multi_modal_inputs", "defined by the model's image processor"),
    missing("data.tool_config_path", "list functions in workflow: {use: tools, tools: [...]}", "tools.yaml"),
    missing("data.function_tool_path", "list functions in workflow: {use: tools, tools: [FILE.py:NAME]}", "tools.py"),
    missing("data.custom_cls.**", "write a task source: @rlsdk.tasks (howto/tasks.md)", "x"),
    missing("data.sampler.**", "a class @rlsdk.sampler for rollout.sampler, or by_pass_rate; tasks.train: {sort_by: COLUMN} orders the data once (howto/tasks.md)", "x"),
    missing("data.datagen.**", "write a task source: @rlsdk.tasks (howto/tasks.md)", "x"),
    part("data.apply_chat_template_kwargs.**", "model.renderer.variables", lambda v: v, False),
    # Model
    same(f"{MODEL}.path", "model.path", text, "Qwen/Qwen2.5-0.5B"),
    same(f"{MODEL}.tokenizer_path", "model.tokenizer", text, "org/tokenizer"),
    same(f"{MODEL}.trust_remote_code", "model.trust_remote_code", flag, False),
    same(f"{MODEL}.enable_gradient_checkpointing", "learner.gradient_checkpointing", flag, True),
    changed(f"{MODEL}.use_remove_padding", "learner.rows", flag, True, "worthwhile with learner.attention=flash_attention_2",
            switched({"learner.rows": "packed"}, "worthwhile with learner.attention=flash_attention_2")),
    same(f"{MODEL}.lora_rank", "learner.lora.rank", whole, 16, lora_of(f"{MODEL}.lora_alpha", 16.0)),
    part(f"{MODEL}.lora_alpha", "learner.lora.alpha", number, 32),
    same(f"{MODEL}.lora.rank", "learner.lora.rank", whole, 16, lora_of(f"{MODEL}.lora.alpha", 32.0)),
    part(f"{MODEL}.lora.alpha", "learner.lora.alpha", number, 32),
    changed(f"{MODEL}.lora.**", "", lambda v: v, "x", "learner.lora has rank, alpha, targets and sync",
            lambda v, given: KeyOutcome.missing("learner.lora has rank, alpha, targets and sync")
            if given.whole(f"{MODEL}.lora.rank", 0) else KeyOutcome.ignored("lora.rank is 0")),
    same(f"{MODEL}.target_modules", "learner.lora.targets", texts, "all-linear",
         lambda v, given: {"learner.lora.targets": v if v != ["all-linear"] else "all-linear"}
         if given.whole(f"{MODEL}.lora_rank", 0) else {}),
    changed(f"{MODEL}.exclude_modules", "learner.lora.targets", texts, "lm_head", "", _excluded),
    changed(f"{MODEL}.lora_adapter_path", "learner.lora.path", text, "adapter", "rank, alpha and targets must be the adapter's"),
    missing(f"{MODEL}.custom_chat_template", f"save it to a file, and {TEMPLATE_NOTE}", "{{ x }}"),
    missing(f"{MODEL}.external_lib", "import it in a plugin: plugins: [FILE]", "my_lib"),
    *(same(f"{MODEL}.override_config.{where}attn_implementation", "learner.attention", ATTENTION, "flash_attention_2")
      for where in ("", "model_config.")),
    *(unless(f"{MODEL}.override_config.{name}", (0, 0.0), "models are trained without dropout", 0.1)
      for name in ("attention_dropout", "embd_pdrop", "resid_pdrop")),
    missing(f"{MODEL}.override_config.**", "change config.json in the model's folder", 1),
    missing(f"{MODEL}.hf_config_path", "the config.json in the model's folder is read", "x"),
    unless(f"{MODEL}.use_liger", (False,), "there are no Liger kernels; learner.compile=true is similar", True),
    ignored(f"{MODEL}.use_fused_kernels", "not needed: losses never hold all logits at once", True),
    ignored(f"{MODEL}.fused_kernel_options.**", "logits are always computed in chunks"),
    ignored(f"{MODEL}.use_shm", "models are read from their folder"),
    ignored(f"{MODEL}.enable_activation_offload", "activations stay on the device; learner.gradient_checkpointing drops them", False),
    ignored(f"{MODEL}.tiled_mlp.**", "layers are not tiled"),
    only_with(f"{MODEL}.mtp.enable", f"{MODEL}.mtp.**", "multi-token prediction is not trained", True),
    # Actor
    same(f"{ACTOR}.optim.lr", "learner.lr", number, 1e-6),
    weight_decay(f"{ACTOR}.optim.weight_decay", 0.01, _uses_megatron),
    same(f"{ACTOR}.optim.betas", "learner.betas", numbers, [0.9, 0.999]),
    same(f"{ACTOR}.optim.clip_grad", "learner.grad_clip", number, 1.0),
    changed(f"{ACTOR}.optim.lr_warmup_steps", "learner.warmup_steps", whole, 10, "in optimiser steps", _warmup),
    changed(f"{ACTOR}.optim.lr_warmup_steps_ratio", "learner.warmup_steps", number, 0.1, "in optimiser steps",
            _warmup_ratio),
    same(f"{ACTOR}.optim.warmup_style", "learner.schedule", SCHEDULE, "constant"),
    same(f"{ACTOR}.optim.lr_scheduler_type", "learner.schedule", SCHEDULE, "cosine"),
    same(f"{ACTOR}.optim.min_lr_ratio", "learner.final_ratio", number, 0.1,
         lambda v, given: {"learner.final_ratio": v} if _decays(given) else {}),
    changed(f"{ACTOR}.optim.min_lr", "learner.final_ratio", number, 1e-7, "as a share of the peak",
            lambda v, given: {"learner.final_ratio": min(1.0, v / given.read(f"{ACTOR}.optim.lr", number, 1e-6))}
            if given.read(f"{ACTOR}.optim.lr", number, 1e-6) else {}),
    unless(f"{ACTOR}.optim.lr_warmup_init", (0, 0.0), "warm-up starts at 0", 1e-7),
    ignored(f"{ACTOR}.optim.num_cycles", "the cosine schedule has a single cycle"),
    ignored(f"{ACTOR}.optim.total_training_steps", "taken from steps or epochs", -1),
    changed(f"{ACTOR}.optim.optimizer", "learner.optimizer", text, "SGD", "", _optimizer),
    ignored(f"{ACTOR}.optim.muon_*", "see optim.optimizer", 0.95),
    unless(f"{ACTOR}.optim.weight_decay_incr_style", ("constant",), "weight decay is the same in all steps", "linear"),
    *(ignored(f"{ACTOR}.optim.{name}", LEARNER_NOTE, False) for name in (
        "use_checkpoint_opt_param_scheduler", "use_precision_aware_optimizer", "use_layer_wise_distributed_optimizer",
        "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")),
    ignored(f"{ACTOR}.optim.optimizer_impl", "see optim.optimizer", "torch.optim"),
    changed(f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload", "learner.offload", flag, True, LEARNER_NOTE,
            switched({"learner.offload": "optimizer"}, LEARNER_NOTE)),
    *(ignored(f"{ACTOR}.optim.override_optimizer_config.{name}", LEARNER_NOTE, 1) for name in (
        "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer")),
    missing(f"{ACTOR}.optim.override_optimizer_config", OPTIMIZER_OPTIONS_NOTE, "x"),
    missing(f"{ACTOR}.optim.override_optimizer_config.**", f"{OPTIMIZER_OPTIONS_NOTE}; see learner.offload", "x"),
    same(f"{ACTOR}.optim.lr_decay_style", "learner.schedule", SCHEDULE, "cosine"),
    changed(f"{ACTOR}.optim.lr_decay_steps", "learner.decay_steps", count, 100, "in optimiser steps, without warm-up",
            _decay_steps),
    changed(f"{ACTOR}.optim.lr_wsd_decay_steps", "learner.decay_steps", count, 100, "in optimiser steps", _wsd_steps),
    same(f"{ACTOR}.optim.lr_wsd_decay_style", "learner.decay_shape", text, "minus_sqrt",
         lambda v, given: {"learner.decay_shape": DECAY_SHAPE(v)} if _style(given) == "wsd" else {}),
    ignored(f"{ACTOR}.optim.zero_indexed_step", "the schedule starts with the first step", True),
    missing(f"{ACTOR}.optim.**", "see the options of the learner: rlsdk plugins learner", 1),
    same(f"{ACTOR}.grad_clip", "learner.grad_clip", number, 1.0),
    changed(f"{ACTOR}.ppo_mini_batch_size", "minibatches", count, 32, "optimiser steps per batch", _mini),
    _rank_arithmetic(f"{ACTOR}.ppo_micro_batch_size", whole_cluster=True),
    _rank_arithmetic(f"{ACTOR}.ppo_micro_batch_size_per_gpu", whole_cluster=False),
    ignored(f"{ACTOR}.use_dynamic_bsz", "rlsdk always counts tokens", True),
    changed(f"{ACTOR}.ppo_max_token_len_per_gpu", "learner.micro_batch_tokens", count, 16384,
            "includes padding, which veRL does not count", _dynamic),
    same(f"{ACTOR}.ppo_epochs", "passes", count, 1),
    part(f"{ACTOR}.clip_ratio", "algorithm.policy_loss.clip_low algorithm.policy_loss.clip_high", number, 0.2,
            "applies if clip_ratio_low and clip_ratio_high are not given; newer veRL ignores it"),
    part(f"{ACTOR}.clip_ratio_low", "algorithm.policy_loss.clip_low", number, 0.2),
    part(f"{ACTOR}.clip_ratio_high", "algorithm.policy_loss.clip_high", number, 0.28),
    part(f"{ACTOR}.clip_ratio_c", "algorithm.policy_loss.dual_clip", number, 3.0),
    part(f"{ACTOR}.tau_pos", "algorithm.policy_loss.tau_pos", number, 1.0),
    part(f"{ACTOR}.tau_neg", "algorithm.policy_loss.tau_neg", number, 1.05),
    same(f"{ACTOR}.policy_loss.loss_mode", "algorithm.policy_loss",
         choice(LOSSES, "the loss"), "vanilla", policy_loss),
    part(f"{ACTOR}.policy_loss.clip_cov_ratio", "algorithm.policy_loss.ratio", number, 0.0002),
    part(f"{ACTOR}.policy_loss.clip_cov_lb", "algorithm.policy_loss.cov_low", number, 1.0),
    part(f"{ACTOR}.policy_loss.clip_cov_ub", "algorithm.policy_loss.cov_high", number, 5.0),
    part(f"{ACTOR}.policy_loss.kl_cov_ratio", "algorithm.policy_loss.ratio", number, 0.0002),
    part(f"{ACTOR}.policy_loss.ppo_kl_coef", "algorithm.policy_loss.kl_coef", number, 0.1),
    part(f"{ACTOR}.policy_loss.dro_beta", "algorithm.policy_loss.tau", number, 0.1),
    same(f"{ACTOR}.loss_agg_mode", "algorithm.aggregate", choice((
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", SUM_NORM), "the aggregation"), "token-mean",
        _aggregation),
    same(f"{ACTOR}.loss_scale_factor", "algorithm.norm", number, 1024),
    same(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coef", number, 0.001),
    same(f"{ACTOR}.use_kl_loss", "algorithm.kl_coef algorithm.kl", flag, True, _kl_loss),
    part(f"{ACTOR}.kl_loss_coef", "algorithm.kl_coef", number, 0.001),
    part(f"{ACTOR}.kl_loss_type", "algorithm.kl", KL_IN_LOSS, "low_var_kl"),
    changed(f"{ACTOR}.ulysses_sequence_parallel_size", "learner.sequence_parallel", count, 1,
            "must divide placement.learners and the number of attention heads"),
    *(_offload(f"{ACTOR}.{backend}.{what}_offload") for backend in BACKENDS for what in ("param", "optimizer")),
    *(changed(f"{ACTOR}.veomni.{name}", "learner.sequence_parallel", count, 2, "must divide placement.learners and the number of attention heads")
      for name in ("ulysses_parallel_size", "ulysses_sequence_parallel_size")),
    same(f"{ACTOR}.veomni.attn_implementation", "learner.attention", ATTENTION, "flash_attention_2"),
    routing_replay(f"{ACTOR}.veomni.router_replay.mode", "disabled"),
    *(ignored(f"{ACTOR}.{section}.**", LEARNER_NOTE, 1) for section in ("veomni", "engine", "torchtitan")),
    ignored(f"{ACTOR}.model_engine", LEARNER_NOTE, "megatron"),
    ignored("actor@actor_rollout_ref.actor", "Hydra's choice of a file with veRL's defaults", "mlite_actor"),
    same(f"{ACTOR}.fsdp_config.dtype", "model.dtype", DTYPE, "bfloat16"),
    same(f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", "model.dtype", DTYPE, "bf16"),
    same(f"{ACTOR}.fsdp_config.model_dtype", "model.dtype", DTYPE, "fp32",
         lambda v, given: KeyOutcome.ignored("weights are kept in float32 in addition to model.dtype")),
    ignored(f"{ACTOR}.fsdp_config.**", LEARNER_NOTE, 1),
    ignored(f"{ACTOR}.strategy", LEARNER_NOTE, "fsdp"),
    changed(f"{MEGATRON}.moe_aux_loss_coeff", "learner.router_loss_coef", number, 0.01,
            "over all rollouts of an optimiser step", _router_loss),
    unless(f"{MEGATRON}.moe_z_loss_coeff", (0, 0.0), "the router has a load-balancing loss only: learner.router_loss_coef", 0.001),
    unless(f"{MEGATRON}.moe_router_bias_update_rate", (0, 0.0), "biases of the router are not moved to balance the load", 0.001),
    unless(f"{MEGATRON}.moe_expert_capacity_factor", (0, 0.0), "experts read all tokens that are routed to them", 1.2),
    *(unless(f"{MEGATRON}.{name}", (0, 0.0), "models are trained without dropout", 0.1)
      for name in ("hidden_dropout", "attention_dropout")),
    ignored(f"{ACTOR}.megatron.**", LEARNER_NOTE, 1),
    changed(f"{ACTOR}.use_torch_compile", "learner.compile", flag, True, "compiles the models, not only the entropy",
            lambda v, given: KeyOutcome.ignored("learner.compile=true compiles whole models; it is off by default")),
    ignored(f"{ACTOR}.shuffle", "rollouts of a batch are split in random order", False),
    ignored(f"{ACTOR}.data_loader_seed", "there is one seed for everything", 42),
    ignored(f"{ACTOR}.rollout_n", "group_size"),
    ignored(f"{ACTOR}.calculate_entropy", "entropy is always measured", False),
    ignored(f"{ACTOR}.entropy_*", "entropy is computed in chunks", False),
    ignored(f"{ACTOR}.checkpoint.**", "checkpoints contain everything; checkpoint.export sets when a model is written", 1),
    unless(f"{ACTOR}.freeze_vision_tower", (False,), "the vision tower is trained with the rest; adapters leave it as it is", True),
    ignored(f"{ACTOR}.use_prefix_grouper", "learner.rows=shared processes a prompt once per group", False),
    ignored(f"{ACTOR}.use_remove_padding", f"as {MODEL}.use_remove_padding"),
    ignored(f"{ACTOR}.use_fused_kernels", "logits are always computed in chunks", False),
    ignored(f"{ACTOR}.calculate_sum_pi_squared", "computed if an advantage needs it", False),
    ignored(f"{ACTOR}.sum_pi_squared_checkpointing", "computed in chunks", False),
    routing_replay(f"{ACTOR}.router_replay.mode", "disabled"),
    ignored(f"{ACTOR}.router_replay.**", "algorithm.correction: routing_replay", "x"),
    only_with(f"{ACTOR}.qat.enable", f"{ACTOR}.qat.**", "models are not quantised", True),
    ignored(f"{ACTOR}.pad_to_length", "learner.rows: padded or packed", False),
    ignored(f"{ACTOR}.profiler.**", _PROFILER),
    # Reference
    ignored(f"{REF}.log_prob_micro_batch_size", _LOGPROB_NOTE, 4),
    ignored(f"{REF}.log_prob_micro_batch_size_per_gpu", _LOGPROB_NOTE, 4),
    ignored(f"{REF}.log_prob_use_dynamic_bsz", _LOGPROB_NOTE, True),
    ignored(f"{REF}.log_prob_max_token_len_per_gpu", _LOGPROB_NOTE, 16384),
    same(f"{REF}.model.path", "model.reference", text, "Qwen/Qwen2.5-0.5B", _reference),
    ignored(f"{REF}.**", "the reference model is placed and sharded like the actor", 1),
    # Rollout
    same(f"{ROLLOUT}.name", "engine.use", ENGINE, "vllm", _engine),
    same(f"{ROLLOUT}.n", "group_size", count, 8),
    same(f"{ROLLOUT}.temperature", "sampling.temperature", number, 1.0),
    no_cut(f"{ROLLOUT}.top_p", 1.0),
    no_cut(f"{ROLLOUT}.top_k", -1, "top_k"),
    no_cut(f"{ROLLOUT}.repetition_penalty", 1.0, "repetition_penalty"),
    changed(f"{ROLLOUT}.tensor_model_parallel_size", "engine.tensor_parallel_size placement.gpus_per_engine", count, 1,
            _GPU_NOTE, lambda v, given: {"engine.tensor_parallel_size": v}),
    same(f"{ROLLOUT}.gpu_memory_utilization", "engine.gpu_memory_utilization", number, 0.4),
    same(f"{ROLLOUT}.enforce_eager", "engine.enforce_eager", flag, True),
    same(f"{ROLLOUT}.max_num_seqs", "engine.max_num_seqs", count, 256),
    same(f"{ROLLOUT}.max_num_batched_tokens", "engine.max_num_batched_tokens", count, 8192),
    same(f"{ROLLOUT}.enable_chunked_prefill", "engine.args.enable_chunked_prefill", flag, True),
    same(f"{ROLLOUT}.enable_prefix_caching", "engine.args.enable_prefix_caching", flag, True),
    ignored(f"{ROLLOUT}.max_model_len", "model.max_length counts prompt and response together", 2048),
    ignored(f"{ROLLOUT}.prompt_length", "data.max_prompt_length", 512),
    ignored(f"{ROLLOUT}.response_length", "data.max_response_length", 512),
    same(f"{ROLLOUT}.dtype", "model.dtype", DTYPE, "bfloat16", _engine_dtype),
    changed(f"{ROLLOUT}.calculate_log_probs", "old_logprobs", flag, True, "engines always return the logprobs they sampled with",
            lambda v, given: KeyOutcome.ignored("engines always return the logprobs they sampled with")),
    ignored(f"{ROLLOUT}.free_cache_engine", "engines that share GPUs sleep while the learner works"),
    ignored(f"{ROLLOUT}.load_format", "engines load the learner's weights before the first step", "dummy"),
    ignored(f"{ROLLOUT}.layered_summon", "weights are sent layer by layer", False),
    unless(f"{ROLLOUT}.ignore_eos", (False,), "an answer ends at the end-of-text token", True),
    unless(f"{ROLLOUT}.do_sample", (True,), "training samples at sampling.temperature", False),
    ignored(f"{ROLLOUT}.mode", "rollouts are asynchronous requests; rollout.max_staleness lets them run ahead", "async"),
    ignored(f"{ROLLOUT}.log_prob_micro_batch_size", _LOGPROB_NOTE, 8),
    ignored(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", _LOGPROB_NOTE, 8),
    ignored(f"{ROLLOUT}.log_prob_use_dynamic_bsz", _LOGPROB_NOTE, True),
    ignored(f"{ROLLOUT}.log_prob_max_token_len_per_gpu", _LOGPROB_NOTE, 16384),
    same(f"{ROLLOUT}.over_sample_rate", "rollout.oversample", number, 0.1),
    changed(f"{ROLLOUT}.data_parallel_size", "placement.engines", count, 2, _RANKS_APART,
            lambda v, given: KeyOutcome({}, _RANKS_APART) if v > 1 else KeyOutcome.ignored("off")),
    unless(f"{ROLLOUT}.pipeline_model_parallel_size", (1,), "engines have tensor parallelism only", 2),
    experts_sharded(f"{ROLLOUT}.expert_parallel_size", f"{ROLLOUT}.tensor_model_parallel_size"),
    same(f"{ROLLOUT}.engine_kwargs.vllm.*", "engine.args", lambda v: v, 4, of_vllm),
    same(f"{ROLLOUT}.engine_kwargs.vllm.compilation_config.*", "engine.args", lambda v: v, "FULL_AND_PIECEWISE",
         lambda v, given: {f"engine.args.compilation_config.{given.key.rpartition('.')[2]}": v}),
    missing(f"{ROLLOUT}.engine_kwargs.vllm.**", "put it into engine.args if vLLM's EngineArgs has it", 1),
    missing(f"{ROLLOUT}.engine_kwargs.**", "there is no such engine", 1),
    same(f"{ROLLOUT}.val_kwargs.n", "eval.samples", count, 4),
    ignored(f"{ROLLOUT}.val_kwargs.do_sample", "eval.temperature, eval.greedy", True),
    *eval_sampling(f"{ROLLOUT}.val_kwargs", usual=0.0),
    missing(f"{ROLLOUT}.val_kwargs.*", EVALUATION_NOTE, 0),
    changed(f"{ROLLOUT}.multi_turn.enable", "workflow", flag, True, "choose a workflow",
            lambda v, given: KeyOutcome.missing("set workflow: tools, environment or agent") if v else KeyOutcome.ignored("off")),
    *(only_with(f"{ROLLOUT}.multi_turn.enable", f"{ROLLOUT}.multi_turn.{name}", note, sample) for name, note, sample in (
        ("max_assistant_turns", "set max_turns of the workflow", 5),
        ("max_parallel_calls", "set max_calls of the workflow tools", 1),
        ("tool_config_path", "list functions: workflow: {use: tools, tools: [...]}", "t.yaml"),
        ("interaction_config_path", "write a workflow or an environment", "i.yaml"),
        ("format", "parser of the workflow tools (hermes, json, pythonic)", "hermes"),
        ("**", "see the options of the workflow: rlsdk plugins workflow", 1))),
    unless(f"{ROLLOUT}.agent.default_agent_loop", ("single_turn_agent",),
           "workflow: single_turn, tools, environment or agent", "tool_agent"),
    missing(f"{ROLLOUT}.agent.agent_loop_config_path", "write a workflow (howto/workflow.md)", "a.yaml"),
    missing(f"{ROLLOUT}.agent.custom_async_server.**", "write an engine: @rlsdk.engine (howto/plugin.md)", "x"),
    ignored(f"{ROLLOUT}.agent.**", "workflows run as coroutines in the driver", 8),
    ignored(f"{ROLLOUT}.checkpoint_engine.**", "weights are sent from ranks to engines directly", 1),
    ignored(f"{ROLLOUT}.trace.**", "rollouts are saved (save_rollouts) and shown by rlsdk rollouts", 1),
    ignored(f"{ROLLOUT}.profiler.**", _PROFILER),
    ignored(f"{ROLLOUT}.prometheus.**", "metrics.jsonl has engine metrics", 1),
    ignored(f"{ROLLOUT}.logprobs_mode", "logprobs are those of the sampling distribution", "processed_logprobs"),
    ignored(f"{ROLLOUT}.disable_log_stats", "metrics.jsonl has engine metrics", True),
    ignored(f"{ROLLOUT}.enable_rollout_routing_replay", "the engine returns the experts if router_replay.mode asks for them", True),
    missing(f"{ROLLOUT}.quantization", "engines compute in model.dtype, as the learner does", "fp8"),
    ignored(f"{ROLLOUT}.**", "the engine's default is kept; engine.args accepts vLLM's settings", 1),
    ignored("actor_rollout_ref.hybrid_engine", "see placement.colocate, the default"),
    ignored("actor_rollout_ref.nccl_timeout", "the watchdog ends a run with silent processes", 600),
    # Critic
    same("critic.optim.lr", "learner.critic_lr", number, 1e-5,
         of_critic("algorithm.adv_estimator", "gae", "learner.critic_lr")),
    *(_as_actor(f"optim.{name}", f"{ACTOR}.optim.{name}", sample) for name, sample in (
        ("weight_decay", 0.01), ("betas", [0.9, 0.999]), ("clip_grad", 1.0), ("lr_warmup_steps", 10),
        ("lr_warmup_steps_ratio", 0.1), ("warmup_style", "constant"), ("lr_scheduler_type", "constant"),
        ("min_lr_ratio", 0.1))),
    *(_as_actor(name, f"{ACTOR}.{name}", sample) for name, sample in (
        ("ppo_epochs", 1), ("ppo_mini_batch_size", 64), ("grad_clip", 1.0), ("loss_agg_mode", "token-mean"))),
    ignored("critic.optim.**", _CRITIC_NOTE, 0.01),
    same("critic.model.path", "model.critic", text, "Qwen/Qwen2.5-0.5B",
         of_critic("algorithm.adv_estimator", "gae", "model.critic", f"{MODEL}.path")),
    ignored("critic.model.enable_gradient_checkpointing", _CRITIC_NOTE),
    ignored("critic.model.**", _CRITIC_NOTE),
    part("critic.cliprange_value", "algorithm.value_clip", number, 0.5),
    ignored("critic.ppo_micro_batch_size", _CRITIC_NOTE, 8),
    ignored("critic.**", _CRITIC_NOTE),
    # Rewards
    part("custom_reward_function.path", "reward", text, "my_reward.py", "the function is called unchanged"),
    part("custom_reward_function.name", "reward", text, "compute_score", "the function is called unchanged"),
    part("custom_reward_function.reward_kwargs.**", "reward.arguments", lambda v: v, 1, "passed to the function"),
    part("reward.custom_reward_function.reward_kwargs.**", "reward.arguments", lambda v: v, 1, "passed to the function"),
    part("reward_model.enable", "reward", flag, True, "the model's score is the only reward; for a served model: judge"),
    part("reward_model.model.path", "reward", text, "org/reward-model", "a transformers sequence classifier"),
    changed("reward_model.reward_manager", "reward", text, "naive", "rewards are combined by weight, gate and factor",
            lambda v, given: KeyOutcome.ignored("rewards run in processes that can be killed") if v in MANAGERS
            else KeyOutcome.missing("write a reward (howto/reward.md)")),
    *(row for where in OVERLONG for row in (
        part(f"{where}.enable", "algorithm.shaping", flag, True,
             "veRL's DAPO rewards are 1 and -1; those of rlsdk's math are 1 and 0"),
        part(f"{where}.len", "algorithm.shaping", count, 512),
        part(f"{where}.penalty_factor", "algorithm.shaping", number, 1.0),
        ignored(f"{where}.**", "metrics.jsonl has the rewards before and after shaping", False))),
    part("reward_model.reward_kwargs.max_resp_len", "algorithm.shaping", count, 1024),
    *(missing(f"{where}sandbox_fusion.url", "reward: code_tests runs the model's code in a sandbox", "x")
      for where in ("", "reward.", "reward_model.")),
    *(ignored(f"{where}sandbox_fusion.**", "see sandbox_fusion.url", "x") for where in ("", "reward.", "reward_model.")),
    ignored("reward.reward_model.rollout.**", "the reward model runs with transformers, not in an engine", "vllm"),
    only_with("reward_model.enable", "reward.reward_model.**", "a transformers sequence classifier: reward_model", 1),
    ignored("reward.reward_manager.**", "rewards are combined by weight, gate and factor", "x"),
    missing("reward_model.reward_kwargs.**", "arguments of a reward: custom_reward_function.reward_kwargs", 1),
    ignored("reward_model.**", "the trainer holds no reward model", 1),
    ignored("reward.num_workers", "scoring.workers sets the number of scoring processes, by default one per core", 8),
    ignored("reward_manager.**", "rewards are combined by weight, gate and factor", "x"),
    # Algorithm
    same("algorithm.adv_estimator", "algorithm.use algorithm.advantage algorithm.critic",
         choice(ESTIMATORS, "the estimator"), "grpo", _estimator),
    part("algorithm.gamma", "algorithm.advantage.gamma", number, 1.0),
    part("algorithm.lam", "algorithm.advantage.lam", number, 0.95),
    part("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage.std_normalize", flag, False),
    part("algorithm.gdpo_reward_keys", "reward", texts, ["accuracy", "format"], "each is a part of the reward"),
    part("algorithm.gdpo_reward_weights", "reward", numbers, [1.0, 0.5]),
    part("algorithm.use_kl_in_reward", "algorithm.shaping", flag, True),
    part("algorithm.kl_ctrl.kl_coef", "algorithm.shaping", number, 0.001,
            "KL in the reward (shaping kl_penalty); current veRL reads it only with use_kl_in_reward"),
    part("algorithm.kl_ctrl.type", "algorithm.shaping", text, "fixed"),
    part("algorithm.kl_ctrl.horizon", "algorithm.shaping", count, 10000),
    part("algorithm.kl_ctrl.target_kl", "algorithm.shaping", number, 0.1),
    part("algorithm.kl_penalty", "algorithm.shaping", KL, "kl"),
    *ROWS_OF_CORRECTION,
    changed("algorithm.filter_groups.enable", "algorithm.filters rollout.dynamic_sampling", flag, True,
            "groups of equal rewards are replaced",
            switched({"algorithm.filters": ["nonzero_variance"], "rollout.dynamic_sampling": True},
                     "groups of equal rewards are replaced")),
    part("algorithm.filter_groups.metric", "algorithm.filters", text, "acc", "the filter compares rewards"),
    ignored("algorithm.filter_groups.max_num_gen_batches", "sampling continues until the batch is full; see max_empty_steps", 10),
    ignored("algorithm.filter_groups.max_inflight_gen_batches", "rollout.oversample", 1),
    missing("algorithm.filter_groups.**", "algorithm.filters, see rlsdk plugins filter", 1),
    unless("algorithm.use_pf_ppo", (False,), "there is no such reweighting; write a buffer", True),
    ignored("algorithm.pf_ppo.**", "use_pf_ppo", 1),
    # Trainer
    same("trainer.experiment_name", "name", text, "my-run", _name),
    part("trainer.project_name", "trackers", text, "TinyZero", "project of the tracker wandb"),
    same("trainer.logger", "trackers", texts, ["console", "wandb"],
         trackers_with("trainer.project_name")),
    same("trainer.total_epochs", "epochs", number, 15, _rounds),
    same("trainer.total_training_steps", "steps", count, 100, _total),
    same("trainer.save_freq", "checkpoint.every", interval, 100),
    same("trainer.test_freq", "eval.every", interval, 100),
    same("trainer.val_before_train", "eval.before", flag, False),
    unless("trainer.val_only", (False,), "`rlsdk eval` evaluates without training", True),
    part("trainer.n_gpus_per_node", "placement.learners placement.engines", count, 2, _GPU_NOTE),
    part("trainer.nnodes", "placement.learners placement.engines", count, 1, _GPU_NOTE),
    changed("trainer.default_local_dir", "out", text, "checkpoints", "a run's folder is out/name", _out),
    missing("trainer.default_hdfs_dir", "out may be an fsspec URL, such as s3://bucket/runs", "hdfs://x"),
    same("trainer.max_actor_ckpt_to_keep", "checkpoint.keep", whole, 2, checkpoints_kept("trainer.save_freq")),
    ignored("trainer.max_critic_ckpt_to_keep", "checkpoint.keep: a checkpoint holds actor and critic", 2),
    ignored("trainer.resume_mode", "rlsdk resumes only on request: rlsdk train CONFIG --resume", "auto"),
    missing("trainer.resume_from_path", "set model.path to an export of that checkpoint in transformers format", "x"),
    changed("trainer.critic_warmup", "critic.warmup_steps", whole, 10, CRITIC_WARMUP_NOTE,
            critic_warmup("algorithm.adv_estimator", "gae", -1, CRITIC_WARMUP_NOTE)),
    changed("trainer.log_val_generations", "save_rollouts", whole, 10, "`rlsdk rollouts RUN` shows them",
            lambda v, given: KeyOutcome.ignored("evaluations store their answers: see `rlsdk rollouts RUN`")),
    changed("trainer.rollout_data_dir", "save_rollouts", text, "d", "rollouts are saved in the run's database",
            lambda v, given: KeyOutcome({"save_rollouts": 1}, "rollouts are saved in the run's database")),
    ignored("trainer.validation_data_dir", "evaluations store their answers in the run's folder", "d"),
    changed("trainer.device", "placement.device", text, "cuda", "auto uses CUDA if Ray finds GPUs",
            lambda v, given: {"placement.device": v} if v in ("cuda", "cpu") else
            KeyOutcome.missing("rlsdk runs on CUDA and on CPUs")),
    ignored("trainer.balance_batch", "ranks always get equal numbers of tokens"),
    ignored("trainer.use_v1", "batches are the same with both trainers", True),
    changed("trainer.v1.trainer_mode", "rollout.max_staleness rollout.partial_rollouts",
            choice(("sync", "colocate_async", "separate_async"), "the mode"), "colocate_async",
            "the batches sampled in advance", _ahead),
    *(part(f"trainer.v1.{mode}.num_warmup_batches", "rollout.max_staleness", whole, 1)
      for mode in ("colocate_async", "separate_async")),
    ignored("trainer.v1.separate_async.parameter_sync_step", "weights are sent after each batch of train_batch_size tasks", 4),
    unless("trainer.v1.separate_async.hybrid_rollout.enable_switch", (False,), "the learner's GPUs do not sample", True),
    *(changed(f"trainer.v1.sampler.max_off_policy_{name}", "rollout.max_staleness", lambda v: v, sample, "", _oldest)
      for name, sample in (("threshold", 8), ("strategy", "drop"))),
    missing("trainer.v1.sampler.custom_sampler.**", "write a buffer: @rlsdk.buffer (howto/buffer.md)", "x"),
    missing("trainer.v1.sampler.sampler_kwargs.**", "write a buffer: @rlsdk.buffer (howto/buffer.md)", "x"),
    ignored("trainer.**", "not needed in rlsdk", 1),
    # The asynchronous trainers
    part("rollout.nnodes", "placement.engines", count, 1, "engines have GPUs of their own"),
    part("rollout.n_gpus_per_node", "placement.engines", count, 4, "engines have GPUs of their own"),
    changed("rollout.total_rollout_steps", "steps", count, 1000, "veRL counts tasks",
            lambda v, given: KeyOutcome({"steps": max(1, v // _batch(given))}, "veRL counts tasks")),
    changed("rollout.test_freq", "eval.every", whole, 1, "in steps; veRL counts weight syncs", _tested),
    ignored("rollout.total_epochs", "trainer.total_epochs or rollout.total_rollout_steps", 10),
    ignored("rollout.n", "actor_rollout_ref.rollout.n", 4),
    changed("async_training.staleness_threshold", "rollout.max_staleness", number, 0.5, "whole weight syncs",
            lambda v, given: KeyOutcome({"rollout.max_staleness": math.ceil(v)}, "whole weight syncs")),
    same("async_training.trigger_parameter_sync_step", "rollout.sync_interval", count, 4),
    part("async_training.require_batches", "batch_size", count, 1, "in mini-batches"),
    same("async_training.partial_rollout", "rollout.partial_rollouts", flag, True),
    same("async_training.use_rollout_log_probs", "old_logprobs", flag, True, sampled_first),
    part("async_training.compute_prox_log_prob", "old_logprobs", flag, True),
    ignored("async_training.**", "weights are sent from ranks to engines directly", 1),
    # Everything else
    changed("distillation.teacher_models.*.model_path", "model.reference", text, "Qwen/Qwen3-32B", "algorithm: opd", _teacher),
    changed("distillation.**", "algorithm", lambda v: v, 1, "algorithm: opd", _distilled),
    ignored("model_engine", LEARNER_NOTE, "megatron"),
    ignored("skip.**", "`rlsdk simulate` and the scripted policy of rlsdk.testing need no engine", 1),
    changed("global_profiler.steps", "profile.steps", numbers, [1, 2], "of the learner; engines are not recorded", _profile),
    part("global_profiler.tool", "profile.steps", text, "torch"),
    ignored("global_profiler.**", _PROFILER),
    ignored("ray_kwargs.**", "placement.ray names a running cluster; rlsdk starts Ray otherwise", 1),
    ignored("ray_init.**", "placement.ray names a running cluster; rlsdk starts Ray otherwise", 1),
    ignored("transfer_queue.**", "batches stay in the driver", False),
    ignored("defaults", "Hydra's list of files with veRL's defaults", []),
    ignored("hydra.**", "the location of Hydra's logs", "x"),
)  # fmt: skip

DEFAULTS: Mapping[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.truncation": "error",
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.gpu_memory_utilization": 0.5,
    f"{ROLLOUT}.dtype": "bfloat16",
    f"{MODEL}.enable_gradient_checkpointing": True,
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.ppo_epochs": 1,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.betas": [0.9, 0.999],
    f"{ACTOR}.optim.weight_decay": 0.01,
    f"{ACTOR}.optim.min_lr_ratio": 0.0,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.entropy_coeff": 0.0,
    f"{ACTOR}.use_kl_loss": False,
    "critic.optim.lr": 1e-5,
    "algorithm.adv_estimator": "gae",
    "trainer.experiment_name": "verl-run",
    "trainer.total_epochs": 30,
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.max_actor_ckpt_to_keep": -1,
}

FRAMEWORK = Framework(
    name="verl",
    title="veRL",
    rows=ROWS,
    defaults=DEFAULTS,
    finish=_finish,
    renamed={
        "reward.custom_reward_function.path": "custom_reward_function.path",
        "reward.custom_reward_function.name": "custom_reward_function.name",
        "reward.reward_manager.name": "reward_model.reward_manager",
        "reward.reward_kwargs.": "reward_model.reward_kwargs.",
        "reward.reward_model.enable": "reward_model.enable",
        "reward.reward_model.model_path": "reward_model.model.path",
        f"{ACTOR}.policy_loss.tau_pos": f"{ACTOR}.tau_pos",
        f"{ACTOR}.policy_loss.tau_neg": f"{ACTOR}.tau_neg",
    },
    others={
        **dict.fromkeys(
            ("verl.trainer.fsdp_sft_trainer", "verl.trainer.sft_trainer", "verl.trainer.sft_trainer_ray"),
            "algorithm: sft",
        ),
        **dict.fromkeys(
            ("verl.trainer.main_generation", "verl.trainer.main_generation_server"),
            "tasks.eval, and run `rlsdk eval`",
        ),
    },
    entries=("verl.trainer.main_ppo", "main_ppo.py", "verl.trainer.main", "main_dapo", "fully_async_main"),
)
