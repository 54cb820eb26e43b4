"""Keys of Trinity-RFT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlsdk.migration.parts import (
    CRITIC_WARMUP_NOTE,
    DTYPE,
    EVALUATION_NOTE,
    LEARNER_NOTE,
    SCHEDULE,
    TEMPLATE_NOTE,
    ZOO,
    checkpoints_kept,
    critic_warmup,
    dataset,
    likely_reward,
    lora_of,
    minibatches,
    no_cut,
    of_critic,
    of_vllm,
    optimizer,
    routing_replay,
    share_of_steps,
    switched,
    template_file,
    trackers_with,
    weight_decay,
)
from rlsdk.migration.reading import flattened
from rlsdk.migration.rows import (
    NOTES,
    Choice,
    Framework,
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
    numbers,
    only_with,
    part,
    same,
    text,
    texts,
    unless,
    whole,
)
from rlsdk.migration.trinity_tasks import (
    INPUT,
    NO_SELECTOR,
    TASKSET_KEYS,
    TASKSETS,
    evaluation_sampling,
    features_rule,
    most_samples,
    selector_rule,
    source_of,
    training_sources,
)
from rlsdk.migration.verl import FRAMEWORK as OWN_KEYS_OF_VERL

ALGORITHMS: Mapping[str, tuple[str, str, str]] = {
    "ppo": ("ppo", "ppo", "ppo"),
    "grpo": ("grpo", "grpo", "ppo"),
    "grpo_verl": ("grpo", "grpo", "ppo"),
    "dapo": ("dapo", "grpo", "ppo"),
    "gspo": ("gspo", "grpo", "gspo"),
    "cispo": ("cispo", "grpo", "cispo"),
    "sapo": ("sapo", "grpo", "sapo"),
    "reinforceplusplus": ("reinforce_plus_plus", "reinforceplusplus", "ppo"),
    "rloo": ("rloo", "rloo", "ppo"),
    "opmd": ("opmd", "opmd", "opmd"),
    "asymre": ("opmd", "asymre", "opmd"),
    "topr": ("topr", "reinforce", "topr"),
    "rec": ("grpo", "rec", "rec"),
    "sppo": ("opmd", "opmd", "sppo"),
    "multi_step_grpo": ("grpo", "step_wise_grpo", "ppo"),
    "gigpo": ("gigpo", "gigpo", "ppo"),
    "sft": ("sft", "", "sft"),
    "dpo": ("dpo", "", "dpo"),
    "mix": ("mix", "grpo", "mix"),
    "mix_chord": ("mix", "grpo", "mix_chord"),
    "on_policy_distill": ("opd", "on_policy_distill", "ppo"),
}
"""Algorithm -> rlsdk's, and Trinity's own default advantage and loss for it."""
WITHOUT_KL = ("asymre", "dapo", "on_policy_distill", "rec", "sppo")
"""Algorithms that have no KL unless it is given."""
ADVANTAGES: Mapping[str, Mapping[str, Any]] = {
    "ppo": {"use": "gae"},
    "grpo": {"use": "grpo"},
    "step_wise_grpo": {"use": "step_grpo"},
    "gigpo": {"use": "gigpo"},
    "rloo": {"use": "rloo"},
    "remax": {"use": "remax"},
    "reinforceplusplus": {"use": "reinforce_plus_plus"},
    "reinforce": {"use": "segment_returns"},
    "opmd": {"use": "opmd"},
    "asymre": {"use": "asymre"},
    "rec": {"use": "rec"},
    "on_policy_distill": {"use": "on_policy_distill"},
}
LOSSES: Mapping[str, Mapping[str, Any]] = {
    **{name: {"use": name} for name in ("ppo", "gspo", "cispo", "sapo", "topr", "opmd")},
    "importance_sampling": {"use": "tis"},
    "mix": {"use": "mix"},
    "mix_chord": {"use": "mix"},
    "rec": {"use": "reinforce"},
    "sppo": {"use": "zoo/sppo"},
}
KL = Choice(
    {**dict.fromkeys(("k1", "k2", "k3"), ""), "low_var_kl": "", "abs": "", "corrected_k3": "", "none": ""}, "KL"
)
KL_HERE = {
    "k1": "k1",
    "k2": "k2",
    "k3": "k3",
    "low_var_kl": "low_var",
    "abs": "abs",
    "corrected_k3": "k3",
    "none": None,
}
WORKFLOWS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{name: ("single_turn", {}) for name in ("simple_workflow", "async_simple_workflow")},
    **{name: ("single_turn", {"use": "math", "strict": False})
       for name in ("math_workflow", "async_math_workflow", "math_eval_workflow", "async_math_eval_workflow")},
    **{name: ("single_turn", {"use": "math"}) for name in ("math_boxed_workflow", "async_math_boxed_workflow")},
    "on_policy_distill_workflow": ("single_turn", {}),
    "on_policy_distill_math_workflow": ("single_turn", {"use": "math", "strict": False}),
}  # fmt: skip
"""Workflow -> rlsdk's, and the reward that is part of it."""
REWARDS: Mapping[str, Mapping[str, Any]] = {
    "math_reward": {"use": "math", "strict": False},
    "math_boxed_reward": {"use": "math"},
    "math_dapo_reward": {"use": "math"},
    "countdown_reward": {"use": "countdown"},
    "accuracy_reward": {"use": "exact_match"},
    "format_reward": {"use": "format"},
}
OPERATORS = "data_processor.experience_pipeline.operators"
VERL = "trainer.trainer_config"
EXPERIENCE = "buffer.trainer_input.experience_buffer"
REPLAY = f"{EXPERIENCE}.replay_buffer"


OF_VERL = "`rlsdk migrate verl` converts this key, without its prefix"


def _if_verl_needs_it(value: Any, given: Given) -> KeyOutcome:
    """Ask veRL's own rule whether one of its keys needs anything."""
    name = given.key.removeprefix(f"{VERL}.")
    rule, section = OWN_KEYS_OF_VERL.row(name), given.section(VERL)
    try:
        inner = Given(dict(flattened(section)), section, OWN_KEYS_OF_VERL.defaults, key=name)
        outcome = rule.settings(value, inner) if rule else None
    except UnfitError:
        outcome = None
    return outcome if outcome and outcome.status == "ignored" else KeyOutcome.missing(OF_VERL)


