"""Tasks, rewards and engines of veRL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlsdk.migration.references import from_environment
from rlsdk.migration.rules import Given, KeyOutcome
from rlsdk.migration.shared.choices import DTYPE
from rlsdk.migration.shared.engines import layout, layout_apart
from rlsdk.migration.shared.tasks import dataset, function, likely_reward, template_variables, unshuffled
from rlsdk.migration.values import flag, text, texts
from rlsdk.migration.verl.algorithm import distillation, distills, reward_parts
from rlsdk.migration.verl.sizes import ACTOR, ROLLOUT, asynchronous, context_length, learner_gpus, trainer_mode

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


def finish(given: Given) -> dict[str, Any]:
    """Tasks, rewards and the context length, which many keys make together."""
    columns = (
        {"prompt": str(given.get("data.prompt_key"))} if given.get("data.prompt_key") not in (None, "prompt") else {}
    )
    found: dict[str, Any] = {
        "model.max_length": context_length(given),
        **template_variables(given, "data.apply_chat_template_kwargs"),
    }
    for key, to in (("data.train_files", "tasks.train"), ("data.val_files", "tasks.eval")):
        if given.get(key) is not None:
            found[to] = given.read(key, lambda value: data_files(value, columns))
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
        found["reward"] = reward_parts(reward, given) or reward
    elif given.read("reward_model.enable", flag, False) and given.get("reward_model.model.path") is not None:
        found["reward"] = {"use": "reward_model", "path": str(given.get("reward_model.model.path"))}
    else:
        hints = [given.get(key) for key in ("data.train_files", "trainer.project_name", "trainer.experiment_name")]
        found |= likely_reward(*hints)
    per_engine = (
        1 if str(given.get(f"{ROLLOUT}.name")) == "hf" else given.whole(f"{ROLLOUT}.tensor_model_parallel_size")
    )
    if trainer_mode(given) == "separate_async":
        apart = given.whole(f"{ROLLOUT}.nnodes") * given.whole(f"{ROLLOUT}.n_gpus_per_node", 8)
        found |= layout_apart(apart, per_engine, learner_gpus(given))
    elif "rollout" in given.tree:  # engines on GPUs of their own
        apart = given.whole("rollout.nnodes") * given.whole("rollout.n_gpus_per_node", 8)
        found |= layout_apart(apart, per_engine, learner_gpus(given))
        if not asynchronous(given):
            found["rollout.max_staleness"] = 1  # one step off
    else:
        found |= layout(learner_gpus(given), per_engine)
    found = {key: value for key, value in found.items() if value is not None}
    return found | distillation(given) if distills(given) else found
