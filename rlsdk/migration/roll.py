"""Keys of ROLL's pipelines: RLVR (rewards by domain) and agentic (environments)."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from rlsdk.migration.parts import (
    ATTENTION,
    DECAY_SHAPE,
    DTYPE,
    EVALUATION_NOTE,
    KEEP_ALL,
    KL,
    LEARNER_NOTE,
    SCHEDULE,
    ZOO,
    critic_warmup,
    dataset,
    eval_sampling,
    evaluated,
    layout,
    minibatches,
    no_cut,
    of_critic,
    of_vllm,
    optimizer,
    routing_replay,
    share_of_steps,
    switched,
    trackers_with,
    transformers_schedule,
    weight_decay,
)
from rlsdk.migration.roll_domains import (
    convert_filter,
    convert_judge_key,
    convert_share,
    convert_sources,
    convert_worker,
    files_of_domains,
    filters_of_domains,
    reward_of,
)
from rlsdk.migration.rows import (
    NOTES,
    Framework,
    Give,
    Given,
    KeyOutcome,
    KeyRule,
    UnfitError,
    changed,
    choice,
    count,
    flag,
    ignored,
    interval,
    missing,
    number,
    only_with,
    part,
    same,
    text,
    texts,
    unless,
    whole,
)

TRAIN, INFER, VALIDATION = "actor_train", "actor_infer", "validation.generating_args"
ENVIRONMENTS = {"sokoban": "gridworlds/sokoban", "frozen_lake": "gridworlds/frozen_lake"}
"""`env_type` -> an environment of the plugin rlsdk-gridworlds, whose options have ROLL's names."""
BESIDE = ("user_prompt_format", "added_text", "max_tokens_per_step")
"""Keys beside `env_config` that are options of the environment here."""
ZERO = {"deepspeed_zero": 1, "deepspeed_zero2": 2, "deepspeed_zero3": 3, "deepspeed_zero3_cpuoffload": 3}
_GRID_NOTE = "an option of the environment, under the same name (pip install rlsdk-gridworlds)"


def devices(value: Any) -> int:
    """The number of GPUs of a device mapping such as `list(range(0,8))`, which is not evaluated."""
    if isinstance(value, list):
        return len(value)
    try:
        node = ast.parse(str(value), mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise UnfitError(f"expected list(range(first, last)), got {value!r}") from error
    return _devices(node, value)


def _devices(node: ast.expr, value: Any) -> int:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _devices(node.left, value) + _devices(node.right, value)
    if isinstance(node, ast.List):
        return len(node.elts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        if node.func.id == "list":
            return _devices(node.args[0], value)
        bounds = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, int)]
        if node.func.id == "range" and len(bounds) == len(node.args) <= 3 and 0 not in bounds[2:]:
            return len(range(*bounds))
    raise UnfitError(f"expected list(range(first, last)), got {value!r}")


def _agentic(given: Given) -> bool:
    return bool(given.section("custom_envs")) or "train_env_manager" in given.tree


def _group(given: Given) -> int:
    if _agentic(given):
        return given.whole("train_env_manager.group_size")
    return max(
        given.whole("num_return_sequences_in_group"), given.whole(f"{INFER}.generating_args.num_return_sequences")
    )


def _gpus(given: Given) -> int:
    found: int | None = given.read(f"{TRAIN}.device_mapping", devices)
    return found or given.whole("num_gpus_per_node") * given.whole("num_nodes")


def _updates(given: Given) -> int:
    arguments = f"{TRAIN}.training_args"
    rows = given.whole(f"{arguments}.per_device_train_batch_size") * given.whole(
        f"{arguments}.gradient_accumulation_steps"
    )
    rollouts = given.whole("rollout_batch_size")
    if not _agentic(given):  # an agentic pipeline counts trajectories, RLVR counts prompts
        rollouts *= _group(given)
    return minibatches(rollouts, rows * _replicas(given))