def _batch(given: Given) -> int:
    """Tasks in a batch; a trainer without an explorer of its own gives the rollouts instead."""
    if "buffer.batch_size" not in given.flat and not _offline(given):
        return max(1, given.whole("buffer.train_batch_size", 0) // given.whole("algorithm.repeat_times"))
    return given.whole("buffer.batch_size")


def _updates(given: Given) -> int:
    rollouts = _batch(given) * given.whole("algorithm.repeat_times")
    return minibatches(rollouts, given.whole("buffer.train_batch_size", 0) or rollouts)


def _length(given: Given) -> int:
    explicit = given.whole("model.max_model_len", 0)
    return explicit or given.whole("model.max_prompt_tokens", 1024) + given.whole("model.max_response_tokens", 1024)


def _response(given: Given) -> int:
    keys = (*(f"{where}.rollout_args.max_tokens" for where in TASKSET_KEYS[1:3]), "model.max_response_tokens")
    found = next(
        (size for key in (*keys, "explorer.rollout_model.max_response_tokens") if (size := given.whole(key, 0))), 0
    )
    return found or min(_length(given) // 2, 1024)


def _algorithm(name: str, given: Given) -> dict[str, Any]:
    algorithm, advantage, loss = ALGORITHMS[name]
    # Trinity trains a critic with its PPO whatever the advantage; only GAE reads it.
    critic = given.flat.get("algorithm.advantage_fn", advantage) == "ppo"
    values: dict[str, Any] = {"algorithm.use": algorithm, "algorithm.critic": critic}
    if advantage and "algorithm.advantage_fn" not in given.flat:
        values |= _advantage(advantage, given)
    if loss and name not in ("sft", "dpo") and "algorithm.policy_loss_fn" not in given.flat:
        values |= _loss(loss, given)
    if name not in ("sft", "dpo"):
        values |= _kl(given)
    if name == "on_policy_distill":
        values["algorithm.clip_advantages"] = None
    filters = _filters(given)
    if filters or name == "dapo":  # whose filters are operators in Trinity, and defaults in rlsdk
        values["algorithm.filters"] = filters
    if name == "dapo":
        values["rollout.dynamic_sampling"] = False
    if name == "dpo":
        options = {
            key: given.read(f"algorithm.policy_loss_fn_args.{key}", number) for key in ("beta", "label_smoothing")
        }
        values["algorithm.policy_loss"] = {"use": "dpo", **{k: v for k, v in options.items() if v is not None}}
        values["algorithm.rollouts"] = "demonstrations"
    return values


def _filters(given: Given) -> list[Any]:
    """Return the filters of groups, which are arguments of the advantage and operators on experiences."""
    found: list[Any] = []
    if (least := given.read("algorithm.advantage_fn_args.std_threshold", number)) is not None:
        found.append({"use": "min_std", "threshold": least})
    for index in range(64):
        name = given.get(f"{OPERATORS}.{index}.name")
        least = given.read(f"{OPERATORS}.{index}.args.threshold", number, 0.0)
        size = max(2, given.whole("algorithm.repeat_times"))
        made = {
            "reward_std_filter": {"use": "min_std", "threshold": least * (size / (size - 1)) ** 0.5},  # of n to n - 1
            "dapo_dynamic_sampling": "nonzero_variance",
            "mask_response_truncated": "truncated",
        }.get(str(name))
        found += [made] if made else []
    return found


def _operator(value: str, given: Given) -> KeyOutcome:
    if value == "invalid_reward_filter":
        return KeyOutcome.ignored("rollouts without a score are dropped automatically")
    if value == "dapo_dynamic_sampling":
        return KeyOutcome({"rollout.dynamic_sampling": True}, "keeps groups whose rewards differ")
    notes = {"reward_std_filter": "drops groups", "mask_response_truncated": "drops truncated rollouts"}
    if value not in notes:
        return KeyOutcome.missing("algorithm.filters and algorithm.shaping, see rlsdk plugins")
    return KeyOutcome({}, notes[value])


def _offline(given: Given) -> bool:
    """True for the algorithms that learn from a data set, which is then the trainer's buffer."""
    return str(given.get("algorithm.algorithm_type")) in ("sft", "dpo")


def _demonstrations(given: Given) -> dict[str, Any]:
    """Data and batch of supervised fine-tuning and DPO; other columns, such as chosen and rejected, are metadata."""
    path = given.read(f"{EXPERIENCE}.path", text)
    if not _offline(given) or path is None:
        return {}
    columns = {"prompt": str(given.get(f"{EXPERIENCE}.format.prompt_key", "prompt"))}
    if str(given.get("algorithm.algorithm_type")) == "sft":
        columns["demonstration"] = str(given.get(f"{EXPERIENCE}.format.response_key", "response"))
    source = dataset(path, str(given.get(f"{EXPERIENCE}.split", "train")), columns, chat=True)
    return {
        "tasks.train": source,
        "batch_size": given.whole("buffer.train_batch_size", 0) or given.whole("buffer.batch_size"),
    }


def _held(key: str, sample: str, usual: str = "") -> KeyRule:
    """Return the rule of a key of the trainer's buffer, which holds data only if nothing is sampled."""

    def give(value: Any, given: Given) -> KeyOutcome:
        if not _offline(given):
            return KeyOutcome.ignored(_BUFFER)
        if usual and value != usual:
            return KeyOutcome.missing(f"rename the column to {usual}")
        return KeyOutcome({})

    return KeyRule(f"{EXPERIENCE}.{key}", "mapped", ("tasks.train",), "", sample, text, give)


def _ahead(to: str) -> Any:
    def give(value: int, given: Given) -> KeyOutcome:
        if _offline(given):
            return KeyOutcome.ignored("nothing is sampled")
        return KeyOutcome({to: value})

    return give


_RUN_AHEAD = "engines sample this many batches in advance; Trinity's explorer has no limit"


def _style(value: str, given: Given) -> KeyOutcome:
    """Convert the style of synchronisation, of which all but one let the explorer run ahead."""
    if value == "fixed" or _offline(given):
        return KeyOutcome.ignored("explorer and trainer take turns, the default")
    limits = ("algorithm.sample_strategy_args.max_staleness", "synchronizer.sync_offset")
    if any(given.whole(key, 0) > 0 for key in limits):
        return KeyOutcome({}, _RUN_AHEAD)
    return KeyOutcome({"rollout.max_staleness": 1}, _RUN_AHEAD)


def _arguments(given: Given, key: str) -> Mapping[str, Any]:
    return given.section(f"algorithm.{key}")


def _advantage(name: str, given: Given) -> dict[str, Any]:
    arguments = _arguments(given, "advantage_fn_args")
    options: dict[str, Any] = {}
    if name == "ppo":
        options = {to: number(arguments.get(key, 1.0)) for to, key in (("gamma", "gamma"), ("lam", "lam"))}
    elif name == "opmd" and arguments.get("opmd_baseline") == "logavgexp":
        options = {"baseline": "logavgexp", "tau": number(arguments.get("tau", 1.0))}
    elif name == "grpo" and arguments.get("std_cal_level") == "batch":
        options = {"std_over": "batch"}
    elif name == "rec":
        options = {"std_normalize": flag(arguments.get("std_normalize") or False), "drop": arguments.get("drop")}
    elif name == "asymre":
        options = {"shift": number(arguments.get("baseline_shift", -0.1))}
    elif name == "step_wise_grpo":
        options = {"divide_by_steps": flag(arguments.get("enable_step_norm", False))}
    elif name == "gigpo":
        options = {key: number(arguments.get(key, 1.0)) for key in ("omega", "gamma")}
        options["std_normalize"] = str(arguments.get("fnorm")) == "std"
    elif name == "reinforceplusplus":
        options = {"gamma": number(arguments.get("gamma", 1.0))}
    elif name == "on_policy_distill":
        options = {"coef": number(arguments.get("kl_coef", 1.0))}
    return {"algorithm.advantage": {**ADVANTAGES[name], **options}}


def _loss(name: str, given: Given) -> dict[str, Any]:
    arguments = _arguments(given, "policy_loss_fn_args")
    options: dict[str, Any] = {}
    if name in ("ppo", "gspo", "cispo", "mix", "mix_chord"):
        fallback = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 0.28)}.get(name, (0.2, 0.2))
        both = arguments.get("clip_range")
        ends = (("clip_low", "clip_range_low"), ("clip_high", "clip_range_high"))
        for (to, key), usual in zip(ends, fallback, strict=True):
            value = arguments.get(key, both)
            options[to] = usual if value is None else number(value)
        if name != "cispo":
            options["dual_clip"] = None if name == "gspo" else number(arguments.get("clip_ratio_c", 3.0))
        if name == "mix":
            options["mu"] = number(arguments.get("mu", 0.1))
        elif name == "mix_chord":
            options["mu"] = _chord(arguments)
    elif name == "sapo":
        options = {"tau_pos": number(arguments.get("tau_pos", 1.0)), "tau_neg": number(arguments.get("tau_neg", 1.05))}
    elif name == "rec" and _clipped_rec(arguments):
        bounds = {f"clip_{end}": number(arguments.get(f"epsilon_{end}", 0.2)) for end in ("low", "high")}
        return {"algorithm.policy_loss": {"use": "ppo", **bounds, "dual_clip": None}}
    elif name == "opmd":
        options = {"tau": number(arguments.get("tau", 1.0))}
    elif name == "importance_sampling":
        options = {"cap": 1e6}
    elif name == "sppo":
        options = {"clip": number(arguments.get("epsilon", 0.3))}
    return {"algorithm.policy_loss": {**LOSSES[name], **options}}


