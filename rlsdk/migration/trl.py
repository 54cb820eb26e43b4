"""Keys of TRL: GRPOConfig, RLOOConfig and the arguments of `trl grpo`; those of transformers' trainer among them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsdk.migration.parts import (
    ATTENTION,
    DECAY_SHAPE,
    DTYPE,
    KEEP_ALL,
    OPTIMIZER_NOTE,
    OPTIMIZER_OPTIONS_NOTE,
    SCHEDULE,
    TRACKERS,
    ZOO,
    dataset,
    minibatches,
    no_cut,
    optimizer,
    share_of_steps,
    switched,
    template_file,
    template_variables,
    trackers,
    transformers_schedule,
    unshuffled,
    weight_decay,
)
from rlsdk.migration.python_files import LOADERS
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
from rlsdk.migration.trl_rewards import called, convert_aggregation, convert_functions, normalises_parts, rewards_of
from rlsdk.migration.trl_tools import convert_factory, convert_tools, workflow_of
from rlsdk.migration.trl_trainers import (
    CONSTRUCTORS,
    OTHERS,
    TRAINERS,
    VARIANTS,
    answers_per_row,
    counts_batches,
    first,
    online_dpo,
    own_shaping,
    ppo,
)
from rlsdk.migration.trl_trainers import ROWS as ROWS_OF_TRAINERS

LOSSES: Mapping[str, str] = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
    "cispo": "token-mean",
    "sapo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "vespo": "token-mean",
}
"""`loss_type` -> the aggregation."""
VESPO: Mapping[str, tuple[str, float]] = {
    "power_pos": ("k_pos", 2.0),
    "decay_pos": ("lambda_pos", 3.0),
    "power_neg": ("k_neg", 3.0),
    "decay_neg": ("lambda_neg", 2.0),
}
"""Option of the loss zoo/vespo -> its name in TRL, and its default."""
STRATEGY = Choice({"no": "no", "false": "no", "steps": "steps", "epoch": "epoch", "best": "best"}, "the strategy")
"""When something is done; YAML reads a plain `no` as false."""


def _ranks(given: Given) -> int:
    return given.whole("num_processes")


def _rollouts(given: Given) -> int:
    """Completions that are generated at once."""
    explicit = given.whole("generation_batch_size", 0)
    accumulated = given.whole("gradient_accumulation_steps")
    return explicit or _on_all_ranks(given) * given.whole("steps_per_generation", accumulated)


def _per_update(given: Given) -> int:
    """Completions of one optimiser step."""
    return _on_all_ranks(given) * given.whole("gradient_accumulation_steps")


def _on_all_ranks(given: Given) -> int:
    """Completions of one micro-batch of all ranks."""
    return given.whole("per_device_train_batch_size", 8) * answers_per_row(given) * _ranks(given)


def _updates(given: Given) -> int:
    """TRL's steps in one of rlsdk's."""
    if counts_batches(given):
        return 1
    return minibatches(_rollouts(given), _per_update(given)) * given.whole("num_iterations")


def _prompt(given: Given) -> int:
    """Maximum tokens of a prompt, for which today's TRL has no option."""
    both = given.whole("vllm_max_model_length", 0) or given.whole("max_length", 0)
    whole_length = both - given.whole("max_completion_length", 512)
    return given.whole("max_prompt_length", 0) or (whole_length if whole_length > 0 else 512)


def _length(given: Given) -> int:
    return _prompt(given) + given.whole("max_completion_length", 512)


def _estimator(kind: str, given: Given) -> Mapping[str, Any] | KeyOutcome:
    if kind in ("online_dpo", "ppo"):
        return online_dpo(given) if kind == "online_dpo" else ppo(given)
    if kind == "async_grpo":  # whose ratio is that to the engine's policy
        return {"old_logprobs": "rollout", **_group_relative(given)}
    if kind == "rloo":
        whitened = given.read("normalize_advantages", flag, False)
        values: dict[str, Any] = {"algorithm.use": "rloo", "algorithm.advantage": "rloo"}
        return {**values, **({"algorithm.whiten_advantages": True} if whitened else {})}
    return _group_relative(given)


def _group_relative(given: Given) -> dict[str, Any]:
    if normalises_parts(given):
        return {"algorithm.use": "gdpo", "algorithm.advantage": "gdpo"}
    scale = str(given.get("scale_rewards", "group")).lower()
    over = {"std_over": "batch"} if scale == "batch" else {}
    normalise = scale not in ("none", "false")
    return {"algorithm.use": "grpo", "algorithm.advantage": {"use": "grpo", "std_normalize": normalise, **over}}


def _loss(kind: str, given: Given) -> Mapping[str, Any] | KeyOutcome:
    if (trainer := str(given.get("trainer"))) == "ppo":
        return {}
    if trainer == "online_dpo":
        if kind != "sigmoid":
            raise UnfitError(f"the loss of online DPO is sigmoid; {kind} has no counterpart: write a policy loss")
        return {}
    if kind not in LOSSES:
        raise UnfitError(f"{kind} is a loss of online DPO")
    low = given.read("epsilon", number, 0.2)
    high = given.read("epsilon_high", number, low)
    values: dict[str, Any] = {"algorithm.aggregate": LOSSES[kind]}
    bounds = {"clip_low": low, "clip_high": high}
    if trainer == "gmpo":
        loss = {"use": "geo_mean", **bounds, "dual_clip": None}
        return {"algorithm.policy_loss": loss, "algorithm.aggregate": "seq-mean-token-mean"}
    if trainer == "rloo":  # its ratio is that of the whole answer, whose first gradient is the same
        return {
            "algorithm.aggregate": "seq-mean-token-sum",
            "algorithm.policy_loss": {"use": "ppo", **bounds, "dual_clip": None},
        }
    # sequence_token has the same gradient as sequence, since the tokens of an answer share its advantage
    whole_answer = str(given.get("importance_sampling_level")) in ("sequence", "sequence_token")
    if kind == "vespo":
        options = {to: given.read(f"vespo_{key}", number, usual) for to, (key, usual) in VESPO.items()}
        values["algorithm.policy_loss"] = {"use": "zoo/vespo", **options}
        return KeyOutcome(values, ZOO)
    if kind == "cispo":
        # TRL's epsilon_high is the greatest ratio itself, rlsdk's clip_high its distance from 1
        values["algorithm.policy_loss"] = {"use": "cispo", "clip_low": 1.0, "clip_high": max(0.0, high - 1)}
    elif kind == "sapo":
        names = {"tau_pos": "sapo_temperature_pos", "tau_neg": "sapo_temperature_neg"}
        temperatures = {to: given.read(key, number, 1.05 if to == "tau_neg" else 1.0) for to, key in names.items()}
        values["algorithm.policy_loss"] = {"use": "sapo", **temperatures}
    else:
        name = "gspo" if whole_answer else "ppo"
        values["algorithm.policy_loss"] = {"use": name, **bounds, "dual_clip": given.read("delta", number)}
    if kind == "dr_grpo":
        values["algorithm.norm"] = float(given.whole("max_completion_length", 512))
    return values