def _replicas(given: Given) -> int:
    """Ranks with batches of their own; others split a model or a sequence."""
    config = f"{TRAIN}.strategy_args.strategy_config"
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    shared = math.prod(given.whole(f"{config}.{size}") for size in sizes)
    return max(1, _gpus(given) // max(1, shared * given.whole(f"{TRAIN}.model_args.ulysses_size")))


def _length(given: Given) -> int:
    length = given.whole("sequence_length", 0)
    return length or given.whole("prompt_length") + given.whole("response_length", 1024)


def _response(given: Given) -> int:
    """Maximum tokens of an answer, or of a turn in an environment."""
    if _agentic(given):
        return max(1, min(given.whole(f"{INFER}.generating_args.max_new_tokens", 8192), _length(given) - 1))
    return max(1, _length(given) - given.whole("prompt_length"))


def _batch(value: int, given: Given) -> KeyOutcome:
    if not _agentic(given):
        return KeyOutcome({"batch_size": value})
    return KeyOutcome(
        {"batch_size": max(1, value // _group(given))},
        "ROLL counts trajectories; rlsdk counts tasks, each with group_size rollouts",
    )


def _estimator(value: Any, given: Given) -> KeyOutcome:
    """The advantage: ROLL normalises rewards first, then takes discounted sums of what is left."""
    grouping = str(given.get("reward_normalization.grouping", ""))
    method = str(given.get("reward_normalization.method", ""))
    mean, std = _norm_type("mean", given), _norm_type("std", given)
    if mean:
        grouping, method = mean, method or ("mean_std" if std else "mean")
    grouped = method != "identity" and (grouping == "group" or "traj_group_id" in grouping)
    shaping: list[dict[str, Any]] = []
    note = ""
    gae = {
        "use": "gae",
        "whiten": False,
        **{k: given.read(j, number, 1.0) for k, j in (("gamma", "gamma"), ("lam", "lambd"))},
    }
    gigpo = {
        "use": "gigpo",
        "omega": given.read("step_reward_weight", number, 1.0),
        "gamma": given.read("step_reward_gamma", number, 0.95),
    }
    if value == "grpo" or (value in ("reinforce", "step_reinforce") and grouped):
        # RLVR's grpo always divides by the deviation of the group, unless an older version was told to shift only.
        always = value == "grpo" and not _agentic(given) and not given.read("reward_shift", flag, False)
        spread = always or method in ("mean_std", "asym_clip") or (value == "grpo" and not method)
        over = {"std_over": "batch"} if spread and std == "batch" and not always else {}
        algorithm, advantage = "grpo", {"use": "grpo", "std_normalize": spread, **over}
        note = "in rlsdk, the advantage includes the normalisation of rewards by group"
    elif value == "gae":
        algorithm, advantage = "ppo", gae
    elif value == "gigpo":
        algorithm, advantage = "gigpo", gigpo
    elif value == "agentic_reinforce" or gae["gamma"] == 1.0:  # undiscounted, tokens earn what turns do
        algorithm, advantage = "reinforce_plus_plus", {"use": "segment_returns", "gamma": gae["gamma"]}
    else:
        algorithm, advantage = "reinforce_plus_plus", {"use": "reinforce_plus_plus", "gamma": gae["gamma"]}
        note = "rlsdk always whitens returns over the batch"
    by = {"batch": "batch", "running": "batch", "tags": "source"}.get(grouping)
    if by and method in ("mean", "mean_std", "asym_clip") and algorithm != "grpo":
        shaping.append({"use": "reward_norm", "by": by, "method": "running" if grouping == "running" else method})
    bound = given.read("reward_clip", number)
    if bound:
        shaping.append({"use": "reward_clip", "low": -bound, "high": bound})
    values: dict[str, Any] = {
        "algorithm.use": algorithm,
        "algorithm.advantage": advantage,
        "algorithm.critic": value == "gae",
        "algorithm.value_clip": given.read("value_clip", number) if value == "gae" else None,
        "algorithm.shaping": [*shaping, *_kl_in_reward(given)],
    }
    return KeyOutcome(values, note)


def _norm_type(of: str, given: Given) -> str:
    """Return what rewards are normalised over (`group`, `batch` or `running`), by its mean or by its deviation."""
    found = given.get(f"norm_{of}_type") or given.get(f"reward_normalization.norm_{of}_type")
    only_the_other = given.read("reward_scale" if of == "mean" else "reward_shift", flag, False)
    return str(found or ("" if only_the_other else given.get("reward_norm", "")))


def _kl_in_reward(given: Given) -> list[dict[str, Any]]:
    coefficient = given.read("init_kl_coef", number, 0.2)
    if not given.read("add_token_level_kl", flag, False) or coefficient == 0:
        return []
    found = {"use": "kl_penalty", "coef": coefficient, "estimator": given.read("kl_penalty", KL, "k1")}
    target = given.read("target_kl", number)
    return [{**found, "target": target, "horizon": given.whole("kl_horizon", 10000)} if target else found]


def _clip(value: float, given: Given) -> KeyOutcome:
    if str(given.get(f"{TRAIN}.pg_variant", "ppo")) != "ppo":
        return KeyOutcome.ignored(f"{TRAIN}.pg_variant takes precedence")
    return KeyOutcome({"algorithm.policy_loss": _ppo(given)})


def _ppo(given: Given) -> dict[str, Any]:
    clip = given.read("pg_clip", number, 0.2)
    bounds = {"clip_low": clip, "clip_high": clip}
    if given.read("use_pg_clip_range", flag, False):
        bounds = {f"clip_{end}": given.read(f"pg_clip_{end}", number, clip) for end in ("low", "high")}
    cap = 1 + 2 * clip if given.read("dual_clip_loss", flag, False) else None
    name = "gspo" if str(given.get("importance_sampling")) == "seq" else "ppo"
    return {"use": name, **bounds, "dual_clip": cap}


def _variant(value: str, given: Given) -> KeyOutcome:
    low, high = (given.read(f"{TRAIN}.cispo_epsilon_{end}", number, 0.1) for end in ("low", "high"))
    options = {
        "ppo": _ppo(given),
        "vanilla": {"use": "reinforce"},
        "tis": {"use": "tis", "cap": given.read(f"{TRAIN}.tis_upper_bound", number, 1.0)},
        "topr": {"use": "topr", "cap": 1.0},
        "cispo": {"use": "cispo", "clip_low": low, "clip_high": high},
        "kimi15": {"use": "zoo/kimi", "tau": given.read(f"{TRAIN}.kimi15_tau", number, 0.1), "level": "token"},
    }
    note = {"topr": "ROLL truncates the ratio of each token, rlsdk that of the whole answer", "kimi15": ZOO}.get(
        value, ""
    )
    return KeyOutcome({"algorithm.policy_loss": options[value]}, note)


def _difficulty(value: bool, given: Given) -> KeyOutcome:
    if not value:
        return KeyOutcome.ignored("off")
    bounds = {"low": given.read("difficulty_low_threshold", number, 0.0),
              "high": given.read("difficulty_high_threshold", number, 1.0)}  # fmt: skip
    note = "drops the group, by the share of rollouts that pass; ROLL masks it, by its mean reward"
    return KeyOutcome({"algorithm.filters[]": {"use": "pass_rate", **bounds}}, note)


def _bounded_rewards(_: Any, given: Given) -> KeyOutcome:
    estimator = _estimator(str(given.get("adv_estimator")), given).values["algorithm.use"]
    grouped = estimator == "grpo" and "ROLL bounds what is left after rewards are compared within their group"
    return KeyOutcome({}, grouped or "")


CORRECTION = "train_infer_correction"
MASKS = {"token": "token_mask", "sequence": "sequence_mask", "geometric": "geometric"}
"""Level of a filter of tokens by their ratio -> rlsdk's correction."""


def _filters_of_ratios(given: Given) -> list[Mapping[str, Any]]:
    listed = given.tree.get(CORRECTION)
    listed = listed.get("filters") if isinstance(listed, Mapping) else None
    found = [each for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else []
    return [each for each in found if str(each.get("enabled", False)).lower() in ("true", "1")]


def _mismatch(_: Any, given: Given) -> KeyOutcome:
    """Convert ROLL's weights and masks for the mismatch of engine and learner."""
    weighted = given.read(f"{CORRECTION}.is_weight.enabled", flag, False)
    level = str(given.get(f"{CORRECTION}.is_weight.weight_type", "token"))
    cap = given.read(f"{CORRECTION}.is_weight.upper_bound", number, 1.2)
    masks = [_filter_of_ratios(each) for each in _filters_of_ratios(given)]
    if not weighted and not masks:
        return KeyOutcome.ignored("off")
    if weighted and level not in ("token", "sequence"):
        raise UnfitError(f"no correction weighs by the ratio of a {level}; see rlsdk plugins correction")
    single = len(masks) == 1 and masks[0]["use"] == MASKS.get(level) and cap >= masks[0]["high"]
    if weighted and single:
        return KeyOutcome({"algorithm.correction": {**masks[0], "use": "mis", "level": level}})
    found = [*([{"use": "tis", "cap": cap, "level": level}] if weighted else []), *masks]
    return KeyOutcome({"algorithm.correction": found if len(found) > 1 else found[0]})


def _filter_of_ratios(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(given.get("agg_type", "token"))
    if flag(given.get("diff_enabled", False)) or not flag(given.get("ratio_enabled", True)):
        raise UnfitError("no correction masks by differences of probabilities; see rlsdk plugins correction")
    if kind not in MASKS:
        raise UnfitError(f"no correction masks by the ratio of a {kind}; see rlsdk plugins correction")
    low, high = number(given.get("ratio_low", 0.8)), number(given.get("ratio_high", 1.2))
    return {"use": MASKS[kind], "low": low, "high": high}


def _separated(value: Any) -> list[str]:
    """Read names separated by commas."""
    return [name.strip() for each in texts(value) for name in each.split(",")]


def _kl_loss(value: bool, given: Given) -> dict[str, Any]:
    if not value:
        return {"algorithm.kl_coef": 0.0}
    return {"algorithm.kl_coef": given.read("kl_loss_coef", number, 0.0), "algorithm.kl": "low_var"}


def _warmup_ratio(value: float, given: Given) -> KeyOutcome:
    if given.whole(f"{TRAIN}.training_args.warmup_steps", 0):
        return KeyOutcome.ignored("warmup_steps takes precedence")
    return share_of_steps(given.whole("max_steps", 0) * _updates(given) or None, value)


def _strategy(role: str) -> KeyRule:
    key = f"{role}.strategy_args.strategy_name"
    if role == INFER:
        known = {"vllm": "vllm", "hf_infer": "transformers", "sglang": "vllm"}

        def engine(value: Any, _: Given) -> KeyOutcome:
            if str(value) not in known:
                raise UnfitError(f"there is no engine {value!r}; available are vllm and transformers")
            lacking = value == "sglang"
            note = "there is no SGLang engine; vLLM is used instead" if lacking else ""
            return KeyOutcome({"engine.use": known[str(value)]}, note, "missing" if lacking else "mapped")

        return same(key, "engine.use", text, "vllm", engine)

    def learner(value: Any, given: Given) -> KeyOutcome:
        if str(value).startswith("deepspeed"):
            config = f"{role}.strategy_args.strategy_config"
            stage = given.section(f"{config}.zero_optimization").get("stage")
            named = next((each for name, each in ZERO.items() if str(given.get(config)) == f"${{{name}}}"), None)
            found = stage if isinstance(stage, int) else named
            return KeyOutcome({"learner.zero_stage": found} if found is not None else {})
        return KeyOutcome({"learner.zero_stage": 1}, f"{LEARNER_NOTE}, without tensor or pipeline parallelism")

    return changed(key, "learner.zero_stage", text, "megatron_train", LEARNER_NOTE, learner)


def _lora(value: int, given: Given) -> dict[str, Any]:
    alpha = given.read(f"{TRAIN}.model_args.lora_alpha", number, 2.0 * value)
    return {"learner.lora": {"rank": value, "alpha": alpha}} if value else {}


def _environments(given: Given) -> dict[str, dict[str, Any]]:
    """Tag -> environment with its options."""
    found: dict[str, dict[str, Any]] = {}
    for tag, entry in given.section("custom_envs").items():
        if not isinstance(entry, Mapping):
            continue
        options = dict(given.section(f"custom_envs.{tag}.env_config"))
        options |= {key: entry[key] for key in BESIDE if entry.get(key) is not None}
        if isinstance(room := options.get("dim_room"), list) and len(room) == 2:  # the name of the newer versions
            del options["dim_room"]
            options |= {"dim_x": room[0], "dim_y": room[1]}
        penalty = given.read("train_env_manager.format_penalty", number)
        options = {"format_penalty": penalty, **options} if penalty is not None else options
        if "<think>" in str(options.get("user_prompt_format", "")):
            options.setdefault("think", True)
        name = str(entry.get("env_type", ""))
        found[tag] = {"use": ENVIRONMENTS.get(name, name), **options}
    return found


def _kind(value: str, given: Given) -> KeyOutcome:
    if value in ENVIRONMENTS:
        return KeyOutcome({}, "environments of rlsdk-gridworlds")
    if value == "gymnasium":
        return KeyOutcome({}, "an environment of rlsdk")
    single = "; those with one question each are tasks, with a reward such as math" if "math" in value else ""
    return KeyOutcome.missing(f"write this environment (howto/environment.md){single}")


def _played(given: Given, manager: str, split: str, environments: Mapping[str, Any]) -> dict[str, Any]:
    """Groups of environments as a source of tasks."""
    tags = [tag for tag in given.read(f"{manager}.tags", texts, [*environments]) if tag in environments]
    groups = given.whole(f"{manager}.num_env_groups", 128)
    found = {"use": "environments", "split": split, "groups": groups, "tags": tags, "environments": environments}
    shares = given.read(f"{manager}.num_groups_partition", lambda value: [whole(each) for each in texts(value)], [])
    return {**found, "partition": shares} if len(shares) == len(tags) and sum(shares) == groups else found


def _workers(given: Given, manager: str) -> dict[str, int]:
    total = given.whole(f"{manager}.num_env_groups", 128) * given.whole(f"{manager}.group_size")
    each = given.whole(f"{manager}.max_env_num_per_worker", 0)
    each = each if each > 0 else total
    return {"workers": math.ceil(total / each), "per_worker": each, "threads": min(each, 64)}


def _finish_agentic(given: Given) -> dict[str, Any]:
    environments = _environments(given)
    turns = given.whole("max_actions_per_traj", 0)
    steps = [whole(each["max_steps"]) for each in environments.values() if "max_steps" in each]
    found: dict[str, Any] = {
        "tasks.train": _played(given, "train_env_manager", "train", environments),
        "workflow": {"use": "environment", "max_turns": turns or max(steps, default=20)},
        "environments": _workers(given, "train_env_manager"),
        "group_size": _group(given),
        "sampling.max_tokens": _response(given),
    }
    if "val_env_manager" in given.tree:
        found["tasks.eval"] = _played(given, "val_env_manager", "test", environments)
        found["eval.environments"] = _workers(given, "val_env_manager")
        found["eval.samples"] = given.whole("val_env_manager.group_size")
    return found


def _evaluated_answers(given: Given) -> int:
    """Return the maximum tokens of an answer in evaluations; 0 if it is that of the training."""
    whole_length = given.whole("val_sequence_length", 0)
    answers = whole_length - given.whole("val_prompt_length", given.whole("prompt_length", 1024))
    return answers if whole_length and answers > 0 and answers != _response(given) else 0


def _validated(_: int, given: Given) -> Mapping[str, Any] | KeyOutcome:
    return {} if not _agentic(given) and _evaluated_answers(given) else KeyOutcome.ignored("as in training")


def _finish_rlvr(given: Given) -> dict[str, Any]:
    found: dict[str, Any] = {"group_size": _group(given), "max_prompt_tokens": given.whole("prompt_length", 1024)}
    found["sampling.max_tokens"] = _response(given)
    data = f"{TRAIN}.data_args"  # its columns are read in both files
    prompt = given.get(f"{data}.messages") or given.get(f"{data}.prompt")
    names = {"prompt": prompt, "answer": "ground_truth", "source": given.get(f"{data}.tag", "tag")}
    columns = {name: str(column) for name, column in names.items() if column}
    for key, to in ((data, "tasks.train"), ("validation.data_args", "tasks.eval")):
        source = given.read(f"{key}.file_name", partial(dataset, split="train", columns=columns))
        found |= {to: source} if source else {}
    if files := files_of_domains(given):
        shares = given.section(f"{data}.domain_interleave_probs")
        found["tasks.train"] = [
            {**dataset(paths, "train", columns), "source": domain, "weight": number(shares[domain])}
            for domain, paths in files.items()
        ]
    if filters := filters_of_domains(given):
        found |= {"algorithm.filters[]": filters[0], "rollout.dynamic_sampling": True}
    if _distills(given):
        found |= _distillation(given)
    if given.section(VALIDATION):
        temperature = given.read(f"{VALIDATION}.temperature", number, 0.95)
        for name, usual in (("temperature", 0.95), ("top_p", 0.7), ("top_k", 50)):  # ROLL's defaults
            if given.flat.get(f"{VALIDATION}.{name}") is None:
                found |= evaluated(name, usual, temperature).values
    if answers := _evaluated_answers(given):
        found |= {
            "eval.max_tokens": answers,
            "model.max_length": max(_length(given), given.whole("val_sequence_length")),
        }
    rewards = []
    for domain in given.section("rewards"):
        if reward := reward_of(domain, given):
            tags = [*([domain] if domain in files else []), *given.read(f"rewards.{domain}.tag_included", texts, [])]
            rewards.append({**reward, **({"sources": tags} if tags else {})})
    return {**found, "reward": rewards} if rewards else found


def _distills(given: Given) -> bool:
    """True for the pipeline of on-policy distillation, in which a teacher takes the place of rewards."""
    return "student_train" in given.tree


def _distillation(given: Given) -> dict[str, Any]:
    clip = given.read("advantage_clip", number)
    coefficient = given.read("teacher.opd_kl_coef", number, 1.0)
    return {
        "algorithm.use": "opd",
        "algorithm.advantage": {"use": "on_policy_distill", "coef": coefficient},
        "algorithm.critic": False,
        "algorithm.shaping": [],
        "algorithm.clip_advantages": clip,
    }


def _of_rewards(give: Give) -> Give:
    """Return a converter that has nothing to do if a teacher takes the place of rewards."""

    def given_rewards(value: Any, given: Given) -> Mapping[str, Any] | KeyOutcome:
        if _distills(given):
            return KeyOutcome.ignored("a teacher takes the place of rewards")
        return give(value, given)

    return given_rewards


def _finish(given: Given) -> dict[str, Any]:
    found = _finish_agentic(given) if _agentic(given) else _finish_rlvr(given)
    per_engine = given.whole(f"{INFER}.strategy_args.strategy_config.tensor_parallel_size")
    train, infer = _gpus(given), given.read(f"{INFER}.device_mapping", devices) or _gpus(given)
    found |= {**layout(infer, per_engine), "placement.learners": train}
    if not given.tree.keys() & {"rewards", "custom_envs", "train_env_manager", "adv_estimator"}:
        found[NOTES] = ("there are neither rewards nor environments; ROLL's pipelines for DPO, supervised fine-tuning and "
                        "distillation are not converted: set algorithm to dpo, sft or opd",)  # fmt: skip
    return found


def _dynamic(given: Given) -> bool:
    """True if micro-batches are measured in tokens."""
    return bool(given.read(f"{TRAIN}.use_dynamic_batching_in_train", flag, False))


def _packed(given: Given) -> int:
    """Return the tokens of a micro-batch of packed sequences; 0 if they are not packed by tokens."""
    packs = given.read(f"{TRAIN}.use_sequence_packing", flag, False)
    return given.whole(f"{TRAIN}.sequence_packing_args.max_packed_sequence_length_train", 0) if packs else 0


def _variables(given: Given) -> dict[str, Any]:
    """Return Ray's runtime environment with the variables that actors get."""
    named = given.section("system_envs").items()
    return {"env_vars": {name: str(value) for name, value in named if name != "USE_MODELSCOPE"}}


_VARIABLE_NOTE = "for the run's actors; workflows and rewards have the environment of rlsdk train"
_ROLE = "roles are placed and sharded together: see placement"
_ENV = "an option of the environment"
_HERE = ("rlsdk's engines and learner have no such setting", 1)

ROWS = (
    # Run
    same("exp_name", "name", text, "my-run"),
    same("seed", "seed", whole, 42),
    changed("output_dir", "out", text, "./output", "a run's folder is out/name"),
    ignored("base_dir", "a run's folder is out/name", "x"),
    ignored("logging_dir", "logs are written to the run's folder", "x"),
    ignored("render_save_dir", "rollouts are saved as text: see `rlsdk rollouts RUN`", "x"),
    ignored("rollout_dump_dir", "rollouts are saved: see `rlsdk rollouts RUN`", "x"),
    missing("system_envs.USE_MODELSCOPE", "give a folder or a Hugging Face hub name", "1"),
    changed("system_envs.*", "placement.runtime_env", text, "1", _VARIABLE_NOTE,
            lambda v, given: {"placement.runtime_env": _variables(given)}),
    same("track_with", "trackers", text, "tensorboard", trackers_with("tracker_kwargs.project")),
    part("tracker_kwargs.project", "trackers", text, "my-project"),
    ignored("tracker_kwargs.log_dir", "event files are written to the run's folder", "x"),
    ignored("tracker_kwargs.name", "the run's name", "x"),
    ignored("tracker_kwargs.api_key", "log in with `wandb login`", "x"),
    missing("tracker_kwargs.tags", "WANDB_TAGS in the environment", ["x"]),
    missing("tracker_kwargs.notes", "WANDB_NOTES in the environment", "x"),
    missing("tracker_kwargs.**", "see rlsdk plugins tracker", "x"),
    ignored("checkpoint_config.type", "checkpoints are written to the run's folder; out may be an fsspec URL", "file_system"),
    ignored("checkpoint_config.output_dir", "checkpoints are written to the run's folder; out may be an fsspec URL", "x"),
    missing("checkpoint_config.**", "checkpoints are written to the run's folder; out may be an fsspec URL", 1),
    same("max_steps", "steps", count, 100),
    same("save_steps", "checkpoint.every", interval, 100),
    same("max_ckpt_to_keep", "checkpoint.keep", whole, 2, lambda v, given: {"checkpoint.keep": v if v > 0 else KEEP_ALL}),
    ignored("logging_steps", "every step is logged"),
    same("eval_steps", "eval.every", interval, 10),
    ignored("resume_from_checkpoint", "rlsdk resumes only on request: rlsdk train CONFIG --resume", "auto"),
    part("num_gpus_per_node", "placement.learners", count, 8, "unless a device_mapping is set"),
    part("num_nodes", "placement.learners", count, 1, "unless a device_mapping is set"),
    ignored("rpc_timeout", "the watchdog ends a run with silent processes", 3600),
    unless("model_download_type", ("HUGGINGFACE_HUB",), "give a folder or a Hugging Face hub name", "MODELSCOPE"),
    ignored("model_update_buffer_size_mb", "weights are sent from ranks to engines directly", 1024),
    ignored("profiler_*", "metrics.jsonl has the time of each stage", True),
    ignored("*_profiler_dir", "metrics.jsonl has the time of each stage", "x"),
    ignored("length_profiler_dir", "metrics.jsonl has the time of each stage", "x"),
    ignored("report_length_and_rewards", "metrics.jsonl has lengths and rewards", True),
    only_with("rollout_mock.enable", "rollout_mock.**", "rlsdk simulate and the scripted policy of rlsdk.testing", True),
    ignored("defaults", "Hydra's list of files; DeepSpeed settings are learner options", []),
    ignored("hydra.**", "the location of Hydra's logs", "."),
    ignored("deepspeed_*.**", "settings of DeepSpeed, of which strategy_config names those in use", 1),
    ignored("is_offload_*", "engines that share GPUs sleep while the learner works", True),
    ignored("local_rank", "ranks are placed by Ray", -1),
    # Lengths and sizes
    changed("rollout_batch_size", "batch_size", count, 128, "an agentic pipeline counts trajectories", _batch),
    ignored("val_batch_size", "an evaluation runs all tasks, as many at once as the engines take", 1024),
    same("num_return_sequences_in_group", "group_size", count, 8),
    same("sequence_length", "model.max_length", count, 2048),
    same("prompt_length", "max_prompt_tokens", count, 512),
    changed("response_length", "model.max_length sampling.max_tokens", count, 1024,
            "model.max_length counts prompt and response together",
            lambda v, given: {} if given.get("sequence_length") else {"model.max_length": _length(given)}),
    ignored("val_prompt_length", "evaluations drop no prompt", 512),
    changed("val_sequence_length", "eval.max_tokens model.max_length", count, 4096,
            "less val_prompt_length: rlsdk limits the answers, not the whole sequences", _validated),
    same("ppo_epochs", "passes", count, 1),
    # Model
    same("pretrain", "model.path", text, "Qwen/Qwen2.5-0.5B"),
    same("reward_pretrain", "model.critic", text, "Qwen/Qwen2.5-0.5B",
         of_critic("adv_estimator", "gae", "model.critic", "pretrain")),
    same(f"{TRAIN}.model_args.model_name_or_path", "model.path", text, "Qwen/Qwen2.5-0.5B"),
    same(f"{TRAIN}.model_args.dtype", "model.dtype", DTYPE, "bf16"),
    same(f"{TRAIN}.model_args.attn_implementation", "learner.attention", ATTENTION, "fa2"),
    same(f"{TRAIN}.model_args.disable_gradient_checkpointing", "learner.gradient_checkpointing", flag, False,
         lambda v, given: {"learner.gradient_checkpointing": not v}),
    same(f"{TRAIN}.model_args.lora_rank", "learner.lora.rank", whole, 16, _lora),
    part(f"{TRAIN}.model_args.lora_alpha", "learner.lora.alpha", number, 32),
    same(f"{TRAIN}.model_args.lora_target", "learner.lora.targets", _separated, "o_proj,q_proj",
         lambda v, given: {"learner.lora.targets": v} if given.whole(f"{TRAIN}.model_args.lora_rank", 0) else {}),
    changed(f"{TRAIN}.model_args.ulysses_size", "learner.sequence_parallel", count, 1, "must divide placement.learners"),
    missing(f"{TRAIN}.model_args.freeze_module_prefix", "all parts of the model are trained; adapters leave the vision tower as it is", "vision_model"),
    ignored(f"{TRAIN}.model_args.**", "the model's own config.json is read", 1),
    # Optimisation
    same(f"{TRAIN}.training_args.learning_rate", "learner.lr", number, 1e-6),
    weight_decay(f"{TRAIN}.training_args.weight_decay", 0.1,
                 lambda given: "fsdp" not in str(given.get(f"{TRAIN}.strategy_args.strategy_name"))),
    same(f"{TRAIN}.training_args.adam_beta1", "learner.betas", number, 0.9, lambda v, given: {
        "learner.betas": [v, given.read(f"{TRAIN}.training_args.adam_beta2", number, 0.999)]}),
    part(f"{TRAIN}.training_args.adam_beta2", "learner.betas", number, 0.999),
    same(f"{TRAIN}.training_args.adam_epsilon", "learner.eps", number, 1e-8),
    same(f"{TRAIN}.training_args.warmup_steps", "learner.warmup_steps", whole, 10),
    changed(f"{TRAIN}.training_args.warmup_ratio", "learner.warmup_steps", number, 0.1, "in optimiser steps",
            _warmup_ratio),
    same(f"{TRAIN}.training_args.lr_scheduler_type", "learner.schedule learner.final_ratio", SCHEDULE, "cosine",
         transformers_schedule(f"{TRAIN}.training_args.lr_scheduler_kwargs")),
    part(f"{TRAIN}.training_args.lr_scheduler_kwargs.power", "learner.decay_power", number, 2.0),
    part(f"{TRAIN}.training_args.lr_scheduler_kwargs.num_decay_steps", "learner.decay_steps", count, 100),
    part(f"{TRAIN}.training_args.lr_scheduler_kwargs.decay_type", "learner.decay_shape", DECAY_SHAPE, "1-sqrt"),
    same(f"{TRAIN}.training_args.lr_scheduler_kwargs.min_lr_rate", "learner.final_ratio", number, 0.1),
    changed(f"{TRAIN}.training_args.per_device_train_batch_size", "learner.micro_batch_tokens minibatches", count, 2,
            "rlsdk counts tokens of a micro-batch (rollouts × sequence_length), and optimiser steps per batch",
            lambda v, given: {"minibatches": _updates(given)} |
            ({} if _dynamic(given) else {"learner.micro_batch_tokens": _packed(given) or v * _length(given)})),
    part(f"{TRAIN}.sequence_packing_args.max_packed_sequence_length_train", "learner.micro_batch_tokens", count, 16384),
    part(f"{TRAIN}.training_args.gradient_accumulation_steps", "minibatches", count, 64,
         "rollouts of an optimiser step are micro-batch × accumulation × ranks"),
    ignored(f"{TRAIN}.training_args.num_train_epochs", "max_steps takes precedence", 50),
    ignored(f"{TRAIN}.training_args.**", "the learner's default applies", 1),
    same("max_grad_norm", "learner.grad_clip", number, 1.0),
    _strategy(TRAIN),
    optimizer(f"{TRAIN}.strategy_args.strategy_config.optimizer", "sgd", ("adam",)),
    ignored(f"{TRAIN}.strategy_args.strategy_config.**", LEARNER_NOTE, 1),
    ignored(f"{TRAIN}.strategy_args.strategy_config", LEARNER_NOTE, "x"),
    part(f"{TRAIN}.device_mapping", "placement.learners", devices, "list(range(0,8))", "only the number of GPUs matters"),
    ignored(f"{TRAIN}.infer_batch_size", "forward passes use learner.micro_batch_tokens, too", 2),
    same(f"{TRAIN}.pg_variant", "algorithm.policy_loss", choice((
        "ppo", "vanilla", "tis", "topr", "cispo", "kimi15"), "the loss"), "ppo", _variant),
    part(f"{TRAIN}.kimi15_tau", "algorithm.policy_loss.tau", number, 0.1),
    part(f"{TRAIN}.tis_upper_bound", "algorithm.policy_loss.cap", number, 1.0),
    unless(f"{TRAIN}.tis_lower_bound", (0, 0.0), "weights have no minimum: see rlsdk plugins policy_loss", 0.1),
    part(f"{TRAIN}.cispo_epsilon_low", "algorithm.policy_loss.clip_low", number, 0.1),
    part(f"{TRAIN}.cispo_epsilon_high", "algorithm.policy_loss.clip_high", number, 0.1),
    unless(f"{TRAIN}.cispo_use_unified_mask", (False,), "cispo removes no tokens: write a policy loss (howto/algorithm.md)", True),
    *(unless(f"{TRAIN}.topr_{sign}_weight", (1, 1.0), "topr weighs right and wrong answers alike: write a policy loss", 0.5)
      for sign in ("positive", "negative")),
    only_with(f"{TRAIN}.use_dynamic_batching_in_train", f"{TRAIN}.sequence_length_round_in_train",
              "micro-batches have no rounded lengths", 4),
    changed(f"{TRAIN}.max_tokens_per_microbatch_in_train", "learner.micro_batch_tokens", whole, 8192, "with padding",
            lambda v, given: {"learner.micro_batch_tokens": v} if _dynamic(given) and v
            else KeyOutcome.ignored("use_dynamic_batching_in_train is off")),
    routing_replay(f"{TRAIN}.router_replay.mode", "disable", "disabled"),
    unless(f"{TRAIN}.mtp_training_mode", ("disabled",), "multi-token prediction is not trained", "joint"),
    changed(f"{TRAIN}.use_sequence_packing", "learner.rows", flag, True, "worthwhile with flash_attention_2",
            switched({"learner.rows": "packed"}, "worthwhile with flash_attention_2")),
    # Data
    part(f"{TRAIN}.data_args.file_name", "tasks.train", texts, ["data/math.jsonl"]),
    part(f"{TRAIN}.data_args.prompt", "tasks.train.columns.prompt", text, "question"),
    part(f"{TRAIN}.data_args.messages", "tasks.train.columns.prompt", text, "messages"),
    ignored(f"{TRAIN}.data_args.response", "rewards read the column ground_truth", "solution"),
    part(f"{TRAIN}.data_args.tag", "tasks.train.columns.source", text, "tag"),
    changed(f"{TRAIN}.data_args.domain_interleave_probs.*", "tasks.train", number, 0.5,
            "the weight of a source of its own", convert_share),
    ignored(f"{TRAIN}.data_args.template", "the tokenizer's chat template is used", "qwen2_5"),
    *(missing(f"{TRAIN}.data_args.image_{end}_pixels", "images get the size that preprocessor_config.json in the model's folder "
              "sets: change it", 1048576) for end in ("min", "max")),
    ignored(f"{TRAIN}.data_args.**", "tasks are read on demand", 1),
    part("validation.data_args.file_name", "tasks.eval", texts, ["data/test.jsonl"]),
    *eval_sampling(VALIDATION, usual=0.95),
    same(f"{VALIDATION}.num_return_sequences", "eval.samples", count, 4),
    ignored(f"{VALIDATION}.**", EVALUATION_NOTE, 1),
    ignored("validation.**", "evaluations run all tasks of tasks.eval", 1),
    same("val_n_sample", "eval.samples", count, 4),
    ignored("val_greedy", "evaluations include greedy answers (eval.greedy)", True),
    # Inference
    same(f"{INFER}.model_args.dtype", "model.dtype", DTYPE, "bf16"),
    ignored(f"{INFER}.model_args.**", "engines load the model of model.path", 1),
    part(f"{INFER}.generating_args.max_new_tokens", "sampling.max_tokens", count, 128,
         "of a turn; the RLVR pipeline replaces it by sequence_length less prompt_length"),
    same(f"{INFER}.generating_args.temperature", "sampling.temperature", number, 0.99),
    no_cut(f"{INFER}.generating_args.top_p", 1.0),
    no_cut(f"{INFER}.generating_args.top_k", 0, "top_k"),
    no_cut(f"{INFER}.generating_args.repetition_penalty", 1.0, "repetition_penalty"),
    unless(f"{INFER}.generating_args.num_beams", (1,), "rollouts are sampled token by token", 4),
    part(f"{INFER}.generating_args.num_return_sequences", "group_size", count, 1, "RLVR; agentic has a group_size"),
    same(f"{INFER}.generating_args.stop_strings", "sampling.stop", texts, ["</answer>"]),
    ignored(f"{INFER}.generating_args.**", "an answer ends at the end-of-text token, sampling.stop or max_tokens", 1),
    ignored(f"{INFER}.data_args.**", "the tokenizer's chat template is used", "qwen2_5"),
    _strategy(INFER),
    same(f"{INFER}.strategy_args.strategy_config.gpu_memory_utilization", "engine.gpu_memory_utilization", number, 0.8),
    same(f"{INFER}.strategy_args.strategy_config.tensor_parallel_size", "engine.tensor_parallel_size", count, 1),
    same(f"{INFER}.strategy_args.strategy_config.max_num_seqs", "engine.max_num_seqs", count, 128),
    same(f"{INFER}.strategy_args.strategy_config.max_num_batched_tokens", "engine.max_num_batched_tokens", count, 8192),
    same(f"{INFER}.strategy_args.strategy_config.enforce_eager", "engine.enforce_eager", flag, True),
    same(f"{INFER}.strategy_args.strategy_config.block_size", "engine.args.block_size", count, 16),
    ignored(f"{INFER}.strategy_args.strategy_config.max_model_len", "model.max_length", 8000),
    ignored(f"{INFER}.strategy_args.strategy_config.load_format", "engines load the learner's weights at the start", "auto"),
    changed(f"{INFER}.strategy_args.strategy_config.mem_fraction_static", "engine.gpu_memory_utilization", number, 0.6,
            "the share of an engine's memory, which SGLang and vLLM count alike but for what runs beside them"),
    same(f"{INFER}.strategy_args.strategy_config.*", "engine.args", lambda v: v, 1, of_vllm),
    part(f"{INFER}.device_mapping", "placement.engines", devices, "list(range(0,8))", "only the number of GPUs matters"),
    ignored(f"{INFER}.**", *_HERE),
    ignored(f"{TRAIN}.**", *_HERE),
    changed("teacher.model_args.model_name_or_path", "model.reference", text, "Qwen/Qwen3-32B", "algorithm: opd",
            lambda v, given: {"model.reference": v} if _distills(given)
            else KeyOutcome.missing("algorithm: opd; the teacher is model.reference")),
    part("teacher.opd_kl_coef", "algorithm.advantage.coef", number, 1.0),
    missing("teacher.*.model_args.model_name_or_path", "there is one teacher, model.reference", "x"),
    ignored("teacher.**", f"the teacher runs with the learner; {_ROLE}", 1),
    ignored("is_pure_opd", "set by the program that starts the pipeline", True),
    ignored("reference.**", f"the reference model runs with the learner; {_ROLE}", 1),
    same("critic.training_args.learning_rate", "learner.critic_lr", number, 1e-5),
    ignored("critic.**", "the critic shares the actor's settings", 1),
    ignored("reward.**", "rewards run in separate processes; see scoring", 1),
    # Algorithm
    same("adv_estimator", "algorithm.use algorithm.advantage", choice((
        "gae", "reinforce", "grpo", "gigpo", "step_reinforce", "agentic_reinforce"), "the estimator"), "grpo",
        _of_rewards(_estimator)),
    part("gamma", "algorithm.advantage.gamma", number, 1.0),
    part("lambd", "algorithm.advantage.lam", number, 0.95),
    same("pg_clip", "algorithm.policy_loss", number, 0.2, _clip),
    part("pg_clip_low", "algorithm.policy_loss.clip_low", number, 0.2),
    part("pg_clip_high", "algorithm.policy_loss.clip_high", number, 0.28),
    part("use_pg_clip_range", "algorithm.policy_loss", flag, True),
    part("dual_clip_loss", "algorithm.policy_loss.dual_clip", flag, True, "ROLL's cap is 1 + 2 × pg_clip"),
    part("importance_sampling", "algorithm.policy_loss", text, "token"),
    part("value_clip", "algorithm.value_clip", number, 0.5),
    part("add_token_level_kl", "algorithm.shaping", flag, True),
    part("init_kl_coef", "algorithm.shaping", number, 0.1),
    part("kl_penalty", "algorithm.shaping", KL, "kl"),
    part("target_kl", "algorithm.shaping", number, 0.1),
    part("kl_horizon", "algorithm.shaping", count, 10000),
    same("use_kl_loss", "algorithm.kl_coef algorithm.kl", flag, True, _kl_loss),
    part("kl_loss_coef", "algorithm.kl_coef", number, 0.001),
    same("entropy_loss_coef", "algorithm.entropy_coef", number, 0.0),
    same("loss_agg_mode", "algorithm.aggregate", choice((
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"), "the aggregation"),
        "seq-mean-token-mean"),
    same("whiten_advantages", "algorithm.whiten_advantages", flag, True),
    same("advantage_clip", "algorithm.clip_advantages", number, 0.2),
    same("reward_clip", "algorithm.shaping", number, 10.0, _bounded_rewards),
    part("reward_normalization.grouping", "algorithm.advantage", text, "traj_group_id"),
    part("reward_normalization.method", "algorithm.advantage.std_normalize", text, "mean_std"),
    part("reward_normalization.norm_mean_type", "algorithm.advantage algorithm.shaping", text, "group"),
    part("reward_normalization.norm_std_type", "algorithm.advantage algorithm.shaping", text, "batch"),
    missing("reward_normalization.**", "algorithm.shaping: [{use: reward_norm, ...}]", 1),
    part("norm_mean_type", "algorithm.advantage algorithm.shaping", text, "group"),
    part("norm_std_type", "algorithm.advantage algorithm.shaping", text, "group"),
    part("reward_norm", "algorithm.advantage algorithm.shaping", text, "group"),
    part("reward_shift", "algorithm.advantage algorithm.shaping", flag, True),
    part("reward_scale", "algorithm.advantage algorithm.shaping", flag, True),
    part("step_reward_weight", "algorithm.advantage.omega", number, 1.0),
    part("step_reward_gamma", "algorithm.advantage.gamma", number, 0.95),
    unless("episode_reward_weight", (1, 1.0), "the trajectory's part of gigpo has weight 1; change omega", 0.5),
    unless("use_reward_scaling", (False,), "algorithm.shaping: [reward_norm]", True),
    unless("use_reward_norm", (False,), "algorithm.shaping: [reward_norm]", True),
    unless("whiten_rewards", (False,), "algorithm.shaping: [{use: reward_norm, by: batch}]", True),
    ignored("add_len_reward", "ROLL does not read it", True),
    changed("max_len_mask", "algorithm.filters", flag, True, "drops truncated rollouts",
            switched({"algorithm.filters[]": "truncated"}, "drops truncated rollouts")),
    changed("difficulty_mask", "algorithm.filters", flag, True, "pass rates", _difficulty),
    part("difficulty_low_threshold", "algorithm.filters", number, 0.1),
    part("difficulty_high_threshold", "algorithm.filters", number, 0.95),
    unless("error_max_len_clip", (False,), "no filter drops wrong answers by their length: write one (howto/plugin.md)", True),
    only_with("error_max_len_clip", "error_max_len_threshold", "no filter drops wrong answers by their length", 1000),
    unless("mask_type", ("loss",), "dropped rollouts are excluded from the baseline, too", "all"),
    unless("rl_loss_coef", (1, 1.0), "multiply learner.lr by it, and divide algorithm.entropy_coef", 0.5),
    unless("difficulty_loss_weight", (False,), "write a policy loss or a shaping", True),
    unless("length_loss_weight", (False,), "algorithm.aggregate", True),
    unless("use_topr_loss", (False,), "algorithm.policy_loss: topr", True),
    unless("use_opd", (False,), "a teacher's log-ratio cannot be added to advantages of rewards: algorithm: opd replaces them", True),
    ignored("dirty_data_mask", "failed rollouts are dropped automatically", True),
    *(ignored(name, "ROLL does not read it", 0) for name in (
        "use_topr_neg_loss_coef", "postive_loss_coef", "positive_loss_coef", "use_policy_loss_type", "balance_length",
        "minibatch_data_iter_num", "open_feedback_turn")),
    unless("force_disable_old_logprobs_recompute", (False,), "old logprobs are those before the first optimiser step", True),
    unless("l2", (0, 0.0), "see actor_train.training_args.weight_decay: learner.weight_decay", 0.01),
    ignored("enable_reference", "a reference model runs where the algorithm uses one", True),
    ignored("partial_gpu_mode", "placement decides where ranks and engines run", True),
    ignored("otlp_output_dir", "metrics.jsonl has the time of each stage", "x"),
    *(ignored(name, "the chat template writes prompts and tool calls", True)
      for name in ("skip_mock_system_prompt", "parse_tool_call_parameter_to_dict")),
    unless("exp_mode", ("train",), "rlsdk train trains, rlsdk eval evaluates", "eval"),
    missing("reward_model.**", "serve the model, with vLLM for instance, and add the reward judge with its base_url", "x"),
    unless("enable_old_logprobs_recompute", (True, False), "old_logprobs: learner", True),
    changed("async_generation_ratio", "rollout.max_staleness", number, 0, "number of steps that rollouts may lag behind",
            lambda v, given: {"rollout.max_staleness": math.ceil(v)}),
    same("critic_warmup", "critic.warmup_steps", whole, 10, critic_warmup("adv_estimator", "gae")),
    same(f"{CORRECTION}.is_weight.enabled", "algorithm.correction", flag, True, _mismatch),
    part(f"{CORRECTION}.is_weight.weight_type", "algorithm.correction", text, "token"),
    part(f"{CORRECTION}.is_weight.upper_bound", "algorithm.correction", number, 1.2),
    ignored(f"{CORRECTION}.is_weight.detach", "weights are always detached", True),
    same(f"{CORRECTION}.filters.*.enabled", "algorithm.correction", flag, True, _mismatch),
    *(part(f"{CORRECTION}.filters.*.{name}", "algorithm.correction", lambda v: v, sample) for name, sample in (
        ("agg_type", "token"), ("ratio_enabled", True), ("ratio_low", 0.8), ("ratio_high", 1.2))),
    unless(f"{CORRECTION}.filters.*.diff_enabled", (False,), "corrections compare ratios of probabilities only", True),
    ignored(f"{CORRECTION}.filters.*.diff_*", "diff_enabled", 0.2),
    missing(f"{CORRECTION}.**", "see rlsdk plugins correction", 1),
    ignored("is_use_additional_prompts", "another task replaces each one that a filter of `rewards` drops", True),
    ignored("is_num_return_sequences_expand", "each rollout is a separate request", True),
    ignored("max_running_requests", "engine.max_num_seqs", 128),
    ignored("max_additional_running_prompts", "rollout.oversample", 16),
    ignored("generate_opt_level", "requests are balanced over engines", 1),
    # Rewards of RLVR
    changed("rewards.*.worker_cls", "reward", text, "roll.x.MathRuleRewardWorker", "the nearest built-in reward", convert_worker),
    changed("rewards.*.tag_included", "reward", texts, ["math"], "sources of the reward", convert_sources),
    same("rewards.*.query_filter_config.type", "algorithm.filters rollout.dynamic_sampling",
         choice(("no_filter", "mean_filter", "std_filter"), "the filter"), "std_filter", convert_filter),
    *(part(f"rewards.*.query_filter_config.filter_args.{name}", "algorithm.filters", number, sample)
      for name, sample in (("threshold_down", 0.1), ("threshold_up", 0.9), ("std_threshold", 0.0))),
    missing("rewards.*.query_filter_config.**", "algorithm.filters: [min_std] or [pass_rate]", 1),
    part("rewards.*.judge_api_url", "reward", text, "http://localhost:8000/v1"),
    part("rewards.*.judge_model_name", "reward", text, "judge"),
    part("rewards.*.judge_model_type", "reward", text, "api"),
    same("rewards.*.judge_api_key", "reward", text, "${oc.env:KEY}", convert_judge_key),
    missing("rewards.*.judge_prompt", "rubric of the judge, with {prompt}, {response} and {reference}", "x"),
    missing("rewards.*.format_pattern", "reward: [..., {use: format, pattern: ...}]", "x"),
    unless("rewards.*.response_length_penalty_coef", (0, 0.0), "reward: [..., length_penalty]", 0.1),
    unless("rewards.*.reward_type", ("soft",), "rewards are numbers; gate and multiply combine them", "hard"),
    ignored("rewards.**", "rewards run in separate processes; see scoring", 1),
    # Environments
    part("train_env_manager.num_env_groups", "tasks.train.groups", count, 128, "tasks per round of the source `environments`"),
    part("train_env_manager.group_size", "group_size", count, 8),
    part("train_env_manager.tags", "tasks.train.tags", texts, ["FrozenLake"]),
    part("train_env_manager.num_groups_partition", "tasks.train.partition", texts, [128]),
    part("train_env_manager.max_env_num_per_worker", "environments.workers environments.per_worker", whole, 16,
         "workers are processes, each with this number of environments"),
    part("train_env_manager.format_penalty", "tasks.train.environments", number, -0.15, _ENV),
    unless("train_env_manager.group_filter_cls", ("roll.pipeline.agentic.agentic_pipeline.GroupFilter",),
           "algorithm.filters, see rlsdk plugins filter", "x"),
    unless("train_env_manager.group_size_redundancy", (0,),
           "no rollouts of a group are discarded; rollout.oversample runs more tasks than a step needs", 1),
    ignored("train_env_manager.**", "rlsdk's scheduler needs no such limit", 1),
    part("val_env_manager.num_env_groups", "tasks.eval.groups", count, 256, "tasks of an evaluation"),
    part("val_env_manager.group_size", "eval.samples", count, 1, "in addition to one greedy answer"),
    part("val_env_manager.tags", "tasks.eval.tags", texts, ["FrozenLake"]),
    part("val_env_manager.num_groups_partition", "tasks.eval.partition", texts, [256]),
    part("val_env_manager.max_env_num_per_worker", "eval.environments.workers", whole, 32, "workers are processes"),
    ignored("val_env_manager.**", "rlsdk's scheduler needs no such limit", 1),
    changed("custom_envs.*.env_type", "tasks.train.environments", text, "frozen_lake", "environments of rlsdk-gridworlds", _kind),
    part("custom_envs.*.env_config.**", "tasks.train.environments", lambda v: v, 1, _GRID_NOTE),
    *(part(f"custom_envs.*.{name}", "tasks.train.environments", lambda v: v, 1, _GRID_NOTE) for name in BESIDE),
    missing("custom_envs.*.agent_*template", "the environment writes its prompt; see its options", "x"),
    unless("custom_envs.*.agent_template", ("{observation}",), "the environment writes its prompt; see its options", "Go."),
    missing("custom_envs.*.tool_wrapper.**", "an environment has no tools beside it: give it these as actions, or take the workflow "
            "tools", "x"),
    ignored("custom_env.**", "custom_envs names the environments that are used", "x"),
    ignored("gem_*.**", "custom_envs names the environments that are used", "x"),
    ignored("*_template", "custom_envs refers to it", "x"),
    ignored("*_format_penalty", "custom_envs refers to it", -0.15),
    ignored("all_response_pattern", "custom_envs refers to it", "x"),
    ignored("agent_runner_cls", "custom_envs refers to it", "x"),
    ignored("env_manager_cls", "custom_envs refers to it", "x"),
    ignored("custom_envs.*.env_manager_cls", "the workflow `environment` plays whole trajectories", "x"),
    ignored("custom_envs.*.use_thread_lock", "environments have their own random generators", True),
    ignored("custom_envs.**", "an environment's texts are its options", 1),
    part("max_actions_per_traj", "workflow.max_turns", count, 10),
    part("max_tokens_per_step", "tasks.train.environments", count, 128, f"{_ENV} if custom_envs refers to it"),
    *(part(name, "tasks.train.environments", text, "x", f"{_ENV} if custom_envs refers to it") for name in (
        "action_pattern", "think_action_pattern", "user_prompt_no_think_format", "user_prompt_think_format",
        "user_prompt_format", "added_text_no_think", "added_text_think")),
    ignored("env_monitor.**", "the watchdog reports silent environments", 1),
    unless("use_token_reward", (False,), "environments always assign each action's reward to its tokens", True),
    ignored("batch_adjust_mode", "batches need not be padded with copies", "copy"),
    unless("ratio_type", ("token",), "algorithm.policy_loss: gspo has ratios of whole answers, of all their turns", "segment"),
)  # fmt: skip

DEFAULTS: Mapping[str, Any] = {
    "exp_name": "roll-run",
    "seed": 42,
    "max_steps": 500,
    "save_steps": 50,
    "max_ckpt_to_keep": 0,
    "eval_steps": 10,
    "rollout_batch_size": 128,
    "prompt_length": 1024,
    "num_gpus_per_node": 8,
    "num_nodes": 1,
    "ppo_epochs": 1,
    "max_grad_norm": 1.0,
    "gamma": 1.0,
    "lambd": 0.95,
    "pg_clip": 0.2,
    "adv_estimator": "gae",
    "use_kl_loss": False,
    "entropy_loss_coef": 0.0,
    "loss_agg_mode": "seq-mean-token-mean",
    f"{TRAIN}.training_args.learning_rate": 5e-5,
    f"{TRAIN}.training_args.weight_decay": 0.0,
    f"{TRAIN}.training_args.adam_beta1": 0.9,
    f"{TRAIN}.training_args.lr_scheduler_type": "linear",
    f"{TRAIN}.training_args.per_device_train_batch_size": 8,
    f"{INFER}.generating_args.temperature": 0.95,
    f"{INFER}.generating_args.top_p": 0.7,
    f"{INFER}.generating_args.top_k": 50,
    f"{INFER}.strategy_args.strategy_name": "vllm",
}

FRAMEWORK = Framework(
    name="roll",
    title="ROLL",
    rows=ROWS,
    defaults=DEFAULTS,
    finish=_finish,
    renamed={"student_train.": f"{TRAIN}.", "student_infer.": f"{INFER}."},
    others={
        "sft_train": "algorithm: sft",
        **dict.fromkeys(("student_pretrain", "teacher_pretrain"), "algorithm: opd"),
        **dict.fromkeys(("chosen_key", "rejected_key"), "algorithm: dpo"),
    },
    entries=("start_rlvr_pipeline", "start_agentic_pipeline", "start_onpolicy_distill_pipeline"),
)