def _clipped_rec(arguments: Mapping[str, Any]) -> bool:
    """True if the loss `rec` has PPO's gradient: ratios as weights, and none beyond its bounds."""
    return (arguments.get("clip_mode"), arguments.get("weight")) == ("one-side", "importance_sampling")


def _rec_option(value: Any, given: Given) -> KeyOutcome:
    arguments = _arguments(given, "policy_loss_fn_args")
    if value == "none" or (_clipped_rec(arguments) and value in ("one-side", "importance_sampling")):
        return KeyOutcome.ignored("as in the policy loss that is taken")
    return KeyOutcome.missing("reinforce is taken, or ppo for one-side with importance_sampling: write a policy loss")


def _sequence_masking(value: bool, given: Given) -> KeyOutcome:
    if not value:
        return KeyOutcome.ignored("off")
    threshold = given.read("algorithm.policy_loss_fn_args.delta_sequence_masking", number, 0.1)
    return KeyOutcome({"algorithm.correction": {"use": "zoo/off_policy_mask", "threshold": threshold}}, ZOO)


def _chord(arguments: Mapping[str, Any]) -> float | dict[str, Any]:
    """CHORD's μ, which falls from a peak; a schedule has no warm-up."""
    peak, valley = (number(arguments.get(f"mu_{end}", 0.1)) for end in ("peak", "valley"))
    over = whole(arguments.get("mu_warmup_steps", 0)) + whole(arguments.get("mu_decay_steps", 0))
    return {"from": peak, "to": valley, "over": over, "shape": "cosine"} if over and peak != valley else valley


def _kl(given: Given) -> dict[str, Any]:
    """KL in loss and reward; Trinity's default is k2 in the loss, with a coefficient of .001."""
    usual = "none" if str(given.get("algorithm.algorithm_type", "ppo")) in WITHOUT_KL else "k2"
    name = str(given.get("algorithm.kl_loss_fn", usual))
    coefficient = number(_arguments(given, "kl_loss_fn_args").get("kl_coef", 0.001))
    found: dict[str, Any] = {"algorithm.kl_coef": 0.0}
    if name != "none" and name in KL_HERE and coefficient:
        found = {"algorithm.kl_coef": coefficient, "algorithm.kl": KL_HERE[name]}
    penalty = KL_HERE.get(str(given.get("algorithm.kl_penalty_fn", "none")))
    in_reward = number(_arguments(given, "kl_penalty_fn_args").get("kl_coef", 0.001))
    part = {"use": "kl_penalty", "coef": in_reward, "estimator": penalty}
    arguments = _arguments(given, "kl_penalty_fn_args")
    if flag(arguments.get("adaptive") or False):
        part |= {"target": number(arguments.get("target_kl", 0.1)), "horizon": whole(arguments.get("horizon", 10000))}
    return {**found, "algorithm.shaping": [part] if penalty and in_reward else []}


def _argument(kind: str, name: str, sample: Any) -> KeyRule:
    """Return the rule of an argument that `_advantage` or `_loss` reads if its function has it."""
    where, to = (("advantage_fn_args", "algorithm.advantage") if kind == "advantage" else ("policy_loss_fn_args", "algorithm.policy_loss"))  # fmt: skip
    here = {"clip_range": "clip_low", "clip_range_low": "clip_low", "clip_range_high": "clip_high", "clip_ratio_c": "dual_clip",
            "std_cal_level": "std_over", "opmd_baseline": "baseline", "baseline_shift": "shift", "kl_coef": "coef",
            "mu_peak": "mu", "mu_valley": "mu", "mu_decay_steps": "mu", "enable_step_norm": "divide_by_steps", "fnorm": "std_normalize"}.get(name, name)  # fmt: skip
    return part(f"algorithm.{where}.{name}", f"{to}.{here}", lambda v: v, sample, f"an option of the {kind}")


def _temperature(value: float, given: Given) -> dict[str, Any]:
    """Set the temperature of rollouts and, unless their tasks have one, of evaluations."""
    evaluates = any(key.startswith(f"{INPUT}.eval_tasksets.") for key in given.flat)
    return {"sampling.temperature": value, **({"eval.temperature": value} if evaluates and value > 0 else {})}


def _total(value: int, given: Given) -> dict[str, Any]:
    return {"steps": value}


def _epochs(value: float, given: Given) -> KeyOutcome:
    if given.whole("buffer.total_steps", 0) or given.whole("trainer.total_steps", 0):
        return KeyOutcome.ignored("total_steps takes precedence")
    return KeyOutcome({"epochs": value})


def _warmup_ratio(value: float, given: Given) -> KeyOutcome:
    if given.whole("algorithm.optimizer.lr_warmup_steps", -1) >= 0:
        return KeyOutcome.ignored("lr_warmup_steps takes precedence")
    steps = given.whole("buffer.total_steps", 0) or given.whole("trainer.total_steps", 0)
    return share_of_steps(steps * _updates(given) or None, value)


def _engine(value: str, given: Given) -> KeyOutcome:
    if value in ("vllm", "vllm_async", "async"):
        return KeyOutcome({"engine.use": "vllm"})
    return KeyOutcome({"engine.use": "vllm"}, f"there is no engine {value!r}; vLLM is used instead", "missing")


def _gpus(given: Given) -> dict[str, Any]:
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


def _out(value: Any, given: Given) -> KeyOutcome:
    folders = [str(given.get("project", "Trinity-RFT")), str(given.get("group") or "")]
    below = "/".join(folder for folder in folders if folder)
    return KeyOutcome({"out": f"{text(value).rstrip('/')}/{below}"}, "a run's folder is out/name")


def _mode(value: Any, given: Given) -> KeyOutcome:
    if value in ("both", "colocate") or (value == "train" and _offline(given)):
        return KeyOutcome({})
    return KeyOutcome.missing(f"rlsdk train CONFIG --mode {value}")


def _finish(given: Given) -> dict[str, Any]:
    where = f"{INPUT}.taskset" if f"{INPUT}.taskset.path" in given.flat else f"{INPUT}.tasksets.0"
    found: dict[str, Any] = {
        **_gpus(given),
        "model.max_length": _length(given),
        "sampling.max_tokens": _response(given),
        "max_prompt_tokens": given.whole("model.max_prompt_tokens", 0) or max(1, _length(given) - _response(given)),
    }
    if "qwen3" in str(given.get("model.model_path", "")).lower() and "model.enable_thinking" not in given.flat:
        found[NOTES] = (_THINKING,)
    train = training_sources(given)
    found |= {**train, NOTES: (*found.get(NOTES, ()), *train.get(NOTES, ()))}
    found |= _demonstrations(given)
    held_out = [source for i in range(64) if (source := source_of(given, f"{INPUT}.eval_tasksets.{i}"))]
    names = [given.get(f"{INPUT}.eval_tasksets.{i}.name") for i in range(len(held_out))]
    if held_out:
        labelled = [{**s, "source": str(name)} if name else s for s, name in zip(held_out, names, strict=True)]
        found["tasks.eval"] = labelled[0] if len(labelled) == 1 else labelled
    kind = str(given.get(f"{where}.default_workflow_type") or given.get(f"{INPUT}.default_workflow_type") or "")
    function = str(given.get(f"{where}.default_reward_fn_type") or given.get(f"{INPUT}.default_reward_fn_type") or "")
    workflow, reward = WORKFLOWS.get(kind, (None, {}))
    if workflow:
        found["workflow"] = workflow
    rank = given.read("algorithm.advantage_fn_args.rank_penalty", number, 0.0)
    penalties = [*([{"use": "rank_penalty", "coef": rank}] if rank else []), *_overlong(given, where)]
    if penalties:
        found["algorithm.shaping"] = [*penalties, *_kl(given)["algorithm.shaping"]]
    if any(str(given.get(f"algorithm.{key}")) == "sppo" for key in ("algorithm_type", "policy_loss_fn")):
        found[NOTES] = (*found[NOTES], f"algorithm.policy_loss: {ZOO}")
    if chosen := REWARDS.get(function) or reward:
        return {**found, "reward": dict(chosen)}
    guessed = {} if _offline(given) else likely_reward(given.get(f"{where}.path"), given.get(f"{where}.name"))
    return {**found, **guessed, NOTES: (*found.get(NOTES, ()), *guessed.get(NOTES, ()))}


