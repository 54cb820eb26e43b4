"""Models, tasks, tools and engines of TRL."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rlsdk.migration.python_values import LOADERS
from rlsdk.migration.rules import NOTES, Given, KeyOutcome
from rlsdk.migration.shared.learner import OFFLOAD_ALL, OFFLOAD_OPTIMIZER
from rlsdk.migration.shared.tasks import TRACKERS, dataset, template_variables, trackers, unshuffled
from rlsdk.migration.trl.algorithm import context_length, evaluates, every, prompt_length
from rlsdk.migration.trl.rewards import rewards_of
from rlsdk.migration.values import UnfitError, flag, number, text, texts

DEEPSPEED = "deepspeed_file"
"""Section with the contents of the file that `deepspeed` names."""
_OF_EXPERTS = re.compile(r"-A\d+(\.\d+)?B\b|moe|mixtral|gpt-oss", re.IGNORECASE)
"""Parts of the names of published mixtures of experts."""
ROUTER_LOSS = 0.001
"""TRL's default of `router_aux_loss_coef`."""


def has_experts(given: Given) -> bool | None:
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


def balance(value: float, given: Given) -> dict[str, Any] | KeyOutcome:
    experts = has_experts(given)
    if experts:
        return {"learner.router_loss_coef": value}
    if experts is False:
        return KeyOutcome.ignored("the model is not a mixture of experts")
    return KeyOutcome.missing(
        "learner.router_loss_coef, if the model is a mixture of experts; TRL ignores it for others"
    )


def peft(value: bool, given: Given) -> dict[str, Any]:
    if not value:
        return {}
    targets = given.read("lora_target_modules", layers)
    usual = (8, 8.0) if given.get("peft_config.class") == "LoraConfig" else (16, 32.0)  # of peft; of TRL's own flags
    rank, alpha = given.whole("lora_r", usual[0]), given.read("lora_alpha", number, usual[1])
    if given.read("use_rslora", flag, False):  # whose scale is alpha / sqrt(rank)
        alpha *= rank**0.5
    named = {"targets": targets} if targets and targets != ["all-linear"] else {}
    return {"learner.lora": {"rank": rank, "alpha": alpha, **named}}


def dropout(value: float, given: Given) -> KeyOutcome:
    adapted = given.read("use_peft", flag, False) or given.get("peft_config.class") == "LoraConfig"
    if value and adapted:
        return KeyOutcome.missing("adapters have no dropout: engine and learner must agree")
    return KeyOutcome.ignored("off, as always in rlsdk" if adapted else "use_peft is off")


def _of_adapters(given: Given) -> dict[str, Any]:
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
    return {NOTES: notes}


def layers(value: Any) -> list[str]:
    """Read names of layers; peft also takes a regular expression."""
    found = texts(value)
    if strange := next((each for each in found if re.search(r"[*()|\\^$+?]", each)), None):
        raise UnfitError(f"{strange!r} is a regular expression; name the layers")
    return found


def offload(value: str, given: Given) -> dict[str, Any]:
    if value != "cpu":
        return {}
    everything = str(given.get(f"{DEEPSPEED}.zero_optimization.offload_param.device")) == "cpu"
    return OFFLOAD_ALL if everything else OFFLOAD_OPTIMIZER


MOST_TURNS = 64
"""Answers of a rollout with tools where TRL sets no limit."""
_SIZE = 10_000
"""Tasks where an environment makes its own."""


def callables(value: Any) -> list[str]:
    """Read the paths of functions, as in `tools.py:add`."""
    found = texts(value)
    if unknown := next((each for each in found if ":" not in each), None):
        raise UnfitError(f"{unknown!r} is not the path of a function: give FILE.py:NAME")
    return found


def convert_tools(value: Any, _: Given) -> KeyOutcome:
    """Report the functions that `workflow_of` converts."""
    try:
        callables(value)
    except UnfitError:
        return KeyOutcome.missing("workflow: {use: tools, tools: ['FILE.py:function']}")
    return KeyOutcome({}, "the workflow tools; results count towards model.max_length, not max_tokens")


def convert_factory(_: Any, given: Given) -> KeyOutcome:
    """Report the class of environments that `workflow_of` converts."""
    if tool_class(given) is None:
        return KeyOutcome.missing("name the class that it makes: workflow: {use: tools, tools: ['FILE.py:CLASS']}")
    return KeyOutcome({}, "a tool class; its public methods are the tools, except close (howto/tools.md)")


def tool_class(given: Given) -> str | None:
    """Return the path of the class that makes environments; None for a function, a call or several classes."""
    value = given.get("environment_factory")
    named = isinstance(value, str) and value.rpartition(":")[1:]
    return str(value) if named and named[0] and named[1][:1].isupper() else None


