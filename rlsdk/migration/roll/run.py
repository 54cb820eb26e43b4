"""Tasks, rewards and engines of ROLL."""

from __future__ import annotations

from functools import partial
from typing import Any

from rlsdk.migration.roll.algorithm import distillation, distills
from rlsdk.migration.roll.domains import files_of_domains, filters_of_domains, reward_of
from rlsdk.migration.roll.environments import finish_agentic
from rlsdk.migration.roll.sizes import (
    INFER,
    TRAIN,
    VALIDATION,
    agentic,
    answer_length,
    context_length,
    devices,
    evaluated_length,
    learner_gpus,
    rollouts_per_task,
)
from rlsdk.migration.rows import changed, same
from rlsdk.migration.rules import NOTES, Given, KeyOutcome, KeyRule
from rlsdk.migration.shared.engines import evaluated, layout
from rlsdk.migration.shared.learner import LEARNER_NOTE
from rlsdk.migration.shared.tasks import dataset
from rlsdk.migration.values import UnfitError, number, text, texts

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


def finish(given: Given) -> dict[str, Any]:
    found = finish_agentic(given) if agentic(given) else _finish_rlvr(given)
    per_engine = given.whole(f"{INFER}.strategy_args.strategy_config.tensor_parallel_size")
    train, infer = learner_gpus(given), given.read(f"{INFER}.device_mapping", devices) or learner_gpus(given)
    found |= {**layout(infer, per_engine), "placement.learners": train}
    if not given.tree.keys() & {"rewards", "custom_envs", "train_env_manager", "adv_estimator"}:
        found[NOTES] = (
            "there are neither rewards nor environments; ROLL's pipelines for DPO, supervised fine-tuning and "
            "distillation are not converted: set algorithm to dpo, sft or opd",
        )
    return found


def variables(given: Given) -> dict[str, Any]:
    """Return Ray's runtime environment with the variables that actors get."""
    named = given.section("system_envs").items()
    return {"env_vars": {name: str(value) for name, value in named if name != "USE_MODELSCOPE"}}