def _workflow(value: str, given: Given) -> KeyOutcome:
    if value in WORKFLOWS:
        return KeyOutcome({}, "the reward is a separate component: reward")
    note = "workflow: tools, environment or agent, or your own (howto/workflow.md), and its reward"
    return KeyOutcome.missing(note)


def _reward(value: str, given: Given) -> KeyOutcome:
    if value in REWARDS:
        return KeyOutcome({})
    return KeyOutcome.missing(f"reward: {{use: foreign, path: 'FILE.py:CLASS', style: trinity}} runs {value} unchanged")


def _distills(given: Given) -> bool:
    return str(given.get("algorithm.algorithm_type")) == "on_policy_distill"


def _single_turn(given: Given) -> bool:
    kinds = filter(None, (given.get(f"{where}.default_workflow_type") for where in TASKSET_KEYS))
    found = [str(kind) in WORKFLOWS for kind in kinds]
    return bool(found) and all(found)


def _eval_workflow(value: str, given: Given) -> KeyOutcome:
    if value in WORKFLOWS and _single_turn(given):
        return KeyOutcome.ignored("evaluations use the training's workflow and reward")
    if value in WORKFLOWS:
        return KeyOutcome({"eval.workflow": WORKFLOWS[value][0]}, "its reward is the training's")
    return KeyOutcome.missing("eval.workflow; its reward is the training's")


def _overlong(given: Given, where: str) -> list[dict[str, Any]]:
    """DAPO's penalty of long answers, which is part of Trinity's reward."""
    arguments = f"{where}.reward_fn_args"
    if not given.read(f"{arguments}.enable_overlong_penalty", flag, False):
        return []
    limit = given.whole(f"{arguments}.max_response_length", _response(given))
    penalty = given.read(f"{arguments}.penalty_factor", number, 1.0)
    return [
        {"use": "overlong", "max_length": limit, "buffer": given.whole(f"{arguments}.cache_length"), "penalty": penalty}
    ]


def _of_verl(key: str, to: str, read: Any, sample: Any, over: str = "") -> KeyRule:
    """Return the rule of a setting of veRL, which a setting of Trinity's own may replace."""

    def give(value: Any, given: Given) -> KeyOutcome:
        if over and given.flat.get(over) is not None:
            return KeyOutcome.ignored(f"{over} takes precedence")
        if key.startswith("critic.") and not _algorithm_of(given).get("algorithm.critic"):
            return KeyOutcome.ignored("the algorithm has no critic")
        return KeyOutcome({to: value})

    return KeyRule(f"{VERL}.{key}", "mapped", (to,), "", sample, read, give)


def _algorithm_of(given: Given) -> dict[str, Any]:
    name = str(given.get("algorithm.algorithm_type"))
    return _algorithm(name, given) if name in ALGORITHMS else {}


def _schedule(least: float) -> Any:
    """Set the schedule with its default for the least rate, as a share of the peak."""

    def give(value: str, _: Given) -> dict[str, Any]:
        return {"learner.schedule": value, **({"learner.final_ratio": least} if value != "constant" else {})}

    return give


def _verl_file(value: str, given: Given) -> KeyOutcome:
    if given.section(VERL):
        return KeyOutcome.ignored(f"its settings are converted, as {VERL}")
    return KeyOutcome.missing(f"put the settings of this file under {VERL}, and convert again")


_THINKING = (
    "model.renderer: without model.enable_thinking, Trinity-RFT turns off the thoughts of Qwen3, as does "
    "renderer: {use: template, variables: {enable_thinking: false}}"
)
_BUFFER = "the run's own scheduler and database pass rollouts from engines to the learner"
_ROLLOUT = "explorer.rollout_model"