def workflow_of(given: Given) -> dict[str, Any]:
    """Return the workflow of tools and environments, the environments' own tasks and reward, and notes on them.

    Args:
        given: Values of the configuration.
    """
    made = tool_class(given)
    tools = [*given.read("tools", callables, []), *([made] if made else [])]
    if not tools:
        return {}
    rounds = given.whole("max_tool_calling_iterations", 0)
    found: dict[str, Any] = {
        "workflow": {"use": "tools", "tools": tools, "max_turns": rounds + 1 if rounds else MOST_TURNS}
    }
    if made is None:
        return found
    notes = ["workflow: a method that takes longer than call_timeout, 10 s, fails its rollout; TRL waits"]
    if "reward_funcs" in given.flat:
        notes.append(
            "reward: if the class has get_reward, which TRL adds to the reward functions, add {use: environment}"
        )
    else:
        found["reward"] = {"use": "environment"}
    if not any(key.split(".")[0] in ("train_dataset", "dataset_name", "datasets") for key in given.flat):
        found["tasks.train"] = {"use": "seeds", "size": _SIZE}
        notes.append(
            "tasks.train: reset gets a seed; draw its state from that, so that the rollouts of a group start alike"
        )
    return {**found, NOTES: tuple(notes)}


COLUMNS = "becomes a task source: set its columns"


def reported(value: Any, given: Given) -> KeyOutcome:
    names = texts(value)
    if names == ["all"]:
        return KeyOutcome({"trackers": []}, "list the trackers: " + ", ".join(TRACKERS), "missing")
    trackio = {"project": given.get("project", "huggingface"), "space": given.get("trackio_space_id")}
    return trackers(value, {"wandb": {"project": given.get("wandb_project")}, "trackio": trackio})


def temperature(value: float, given: Given) -> dict[str, Any]:
    """Set the temperature; evaluations sample as training does."""
    found = {"sampling.temperature": value}
    if not evaluates(given) or value <= 0:
        return found
    return {**found, "eval.temperature": value}


def engine(value: bool, given: Given) -> dict[str, Any]:
    if not value:
        return {"engine.use": "transformers"}
    return {
        "engine.use": "vllm",
        "engine.gpu_memory_utilization": given.read("vllm_gpu_memory_utilization", number, 0.3),
        "engine.tensor_parallel_size": given.whole("vllm_tensor_parallel_size"),
        "placement.gpus_per_engine": given.whole("vllm_tensor_parallel_size"),
        "placement.colocate": str(given.get("vllm_mode", "colocate")) == "colocate",
    }


def model_path(value: Any, given: Given) -> dict[str, Any]:
    return {"model.path": text(value), "model.max_length": context_length(given)}


def folder_and_name(value: Any, given: Given) -> KeyOutcome:
    folder = text(value).rstrip("/")
    out, _, name = folder.rpartition("/")
    values = {"name": name or folder, **({"out": out} if out else {})}
    return KeyOutcome(values, "a run's folder is out/name")


def _lengths(given: Given) -> dict[str, Any]:
    notes: tuple[str, ...] = ()
    if not given.get("max_prompt_length"):
        notes += (
            f"max_prompt_tokens: longer prompts than {prompt_length(given)} tokens are dropped; TRL has no limit",
        )
    if "num_processes" not in given.flat:
        notes += ("batches are those of one process: add num_processes=N to the command if you start N of them",)
    found = {"max_prompt_tokens": prompt_length(given), **template_variables(given, "chat_template_kwargs")}
    return {**found, NOTES: notes}


def _data_set(given: Given) -> Any:
    """Return the name of the training data; None if nothing tells it."""
    return given.get("dataset_name") or _loaded(given, "train_dataset")


def _tasks(given: Given) -> dict[str, Any]:
    name = _data_set(given)
    if not isinstance(name, str):
        return {}
    split = str(given.get("dataset_train_split", given.get("train_dataset.split", "train")))
    config = given.get("dataset_config") or given.get("train_dataset.argument_2")
    files = data_files(given, "train_dataset", split)
    column, system = given.get("dataset_prompt_column"), given.get("system_prompt")  # of Open R1
    extra = {**({"config": config} if config else {}), **({"system": system} if system else {})}
    train = files or dataset(name, split, {"prompt": column} if column else {}, **extra)
    found: dict[str, Any] = {"tasks.train": train}
    if evaluates(given):
        found["tasks.eval"] = _held_out(given, name, train)
    if files and name not in ("json", "parquet"):
        note = f"no source reads {name}: save the data, dataset.to_json('train.jsonl'), and name that file"
        found[NOTES] = (f"tasks: {note}",)
    return found


