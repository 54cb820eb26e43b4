"""Tasks, rewards, environments and engines of ROLL."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

from rlsdk.migration.roll.algorithm import (
    INFER,
    TRAIN,
    VALIDATION,
    agentic,
    answer_length,
    context_length,
    devices,
    distillation,
    distills,
    evaluated_length,
    learner_gpus,
    rollouts_per_task,
)
from rlsdk.migration.rows import changed, same
from rlsdk.migration.rules import NOTES, Given, KeyOutcome, KeyRule
from rlsdk.migration.shared.engines import evaluated, layout
from rlsdk.migration.shared.learner import LEARNER_NOTE
from rlsdk.migration.shared.tasks import dataset
from rlsdk.migration.values import UnfitError, number, text, texts, whole

REWARDS: Mapping[str, Mapping[str, Any]] = {
    "MathRuleRewardWorker": {"use": "math"},
    "CodeSandboxRewardWorker": {"use": "code_tests"},
    "CrossThinkQARuleRewardWorker": {"use": "exact_match", "where": "answer"},
}
"""Worker of a reward -> what is nearest here."""


def convert_worker(value: str, given: Given) -> KeyOutcome:
    """Report the worker of a domain's rewards, which `reward_of` converts."""
    name = value.rsplit(".", 1)[-1]
    if name in REWARDS:
        return KeyOutcome({}, "the nearest built-in reward")
    if name == "GeneralRuleRewardWorker":
        note = (
            "IFEval's instructions are checked by ifeval/followed of rlsdk-ifeval; its tasks name them in two columns"
        )
        return KeyOutcome.missing(f"{note} (howto/ifeval.md)")
    if "Judge" not in name:
        return KeyOutcome.missing("no built-in reward is like it: write one (howto/reward.md)")
    if any(_judge(domain, given) for domain in given.section("rewards")):
        return KeyOutcome({}, "a judge with rlsdk's own rubric and form of the score")
    note = "no built-in reward is like it: use judge, with base_url and model of a server such as vLLM's"
    return KeyOutcome.missing(note)


def _judge(domain: str, given: Given) -> dict[str, Any]:
    """Return the reward of a judge that is called through its API; empty if there is none."""
    where = f"rewards.{domain}.judge"
    url, model = given.read(f"{where}_api_url", text), given.read(f"{where}_model_name", text)
    if url is None or model is None or str(given.get(f"{where}_model_type", "api")) != "api":
        return {}
    key = re.fullmatch(r"\$\{oc\.env:(\w+)[^}]*\}", str(given.get(f"{where}_api_key")))
    return {"use": "judge", "base_url": url, "model": model, **({"api_key_env": key[1]} if key else {})}


def reward_of(domain: str, given: Given) -> dict[str, Any]:
    """Return the reward of a domain; empty if there is none like it."""
    name = str(given.get(f"rewards.{domain}.worker_cls", "")).rsplit(".", 1)[-1]
    return dict(REWARDS.get(name) or (_judge(domain, given) if "Judge" in name else {}))


def convert_sources(_: Any, given: Given) -> KeyOutcome:
    """Report the tags of tasks that a domain's reward scores."""
    if reward_of(given.key.split(".")[1], given):
        return KeyOutcome({}, "sources of the reward")
    return KeyOutcome.ignored("sources of the reward that worker_cls needs")


def convert_judge_key(value: Any, _: Given) -> KeyOutcome:
    """Report the key of a judge's API, which must be in an environment variable."""
    if str(value).startswith("${oc.env:"):
        return KeyOutcome({})
    return KeyOutcome.missing("put it into an environment variable, and name that in the judge's api_key_env")


def _filter_of(domain: str, given: Given) -> dict[str, Any] | None:
    """Return the filter by which a domain's tasks are replaced."""
    where = f"rewards.{domain}.query_filter_config"
    if (kind := str(given.get(f"{where}.type"))) == "mean_filter":
        bounds = {"low": "threshold_down", "high": "threshold_up"}
        read = {end: given.read(f"{where}.filter_args.{key}", number) for end, key in bounds.items()}
        usual = {"low": -1.0, "high": 2.0}  # beyond all shares
        return {"use": "pass_rate", **{end: usual[end] if value is None else value for end, value in read.items()}}
    least = given.read(f"{where}.filter_args.std_threshold", number, -1.0)
    return {"use": "min_std", "threshold": least} if kind == "std_filter" and least >= 0 else None


def filters_of_domains(given: Given) -> list[dict[str, Any]]:
    """Return the filter of all domains that have one; empty if they differ."""
    found = [each for domain in given.section("rewards") if (each := _filter_of(domain, given))]
    return found[:1] if all(each == found[0] for each in found) else []


def convert_filter(value: str, given: Given) -> KeyOutcome:
    """Report the filter of a domain's tasks, which `filters_of_domains` converts."""
    if value == "no_filter":
        return KeyOutcome.ignored("off")
    if not filters_of_domains(given):
        return KeyOutcome.missing("a filter applies to all domains, and theirs differ: write one (howto/plugin.md)")
    notes = ["by the share of rollouts that pass, ROLL by their mean reward"] if value == "mean_filter" else []
    notes += ["applies to all domains"] if len(given.section("rewards")) > 1 else []
    return KeyOutcome({}, "; ".join(notes))