def _beta(value: float, given: Given) -> Mapping[str, Any] | KeyOutcome:
    if str(given.get("trainer")) == "online_dpo":
        several = len(given.read("beta", numbers, [])) > 1
        note = "the first; TRL takes one for each epoch, rlsdk a schedule" if several else ""
        return KeyOutcome({}, note)
    if str(given.get("trainer")) == "rloo":
        return {"algorithm.kl_coef": 0.0, "algorithm.shaping": own_shaping(given)}
    return {"algorithm.kl_coef": value, **({"algorithm.kl": "k3"} if value else {})}


def _has_experts(given: Given) -> bool | None:
    """Return whether the model is a mixture of experts, by its config.json or its name; None if neither tells."""
    if given.read("model_init_kwargs.output_router_logits", flag, False):
        return True
    keys = ("model_name_or_path", "model", "model.argument_1", "model.pretrained_model_name_or_path")
    name = next((value for key in keys if isinstance(value := given.get(key), str)), "")
    try:
        config = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True if _OF_EXPERTS.search(name) else None
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    return any(part.get(count) for part in (config, config.get("text_config") or {}) for count in counts)


def _balance(value: float, given: Given) -> dict[str, Any] | KeyOutcome:
    experts = _has_experts(given)
    if experts:
        return {"learner.router_loss_coef": value}
    if experts is False:
        return KeyOutcome.ignored("the model is not a mixture of experts")
    return KeyOutcome.missing(
        "learner.router_loss_coef, if the model is a mixture of experts; TRL ignores it for others"
    )


