"""Flags of OpenRLHF (openrlhf.cli.train_ppo_ray): today's dotted names, and those of older versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.parts import (
    ATTENTION,
    DTYPE,
    SCHEDULE,
    critic_warmup,
    dataset,
    evaluated,
    layout,
    likely_reward,
    minibatches,
    no_cut,
    of_critic,
    optimizer,
    share_of_steps,
    switched,
    weight_decay,
)
from rlsdk.migration.rows import (
    NOTES,
    Choice,
    Framework,
    Given,
    KeyOutcome,
    UnfitError,
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
    two,
    unless,
    whole,
)

ESTIMATORS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gae": ("ppo", {"use": "gae"}),
    "reinforce": ("reinforce_plus_plus", {"use": "reinforce_plus_plus"}),
    "reinforce_baseline": ("reinforce_plus_plus_baseline", {"use": "reinforce_plus_plus_baseline"}),
    "rloo": ("rloo", {"use": "rloo"}),
    "group_norm": ("grpo", {"use": "grpo", "std_normalize": True}),
    "dr_grpo": ("dr_grpo", {"use": "grpo", "std_normalize": False}),
}
"""Estimator -> the algorithm whose other parts are replaced, and the advantage."""
KL = {"k1": "k1", "k2": "k2", "k3": "k3"}
CORRECTIONS = ("tis", "icepop", "seq-mask-tis")


def _gpus(given: Given) -> int:
    return given.whole("actor.num_nodes") * given.whole("actor.num_gpus_per_node", 8)


def _lengths(given: Given) -> tuple[int, int, int]:
    """Maximum tokens of a prompt, of a response, and of both; versions up to 0.9 had limits for each part."""
    total = given.whole("data.max_len", 2048)
    response = given.whole("rollout.max_new_tokens", 0)
    if "data.prompt_max_len" in given.flat or ("data.max_len" not in given.flat and response >= total):
        prompt = given.whole("data.prompt_max_len", 1024)
        return prompt, response or 1024, prompt + (response or 1024)
    return max(1, total - (response or 1)), response or max(1, total - 1), total


def _updates(given: Given) -> int:
    rollouts = given.whole("rollout.batch_size", 1024) * given.whole("rollout.n_samples_per_prompt")
    return minibatches(rollouts, given.whole("train.batch_size", 128))


def _estimator(name: str, given: Given) -> dict[str, Any]:
    algorithm, advantage = ESTIMATORS[name]
    options = dict(advantage)
    if name in ("gae", "reinforce"):
        options["gamma"] = given.read("algo.advantage.gamma", number, 1.0)
    if name == "gae":
        options["lam"] = given.read("algo.advantage.lambd", number, 1.0)
    if name == "reinforce_baseline" and given.read("algo.advantage.no_std_norm", flag, False):
        options = {"use": "grpo", "std_normalize": False}
    return {
        "algorithm.use": algorithm,
        "algorithm.advantage": options,
        "algorithm.critic": name == "gae",
        "algorithm.value_clip": given.read("critic.value_clip", number, 0.5) if name == "gae" else None,
        "algorithm.aggregate": "token-mean",
        **_kl(given),
        "algorithm.shaping": _shaping(given),
    }


def _kl(given: Given) -> dict[str, Any]:
    coefficient = given.read("algo.kl.init_coef", number, 0.01)
    if not given.read("algo.kl.use_loss", flag, False) or coefficient == 0:
        return {"algorithm.kl_coef": 0.0}
    return {"algorithm.kl_coef": coefficient, "algorithm.kl": str(given.get("algo.kl.estimator", "k1"))}


def _shaping(given: Given) -> list[dict[str, Any]]:
    bounds = given.read("reward.clip_range", two, [-10.0, 10.0])
    found: list[dict[str, Any]] = []
    if given.read("reward.normalize_enable", flag, False):
        found.append({"use": "reward_norm", "by": "batch", "method": "mean_std"})
    if buffer := given.whole("reward.overlong_buffer_len", 0):
        penalty = given.read("reward.overlong_penalty_factor", number, 1.0)
        _, response, total = _lengths(given)
        limit = response if "rollout.max_new_tokens" in given.flat or "data.prompt_max_len" in given.flat else total
        found.append({"use": "overlong", "max_length": limit, "buffer": buffer, "penalty": penalty})
    found.append({"use": "reward_clip", "low": bounds[0], "high": bounds[1]})
    coefficient = given.read("algo.kl.init_coef", number, 0.01)
    if coefficient and not given.read("algo.kl.use_loss", flag, False):
        part = {"use": "kl_penalty", "coef": coefficient, "estimator": str(given.get("algo.kl.estimator", "k1"))}
        target = given.read("algo.kl.target", number)
        found.append({**part, "target": target, "horizon": given.whole("algo.kl.horizon", 10000)} if target else part)
    return found


def _after_the_group(given: Given) -> tuple[str, ...]:
    """Return a note on what OpenRLHF applies to rewards after it has compared those of a group, and rlsdk before."""
    name = str(given.get("algo.advantage.estimator"))
    parts = ["reward_clip"] if "reward.clip_range" in given.flat else []
    parts += ["kl_penalty"] if any(part["use"] == "kl_penalty" for part in _shaping(given)) else []
    if name in ("gae", "reinforce") or not parts:
        return ()
    return (
        f"algorithm.shaping: {' and '.join(parts)} apply before rewards are compared within their group; with {name}, "
        "OpenRLHF applies them to the result of this comparison",
    )


def _loss(name: str, given: Given) -> dict[str, Any]:
    both = given.read("actor.eps_clip", number, 0.2)
    low, high = given.read("actor.eps_clip_low_high", two, [both, both])
    cap = given.read("actor.dual_clip", number)
    return {"algorithm.policy_loss": {"use": name, "clip_low": low, "clip_high": high, "dual_clip": cap}}


def _correction(value: bool, given: Given) -> KeyOutcome:
    if not value:
        return KeyOutcome.ignored("off")
    if str(given.get("actor.policy_loss_type")) == "gspo":
        return KeyOutcome({"old_logprobs": "rollout"}, "the ratio of gspo is then that to the engine's policy")
    low, high = given.read("algo.advantage.is_correction_threshold", _bounds, [0.5, 5.0])
    found, note = {
        "tis": ({"use": "tis", "cap": high}, "weights have no minimum" if low else ""),
        "icepop": ({"use": "icepop", "low": low, "high": high}, ""),
        "seq-mask-tis": (
            [{"use": "tis", "cap": high}, {"use": "geometric", "low": low, "high": high}],
            "the weights of tokens are truncated at the upper bound, unlike OpenRLHF's",
        ),
    }[given.read("algo.advantage.is_correction_type", choice(CORRECTIONS, "the correction"), "tis")]
    return KeyOutcome({"algorithm.correction": found}, note)


def _bounds(value: Any) -> list[float]:
    """Read a minimum and a maximum; versions up to 0.8 had only the maximum."""
    found = [number(value)] if isinstance(value, int | float) else numbers(value)
    if len(found) not in (1, 2):
        raise UnfitError(f"expected one or two numbers, got {value!r}")
    return found if len(found) == 2 else [0.0, *found]


def _no_std(value: bool, given: Given) -> KeyOutcome:
    name = str(given.get("algo.advantage.estimator"))
    if not value or name in ("group_norm", "dr_grpo", "rloo"):
        return KeyOutcome.ignored(f"no effect on {name}" if value else "off")
    if name == "reinforce_baseline":
        return KeyOutcome({}, "without the second subtraction, of the batch's mean")
    return KeyOutcome.missing("advantages are also divided by the standard deviation: write an advantage")


def _filters(value: bool, given: Given) -> KeyOutcome:
    if not value:
        return KeyOutcome.ignored("off")
    low, high = given.read("algo.dynamic_filtering_range", two, [0.0, 1.0])
    values = {
        "algorithm.filters": [{"use": "pass_rate", "low": low, "high": high}],
        "rollout.dynamic_sampling": True,
    }
    return KeyOutcome(values, "uses the share of rollouts that pass; OpenRLHF uses the mean reward")


def _micro(value: int, given: Given) -> KeyOutcome:
    if given.read("train.dynamic_batch_enable", flag, False):
        return KeyOutcome.ignored("train.max_tokens_per_gpu takes precedence")
    return KeyOutcome(
        {"learner.micro_batch_tokens": value * _lengths(given)[2]},
        "rlsdk counts tokens, padding included: sequences × data.max_len",
    )


def _tokens(value: int, given: Given) -> KeyOutcome:
    if not given.read("train.dynamic_batch_enable", flag, False):
        return KeyOutcome.ignored("train.dynamic_batch_enable is off")
    return KeyOutcome({"learner.micro_batch_tokens": value}, "includes padding, which OpenRLHF does not count")


def _mini(value: int, given: Given) -> KeyOutcome:
    return KeyOutcome(
        {"minibatches": _updates(given)}, "rlsdk counts optimiser steps per batch, OpenRLHF the rollouts in each"
    )


def _warmup(value: float, given: Given) -> KeyOutcome:
    if value == 0:
        return share_of_steps(None, 0.0)
    samples = given.whole("data.max_samples", 0)
    batch = given.whole("rollout.batch_size", 1024)
    known = 0 < samples < 10**8
    steps = samples // batch * given.whole("train.num_episodes") * _updates(given) if known else None
    return share_of_steps(steps, value)


def _freezing(value: int, given: Given) -> KeyOutcome | Mapping[str, Any]:
    """OpenRLHF has counted from 0 since 0.9.1, and from 1 before; its flag has had a new name since 0.10.2."""
    older = "critic.freezing_steps" in given.written
    more, note = (0, "OpenRLHF 0.9.1 to 0.10.1 froze the actor for one step more: add 1") if older else (1, _FROM_ZERO)
    return critic_warmup("algo.advantage.estimator", "gae", more, note)(value, given)


def _engines(value: int, given: Given) -> dict[str, Any]:
    tensor = given.whole("vllm.tensor_parallel_size")
    return {
        **layout(_gpus(given), tensor),
        "placement.engines": max(1, value),
        "placement.gpus_per_engine": tensor,
        # With train.async_enable, engines have GPUs of their own whatever is colocated.
        "placement.colocate": given.read("train.colocate_all", flag, False)
        and not given.read("train.async_enable", flag, False),
        "engine.use": "vllm" if value else "transformers",
    }


def _agent(value: Any, given: Given) -> KeyOutcome:
    return KeyOutcome.missing("write a workflow (howto/workflow.md), or workflow: {use: agent, agent: 'FILE.py:solve'}")


def _lora(value: int, given: Given) -> dict[str, Any]:
    if not value:
        return {}
    targets = given.read("ds.lora.target_modules", texts, ["all-linear"])
    named = {} if targets == ["all-linear"] else {"targets": targets}
    return {"learner.lora": {"rank": value, "alpha": given.read("ds.lora.alpha", number, 16.0), **named}}


def _reward(given: Given) -> dict[str, Any]:
    remote = given.get("reward.remote_url")
    if isinstance(remote, str) and remote.endswith(".py"):
        return {"reward": {"use": "foreign", "path": f"{remote}:reward_func", "style": "openrlhf"}}
    if given.get("reward.model_name_or_path") is not None:
        return {"reward": {"use": "reward_model", "path": str(given.get("reward.model_name_or_path"))}}
    if remote is not None:
        return {NOTES: (f"reward: {remote} is a server: write a reward that calls it (howto/reward.md)",)}
    return likely_reward(given.get("data.prompt_dataset"))


def _data(
    names: list[str], split: str, columns: Mapping[str, str], chat: Mapping[str, Any], given: Given
) -> dict[str, Any] | list[dict[str, Any]]:
    """Return a source of all files, or one for each data set of the hub or each probability."""
    weights = given.read("data.prompt_probs", lambda value: [number(each) for each in text(value).split(",")], [])
    if len(weights) == len(names) > 1:
        return [{**dataset(each, split, columns, **chat), "weight": w} for each, w in zip(names, weights, strict=True)]
    if len(names) > 1 and any(dataset(each, split, columns)["use"] == "hub" for each in names):
        return [dataset(each, split, columns, **chat) for each in names]
    return dataset(names, split, columns, **chat)


def _samples(value: int, given: Given) -> KeyOutcome:
    if value >= 10**8:
        return KeyOutcome.ignored("all of the data")
    return KeyOutcome.missing(
        f"if the data has more rows: split 'train[:{value}]' of the source hub, or a shorter file"
    )


def _generated(value: int, given: Given) -> KeyOutcome:
    batch = given.whole("rollout.batch_size", 1024)
    if value == batch:
        return KeyOutcome.ignored("as many as a batch")
    if value < batch:
        return KeyOutcome.missing(f"OpenRLHF then trains on {value} tasks at a time: set batch_size")
    return KeyOutcome({"rollout.oversample": value / batch - 1}, "the share above a batch")


def _wandb(given: Given) -> dict[str, Any]:
    entity = given.read("logger.wandb.org", text)
    project = {"use": "wandb", "project": str(given.get("logger.wandb.project", _PROJECT))}
    return {**project, **({"entity": entity} if entity else {})}


def _finish(given: Given) -> dict[str, Any]:
    prompts, response, length = _lengths(given)
    found: dict[str, Any] = {
        "model.max_length": length,
        "max_prompt_tokens": prompts,
        "sampling.max_tokens": min(response, length),
    }
    reward_model = given.get("reward.model_name_or_path")
    valued = str(given.get("algo.advantage.estimator")) == "gae"
    if valued and reward_model and not given.get("critic.model_name_or_path") and not given.get("reward.remote_url"):
        found["model.critic"] = str(reward_model).split(",")[0]  # where OpenRLHF's critic starts without another
    prompt, label = given.get("data.input_key", "input"), given.get("data.label_key")
    columns = {"prompt": str(prompt), **({"answer": str(label)} if label else {})}
    chat = {"chat": True} if given.read("data.apply_chat_template", flag, False) else {}
    for key, split, to in (("data.prompt_dataset", "data.prompt_split", "tasks.train"),
                           ("eval.dataset", "eval.split", "tasks.eval")):  # fmt: skip
        if given.get(key) is not None:
            names = [each.strip() for name in given.read(key, texts, []) for each in name.split(",") if each.strip()]
            if names:
                found[to] = _data(names, str(given.get(split, "train")), columns, chat, given)
    found |= _reward(given)
    if isinstance(sources := found.get("tasks.train"), list) and "data.prompt_probs" not in given.flat:
        found[NOTES] = (
            *found.get(NOTES, ()),
            f"tasks.train: {len(sources)} sources share each batch equally; OpenRLHF mixes them by size: set their weights",
        )
    if 0 < (rows := given.whole("data.max_samples", 0)) < 10**8 and given.read("actor.lr_warmup_ratio", number, 0.03):
        note = f"learner.warmup_steps: a share of the steps with {rows} tasks (max_samples); set less if the data has fewer"
        found[NOTES] = (*found.get(NOTES, ()), note)
    if notes := _after_the_group(given):
        found[NOTES] = (*found.get(NOTES, ()), *notes)
    if given.get("vllm.num_engines") is None:
        found |= layout(_gpus(given), given.whole("vllm.tensor_parallel_size"))
    return found


_FROM_ZERO = "OpenRLHF counts steps from 0: its actor is frozen for one step more than it says"
_PROJECT = "openrlhf_train_ppo"
"""OpenRLHF's default project of wandb."""
_PLACED = "engines and ranks share the GPUs: placement"
_DS = "the learner has options for the DeepSpeed settings it needs"
_DATA = "tasks are read on demand"