ROWS = (
    # Run
    changed("mode", "", text, "both", "rlsdk train --mode", _mode),
    part("project", "out trackers", text, "my-project", "the folder of runs, and the wandb project"),
    part("group", "out", text, "x", "a folder between project and name"),
    same("name", "name", text, "my-run"),
    changed("checkpoint_root_dir", "out", text, "./checkpoints", "a run's folder is out/name", _out),
    ignored("continue_from_checkpoint", "rlsdk resumes only on request: rlsdk train CONFIG --resume", True),
    ignored("ray_namespace", "each run has its own namespace", "x"),
    missing("stages", "write one config per stage, each starting from the previous stage's export", "x"),
    ignored("ignore_validator_suggestions", "`rlsdk explain` reports faults and warnings", True),
    missing("stages.**", "write one config per stage, each starting from the previous stage's export", "x"),
    # Algorithm
    same("algorithm.algorithm_type", "algorithm.use algorithm.advantage algorithm.policy_loss",
         choice(ALGORITHMS, "the algorithm"), "grpo", _algorithm),
    same("algorithm.repeat_times", "group_size", count, 8),
    same("algorithm.advantage_fn", "algorithm.advantage", choice(ADVANTAGES, "the advantage"), "grpo", _advantage),
    *(_argument("advantage", name, sample) for name, sample in (
        ("gamma", 1.0), ("lam", 0.95), ("tau", 1.0), ("std_cal_level", "batch"), ("std_normalize", False),
        ("opmd_baseline", "mean"), ("baseline_shift", -0.1), ("drop", "balance"), ("enable_step_norm", True),
        ("omega", 1.0), ("fnorm", "std"), ("kl_coef", 1.0))),
    ignored("algorithm.advantage_fn_args.epsilon", "1e-6 beside the standard deviation", 1e-6),
    part("algorithm.advantage_fn_args.std_threshold", "algorithm.filters", number, 0.1, "drops groups"),
    unless("algorithm.advantage_fn_args.duplicate_experiences", (False,),
           "no rollouts are doubled; rollout.dynamic_sampling: true replaces dropped groups by new tasks", True),
    part("algorithm.advantage_fn_args.rank_penalty", "algorithm.shaping", number, 0.25,
         "of the rewards themselves, as in the paper; Trinity changes only the group's mean and deviation"),
    missing("algorithm.advantage_fn_args.**", "see the options of the advantage: rlsdk plugins advantage", 1),
    same("algorithm.policy_loss_fn", "algorithm.policy_loss", choice(LOSSES, "the loss"), "ppo", _loss),
    same("algorithm.policy_loss_fn_args.loss_agg_mode", "algorithm.aggregate", text, "token-mean",
         lambda v, given: {} if "algorithm.loss_agg_mode" in given.flat else {"algorithm.aggregate": v}),
    *(_argument("loss", name, sample) for name, sample in (
        ("clip_range", 0.2), ("clip_range_low", 0.2), ("clip_range_high", 0.28), ("clip_ratio_c", 3.0), ("tau_pos", 1.0),
        ("tau_neg", 1.05), ("tau", 1.0), ("mu", 0.1), ("mu_peak", 0.9), ("mu_valley", 0.05), ("mu_decay_steps", 200),
        ("beta", 0.1), ("label_smoothing", 0.0), ("epsilon", 0.3))),
    unless("algorithm.policy_loss_fn_args.mu_warmup_steps", (0,), "a schedule of mu has no warm-up: it falls from the first step", 200),
    unless("algorithm.policy_loss_fn_args.enable_phi_function", (False,), "the loss mix does not weigh an expert's tokens by "
           "their probability: write a policy loss", True),
    *(changed(f"algorithm.policy_loss_fn_args.{name}", "algorithm.policy_loss", text, "one-side", "", _rec_option)
      for name in ("clip_mode", "weight", "regularizer")),
    *(part(f"algorithm.policy_loss_fn_args.epsilon_{end}", f"algorithm.policy_loss.clip_{end}", number, 0.2)
      for end in ("low", "high")),
    *(ignored(f"algorithm.policy_loss_fn_args.{name}", "each part of mix has its own denominator", 1) for name in (
        "use_dynamic_bsz", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ngpus_trainer", "train_batch_size_usual",
        "train_batch_size_expert", "gradient_accumulation", "read_batch_size_usual", "read_batch_size_expert")),
    *(unless(f"algorithm.policy_loss_fn_args.{name}", (False,), "see rlsdk plugins policy_loss", True) for name in (
        "enable_mask_clip", "fallback_to_policy_gradient")),
    *(changed(f"algorithm.policy_loss_fn_args.{side}_loss_agg_mode", "algorithm.aggregate", text, "token-mean", "",
              lambda v, given: KeyOutcome.ignored("as the other part") if v == given.get("algorithm.loss_agg_mode")
              else KeyOutcome.missing("algorithm.aggregate is that of both parts")) for side in ("sft", "grpo")),
    changed("algorithm.policy_loss_fn_args.enable_sequence_masking", "algorithm.correction", flag, True, ZOO, _sequence_masking),
    part("algorithm.policy_loss_fn_args.delta_sequence_masking", "algorithm.correction.threshold", number, 0.1),
    missing("algorithm.policy_loss_fn_args.**", "see the options of the loss: rlsdk plugins policy_loss", 1),
    part("algorithm.kl_loss_fn", "algorithm.kl", KL, "k2"),
    part("algorithm.kl_loss_fn_args.kl_coef", "algorithm.kl_coef", number, 0.001),
    part("algorithm.kl_penalty_fn", "algorithm.shaping", KL, "k1"),
    part("algorithm.kl_penalty_fn_args.kl_coef", "algorithm.shaping", number, 0.001),
    *(part(f"algorithm.kl_penalty_fn_args.{name}", "algorithm.shaping", lambda v: v, sample) for name, sample in (
        ("adaptive", True), ("target_kl", 0.1), ("horizon", 10000))),
    missing("algorithm.kl_penalty_fn_args.*", "options of the shaping kl_penalty: target and horizon", 1),
    *(ignored(f"algorithm.kl_loss_fn_args.{name}", "the coefficient of the loss stays as it is", 1) for name in (
        "adaptive", "target_kl", "horizon")),
    missing("algorithm.kl_loss_fn_args.*", "algorithm.kl_coef may be a schedule", 1),
    unless("algorithm.entropy_loss_fn", ("default", "none", "mix"), "algorithm.entropy_coef", "x"),
    same("algorithm.entropy_loss_fn_args.entropy_coef", "algorithm.entropy_coef", number, 0.0),
    unless("algorithm.sample_strategy", ("default", "warmup", "mix", "staleness_control"), "rollout.max_staleness", "x"),
    changed("algorithm.sample_strategy_args.max_staleness", "rollout.max_staleness", whole, 1,
            "groups that are too old are sampled again"),
    ignored("algorithm.sample_strategy_args.expert_data_ratio",
            "each task has one demonstration; mu weighs the two parts, whatever their sizes", 0.2),
    ignored("algorithm.sample_strategy_args.sft_dataset_name", "see buffer.trainer_input.auxiliary_buffers", "sft_dataset"),
    missing("algorithm.sample_strategy_args.*", "see the options of algorithm: mix", 1),
    same("algorithm.bypass_old_logprobs", "old_logprobs", flag, True,
         lambda v, given: {"old_logprobs": "rollout"} if v and not _offline(given) else {}),
    routing_replay("algorithm.enable_router_replay", "false"),
    missing("algorithm.rollout_correction.**", "algorithm.correction: tis, mis, token_mask or geometric", 1),
    same("algorithm.loss_agg_mode", "algorithm.aggregate", choice((
        "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"), "the aggregation"),
        "token-mean",
        lambda v, given: {} if given.get("algorithm.policy_loss_fn_args.loss_agg_mode")
        and "algorithm.loss_agg_mode" not in given.flat else {"algorithm.aggregate": v}),
    same("algorithm.optimizer.lr", "learner.lr", number, 1e-6),
    same("algorithm.optimizer.betas", "learner.betas", numbers, [0.9, 0.999]),
    weight_decay("algorithm.optimizer.weight_decay", 0.01,
                 lambda given: str(given.get("trainer.trainer_strategy")) == "megatron"),
    same("algorithm.optimizer.clip_grad", "learner.grad_clip", number, 1.0),
    same("algorithm.optimizer.lr_scheduler_type", "learner.schedule learner.final_ratio", SCHEDULE, "constant", _schedule(0.01)),
    same("algorithm.optimizer.warmup_style", "learner.schedule learner.final_ratio", SCHEDULE, "constant", _schedule(0.0)),
    same("algorithm.optimizer.min_lr_ratio", "learner.final_ratio", number, 0.01),
    changed("algorithm.optimizer.lr_warmup_steps", "learner.warmup_steps", whole, 10, "in optimiser steps",
            lambda v, given: {"learner.warmup_steps": v * _updates(given)} if v >= 0 else {}),
    changed("algorithm.optimizer.lr_warmup_steps_ratio", "learner.warmup_steps", number, 0.1, "in optimiser steps",
            _warmup_ratio),
    optimizer("algorithm.optimizer.optimizer_type", "sgd", ("adam", "adamw")),
    # Model
    same("model.model_path", "model.path", text, "Qwen/Qwen2.5-0.5B"),
    same("model.critic_model_path", "model.critic", text, "Qwen/Qwen2.5-0.5B",
         of_critic("algorithm.algorithm_type", "ppo", "model.critic", "model.model_path")),
    same("model.trust_remote_code", "model.trust_remote_code", flag, False),
    part("model.max_model_len", "model.max_length", count, 2048),
    part("model.max_prompt_tokens", "max_prompt_tokens", count, 512),
    part("model.max_response_tokens", "sampling.max_tokens", count, 512),
    same("model.temperature", "sampling.temperature eval.temperature", number, 1.0, _temperature),
    no_cut("model.top_p", 1.0),
    no_cut("model.top_k", -1, "top_k"),
    no_cut("model.repetition_penalty", 1.0, "repetition_penalty"),
    changed("model.enable_prompt_truncation", "long_prompts", flag, True, "longer prompts are dropped, never truncated",
            lambda v, given: {"long_prompts": "drop"}),
    ignored("model.min_response_tokens", "the policy decides where an answer ends", 0),
    ignored("model.logprobs", "engines always return the logprobs they sampled with", 0),
    missing("model.custom_chat_template", f"save it to a file, and {TEMPLATE_NOTE}", "{{ x }}"),
    same("model.chat_template_path", "model.renderer.file", text, "chat.jinja", template_file),
    same("model.enable_thinking", "model.renderer.variables.enable_thinking", flag, False),
    same("model.lora_configs.0.lora_rank", "learner.lora.rank", whole, 32, lora_of("model.lora_configs.0.lora_alpha", 32.0)),
    part("model.lora_configs.0.lora_alpha", "learner.lora.alpha", number, 32),
    ignored("model.lora_configs.0.name", "there is a single adapter", "lora"),
    same("model.lora_configs.0.target_modules", "learner.lora.targets", texts, "all-linear",
         lambda v, given: {"learner.lora.targets": v if v != ["all-linear"] else "all-linear"}),
    ignored("model.lora_configs.0.lora_dtype", "an adapter has the model's dtype", "bfloat16"),
    ignored("model.lora_configs.0.is_dummy", "an adapter starts from zero", True),
    changed("model.lora_configs.0.path", "learner.lora.path", text, "adapter", "rank, alpha and targets must be the adapter's"),
    missing("model.lora_configs.**", "learner.lora: rank, alpha, targets", 32),
    same("model.tinker.rank", "learner.lora.rank", count, 32,
         lambda v, given: lora_of("", 32.0)(v, given) if given.read("model.tinker.enable", flag, False) else {}),
    only_with("model.tinker.enable", "model.tinker.**", "the service Tinker trains an adapter elsewhere; rlsdk trains it "
              "itself: set placement.learners and placement.engines", True),
    missing("model.**", "change config.json in the model's folder", 1),
    # Cluster
    part("cluster.node_num", "placement.learners", count, 1, "the learner gets the GPUs not used by engines"),
    part("cluster.gpu_per_node", "placement.learners", count, 2, "the learner gets the GPUs not used by engines"),
    changed("cluster.ray_address", "placement.ray", text, "auto", "null starts a Ray instance for this run",
            lambda v, given: {} if v == "auto" else {"placement.ray": v}),
    ignored("cluster.**", "counts are in placement", 1),
    missing("cod.**", "write a workflow (howto/workflow.md)", 1),
    # Data
    same("buffer.batch_size", "batch_size", count, 96, lambda _, given: {"batch_size": _batch(given)}),
    changed("buffer.train_batch_size", "minibatches", count, 96, "optimiser steps per batch",
            lambda v, given: KeyOutcome({"minibatches": _updates(given)}, "Trinity counts experiences per trainer step; rlsdk splits a batch of rollouts")),
    same("buffer.total_epochs", "epochs", number, 1, _epochs),
    same("buffer.total_steps", "steps", count, 100, _total),
    *(row for where in TASKSETS for row in (
        part(f"{where}.path", "tasks.train", text, "openai/gsm8k", "becomes a task source"),
        part(f"{where}.name", "tasks.train", text, "gsm8k"),
        part(f"{where}.split", "tasks.train.split", text, "train"),
        part(f"{where}.subset_name", "tasks.train.config", text, "main"),
        part(f"{where}.format.prompt_key", "tasks.train.columns.prompt", text, "question"),
        part(f"{where}.format.response_key", "tasks.train.columns.answer", text, "answer"),
        part(f"{where}.format.system_prompt", "tasks.train.system", text, "Think first."),
        part(f"{where}.format.reply_prefix", "tasks.train.prefill", text, "x"),
        missing(f"{where}.format.**", "write the rows in their final form, or write a task source", "x"),
        same(f"{where}.rollout_args.temperature", "sampling.temperature", number, 1.0),
        no_cut(f"{where}.rollout_args.top_p", 1.0),
        ignored(f"{where}.rollout_args.logprobs", "engines always return the logprobs they sampled with", 0),
        no_cut(f"{where}.rollout_args.top_k", -1, "top_k"),
        part(f"{where}.rollout_args.max_tokens", "sampling.max_tokens", count, 512),
        ignored(f"{where}.rollout_args.n", "algorithm.repeat_times", 8),
        missing(f"{where}.rollout_args.**", "sampling has temperature, max_tokens and stop", 1),
        changed(f"{where}.default_workflow_type", "workflow reward", text, "math_workflow", "its reward is separate", _workflow),
        same(f"{where}.default_reward_fn_type", "reward", text, "math_reward", _reward),
        missing(f"{where}.workflow_args.**", "set options of the workflow", 1),
        part(f"{where}.reward_fn_args.enable_overlong_penalty", "algorithm.shaping", flag, True,
             "Trinity's DAPO rewards are 1 and -1; those of rlsdk's math are 1 and 0"),
        part(f"{where}.reward_fn_args.penalty_factor", "algorithm.shaping", number, 1.0),
        part(f"{where}.reward_fn_args.max_response_length", "algorithm.shaping", count, 1024),
        part(f"{where}.reward_fn_args.cache_length", "algorithm.shaping", count, 256),
        missing(f"{where}.reward_fn_args.**", "set options of the reward", 1),
        *(row for selector in ("data_selector", "task_selector") for row in (
            selector_rule(f"{where}.{selector}"),
            features_rule(f"{where}.{selector}"),
            part(f"{where}.{selector}.kwargs.target_reward", "rollout.sampler.target", number, 0.8),
            missing(f"{where}.{selector}.kwargs.**", "rollout.sampler: by_pass_rate has the options target, newest and least", 16),
            ignored(f"{where}.{selector}.seed", "there is one seed for everything", 42),
            missing(f"{where}.{selector}.**", NO_SELECTOR, "x"))),
        ignored(f"{where}.storage_type", "files and hub data sets are recognised by name", "file"),
        ignored(f"{where}.**", "the run's settings apply", 1),
    )),
    part(f"{INPUT}.eval_tasksets.*.path", "tasks.eval", text, "openai/gsm8k", "becomes a task source"),
    part(f"{INPUT}.eval_tasksets.*.name", "tasks.eval", text, "gsm8k-eval"),
    part(f"{INPUT}.eval_tasksets.*.split", "tasks.eval", text, "test"),
    part(f"{INPUT}.eval_tasksets.*.subset_name", "tasks.eval", text, "main"),
    part(f"{INPUT}.eval_tasksets.*.format.*", "tasks.eval", text, "question"),
    changed(f"{INPUT}.eval_tasksets.*.repeat_times", "eval.samples", count, 4, "of all tasks", most_samples),
    changed(f"{INPUT}.eval_tasksets.*.rollout_args.n", "eval.samples", count, 4, "of all tasks", most_samples),
    evaluation_sampling("temperature", 0.6),
    evaluation_sampling("top_p", 0.95),
    evaluation_sampling("top_k", 20),
    changed(f"{INPUT}.eval_tasksets.*.rollout_args.max_tokens", "eval.max_tokens", count, 1024, "of all tasks"),
    ignored(f"{INPUT}.eval_tasksets.*.rollout_args.logprobs", "engines always return the logprobs they sampled with", 0),
    missing(f"{INPUT}.eval_tasksets.*.rollout_args.**", EVALUATION_NOTE, 0.6),
    ignored(f"{INPUT}.eval_tasksets.*.**", "evaluations use the training's workflow and reward", "x"),
    changed(f"{INPUT}.default_workflow_type", "workflow reward", text, "math_workflow", "its reward is separate", _workflow),
    same(f"{INPUT}.default_reward_fn_type", "reward", text, "math_reward", _reward),
    changed(f"{INPUT}.default_eval_workflow_type", "eval.workflow", text, "math_workflow", "its reward is the training's",
            _eval_workflow),
    part(f"{INPUT}.system_prompt", "tasks.train.system", text, "Think first."),
    part(f"{INPUT}.reply_prefix", "tasks.train.prefill", text, "x"),
    unless(f"{REPLAY}.enable", (False,), "rollout.replay.share and rollout.max_staleness: the share of a batch that is trained "
           "again, which Trinity leaves to the speed of its explorer", True),
    only_with(f"{REPLAY}.enable", f"{REPLAY}.**", "with rollout.replay.share, rollout.buffer: {use: priority, sign: 0, age_decay: 1, "
              "use_decay: 2.0} is linear_decay with a decay of 2.0", 1),
    missing("buffer.trainer_input.auxiliary_buffers.*.path", "demonstrations are a column of the tasks: join these answers to "
            "tasks.train as the column `demonstration`", "x"),
    _held("path", "o/data"),
    _held("split", "train"),
    _held("format.prompt_key", "prompt"),
    _held("format.response_key", "response"),
    _held("format.chosen_key", "chosen", "chosen"),
    _held("format.rejected_key", "rejected", "rejected"),
    ignored("buffer.trainer_input.auxiliary_buffers.**", "see its path", "x"),
    ignored("buffer.trainer_input.**", _BUFFER, "x"),
    ignored("buffer.explorer_output.**", _BUFFER, "x"),
    ignored("buffer.**", _BUFFER, "x"),
    ignored("data.**", _BUFFER, "x"),
    changed(f"{OPERATORS}.*.name", "algorithm.filters", text, "reward_std_filter", "a filter", _operator),
    part(f"{OPERATORS}.*.args.threshold", "algorithm.filters", number, 0.0),
    missing(f"{OPERATORS}.**", "algorithm.filters and algorithm.shaping, see rlsdk plugins", "x"),
    ignored("data_processor.experience_pipeline.save_input", "rollouts are saved: save_rollouts", True),
    ignored("data_processor.experience_pipeline.input_save_path", "rollouts are saved in the run's database", "x"),
    missing("data_processor.**", "algorithm.filters and algorithm.shaping, or a task source", "x"),
    # Explorer
    same("explorer.eval_interval", "eval.every", interval, 50),
    same("explorer.eval_on_startup", "eval.before", flag, True),
    part(f"{_ROLLOUT}.engine_num", "placement.engines", count, 1),
    same(f"{_ROLLOUT}.engine_type", "engine.use", text, "vllm", _engine),
    same(f"{_ROLLOUT}.tensor_parallel_size", "engine.tensor_parallel_size", count, 1),
    same(f"{_ROLLOUT}.gpu_memory_utilization", "engine.gpu_memory_utilization", number, 0.9),
    same(f"{_ROLLOUT}.enforce_eager", "engine.enforce_eager", flag, True),
    same(f"{_ROLLOUT}.enable_prefix_caching", "engine.args.enable_prefix_caching", flag, False),
    same(f"{_ROLLOUT}.enable_chunked_prefill", "engine.args.enable_chunked_prefill", flag, True),
    changed(f"{_ROLLOUT}.dtype", "model.dtype", DTYPE, "bfloat16",
            "of engines and learner, which compute alike; the optimiser keeps float32 weights"),
    same(f"{_ROLLOUT}.temperature", "sampling.temperature", number, 1.0),
    part(f"{_ROLLOUT}.max_response_tokens", "sampling.max_tokens", count, 512),
    ignored(f"{_ROLLOUT}.seed", "there is one seed for everything", 42),
    no_cut(f"{_ROLLOUT}.top_p", 1.0),
    no_cut(f"{_ROLLOUT}.top_k", -1, "top_k"),
    no_cut(f"{_ROLLOUT}.repetition_penalty", 1.0, "repetition_penalty"),
    same(f"{_ROLLOUT}.enable_expert_parallel", "engine.args", flag, True, of_vllm),
    same(f"{_ROLLOUT}.extra_engine_args.*", "engine.args", lambda v: v, 4, of_vllm),
    unless(f"{_ROLLOUT}.data_parallel_size", (1,), "placement.engines is the number of engines", 2),
    unless(f"{_ROLLOUT}.pipeline_parallel_size", (1,), "engines have tensor parallelism only", 2),
    unless(f"{_ROLLOUT}.ignore_eos", (False,), "an answer ends at the end-of-text token", True),
    missing(f"{_ROLLOUT}.chat_template", f"save it to a file, and {TEMPLATE_NOTE}", "{{ x }}"),
    missing(f"{_ROLLOUT}.tool_call_parser", "parser of the workflow tools", "hermes"),
    ignored(f"{_ROLLOUT}.**", "the engine's default is kept; engine.args accepts vLLM's settings", 1),
    changed("explorer.auxiliary_models.0.model_path", "model.reference", text, "Qwen/Qwen3-32B", "the teacher",
            lambda v, given: {"model.reference": v} if _distills(given)
            else KeyOutcome.missing("reward: judge, for a model behind an endpoint")),
    *(changed(f"explorer.auxiliary_models.{name}", "", lambda v: v, 1, "",
              lambda v, given: KeyOutcome.ignored("the teacher runs with the learner") if _distills(given)
              else KeyOutcome.missing("reward: judge, for a model behind an endpoint")) for name in ("0.**", "**")),
    changed("explorer.over_rollout.ratio", "rollout.stop", number, 0.1, "part of a batch suffices",
            lambda v, given: {"rollout.stop": {"use": "enough", "share": 1 - v}} if v else {}),
    changed("explorer.max_timeout", "workflow.timeout", whole, 1800, "",
            lambda v, given: KeyOutcome.ignored("an answer ends at sampling.max_tokens") if _single_turn(given)
            else KeyOutcome.missing("set timeout of the workflow")),
    ignored("explorer.max_retry_times", "failed rollouts are dropped; max_invalid limits their share", 2),
    ignored("explorer.runner_per_model", "rollouts are coroutines; engine.max_num_seqs limits them", 8),
    missing("explorer.env_vars.**", "set it in the environment of rlsdk train", "x"),
    ignored("explorer.bench_on_latest_checkpoint", "rlsdk train --mode bench evaluates each checkpoint", True),
    ignored("explorer.**", "rlsdk's scheduler needs no such limit", 1),
    # Trainer
    same("trainer.save_interval", "checkpoint.every", interval, 100),
    same("trainer.max_checkpoints_to_keep", "checkpoint.keep", whole, 2, checkpoints_kept("trainer.save_interval")),
    same("trainer.save_hf_checkpoint", "checkpoint.export", Choice(
        {"last": "last", "always": "every", "never": "never"}, "the choice"), "last"),
    same("trainer.total_steps", "steps", count, 100, _total),
    same("trainer.grad_clip", "learner.grad_clip", number, 1.0),
    changed("trainer.max_token_len_per_gpu", "learner.micro_batch_tokens", count, 16384, "with padding"),
    changed("trainer.ppo_max_token_len_per_gpu", "learner.micro_batch_tokens", count, 16384, "with padding"),
    *(_of_verl(f"actor_rollout_ref.actor.{key}", to, read, sample, over and f"algorithm.optimizer.{over}")
      for key, to, read, sample, over in (
        ("optim.lr", "learner.lr", number, 1e-6, "lr"),
        ("optim.weight_decay", "learner.weight_decay", number, 0.01, "weight_decay"),
        ("optim.betas", "learner.betas", numbers, [0.9, 0.999], "betas"),
        ("optim.warmup_style", "learner.schedule", SCHEDULE, "constant", "lr_scheduler_type"),
        ("optim.min_lr_ratio", "learner.final_ratio", number, 0.1, "min_lr_ratio"),
        ("optim.lr_warmup_steps", "learner.warmup_steps", whole, 20, "lr_warmup_steps"),
        ("grad_clip", "learner.grad_clip", number, 1.0, ""),
        ("ppo_epochs", "passes", count, 1, ""),
        ("ulysses_sequence_parallel_size", "learner.sequence_parallel", count, 1, ""))),
    *(_of_verl(key, to, read, sample) for key, to, read, sample in (
        ("critic.optim.lr", "learner.critic_lr", number, 1e-5),
        ("critic.cliprange_value", "algorithm.value_clip", number, 0.5),
        ("actor_rollout_ref.model.enable_gradient_checkpointing", "learner.gradient_checkpointing", flag, True),
        ("trainer.max_actor_ckpt_to_keep", "checkpoint.keep", count, 5))),
    changed(f"{VERL}.trainer.critic_warmup", "critic.warmup_steps", whole, 10, CRITIC_WARMUP_NOTE,
            critic_warmup("algorithm.algorithm_type", "ppo", -1, CRITIC_WARMUP_NOTE)),
    changed(f"{VERL}.actor_rollout_ref.actor.ppo_max_token_len_per_gpu", "learner.micro_batch_tokens", count, 16384, "with padding"),
    changed(f"{VERL}.actor_rollout_ref.actor.fsdp_config.optimizer_offload", "learner.offload", flag, True, LEARNER_NOTE,
            switched({"learner.offload": "optimizer"}, LEARNER_NOTE)),
    changed(f"{VERL}.actor_rollout_ref.actor.fsdp_config.param_offload", "learner.offload learner.zero_stage", flag, True,
            LEARNER_NOTE, switched({"learner.zero_stage": 3, "learner.offload": "all"}, LEARNER_NOTE)),
    ignored(f"{VERL}.actor_rollout_ref.actor.clip_ratio*", "algorithm.policy_loss_fn_args sets the bounds", 0.28),
    *(ignored(f"{VERL}.{key}", LEARNER_NOTE, 1) for key in (
        "critic.**", "actor_rollout_ref.ref.**", "actor_rollout_ref.hybrid_engine", "actor_rollout_ref.model.use_remove_padding",
        "actor_rollout_ref.actor.checkpoint.**", "actor_rollout_ref.actor.fsdp_config.**",
        "actor_rollout_ref.actor.use_dynamic_bsz", "actor_rollout_ref.actor.strategy", "actor_rollout_ref.actor.shuffle",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", "actor_rollout_ref.actor.optim.total_training_steps",
        "trainer.**")),
    changed("trainer.use_remove_padding", "learner.rows", flag, True, "worthwhile with flash_attention_2",
            switched({"learner.rows": "packed"}, "worthwhile with learner.attention=flash_attention_2")),
    changed("trainer.optimizer_offload", "learner.offload", flag, True, LEARNER_NOTE,
            switched({"learner.offload": "optimizer"}, LEARNER_NOTE)),
    changed("trainer.param_offload", "learner.offload learner.zero_stage", flag, True, LEARNER_NOTE,
            switched({"learner.zero_stage": 3, "learner.offload": "all"}, LEARNER_NOTE)),
    changed("trainer.trainer_config_path", "", text, "train.yaml", "a file with veRL's settings", _verl_file),
    changed("trainer.ulysses_sequence_parallel_size", "learner.sequence_parallel", count, 1, "must divide placement.learners"),
    ignored("trainer.use_dynamic_bsz", "micro-batches are always counted in tokens", True),
    ignored("trainer.trainer_type", LEARNER_NOTE, "verl"),
    ignored("trainer.trainer_strategy", LEARNER_NOTE, "fsdp"),
    ignored("trainer.enable_preview", "`rlsdk rollouts RUN` shows the samples", True),
    KeyRule(f"{VERL}.**", "missing", (), OF_VERL, 1, give=_if_verl_needs_it),
    ignored("trainer.**", LEARNER_NOTE, 1),
    # Synchroniser, monitor, rest
    same("synchronizer.sync_interval", "rollout.sync_interval", count, 1, _ahead("rollout.sync_interval")),
    same("synchronizer.sync_offset", "rollout.max_staleness", whole, 0, _ahead("rollout.max_staleness")),
    ignored("synchronizer.sync_method", "weights are sent from ranks to engines directly", "nccl"),
    changed("synchronizer.sync_style", "rollout.max_staleness", text, "explorer_driven", _RUN_AHEAD, _style),
    ignored("synchronizer.**", "the watchdog ends a run with silent processes", 1200),
    same("monitor.monitor_type", "trackers", text, "tensorboard", trackers_with("project", "Trinity-RFT")),
    ignored("monitor.monitor_args.api_key", "log in with `wandb login`", "x"),
    missing("monitor.monitor_args.base_url", "WANDB_BASE_URL in the environment", "x"),
    missing("monitor.monitor_args.**", "options of the tracker: rlsdk plugins tracker", "x"),
    ignored("monitor.**", "metrics.jsonl has the metrics of every step", True),
    changed("log.level", "log_level", text, "INFO", "in lower case",
            lambda v, given: {"log_level": v.lower()} if v.lower() in ("debug", "info", "warning", "error") else {}),
    ignored("log.**", "logs are written to the run's folder", "x"),
    missing("service.**", "prepare data before the run", "x"),
)  # fmt: skip