def _follows(value: bool, given: Given) -> KeyOutcome:
    if not value:
        return KeyOutcome.ignored("off, as by default")
    if not given.read("beta", number, 0.0):
        return KeyOutcome.ignored("beta is 0, so there is no reference model")
    if given.read("use_peft", flag, False) or given.get("peft_config.class"):
        return KeyOutcome.missing("reference.update_every, which learner.lora excludes, as TRL does")
    mix = given.read("ref_model_mixup_alpha", number, 0.6)
    if not 0 < mix <= 1:
        return KeyOutcome.missing(f"reference.mix is above 0 and at most 1; got ref_model_mixup_alpha {mix:g}")
    every = max(1, given.whole("ref_model_sync_steps", 512) // _updates(given))
    values = {"reference.update_every": every, "reference.mix": mix}
    return KeyOutcome(values, f"TRL counts optimiser steps; a step of rlsdk has {_updates(given)} of them")


def _entropy_coef(value: float, given: Given) -> KeyOutcome:
    if given.read("use_adaptive_entropy", flag, False):
        return KeyOutcome({})
    note = _entropy_note(given) if value else ""
    return KeyOutcome({"algorithm.entropy_coef": value}, note)


def _entropy_note(given: Given) -> str:
    """How TRL's bonus differs: it is the mean over tokens whatever the loss, or over those of the quantile."""
    aggregate = LOSSES.get(str(given.get("loss_type")), "token-mean")
    some = given.read("top_entropy_quantile", number, 1.0) < 1
    reduced = f"algorithm.aggregate reduces the bonus, too ({aggregate}); TRL's is the mean over tokens"
    everywhere = "over all sampled tokens; TRL's are those of top_entropy_quantile"
    return "; ".join([*([reduced] if aggregate != "token-mean" else []), *([everywhere] if some else [])])


def _adaptive_entropy(value: bool, given: Given) -> KeyOutcome:
    if not value:
        return KeyOutcome.ignored("off, as by default in rlsdk")
    target = {"target": given.read("entropy_target", number, 0.2), "initial": given.read("entropy_coef", number, 0.0)}
    defaults = {"delta": 0.005, "min": 0.0, "max": 1.0}
    rule = {name: given.read(f"entropy_coef_{name}", number, default) for name, default in defaults.items()}
    note = _entropy_note(given)
    return KeyOutcome({"algorithm.entropy_coef": {**target, **rule}}, note)


def _evaluates(given: Given) -> bool:
    return bool(given.read("eval_strategy", STRATEGY, "no") != "no")


def _batch(value: int, given: Given) -> KeyOutcome:
    group = given.whole("num_generations", 8)
    values = {
        "batch_size": max(1, _rollouts(given) // group),
        "minibatches": minibatches(_rollouts(given), _per_update(given)),
        "learner.micro_batch_tokens": value * _length(given),
        "placement.learners": _ranks(given),
    }
    note = "TRL counts completions per rank, rlsdk tasks per step: completions / num_generations, over all ranks"
    return KeyOutcome(values, note)


def _epochs(value: float, given: Given) -> KeyOutcome:
    if given.whole("total_episodes", 0) > 0 and counts_batches(given):
        return KeyOutcome.ignored("total_episodes takes precedence")
    if given.whole("max_steps", -1) > 0:
        return KeyOutcome.ignored("max_steps takes precedence")
    return KeyOutcome({"epochs": value})


def _steps(value: int, given: Given) -> KeyOutcome:
    if counts_batches(given):
        return KeyOutcome.ignored("PPO takes total_episodes, or num_train_epochs")
    if value <= 0:
        return KeyOutcome.ignored("off; num_train_epochs takes precedence")
    return KeyOutcome(
        {"steps": max(1, value // _updates(given))},
        f"TRL counts optimiser steps; a step of rlsdk has {_updates(given)} of them",
    )


def _warmup(value: float, given: Given) -> KeyOutcome:
    if 0 < value < 1:
        return share_of_steps(given.whole("max_steps", 0) or None, value)
    if counts_batches(given):
        epochs = given.whole("num_iterations")
        return KeyOutcome({"learner.warmup_steps": int(value) * epochs}, f"TRL counts batches, of {epochs} steps each")
    return KeyOutcome({"learner.warmup_steps": int(value)})


def _warmup_ratio(value: float, given: Given) -> KeyOutcome:
    if given.read("warmup_steps", number, 0.0):
        return KeyOutcome.ignored("warmup_steps takes precedence")
    steps = given.whole("max_steps", 0)
    return share_of_steps(steps if steps > 0 else None, value)


def _every(to: str, strategy: str) -> Any:
    """Steps between two events, which a strategy may turn off."""

    def give(value: float, given: Given) -> KeyOutcome:
        chosen = given.read(strategy, STRATEGY, "steps")
        if chosen == "no":
            return KeyOutcome({to: 0}, f"{strategy}: no", "mapped")
        if chosen != "steps":
            return KeyOutcome.missing(f"{strategy} is {chosen}: set {to}, which counts steps")
        if 0 < value < 1:
            return KeyOutcome.missing(f"a share of the steps: set {to}")
        return KeyOutcome(
            {to: max(1, int(value) // _updates(given))},
            f"TRL counts optimiser steps; a step of rlsdk has {_updates(given)} of them",
        )

    return give


def _reported(value: Any, given: Given) -> KeyOutcome:
    names = texts(value)
    if names == ["all"]:
        return KeyOutcome({"trackers": []}, "list the trackers: " + ", ".join(TRACKERS), "missing")
    trackio = {"project": given.get("project", "huggingface"), "space": given.get("trackio_space_id")}
    return trackers(value, {"wandb": {"project": given.get("wandb_project")}, "trackio": trackio})


def _peft(value: bool, given: Given) -> dict[str, Any]:
    if not value:
        return {}
    targets = given.read("lora_target_modules", _layers)
    usual = (8, 8.0) if given.get("peft_config.class") == "LoraConfig" else (16, 32.0)  # of peft; of TRL's own flags
    rank, alpha = given.whole("lora_r", usual[0]), given.read("lora_alpha", number, usual[1])
    if given.read("use_rslora", flag, False):  # whose scale is alpha / sqrt(rank)
        alpha *= rank**0.5
    named = {"targets": targets} if targets and targets != ["all-linear"] else {}
    return {"learner.lora": {"rank": rank, "alpha": alpha, **named}}


def _dropout(value: float, given: Given) -> KeyOutcome:
    adapted = given.read("use_peft", flag, False) or given.get("peft_config.class") == "LoraConfig"
    if value and adapted:
        return KeyOutcome.missing("adapters have no dropout: engine and learner must agree")
    return KeyOutcome.ignored("off, as always in rlsdk" if adapted else "use_peft is off")


def _temperature(value: float, given: Given) -> dict[str, Any]:
    """Set the temperature; evaluations sample as training does."""
    found = {"sampling.temperature": value}
    if not _evaluates(given) or value <= 0:
        return found
    return {**found, "eval.temperature": value}


def _engine(value: bool, given: Given) -> dict[str, Any]:
    if not value:
        return {"engine.use": "transformers"}
    return {
        "engine.use": "vllm",
        "engine.gpu_memory_utilization": given.read("vllm_gpu_memory_utilization", number, 0.3),
        "engine.tensor_parallel_size": given.whole("vllm_tensor_parallel_size"),
        "placement.gpus_per_engine": given.whole("vllm_tensor_parallel_size"),
        "placement.colocate": str(given.get("vllm_mode", "colocate")) == "colocate",
    }


def _weights(value: bool, given: Given) -> dict[str, Any]:
    """Return the weights by the ratio to vLLM's logprobs; empty without any."""
    if not value or not given.read("use_vllm", flag, False) or str(given.get("loss_type")) == "vespo":
        return {}  # vespo weighs whole answers by the ratio to the sampler itself
    cap = given.read("vllm_importance_sampling_clip_max", number, 3.0)
    low = given.read("vllm_importance_sampling_clip_min", number, 0.0)
    mode = str(given.get("vllm_importance_sampling_mode", "sequence_mask"))
    level, _, action = mode.partition("_")
    if level not in ("token", "sequence") or action not in ("mask", "truncate"):
        return {}
    if action == "truncate":
        return {"use": "tis", "cap": cap, "level": level}
    return {"use": "mis", "low": low, "high": cap, "level": level}


def _correction(value: bool, given: Given) -> dict[str, Any]:
    weights, threshold = _weights(value, given), given.read("off_policy_mask_threshold", number)
    both = [weights, _off_policy_mask(threshold)] if threshold is not None else weights
    return {"algorithm.correction": both} if weights else {}


def _off_policy_mask(threshold: float) -> dict[str, Any]:
    return {"use": "zoo/off_policy_mask", "threshold": threshold}


def _off_policy(value: float, given: Given) -> KeyOutcome:
    """Convert the mask of bad answers that became unlikely; vLLM's weights come with it."""
    if _weights(given.read("vllm_importance_sampling_correction", flag, True), given):
        return KeyOutcome({}, ZOO)
    return KeyOutcome({"algorithm.correction": _off_policy_mask(value)}, ZOO)


def _model(value: Any, given: Given) -> dict[str, Any]:
    return {"model.path": text(value), "model.max_length": _length(given)}


def _name(value: Any, given: Given) -> KeyOutcome:
    folder = text(value).rstrip("/")
    out, _, name = folder.rpartition("/")
    values = {"name": name or folder, **({"out": out} if out else {})}
    return KeyOutcome(values, "a run's folder is out/name")


def _finish(given: Given) -> dict[str, Any]:
    found = {"max_prompt_tokens": _prompt(given), **template_variables(given, "chat_template_kwargs")}
    notes: tuple[str, ...] = ()
    if not given.get("max_prompt_length"):
        notes += (f"max_prompt_tokens: longer prompts than {_prompt(given)} tokens are dropped; TRL has no limit",)
    if "num_processes" not in given.flat:
        notes += ("batches are those of one process: add num_processes=N to the command if you start N of them",)
    name = given.get("dataset_name") or _loaded(given, "train_dataset")
    if name is not None and isinstance(name, str):
        split = str(given.get("dataset_train_split", given.get("train_dataset.split", "train")))
        config = given.get("dataset_config") or given.get("train_dataset.argument_2")
        files = _files(given, "train_dataset", split)
        column, system = given.get("dataset_prompt_column"), given.get("system_prompt")  # of Open R1
        extra = {**({"config": config} if config else {}), **({"system": system} if system else {})}
        found["tasks.train"] = files or dataset(name, split, {"prompt": column} if column else {}, **extra)
        if _evaluates(given):
            whole = given.get("eval_dataset.class") not in (None, "load_dataset")  # the only split, without a name
            held_out = str(
                given.get("eval_dataset.split", given.get("dataset_test_split", "train" if whole else "test"))
            )
            other = _loaded(given, "eval_dataset") or name
            source = found["tasks.train"] if other == name else dataset(other, held_out, {})
            source = {**source, "split": held_out} if source["use"] == "hub" else dict(source)
            found["tasks.eval"] = _files(given, "eval_dataset", held_out) or source
        if files and name not in ("json", "parquet"):
            notes += (
                f"tasks: no source reads {name}: save the data, dataset.to_json('train.jsonl'), and name that file",
            )
    adapter = _peft(True, given) if given.get("peft_config.class") == "LoraConfig" else {}
    every, told = _evaluations(given)
    found, notes = found | adapter | every, notes + told + _of_adapters(given)
    if _has_experts(given) and "router_aux_loss_coef" not in given.flat:
        found["learner.router_loss_coef"] = _ROUTER_LOSS
        notes += (
            f"learner.router_loss_coef: {_ROUTER_LOSS} is the default of TRL 1, which adds the load-balancing loss of "
            "every mixture of experts; earlier versions take router_aux_loss_coef of its config.json",
        )
    tools = workflow_of(given)
    found, notes = {**tools, **found}, notes + tools.get(NOTES, ())
    if mixture := _mixture(given):
        found["tasks.train"] = mixture[0] if len(mixture) == 1 else mixture
        if len(mixture) > 1 and not any("weight" in each for each in mixture):
            notes += (
                f"tasks.train: {len(mixture)} sources share each batch equally; TRL mixes them by size: set weights",
            )
    if "tasks.train" in found and not given.read("shuffle_dataset", flag, True):
        found["tasks.train"] = unshuffled(found["tasks.train"])
    rewards = {} if "reward" in tools else rewards_of(given, name)
    return {**found, **rewards, NOTES: (*notes, *rewards.get(NOTES, ()))}


def _evaluations(given: Given) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the steps between evaluations where TRL takes those between logs, and a note that says so."""
    if not _evaluates(given) or "eval_steps" in given.flat:
        return {}, ()
    outcome = _every("eval.every", "eval_strategy")(given.read("logging_steps", number, 10.0), given)
    return dict(outcome.values), (f"eval.every: {'TRL takes logging_steps' if outcome.values else outcome.note}",)


def _of_adapters(given: Given) -> tuple[str, ...]:
    """Return notes on what TRL's adapters have that is not in the configuration."""
    ours = given.read("use_peft", flag, False)
    notes: tuple[str, ...] = ()
    if ours and "lora_dropout" not in given.flat:
        notes += ("learner.lora: adapters have no dropout; TRL's have 0.05 unless lora_dropout is set",)
    if (ours or given.get("peft_config.class") == "LoraConfig") and "lora_target_modules" not in given.flat:
        notes += (
            "learner.lora: all linear layers are adapted; peft's own choice for many models is q_proj and v_proj: set "
            "targets",
        )
    return notes


def _loaded(given: Given, key: str) -> Any:
    """Return what a script's `load_dataset` loads: a data set of the hub or a format such as json."""
    if given.get(f"{key}.class", LOADERS[0]) not in LOADERS:
        return None
    return next((found for at in ("argument_1", "path", "dataset_path") if (found := given.get(f"{key}.{at}"))), None)


def _files(given: Given, key: str, split: str) -> dict[str, Any] | None:
    """Return a source of the files that a script's `load_dataset` names, also by split; None if it names none."""
    name = _loaded(given, key)
    files = given.get(f"{key}.data_files", given.get(f"{key}.data_files.{split}"))
    if not files or "/" in str(name):  # files of a data set of the hub
        return None
    return {"use": "parquet" if name == "parquet" else "jsonl", "path": files}


def _layers(value: Any) -> list[str]:
    """Read names of layers; peft also takes a regular expression."""
    found = texts(value)
    if strange := next((each for each in found if re.search(r"[*()|\\^$+?]", each)), None):
        raise UnfitError(f"{strange!r} is a regular expression; name the layers")
    return found


def _mixture(given: Given) -> list[dict[str, Any]]:
    """Return the sources of a mixture of data sets."""
    found = []
    for index in range(64):
        where = f"datasets.{index}"
        if (path := given.read(f"{where}.path", text)) is None:
            break
        files, split = given.get(f"{where}.data_files"), str(given.get(f"{where}.split", "train"))
        config, fraction = given.get(f"{where}.name"), given.read(f"{where}.fraction", number)
        source = dataset(files if files and "/" not in path else path, split, {})
        source |= {"config": str(config)} if config and source["use"] == "hub" else {}
        found.append({**source, **({} if fraction is None else {"weight": fraction})})
    return found


def _resumed(value: Any, _: Given) -> KeyOutcome:
    if str(value).lower() in ("true", "false"):
        return KeyOutcome.ignored("rlsdk resumes only on request: rlsdk train CONFIG --resume")
    return KeyOutcome.missing("set model.path to that checkpoint's folder; its optimiser state is not read")


def _offload(value: str, given: Given) -> dict[str, Any]:
    if value != "cpu":
        return {}
    everything = str(given.get(f"{_DEEPSPEED}.zero_optimization.offload_param.device")) == "cpu"
    return {"learner.zero_stage": 3, "learner.offload": "all"} if everything else {"learner.offload": "optimizer"}


_DEEPSPEED = "deepspeed_file"
"""Section with the contents of the file that `deepspeed` names."""


def _data_of(name: str) -> Any:
    """Report an argument of the call that makes a script's training or evaluation data."""

    def give(value: Any, given: Given) -> KeyOutcome:
        kind = given.get(f"{name}_dataset.class")
        unused = name == "eval" and not _evaluates(given)
        if unused or kind in (None, *LOADERS):
            return KeyOutcome({}, _COLUMNS)
        file = f"{name}.jsonl"
        note = f"save the data, dataset.to_json('{file}'), and set tasks.{name}: {{use: jsonl, path: {file}}}"
        return KeyOutcome.missing(f"{kind}() is not run: {note}")

    return give


_OF_EXPERTS = re.compile(r"-A\d+(\.\d+)?B\b|moe|mixtral|gpt-oss", re.IGNORECASE)
"""Parts of the names of published mixtures of experts."""
_COLUMNS = "becomes a task source: set its columns"
_ROUTER_LOSS = 0.001
"""TRL's default of `router_aux_loss_coef`."""
_NONE = "rlsdk's learner has no such setting"
_TOP_ENTROPY = "by the entropies before the update, over the whole batch; an entropy bonus stays on all tokens"
_HUB = "`rlsdk export` writes a folder for the hub's tools"
_LOG = "every step is logged to metrics.jsonl and the trackers"
_DATA = "tasks are read on demand"
_DEVICE = "placement decides where ranks and engines run"
_SHARD = "the learner shards with DeepSpeed: learner.zero_stage and learner.offload"

ROWS = (
    # Model and data
    same("model_name_or_path", "model.path", text, "Qwen/Qwen2.5-0.5B", _model),
    same("model", "model.path", text, "Qwen/Qwen2.5-0.5B", _model),
    *(same(f"model.{name}", "model.path", text, "Qwen/Qwen2.5-0.5B", _model)
      for name in ("argument_1", "pretrained_model_name_or_path")),
    same("sft_model_path", "model.path", text, "Qwen/Qwen2.5-0.5B", _model),
    *(same(f"model.{name}", "model.dtype", DTYPE, "bfloat16") for name in ("dtype", "torch_dtype")),
    same("model.attn_implementation", "learner.attention", ATTENTION, "sdpa"),
    same("model.trust_remote_code", "model.trust_remote_code", flag, False),
    ignored("model.class", "class name", "from_pretrained"),
    ignored("model.device_map", _DEVICE, "auto"),
    ignored("model.use_cache", "the learner needs no cache", False),
    missing("model.**", "change config.json in the model's folder", "x"),
    unless("model_revision", ("main",), "download that revision to a folder and set model.path to it", "v2"),
    same("dtype", "model.dtype", DTYPE, "bfloat16"),
    same("torch_dtype", "model.dtype", DTYPE, "bfloat16"),
    same("trust_remote_code", "model.trust_remote_code", flag, False),
    same("attn_implementation", "learner.attention", ATTENTION, "sdpa"),
    same("model_init_kwargs.dtype", "model.dtype", DTYPE, "bfloat16"),
    same("model_init_kwargs.torch_dtype", "model.dtype", DTYPE, "bfloat16"),
    same("model_init_kwargs.attn_implementation", "learner.attention", ATTENTION, "sdpa"),
    same("model_init_kwargs.output_router_logits", "learner.router_loss_coef", flag, True,
         lambda v, given: {"learner.router_loss_coef": given.read("router_aux_loss_coef", number, _ROUTER_LOSS) if v else 0.0}),
    missing("model_init_kwargs.**", "model.dtype, learner.attention; for the rest, change config.json in the model's folder", "x"),
    part("dataset_name", "tasks.train", text, "trl-lib/DeepMath-103K", _COLUMNS),
    part("dataset_prompt_column", "tasks.train.columns", text, "problem", "a setting of Open R1"),
    part("system_prompt", "tasks.train.system", text, "Think first.", "a setting of Open R1"),
    changed("train_dataset.*", "tasks.train", lambda value: value, "trl-lib/DeepMath-103K", _COLUMNS, _data_of("train")),
    missing("args", "give the command that runs this script, with its arguments: rlsdk migrate trl 'python …'", "x"),
    ignored("callbacks", "hooks of a plugin, such as rlsdk_step_end (howto/plugin.md)", "x"),
    ignored("callbacks.**", "hooks of a plugin, such as rlsdk_step_end (howto/plugin.md)", "x"),
    unless("quantization_config.class", ("get_quantization_config",), "models are not quantised", "BitsAndBytesConfig"),
    ignored("quantization_config.argument_1", "load_in_4bit", "x"),
    missing("quantization_config.**", "models are not quantised", "x"),
    ignored("train_dataset.argument_1.**", "see train_dataset.class", "x"),
    ignored("eval_dataset.argument_1.**", "see eval_dataset.class", "x"),
    missing("train_dataset", "tasks.train: {use: hub, name: ...}", "x"),
    changed("eval_dataset.*", "tasks.eval", lambda value: value, "trl-lib/DeepMath-103K", _COLUMNS, _data_of("eval")),
    missing("eval_dataset", "tasks.eval: {use: hub, name: ..., split: test}", "x"),
    part("dataset_config", "tasks.train.config", text, "main"),
    part("dataset_train_split", "tasks.train.split", text, "train"),
    part("dataset_test_split", "tasks.eval.split", text, "test"),
    ignored("dataset_streaming", "data is indexed, so that a resumed run continues where it stopped", True),
    ignored("streaming", "data is indexed, so that a resumed run continues where it stopped", True),
    *(part(f"datasets.*.{name}", "tasks.train", lambda value: value, sample, note) for name, sample, note in (
        ("path", "trl-lib/DeepMath-103K", _COLUMNS), ("name", "main", ""), ("split", "train", ""),
        ("data_files", "train.jsonl", ""), ("fraction", 0.5, "the weight of the source"))),
    ignored("datasets.*.columns", "other columns become metadata of tasks", ["prompt"]),
    missing("datasets.**", "see rlsdk plugins tasks", "x"),
    missing("dataset_mixture_config.**", "tasks.train: a list of sources, each with its weight", "x"),
    missing("test_split_size", "tasks.eval: split the data, and name the held-out part", 0.1),
    same("reward_funcs", "reward", called, ["accuracy_reward"], convert_functions),
    part("reward_model_name_or_path", "reward", text, "org/reward-model"),
    part("reward_weights", "reward", numbers, [1.0]),
    changed("multi_objective_aggregation", "algorithm.advantage", text, "normalize_then_sum", "advantage gdpo", convert_aggregation),
    part("max_prompt_length", "max_prompt_tokens", count, 512),
    same("max_completion_length", "sampling.max_tokens", count, 512),
    same("chat_template_path", "model.renderer.file", text, "chat.jinja", template_file),
    part("chat_template_kwargs.**", "model.renderer.variables", lambda v: v, False),
    # Batches
    same("num_generations", "group_size", count, 8),
    same("num_generations_eval", "eval.samples", count, 4),
    changed("per_device_train_batch_size", "batch_size minibatches learner.micro_batch_tokens", count, 8,
            "tasks per step", _batch),
    part("gradient_accumulation_steps", "minibatches", count, 2, "completions per optimiser step"),
    part("generation_batch_size", "batch_size", count, 64, "completions per step"),
    part("steps_per_generation", "minibatches", count, 2, "optimiser steps per step, times accumulation"),
    part("num_processes", "placement.learners", count, 1, "accelerate's setting; ranks of the learner"),
    same("num_iterations", "passes", count, 1),
    same("max_staleness", "rollout.max_staleness", whole, 4),
    same("weight_sync_steps", "rollout.sync_interval", count, 1),
    ignored("max_inflight_tasks", "rollout.max_staleness batches are requested in advance", -1),
    ignored("queue_maxsize", "rollout.max_staleness batches are requested in advance", 1024),
    changed("token_budget", "learner.micro_batch_tokens", whole, 16384, "with padding, unless learner.rows is packed",
            lambda v, given: {"learner.micro_batch_tokens": v} if v > 0 else {}),
    ignored("fork_threshold_tokens", "a conversation whose start changes becomes several rollouts of one trajectory", 1024),
    ignored("request_timeout", "workflows and environments have their own limits of time", 600),
    ignored("heartbeat_stale_after_s", "the watchdog ends a run with silent processes", 300.0),
    ignored("per_device_eval_batch_size", "an evaluation runs all tasks, as many at once as the engines take", 8),
    ignored("auto_find_batch_size", "micro-batches are counted in tokens", False),
    part("shuffle_dataset", "tasks.train.shuffle", flag, False),
    # Sampling
    same("temperature", "sampling.temperature eval.temperature", number, 1.0, _temperature),
    no_cut("top_p", 1.0),
    no_cut("top_k", 0, "top_k"),
    no_cut("min_p", 0.0, "min_p"),
    no_cut("repetition_penalty", 1.0, "repetition_penalty"),
    *(same(f"generation_kwargs.{name}", "sampling.stop", texts, ["</answer>"]) for name in ("stop", "stop_strings")),
    missing("generation_kwargs.**", "sampling has temperature, max_tokens and stop", 1),
    missing("vllm_structured_outputs_regex", "the learner would train on probabilities other than those sampled from", "x"),
    same("use_vllm", "engine.use", flag, True, _engine),
    part("vllm_mode", "placement.colocate", text, "colocate"),
    part("vllm_gpu_memory_utilization", "engine.gpu_memory_utilization", number, 0.3),
    part("vllm_tensor_parallel_size", "engine.tensor_parallel_size", count, 1),
    ignored("vllm_enable_sleep_mode", "engines that share GPUs sleep while the learner works", True),
    part("vllm_max_model_length", "model.max_length", count, 2048, "without max_prompt_length, what answers leave is for prompts"),
    ignored("vllm_server_*", "engines are started by the run", "x"),
    ignored("vllm_group_port", "engines are started by the run", 51216),
    ignored("vllm_model_impl", "vLLM's own models", "vllm"),
    ignored("vllm_device", "engines are placed by placement", "auto"),
    ignored("use_transformers_*", "the engine transformers batches continuously", False),
    ignored("transformers_continuous_batching_config.**", "options of the engine transformers", 1),
    ignored("cache_implementation", "options of the engine transformers", "x"),
    ignored("ds3_gather_for_generation", "engines have their own weights", True),
    # Objective
    same("trainer", "algorithm.use algorithm.advantage", choice(TRAINERS, "the trainer"), "grpo", _estimator),
    part("scale_rewards", "algorithm.advantage.std_normalize", str, "group"),  # also a truth value
    same("loss_type", "algorithm.policy_loss algorithm.aggregate",
         choice((*LOSSES, "sigmoid", "ipo"), "the loss"), "dapo", _loss),
    part("epsilon", "algorithm.policy_loss.clip_low", number, 0.2),
    part("epsilon_high", "algorithm.policy_loss.clip_high", number, 0.28, "with cispo, the greatest ratio less 1; at least 0"),
    part("delta", "algorithm.policy_loss.dual_clip", number, 5.0, "applies to tokens with negative advantage"),
    part("sapo_temperature_pos", "algorithm.policy_loss.tau_pos", number, 1.0),
    part("sapo_temperature_neg", "algorithm.policy_loss.tau_neg", number, 1.05),
    *(part(f"vespo_{key}", f"algorithm.policy_loss.{to}", number, usual) for to, (key, usual) in VESPO.items()),
    part("importance_sampling_level", "algorithm.policy_loss", text, "sequence", "the loss gspo has answer-level ratios"),
    part("normalize_advantages", "algorithm.whiten_advantages", flag, True, "over tokens, not over answers"),
    part("reward_clip_range", "algorithm.shaping", two, [-10, 10]),
    same("beta", "algorithm.kl_coef algorithm.kl algorithm.policy_loss", first, 0.04, _beta),
    changed("mask_truncated_completions", "algorithm.filters", flag, True, "drops truncated rollouts",
            switched({"algorithm.filters[]": "truncated"}, "drops truncated rollouts")),
    changed("top_entropy_quantile", "algorithm.top_entropy_quantile", number, 0.2, _TOP_ENTROPY,
            lambda v, given: {"algorithm.top_entropy_quantile": v} if v < 1 else KeyOutcome.ignored("all tokens")),
    same("entropy_coef", "algorithm.entropy_coef", number, 0.0, _entropy_coef),
    same("use_adaptive_entropy", "algorithm.entropy_coef", flag, True, _adaptive_entropy),
    *(part(name, "algorithm.entropy_coef", number, sample) for name, sample in (
        ("entropy_target", 0.2), ("entropy_coef_delta", 0.005), ("entropy_coef_min", 0.0), ("entropy_coef_max", 1.0))),
    changed("sync_ref_model", "reference.update_every reference.mix", flag, True, "TRL counts optimiser steps", _follows),
    part("ref_model_sync_steps", "reference.update_every", count, 512, "TRL counts optimiser steps"),
    part("ref_model_mixup_alpha", "reference.mix", number, 0.6),
    same("vllm_importance_sampling_correction", "algorithm.correction", flag, True, _correction),
    part("vllm_importance_sampling_mode", "algorithm.correction", text, "sequence_mask"),
    part("vllm_importance_sampling_clip_max", "algorithm.correction", number, 3.0),
    part("vllm_importance_sampling_clip_min", "algorithm.correction", number, 0.5),
    part("vllm_importance_sampling_cap", "algorithm.correction", number, 2.0),
    changed("off_policy_mask_threshold", "algorithm.correction", number, 0.5, ZOO, _off_policy),
    unless("use_bias_correction_kl", (False,), "write a KL estimator (howto/algorithm.md)", True),
    unless("disable_dropout", (True,), "models are trained without dropout", False),
    changed("router_aux_loss_coef", "learner.router_loss_coef", number, 0.001, "over all rollouts of an optimiser step",
            _balance),
    part("max_tool_calling_iterations", "workflow.max_turns", count, 4, "rlsdk counts answers, one more than rounds of calls"),
    changed("tools", "workflow", lambda value: value, ["my_reward.py:add"], "the workflow tools", convert_tools),
    changed("environment_factory", "workflow.tools", lambda value: value, "my_reward.py:Env", "a tool class", convert_factory),
    missing("environment_factory.**", "name one class, whose reset chooses by the task: workflow: {use: tools, tools: ['FILE.py:CLASS']}", "x"),
    missing("rollout_func", "it returns tokens and logprobs of a whole batch; write a workflow, an async function of one task that samples "
            "with chat.sample() and returns chat.finish(), and set workflow: {use: FILE/NAME} and plugins: [FILE.py] (howto/workflow.md)", "x"),
    # Optimisation
    same("learning_rate", "learner.lr", number, 1e-6),
    weight_decay("weight_decay", 0.1),
    same("adam_beta1", "learner.betas", number, 0.9,
         lambda v, given: {"learner.betas": [v, given.read("adam_beta2", number, 0.999)]}),
    part("adam_beta2", "learner.betas", number, 0.999),
    same("adam_epsilon", "learner.eps", number, 1e-8),
    same("max_grad_norm", "learner.grad_clip", number, 1.0),
    same("lr_scheduler_type", "learner.schedule learner.final_ratio", SCHEDULE, "cosine",
         transformers_schedule("lr_scheduler_kwargs")),
    part("lr_scheduler_kwargs.power", "learner.decay_power", number, 2.0),
    part("lr_scheduler_kwargs.num_decay_steps", "learner.decay_steps", count, 100),
    part("lr_scheduler_kwargs.decay_type", "learner.decay_shape", DECAY_SHAPE, "1-sqrt"),
    ignored("lr_scheduler_kwargs.num_stable_steps", "the decay ends with the run", 100),
    same("lr_scheduler_kwargs.min_lr_ratio", "learner.final_ratio", number, 0.1),
    same("lr_scheduler_kwargs.min_lr_rate", "learner.final_ratio", number, 0.1),
    changed("lr_scheduler_kwargs.min_lr", "learner.final_ratio", number, 1e-7, "as a share of the peak",
            lambda v, given: {"learner.final_ratio": min(1.0, v / given.read("learning_rate", number, 1e-6))}
            if given.read("learning_rate", number, 1e-6) else {}),
    unless("lr_scheduler_kwargs.num_cycles", (0.5,), "the cosine schedule has a single half-wave", 3),
    missing("lr_scheduler_kwargs.**", "learner.final_ratio is the last rate as a share of the peak", 0.1),
    same("warmup_steps", "learner.warmup_steps", number, 10, _warmup),
    changed("warmup_ratio", "learner.warmup_steps", number, 0.1, "in optimiser steps", _warmup_ratio),
    optimizer("optim", "sgd", ("adamw_torch", "adamw_torch_fused", "adamw", "adamw_hf"),
              lambda given: [given.read("adam_beta1", number, 0.9), given.read("adam_beta2", number, 0.999)]),
    same("cast_lm_head_to_fp32", "model.head_dtype", flag, True, switched({"model.head_dtype": "float32"})),
    missing("optim_args", OPTIMIZER_OPTIONS_NOTE, "x"),
    same("gradient_checkpointing", "learner.gradient_checkpointing", flag, True),
    ignored("gradient_checkpointing_kwargs.**", "checkpoints are not re-entrant", False),
    changed("bf16", "model.dtype", flag, True, "weights are also kept in float32",
            switched({"model.dtype": "bfloat16"}, "weights are also kept in float32")),
    changed("fp16", "model.dtype", flag, True, "bfloat16 needs no loss scale",
            switched({"model.dtype": "float16"}, "bfloat16 needs no loss scale")),
    ignored("tf32", "torch's setting applies", True),
    same("torch_compile", "learner.compile", flag, False),
    unless("use_liger_kernel", (False,), "not needed: losses never hold all logits at once", True),
    ignored("liger_kernel_config", "losses never hold all logits at once", "x"),
    missing("neftune_noise_alpha", _NONE, 5),
    unless("label_smoothing_factor", (0, 0.0), _NONE, 0.1),
    same("use_peft", "learner.lora", flag, True, _peft),
    part("lora_r", "learner.lora.rank", count, 16),
    part("lora_alpha", "learner.lora.alpha", number, 32),
    part("lora_target_modules", "learner.lora.targets", _layers, ["q_proj"]),
    part("peft_config.class", "learner.lora", text, "LoraConfig"),
    ignored("peft_config.task_type", "models are language models", "CAUSAL_LM"),
    ignored("peft_config.argument_1", "use_peft", "x"),
    unless("peft_config.bias", ("none",), "learner.lora has rank, alpha, targets and sync", "all"),
    unless("peft_config.use_dora", (False,), "learner.lora trains plain adapters", True),
    ignored("peft_config.inference_mode", "adapters are trained", False),
    unless("peft_config.init_lora_weights", (True,), "adapters start as the model: a random A, and a B of zeros", "pissa"),
    unless("peft_config.fan_in_fan_out", (False,), "the adapted layers are linear", True),
    missing("peft_config.**", "learner.lora has rank, alpha, targets and sync", "x"),
    changed("lora_dropout", "", number, 0.05, "", _dropout),
    ignored("lora_task_type", "models are language models", "CAUSAL_LM"),
    missing("lora_modules_to_save", "only adapters are trained; without learner.lora, all weights are", ["embed_tokens"]),
    missing("lora_*", "learner.lora has rank, alpha, targets and sync", "x"),
    part("use_rslora", "learner.lora.alpha", flag, True, "alpha is multiplied by the square root of rank, for the same scale"),
    unless("use_dora", (False,), "learner.lora trains plain adapters", True),
    unless("load_in_4bit", (False,), "models are not quantised", True),
    unless("load_in_8bit", (False,), "models are not quantised", True),
    only_with("load_in_4bit", "bnb_*", "models are not quantised", "x"),
    only_with("load_in_4bit", "use_bnb_nested_quant", "models are not quantised", True),
    # Length, evaluation, checkpoints
    same("num_train_epochs", "epochs", number, 1, _epochs),
    changed("max_steps", "steps", whole, 100, "optimiser steps", _steps),
    changed("eval_steps", "eval.every", number, 100, "optimiser steps", _every("eval.every", "eval_strategy")),
    part("eval_strategy", "tasks.eval", STRATEGY, "steps", "tasks.eval turns evaluation on"),
    same("eval_on_start", "eval.before", flag, True),
    changed("save_steps", "checkpoint.every", number, 100, "optimiser steps",
            _every("checkpoint.every", "save_strategy")),
    part("save_strategy", "checkpoint.every", STRATEGY, "steps", "no: only a checkpoint at the end"),
    same("save_total_limit", "checkpoint.keep", count, 2,
         lambda v, given: {} if given.read("save_strategy", STRATEGY, "steps") == "no" else {"checkpoint.keep": v}),
    unless("save_only_model", (False,), "checkpoint.every: 0 saves only at the end", True),
    unless("load_best_model_at_end", (False,), "compare checkpoints: rlsdk train --mode bench", True),
    only_with("load_best_model_at_end", "metric_for_best_model", "compare checkpoints: rlsdk train --mode bench", "x"),
    only_with("load_best_model_at_end", "greater_is_better", "compare checkpoints: rlsdk train --mode bench", True),
    changed("resume_from_checkpoint", "", lambda value: value, "runs/x/checkpoint-100", "", _resumed),
    ignored("eval_*", "an evaluation runs all tasks, as many at once as the engines take", 1),
    ignored("save_on_each_node", "checkpoints are written to the run's folder", False),
    changed("output_dir", "name out", text, "runs/my-run", "a run's folder is out/name", _name),
    same("run_name", "name", text, "my-run"),
    ignored("overwrite_output_dir", "rlsdk train --overwrite", True),
    same("seed", "seed", whole, 42),
    ignored("data_seed", "there is one seed for everything", 42),
    ignored("full_determinism", "with one engine, runs with the same seed sample the same; see sampling.seeds", False),
    # Trackers and logs
    same("report_to", "trackers", texts, ["wandb"], _reported),
    part("project", "trackers", text, "x", "project of the tracker trackio"),
    part("trackio_space_id", "trackers", text, "me/space", "Space of the tracker trackio"),
    part("wandb_project", "trackers", text, "my-project", "project of the tracker wandb"),
    ignored("wandb_entity", "wandb reads the environment variable WANDB_ENTITY", "x"),
    ignored("logging_*", _LOG, 10),
    ignored("log_*", "`rlsdk rollouts RUN` shows the samples", True),
    ignored("num_completions_to_print", "`rlsdk rollouts RUN` shows the samples", 4),
    ignored("disable_tqdm", _LOG, True),
    ignored("include_*", _LOG, True),
    missing("trackio_*", "see the options of the tracker: rlsdk plugins tracker", "x"),
    # The rest of transformers' trainer
    changed("deepspeed", "learner.zero_stage", text, "zero2.json", _SHARD,
            lambda v, given: KeyOutcome.ignored(f"its settings are converted, as {_DEEPSPEED}")
            if given.section(_DEEPSPEED) else KeyOutcome.missing(_SHARD)),
    same(f"{_DEEPSPEED}.zero_optimization.stage", "learner.zero_stage", whole, 3),
    *(changed(f"{_DEEPSPEED}.zero_optimization.offload_{what}.device", "learner.offload", text, "cpu", "main memory", _offload)
      for what in ("optimizer", "param")),
    ignored(f"{_DEEPSPEED}.**", "DeepSpeed's other settings are rlsdk's own", "auto"),
    same("deepspeed_config.zero_stage", "learner.zero_stage", whole, 3),
    unless("fsdp", ("[]",), _SHARD, "full_shard"),
    missing("fsdp_config.**", _SHARD, 1),
    changed("use_cpu", "placement.device", flag, True, "one device for engines and learner",
            switched({"placement.device": "cpu"})),
    ignored("ddp_*", _DEVICE, 1),
    ignored("local_rank", _DEVICE, -1),
    ignored("accelerator_config.**", _DEVICE, 1),
    ignored("parallelism_config.**", _DEVICE, 1),
    ignored("dataloader_*", _DATA, 0),
    unless("train_sampling_strategy", ("random",), "tasks.train: {shuffle: false} or {sort_by: COLUMN} orders the data", "sequential"),
    *(ignored(name, _DATA, "x") for name in ("length_column_name", "label_names", "ignore_data_skip")),
    *(ignored(name, "losses and metrics are means over all ranks", True)
      for name in ("average_tokens_across_devices", "batch_eval_metrics", "prediction_loss_only")),
    *(ignored(name, "evaluations run on the engines, in model.dtype", True) for name in ("bf16_full_eval", "fp16_full_eval")),
    *(ignored(name, "checkpoint.every, and `rlsdk train CONFIG --resume`", True)
      for name in ("enable_jit_checkpoint", "restore_callback_states_from_checkpoint")),
    *(ignored(name, _LOG, True) for name in ("debug", "skip_memory_metrics")),
    ignored("use_cache", "the learner needs no cache", False),
    missing("optim_target_modules", OPTIMIZER_NOTE, "x"),
    ignored("ignore_bias_buffers", _DEVICE, False),
    ignored("remove_unused_columns", "columns become metadata of tasks", False),
    ignored("pad_to_multiple_of", "learner.rows: padded or packed", 8),
    ignored("push_to_hub", _HUB, True),
    ignored("hub_*", _HUB, "x"),
    ignored("do_train", "rlsdk train trains, rlsdk eval evaluates", True),
    ignored("do_eval", "rlsdk train trains, rlsdk eval evaluates", True),
    ignored("do_predict", "rlsdk train trains, rlsdk eval evaluates", True),
    ignored("torch_*", "the cache is not emptied between steps; use learner.compile to compile", 1),
    ignored("class", "class name", "GRPOConfig"),
    *ROWS_OF_TRAINERS,
)  # fmt: skip

DEFAULTS: Mapping[str, Any] = {
    "trainer": "grpo",
    "output_dir": "trl-run",
    "max_completion_length": 512,
    "num_generations": 8,
    "per_device_train_batch_size": 8,
    "num_iterations": 1,
    "temperature": 1.0,
    "use_vllm": False,
    "loss_type": "dapo",
    "beta": 0.0,
    "learning_rate": 1e-6,
    "adam_beta1": 0.9,
    "lr_scheduler_type": "linear",
    "gradient_checkpointing": True,
    "bf16": True,
    "num_train_epochs": 3.0,
    "eval_on_start": False,
    "vllm_importance_sampling_correction": True,
    "save_steps": 500,
    "save_total_limit": KEEP_ALL,
    "seed": 42,
}

FRAMEWORK = Framework(
    name="trl",
    title="TRL",
    rows=ROWS,
    defaults=DEFAULTS,
    finish=_finish,
    files={"deepspeed": _DEEPSPEED},
    renamed={
        "evaluation_strategy": "eval_strategy",
        "peft_config.use_rslora": "use_rslora",
        "epsilon_low": "epsilon",
        "peft_config.r": "lora_r",
        "peft_config.lora_alpha": "lora_alpha",
        "peft_config.target_modules": "lora_target_modules",
        "peft_config.lora_dropout": "lora_dropout",
        "peft_config.modules_to_save": "lora_modules_to_save",
        "max_new_tokens": "max_completion_length",
        "response_length": "max_completion_length",
        "num_ppo_epochs": "num_iterations",
        "reward_model_path": "reward_model_name_or_path",
        "reward_model.argument_1": "reward_model_name_or_path",
        "reward_model.pretrained_model_name_or_path": "reward_model_name_or_path",
        "policy.argument_1": "model.argument_1",
    },
    variants=VARIANTS,
    others=OTHERS,
    entries=(
        "trl grpo",
        "trl rloo",
        "trl.scripts.grpo",
        "trl.scripts.rloo",
        "grpo.py",
        "train_grpo.py",
        "rloo.py",
        "online_dpo.py",
        "ppo/ppo.py",
        "ppo/ppo_tldr.py",
    ),
    constructors=CONSTRUCTORS,
    whole=("reward_funcs",),
)