ROWS = (
    # Models
    same("actor.model_name_or_path", "model.path", text, "Qwen/Qwen2.5-0.5B"),
    same("critic.model_name_or_path", "model.critic", text, "Qwen/Qwen2.5-0.5B",
         of_critic("algo.advantage.estimator", "gae", "model.critic", "actor.model_name_or_path")),
    part("reward.model_name_or_path", "reward", text, "org/reward-model"),
    part("reward.remote_url", "reward", text, "my_reward.py", "a file is called unchanged; for a server, write a reward"),
    changed("train.agent_func_path", "workflow", text, "agent.py", "a workflow", _agent),
    same("ds.param_dtype", "model.dtype", DTYPE, "bf16"),
    same("ds.attn_implementation", "learner.attention", ATTENTION, "flash_attention_2"),
    changed("flash_attn", "learner.attention", flag, True, "an older flag",
            switched({"learner.attention": "flash_attention_2"})),
    changed("bf16", "model.dtype", flag, True, "an older flag", switched({"model.dtype": "bfloat16"})),
    ignored("ds.value_head_prefix", "rlsdk creates the critic's head", "score"),
    ignored("actor_init_on_gpu", "each process reads the model it needs", True),
    # Data
    part("data.prompt_dataset", "tasks.train", text, "OpenRLHF/prompt-collection-v0.1", "becomes a task source"),
    part("data.prompt_split", "tasks.train.split", text, "train"),
    part("data.prompt_probs", "tasks.train", text, "0.5,0.5", "weights of the sources"),
    part("eval.dataset", "tasks.eval", text, "OpenRLHF/prompt-collection-v0.1", "becomes a task source"),
    part("eval.split", "tasks.eval.split", text, "train"),
    part("data.input_key", "tasks.train.columns.prompt", text, "context_messages"),
    part("data.label_key", "tasks.train.columns.answer", text, "answer"),
    part("data.apply_chat_template", "tasks.train.chat", flag, True),
    missing("data.input_template", "write the prompts in their final form", "User: {}"),
    part("data.max_len", "model.max_length", count, 2048),
    part("data.prompt_max_len", "max_prompt_tokens", count, 1024),
    changed("data.max_samples", "tasks.train.split", whole, 1000, "", _samples),
    part("rollout.max_new_tokens", "sampling.max_tokens", count, 1024),
    changed("data.image_key", "tasks.train", text, "images", "the column is read under this name",
            lambda v, given: KeyOutcome.ignored("the column is read under this name") if v in ("images", "image")
            else KeyOutcome.missing("name the column images: docs/howto/vision.md")),
    ignored("data.max_images_per_prompt", "all images of a prompt are read", 0),
    ignored("data.disable_fast_tokenizer", "the tokenizer's own setting applies", True),
    ignored("data.dataloader_num_workers", _DATA, 0),
    # Batches
    same("rollout.batch_size", "batch_size", count, 1024),
    same("rollout.n_samples_per_prompt", "group_size", count, 8),
    changed("train.batch_size", "minibatches", count, 128, "optimiser steps per batch", _mini),
    changed("train.micro_batch_size", "learner.micro_batch_tokens", count, 8, "tokens", _micro),
    changed("train.max_tokens_per_gpu", "learner.micro_batch_tokens", count, 16384, "with padding", _tokens),
    ignored("train.dynamic_batch_enable", "micro-batches are always counted in tokens", True),
    same("train.max_epochs", "passes", count, 1),
    same("train.num_episodes", "epochs", number, 1),
    ignored("rollout.micro_batch_size", "forward passes use learner.micro_batch_tokens, too", 16),
    ignored("rollout.max_tokens_per_gpu", "forward passes use learner.micro_batch_tokens, too", 16384),
    changed("rollout.vllm_generate_batch_size", "rollout.oversample", count, 2048, "the share above a batch", _generated),
    # Sampling
    same("rollout.temperature", "sampling.temperature", number, 1.0),
    no_cut("rollout.top_p", 1.0),
    same("vllm.num_engines", "placement.engines placement.gpus_per_engine engine.use", whole, 4, _engines),
    same("vllm.tensor_parallel_size", "engine.tensor_parallel_size", count, 1),
    same("vllm.gpu_memory_utilization", "engine.gpu_memory_utilization", number, 0.6),
    same("vllm.enforce_eager", "engine.enforce_eager", flag, True),
    same("vllm.enable_prefix_caching", "engine.args.enable_prefix_caching", flag, True),
    ignored("vllm.sync_backend", "weights are sent from ranks to engines directly", "nccl"),
    ignored("vllm.sync_with_ray", "weights are sent from ranks to engines directly", True),
    ignored("vllm.enable_sleep", "engines that share GPUs sleep while the learner works", True),
    # Algorithm
    same("algo.advantage.estimator", "algorithm.use algorithm.advantage algorithm.critic",
         choice(ESTIMATORS, "the estimator"), "group_norm", _estimator),
    part("algo.advantage.gamma", "algorithm.advantage.gamma", number, 1.0),
    part("algo.advantage.lambd", "algorithm.advantage.lam", number, 0.95),
    same("algo.advantage.no_std_norm", "algorithm.advantage", flag, True, _no_std),
    same("algo.advantage.is_correction_enable", "algorithm.correction old_logprobs", flag, True, _correction),
    part("algo.advantage.is_correction_threshold", "algorithm.correction", _bounds, [0.5, 5.0]),
    part("algo.advantage.is_correction_type", "algorithm.correction", text, "tis"),
    part("algo.kl.init_coef", "algorithm.kl_coef algorithm.shaping", number, 0.001,
         "in the loss with algo.kl.use_loss, else in the reward"),
    part("algo.kl.use_loss", "algorithm.kl", flag, True),
    part("algo.kl.estimator", "algorithm.kl algorithm.shaping", Choice(KL, "the estimator"), "k3"),
    part("algo.kl.target", "algorithm.shaping", number, 0.1),
    part("algo.kl.horizon", "algorithm.shaping", count, 10000),
    same("actor.policy_loss_type", "algorithm.policy_loss", Choice({"ppo": "ppo", "gspo": "gspo"}, "the loss"), "ppo",
         _loss),
    part("actor.eps_clip", "algorithm.policy_loss.clip_low algorithm.policy_loss.clip_high", number, 0.2),
    part("actor.eps_clip_low_high", "algorithm.policy_loss.clip_low algorithm.policy_loss.clip_high", two, [0.2, 0.27]),
    part("actor.dual_clip", "algorithm.policy_loss.dual_clip", number, 3.0),
    part("critic.value_clip", "algorithm.value_clip", number, 0.5),
    same("actor.entropy_coef", "algorithm.entropy_coef", number, 0.001),
    same("actor.aux_loss_coef", "learner.router_loss_coef", number, 0.01),
    missing("ptx_coef", "algorithm: mix trains on the tasks' demonstrations in addition to rollouts, and needs a column of them", 0.05),
    part("reward.normalize_enable", "algorithm.shaping", flag, True, "over the batch; OpenRLHF keeps a running mean"),
    part("reward.clip_range", "algorithm.shaping", two, [-10, 10]),
    part("reward.overlong_buffer_len", "algorithm.shaping", number, 512),
    part("reward.overlong_penalty_factor", "algorithm.shaping", number, 1.0),
    unless("reward.stop_properly_penalty_coef", (1, 1.0), "no shaping scales the rewards of truncated answers: write one "
           "(howto/plugin.md); algorithm.filters: [truncated] drops them", 0.5),
    changed("algo.dynamic_filtering_enable", "algorithm.filters rollout.dynamic_sampling", flag, True, "pass rates",
            _filters),
    part("algo.dynamic_filtering_range", "algorithm.filters", two, [0, 1]),
    changed("critic.freezing_steps", "critic.warmup_steps", whole, 10, _FROM_ZERO, _freezing),
    # Optimisation
    same("actor.adam.lr", "learner.lr", number, 5e-7),
    same("critic.adam.lr", "learner.critic_lr", number, 9e-6,
         of_critic("algo.advantage.estimator", "gae", "learner.critic_lr")),
    same("actor.adam.betas", "learner.betas", numbers, [0.9, 0.95]),
    same("actor.adam.eps", "learner.eps", number, 1e-8),
    weight_decay("actor.adam.weight_decay", 0.1),
    same("actor.max_norm", "learner.grad_clip", number, 1.0),
    same("actor.lr_scheduler", "learner.schedule", SCHEDULE, "cosine_with_min_lr"),
    changed("actor.lr_warmup_ratio", "learner.warmup_steps", number, 0.03, "in optimiser steps", _warmup),
    same("actor.min_lr_ratio", "learner.final_ratio", number, 0.1),
    optimizer("actor.optim", "muon", ("adam",)),
    ignored("actor.muon.**", "see optim", 0.02),
    ignored("critic.adam.**", "the critic uses the actor's setting", 0.9),
    same("actor.gradient_checkpointing_enable", "learner.gradient_checkpointing", flag, True),
    ignored("actor.gradient_checkpointing_reentrant", "checkpoints are not re-entrant", True),
    unless("actor.freeze_visual_encoder", (False,), "the vision tower is trained with the rest; adapters leave it as it is", True),
    same("ds.zero_stage", "learner.zero_stage", whole, 3),
    changed("ds.adam_offload", "learner.offload", flag, True, "optimiser state in main memory",
            switched({"learner.offload": "optimizer"})),
    changed("ds.packing_samples", "learner.rows", flag, True, "worthwhile with flash_attention_2",
            switched({"learner.rows": "packed"}, "worthwhile with learner.attention=flash_attention_2")),
    changed("ds.ring_attn_size", "learner.sequence_parallel", count, 1, "Ulysses instead of ring attention"),
    ignored("ds.ring_attn_head_stride", "Ulysses instead of ring attention", 1),
    same("ds.lora.rank", "learner.lora.rank", whole, 16, _lora),
    part("ds.lora.alpha", "learner.lora.alpha", number, 32),
    part("ds.lora.target_modules", "learner.lora.targets", texts, "q_proj"),
    unless("ds.lora.dropout", (0, 0.0), "adapters have no dropout: engine and learner must agree", 0.05),
    unless("ds.load_in_4bit", (False,), "models are not quantised", True),
    unless("ds.use_liger_kernel", (False,), "not needed: losses never hold all logits at once", True),
    unless("ds.tensor_parallel_size", (1,), "the learner shards with ZeRO and Ulysses", 2),
    ignored("ds.**", _DS, 1),
    unless("train.enable_ema", (False,), "examples/own_loop/weight_averaging.py averages weights", True),
    only_with("train.enable_ema", "train.ema_beta", "examples/own_loop/weight_averaging.py averages weights", 0.992),
    # Placement
    part("actor.num_nodes", "placement.learners", count, 1),
    part("actor.num_gpus_per_node", "placement.learners", count, 8),
    part("train.colocate_all", "placement.colocate", flag, True),
    ignored("train.colocate_*", _PLACED, True),
    ignored("ref.*", "the reference model runs with the learner", 8),
    ignored("reward.num_*", "a reward model has its own actors: see its option gpus", 8),
    ignored("reward.offload", "a reward model has its own actors", True),
    ignored("critic.num_*", "the critic runs with the actor", 8),
    changed("train.async_enable", "rollout.max_staleness", flag, True, "rollouts run ahead",
            switched({"rollout.max_staleness": 1}, "the next batch is sampled while the learner trains on this one")),
    part("train.async_queue_size", "rollout.max_staleness", count, 1, "set rollout.max_staleness for more"),
    changed("train.partial_rollout_enable", "rollout.partial_rollouts", flag, True, "on whenever rollouts run ahead",
            lambda v, given: {"rollout.in_flight": v} if not v else {}),
    same("train.seed", "seed", whole, 42),
    ignored("train.full_determinism_enable", "with one engine, runs with the same seed sample the same", True),
    # Evaluation, checkpoints, trackers
    same("eval.steps", "eval.every", interval, 10),
    same("eval.n_samples_per_prompt", "eval.samples", count, 4),
    same("eval.temperature", "eval.temperature eval.greedy", number, 0.6, lambda v, _: evaluated("temperature", v, v)),
    same("ckpt.save_steps", "checkpoint.every", interval, 20),
    same("ckpt.max_num", "checkpoint.keep", count, 3),
    changed("ckpt.output_dir", "out", text, "ckpt/final", "a run's folder is out/name",
            lambda v, given: KeyOutcome.ignored("the model is exported to the run's folder, out/name")),
    changed("ckpt.path", "out", text, "ckpt", "a run's folder is out/name",
            lambda v, given: KeyOutcome.ignored("checkpoints are written to the run's folder, out/name")),
    changed("ckpt.save_hf", "checkpoint.export", flag, True, "a model export with every checkpoint",
            switched({"checkpoint.export": "every"}, "a model export with every checkpoint")),
    ignored("ckpt.load_enable", "rlsdk resumes only on request: rlsdk train CONFIG --resume", True),
    unless("ckpt.best_metric_key", ("none",), "compare checkpoints: rlsdk train --mode bench", "x"),
    ignored("ckpt.**", "checkpoint.keep limits their number", 1),
    ignored("critic.save_value_network", "checkpoints contain actor and critic", True),
    changed("logger.wandb.key", "trackers", text, "True", "log in with `wandb login`",
            lambda v, given: {"trackers[]": _wandb(given)}),
    part("logger.wandb.project", "trackers", text, "my-project"),
    part("logger.wandb.org", "trackers", text, "org"),
    missing("logger.wandb.group", "WANDB_RUN_GROUP in the environment", "group"),
    same("logger.wandb.run_name", "name", text, "my-run"),
    changed("logger.tensorboard_dir", "trackers", text, "tb", "event files are written to the run's folder",
            lambda v, given: {"trackers[]": "tensorboard"}),
    ignored("logger.logging_steps", "every step is logged", 1),
    ignored("local_rank", "ranks are placed by Ray", -1),
    ignored("perf", "metrics.jsonl has the time of each stage", True),
    missing("use_ms", "give a folder or a Hugging Face hub name", True),
    # Arguments of `ray job submit`, if given with the command
    ignored("address", "placement.ray names a running cluster", "x"),
    ignored("runtime_env_json", "rlsdk passes the working folder to Ray", "x"),
)  # fmt: skip