def files_of_domains(given: Given) -> dict[str, list[str]]:
    """Return the files of each domain, which their names tell; empty if they do not, or if there is one domain."""
    where = "actor_train.data_args"
    shares = given.section(f"{where}.domain_interleave_probs")
    domains: dict[str, list[str]] = {domain: [] for domain, share in shares.items() if share}
    for path in given.read(f"{where}.file_name", texts, []):
        name = re.sub(r"[^a-z]", "", PurePath(path).stem.lower())
        fitting = [each for each in domains if _named(each, name)]
        if len(fitting) != 1:
            return {}
        domains[fitting[0]].append(path)
    return domains if len(domains) > 1 and all(domains.values()) else {}


def _named(domain: str, name: str) -> bool:
    """True if the name of a file has the name of a domain in it, such as `math_rule`, or the long words of one."""
    words = [word for word in domain.lower().split("_") if word not in ("rule", "sandbox", "cv")]
    return all(re.sub(r"[^a-z]", "", word) in name for word in words)


def convert_share(value: float, given: Given) -> KeyOutcome:
    """Report the share of a domain's tasks in a batch, which becomes the weight of a source."""
    if files_of_domains(given):
        return KeyOutcome({}, "the weight of a source of its own, whose files are guessed from their names")
    if value == 1:
        return KeyOutcome.ignored("the only domain")
    return KeyOutcome.missing("tasks.train: one source per domain, with its weight")


ENVIRONMENTS = {"sokoban": "gridworlds/sokoban", "frozen_lake": "gridworlds/frozen_lake"}
"""`env_type` -> an environment of the plugin rlsdk-gridworlds, whose options have ROLL's names."""
BESIDE = ("user_prompt_format", "added_text", "max_tokens_per_step")
"""Keys beside `env_config` that are options of the environment here."""


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


def kind(value: str, given: Given) -> KeyOutcome:
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
        "group_size": rollouts_per_task(given),
        "sampling.max_tokens": answer_length(given),
    }
    if "val_env_manager" in given.tree:
        found["tasks.eval"] = _played(given, "val_env_manager", "test", environments)
        found["eval.environments"] = _workers(given, "val_env_manager")
        found["eval.samples"] = given.whole("val_env_manager.group_size")
    return found


ZERO = {"deepspeed_zero": 1, "deepspeed_zero2": 2, "deepspeed_zero3": 3, "deepspeed_zero3_cpuoffload": 3}


def strategy(role: str) -> tuple[KeyRule, ...]:
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


def lora(value: int, given: Given) -> dict[str, Any]:
    alpha = given.read(f"{TRAIN}.model_args.lora_alpha", number, 2.0 * value)
    return {"learner.lora": {"rank": value, "alpha": alpha}} if value else {}


def _finish_rlvr(given: Given) -> dict[str, Any]:
    found: dict[str, Any] = {
        "group_size": rollouts_per_task(given),
        "max_prompt_tokens": given.whole("prompt_length", 1024),
    }
    found["sampling.max_tokens"] = answer_length(given)
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
    if distills(given):
        found |= distillation(given)
    if given.section(VALIDATION):
        temperature = given.read(f"{VALIDATION}.temperature", number, 0.95)
        for name, usual in (("temperature", 0.95), ("top_p", 0.7), ("top_k", 50)):  # ROLL's defaults
            if given.flat.get(f"{VALIDATION}.{name}") is None:
                found |= evaluated(name, usual, temperature).values
    if answers := evaluated_length(given):
        found |= {
            "eval.max_tokens": answers,
            "model.max_length": max(context_length(given), given.whole("val_sequence_length")),
        }
    rewards = []
    for domain in given.section("rewards"):
        if reward := reward_of(domain, given):
            tags = [*([domain] if domain in files else []), *given.read(f"rewards.{domain}.tag_included", texts, [])]
            rewards.append({**reward, **({"sources": tags} if tags else {})})
    return {**found, "reward": rewards} if rewards else found


def _tasks_and_rewards(given: Given) -> dict[str, Any]:
    return _finish_agentic(given) if agentic(given) else _finish_rlvr(given)


def _gpus(given: Given) -> dict[str, Any]:
    per_engine = given.whole(f"{INFER}.strategy_args.strategy_config.tensor_parallel_size")
    train, infer = learner_gpus(given), given.read(f"{INFER}.device_mapping", devices) or learner_gpus(given)
    return {**layout(infer, per_engine), "placement.learners": train}


def _remarks(given: Given) -> dict[str, Any]:
    if given.tree.keys() & {"rewards", "custom_envs", "train_env_manager", "adv_estimator"}:
        return {}
    note = (
        "there are neither rewards nor environments; ROLL's pipelines for DPO, supervised fine-tuning and "
        "distillation are not converted: set algorithm to dpo, sft or opd"
    )
    return {NOTES: (note,)}


FINISH = (_tasks_and_rewards, _gpus, _remarks)


def variables(given: Given) -> dict[str, Any]:
    """Return Ray's runtime environment with the variables that actors get."""
    named = given.section("system_envs").items()
    return {"env_vars": {name: str(value) for name, value in named if name != "USE_MODELSCOPE"}}