def _held_out(given: Given, name: str, train: dict[str, Any]) -> dict[str, Any]:
    """Return the source of held-out tasks: by default, another split of the training data."""
    whole = given.get("eval_dataset.class") not in (None, "load_dataset")  # the only split, without a name
    split = str(given.get("eval_dataset.split", given.get("dataset_test_split", "train" if whole else "test")))
    other = _loaded(given, "eval_dataset") or name
    source = train if other == name else dataset(other, split, {})
    source = {**source, "split": split} if source["use"] == "hub" else dict(source)
    return data_files(given, "eval_dataset", split) or source


def _adapter(given: Given) -> dict[str, Any]:
    return peft(True, given) if given.get("peft_config.class") == "LoraConfig" else {}


def _experts(given: Given) -> dict[str, Any]:
    if not has_experts(given) or "router_aux_loss_coef" in given.flat:
        return {}
    note = (
        f"learner.router_loss_coef: {ROUTER_LOSS} is the default of TRL 1, which adds the load-balancing loss of "
        "every mixture of experts; earlier versions take router_aux_loss_coef of its config.json"
    )
    return {"learner.router_loss_coef": ROUTER_LOSS, NOTES: (note,)}


def _mixed(given: Given) -> dict[str, Any]:
    """Return the sources of a mixture of data sets; without one, the training tasks in the order of their data."""
    mixture = _mixture(given)
    train: Any = mixture[0] if len(mixture) == 1 else mixture
    train = train or _tasks(given).get("tasks.train") or workflow_of(given).get("tasks.train")
    if train and not given.read("shuffle_dataset", flag, True):
        train = unshuffled(train)
    found: dict[str, Any] = {"tasks.train": train} if train else {}
    if len(mixture) > 1 and not any("weight" in each for each in mixture):
        shared = f"{len(mixture)} sources share each batch equally; TRL mixes them by size: set weights"
        found[NOTES] = (f"tasks.train: {shared}",)
    return found


def _rewards(given: Given) -> dict[str, Any]:
    return {} if "reward" in workflow_of(given) else rewards_of(given, _data_set(given))


def _evaluations(given: Given) -> dict[str, Any]:
    """Return the steps between evaluations where TRL takes those between logs, and a note that says so."""
    if not evaluates(given) or "eval_steps" in given.flat:
        return {}
    outcome = every("eval.every", "eval_strategy")(given.read("logging_steps", number, 10.0), given)
    note = "TRL takes logging_steps" if outcome.values else outcome.note
    return {**outcome.values, NOTES: (f"eval.every: {note}",)}


def _loaded(given: Given, key: str) -> Any:
    """Return what a script's `load_dataset` loads: a data set of the hub or a format such as json."""
    if given.get(f"{key}.class", LOADERS[0]) not in LOADERS:
        return None
    return next((found for at in ("argument_1", "path", "dataset_path") if (found := given.get(f"{key}.{at}"))), None)


def data_files(given: Given, key: str, split: str) -> dict[str, Any] | None:
    """Return a source of the files that a script's `load_dataset` names, also by split; None if it names none."""
    name = _loaded(given, key)
    files = given.get(f"{key}.data_files", given.get(f"{key}.data_files.{split}"))
    if not files or "/" in str(name):  # files of a data set of the hub
        return None
    return {"use": "parquet" if name == "parquet" else "jsonl", "path": files}


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


def resumed(value: Any, _: Given) -> KeyOutcome:
    if str(value).lower() in ("true", "false"):
        return KeyOutcome.ignored("rlsdk resumes only on request: rlsdk train CONFIG --resume")
    return KeyOutcome.missing("set model.path to that checkpoint's folder; its optimiser state is not read")


def data_of(name: str) -> Any:
    """Report an argument of the call that makes a script's training or evaluation data."""

    def give(value: Any, given: Given) -> KeyOutcome:
        kind = given.get(f"{name}_dataset.class")
        unused = name == "eval" and not evaluates(given)
        if unused or kind in (None, *LOADERS):
            return KeyOutcome({}, COLUMNS)
        file = f"{name}.jsonl"
        note = f"save the data, dataset.to_json('{file}'), and set tasks.{name}: {{use: jsonl, path: {file}}}"
        return KeyOutcome.missing(f"{kind}() is not run: {note}")

    return give


FINISH = (
    *(_lengths, _tasks, _adapter, _evaluations, _of_adapters),
    *(_experts, workflow_of, _mixed, _rewards),
)