RENAMED: Mapping[str, str] = {
    **{f"{role}_num_{kind}": f"{role}.num_{kind}"
       for role in ("actor", "critic", "ref", "reward") for kind in ("nodes", "gpus_per_node")},
    "pretrain": "actor.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "agent_func_path": "train.agent_func_path",
    "colocate_all_models": "train.colocate_all",
    "colocate_actor_ref": "train.colocate_actor_ref",
    "colocate_critic_reward": "train.colocate_critic_reward",
    "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "vllm_sync_backend": "vllm.sync_backend",
    "vllm_sync_with_ray": "vllm.sync_with_ray",
    "vllm_enable_sleep": "vllm.enable_sleep",
    "enable_prefix_caching": "vllm.enable_prefix_caching",
    "enforce_eager": "vllm.enforce_eager",
    "async_train": "train.async_enable",
    "async_queue_size": "train.async_queue_size",
    "partial_rollout": "train.partial_rollout_enable",
    "eval_steps": "eval.steps",
    "save_steps": "ckpt.save_steps",
    "logging_steps": "logger.logging_steps",
    "ckpt_path": "ckpt.path",
    "save_path": "ckpt.output_dir",
    "save_hf_ckpt": "ckpt.save_hf",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "max_ckpt_num": "ckpt.max_num",
    "max_ckpt_mem": "ckpt.max_mem",
    "load_checkpoint": "ckpt.load_enable",
    "use_ds_universal_ckpt": "ds.use_universal_ckpt",
    "zero_stage": "ds.zero_stage",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "actor.gradient_checkpointing_reentrant",
    "deepcompile": "ds.deepcompile",
    "enable_ema": "train.enable_ema",
    "ema_beta": "train.ema_beta",
    "zpg": "ds.zpg",
    "adam_offload": "ds.adam_offload",
    "use_liger_kernel": "ds.use_liger_kernel",
    "grad_accum_dtype": "ds.grad_accum_dtype",
    "overlap_comm": "ds.overlap_comm",
    "disable_fast_tokenizer": "data.disable_fast_tokenizer",
    "deepspeed_enable_sleep": "ds.enable_sleep",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size",
    "packing_samples": "ds.packing_samples",
    "load_in_4bit": "ds.load_in_4bit",
    "lora_rank": "ds.lora.rank",
    "lora_alpha": "ds.lora.alpha",
    "target_modules": "ds.lora.target_modules",
    "lora_dropout": "ds.lora.dropout",
    "num_episodes": "train.num_episodes",
    "rollout_batch_size": "rollout.batch_size",
    "vllm_generate_batch_size": "rollout.vllm_generate_batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "max_epochs": "train.max_epochs",
    "prompt_max_len": "data.prompt_max_len",
    "generate_max_len": "rollout.max_new_tokens",
    "max_len": "data.max_len",
    "max_samples": "data.max_samples",
    "max_norm": "actor.max_norm",
    "l2": "actor.adam.weight_decay",
    "eps_clip": "actor.eps_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high",
    "dual_clip": "actor.dual_clip",
    "policy_loss_type": "actor.policy_loss_type",
    "value_clip": "critic.value_clip",
    "lambd": "algo.advantage.lambd",
    "gamma": "algo.advantage.gamma",
    "micro_train_batch_size": "train.micro_batch_size",
    "train_batch_size": "train.batch_size",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
    "normalize_reward": "reward.normalize_enable",
    "top_p": "rollout.top_p",
    "temperature": "rollout.temperature",
    "seed": "train.seed",
    "full_determinism": "train.full_determinism_enable",
    "freezing_actor_steps": "critic.freezing_steps",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "save_value_network": "critic.save_value_network",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "lr_warmup_ratio": "actor.lr_warmup_ratio",
    "lr_scheduler": "actor.lr_scheduler",
    "kl_target": "algo.kl.target",
    "kl_horizon": "algo.kl.horizon",
    "init_kl_coef": "algo.kl.init_coef",
    "kl_estimator": "algo.kl.estimator",
    "use_kl_loss": "algo.kl.use_loss",
    "aux_loss_coef": "actor.aux_loss_coef",
    "entropy_loss_coef": "actor.entropy_coef",
    "adam_betas": "actor.adam.betas",
    "reward_clip_range": "reward.clip_range",
    "advantage_estimator": "algo.advantage.estimator",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "overlong_buffer_len": "reward.overlong_buffer_len",
    "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "ring_attn_size": "ds.ring_attn_size",
    "ring_head_stride": "ds.ring_attn_head_stride",
    "value_head_prefix": "ds.value_head_prefix",
    "ref_reward_offload": "ref.offload",
    "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "prompt_split": "data.prompt_split",
    "eval_dataset": "eval.dataset",
    "eval_split": "eval.split",
    "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "input_key": "data.input_key",
    "label_key": "data.label_key",
    "input_template": "data.input_template",
    "apply_chat_template": "data.apply_chat_template",
    "use_wandb": "logger.wandb.key",
    "wandb_org": "logger.wandb.org",
    "wandb_group": "logger.wandb.group",
    "wandb_project": "logger.wandb.project",
    "wandb_run_name": "logger.wandb.run_name",
    "use_tensorboard": "logger.tensorboard_dir",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "enable_vllm_is_correction": "algo.advantage.is_correction_enable",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
}  # fmt: skip
"""Flags of versions up to 0.9 -> today's."""