DEFAULTS: Mapping[str, Any] = {
    "name": "trinity-run",
    "algorithm.algorithm_type": "ppo",
    "algorithm.repeat_times": 1,
    "algorithm.loss_agg_mode": "token-mean",
    "algorithm.optimizer.lr": 1e-6,
    "algorithm.optimizer.betas": [0.9, 0.999],
    "algorithm.optimizer.weight_decay": 0.01,
    "buffer.batch_size": 1,
    "buffer.total_epochs": 1,
    "explorer.eval_interval": 100,
    f"{_ROLLOUT}.engine_type": "vllm",
    f"{_ROLLOUT}.dtype": "bfloat16",
    f"{_ROLLOUT}.gpu_memory_utilization": 0.9,
    "monitor.monitor_type": "tensorboard",
    "trainer.save_hf_checkpoint": "last",
    "trainer.max_checkpoints_to_keep": -1,
    "algorithm.bypass_old_logprobs": True,
}

RENAMED: Mapping[str, str] = {
    **{f"data.{old}": f"{INPUT}.{new}" for old, new in (
        ("dataset_path", "taskset.path"), ("train_split", "taskset.split"), ("subset_name", "taskset.subset_name"),
        ("format.", "taskset.format."), ("format_config.", "taskset.format."),
        ("default_workflow_type", "default_workflow_type"), ("default_reward_fn_type", "default_reward_fn_type"))},
    "data.total_epochs": "buffer.total_epochs",
    "data.batch_size": "buffer.batch_size",
    **{f"explorer.{name}": f"{_ROLLOUT}.{name}" for name in (
        "engine_type", "engine_num", "tensor_parallel_size", "enable_prefix_caching", "enforce_eager", "dtype",
        "temperature", "seed", "gpu_memory_utilization")},
    f"{_ROLLOUT}.enable_thinking": "model.enable_thinking",
    "explorer.repeat_times": "algorithm.repeat_times",
    "model.checkpoint_path": "checkpoint_root_dir",
    "model.max_token_len": "model.max_model_len",
    "trainer.algorithm_type": "algorithm.algorithm_type",
    "trainer.eval_interval": "explorer.eval_interval",
    "synchronizer.sync_iteration_interval": "synchronizer.sync_interval",
    "monitor.project": "project",
    "monitor.name": "name",
}  # fmt: skip
"""Keys of version 0.1 -> today's."""

FRAMEWORK = Framework(
    name="trinity",
    title="Trinity-RFT",
    rows=ROWS,
    defaults=DEFAULTS,
    finish=_finish,
    renamed=RENAMED,
    files={"trainer.trainer_config_path": VERL},
    entries=("trinity run",),
)