DEFAULTS: Mapping[str, Any] = {
    "algo.advantage.estimator": "gae",
    "actor.policy_loss_type": "ppo",
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "actor.adam.lr": 1e-6,
    "critic.adam.lr": 9e-6,
    "actor.adam.betas": [0.9, 0.95],
    "actor.lr_scheduler": "cosine_with_min_lr",
    "actor.min_lr_ratio": 0.1,
    "actor.lr_warmup_ratio": 0.03,
    "rollout.batch_size": 1024,
    "rollout.n_samples_per_prompt": 1,
    "train.batch_size": 128,
    "train.micro_batch_size": 1,
    "train.num_episodes": 1,
    "train.max_epochs": 1,
    "train.seed": 42,
    "eval.n_samples_per_prompt": 4,
    "eval.temperature": 0.6,
    "ckpt.max_num": 3,
    "ds.zero_stage": 2,
    "ds.param_dtype": "bf16",
    "logger.wandb.run_name": "openrlhf-run",
}

FRAMEWORK = Framework(
    name="openrlhf",
    title="OpenRLHF",
    rows=ROWS,
    defaults=DEFAULTS,
    finish=_finish,
    renamed=RENAMED,
    others={
        "openrlhf.cli.train_sft": "algorithm: sft",
        "openrlhf.cli.train_dpo": "algorithm: dpo",
        "openrlhf.cli.train_kto": "algorithm: kto",
        "openrlhf.cli.train_rm": "reward: reward_model, for a model trained elsewhere",
    },
    entries=("openrlhf.cli.train_ppo_ray", "openrlhf.cli.train_ppo", "train_ppo_ray.py"),
)
