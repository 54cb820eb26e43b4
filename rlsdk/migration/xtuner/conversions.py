"""Conversions of XTuner's settings that take more than a row of its table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlsdk.migration.python_values import KIND
from rlsdk.migration.rules import NOTES, Given, KeyOutcome, KeyRule
from rlsdk.migration.shared.choices import KL
from rlsdk.migration.shared.engines import layout, layout_apart
from rlsdk.migration.shared.learner import overlong, share_of_steps
from rlsdk.migration.shared.tasks import KEEP_ALL, dataset, unshuffled
from rlsdk.migration.values import UnfitError, flag, number, two

WORKER, LOSS = "train_worker_cfg", "train_worker_cfg.loss_cfg"
TASK, HELD_OUT = "agent_loop_manager_cfg.tasks", "eval_agent_loop_manager_cfg.tasks"
ANSWER_LIMIT = "agent_loop_config.sample_params.max_tokens"
SAMPLE = f"{TASK}.agent_loop_config.sample_params"
PRODUCE = f"{TASK}.produce_strategy_config"
DATA = "sampler_config.dataloader_cfg.dataset_config_list.0"
PROMPT_LIMIT = f"{DATA}.tokenize_fn.max_length"


def warmup(value: float, given: Given) -> KeyOutcome:
    steps = given.whole("total_train_steps", 0) * given.whole(f"{WORKER}.optimizer_steps")
    return share_of_steps(steps or None, value)


def exported(value: int, given: Given) -> dict[str, Any]:
    if not value:
        return {}
    kept = given.whole("hf_max_keep", -1)
    alone = {"checkpoint.every": value, "checkpoint.keep": kept if kept > 0 else KEEP_ALL}
    return {"checkpoint.export": "every", **({} if given.whole("checkpoint_interval", -1) > 0 else alone)}


ADVANTAGES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "GRPOAdvantageConfig": ("grpo", {"use": "grpo", "std_normalize": True}),
    "DrGRPOAdvantageConfig": ("dr_grpo", {"use": "grpo", "std_normalize": False}),
    "RLOOAdvantageConfig": ("rloo", {"use": "rloo"}),
    "OPOAdvantageConfig": ("opo", {"use": "opo"}),
    "PassKAdvantageConfig": ("grpo", {"use": "pass_at_k"}),
}


def advantage(name: str, given: Given) -> KeyOutcome:
    algorithm, advantage = ADVANTAGES[name]
    note = "XTuner deviates from the paper; rlsdk follows the paper" if name == "DrGRPOAdvantageConfig" else ""
    values = {"algorithm.use": algorithm, "algorithm.advantage": dict(advantage), "algorithm.shaping": []}
    return KeyOutcome(values, note)


def loss(kind: str, given: Given) -> dict[str, Any]:
    cap = given.read(f"{LOSS}.policy_loss_cfg.clip_ratio_c", number, 3.0)
    bounds = {
        f"clip_{end}": given.read(f"{LOSS}.policy_loss_cfg.cliprange_{end}", number, 0.2) for end in ("low", "high")
    }
    return {"algorithm.policy_loss": {"use": "ppo", **bounds, "dual_clip": cap}, "algorithm.aggregate": "token-mean"}


def kl(value: bool, given: Given) -> dict[str, Any]:
    if not value:
        return {"algorithm.kl_coef": 0.0}
    estimator = given.read(f"{LOSS}.kl_loss_type", KL, "low_var")
    return {"algorithm.kl_coef": given.read(f"{LOSS}.kl_loss_coef", number, 0.001), "algorithm.kl": estimator}


def importance(value: Any, given: Given) -> KeyOutcome:
    """Convert the weights of the mismatch; XTuner gives the upper bound first."""
    where = f"{LOSS}.rollout_is.rollout_is"
    mode = str(given.get(f"{where}_mode", "truncate"))
    level = str(given.get(f"{where}_level", "token"))
    cap = max(two(value))
    low, high = sorted(given.read(f"{where}_mask_threshold", two, two(value)))
    if mode == "truncate" and level in ("token", "sequence"):
        return KeyOutcome({"algorithm.correction": {"use": "tis", "cap": cap, "level": level}})
    masks = mode == "mask" or (mode == "both" and high <= cap)
    if masks and level in ("token", "sequence"):
        found = {"use": "mis", "low": low, "high": high, "level": level}
        return KeyOutcome({"algorithm.correction": found})
    if masks and level == "geometric":
        found = {"use": "geometric", "low": low, "high": high}
        return KeyOutcome({"algorithm.correction": found}, "the mask of answers; those kept weigh 1")
    if mode == "both" and level in ("token", "sequence"):
        both = [{"use": "tis", "cap": cap, "level": level}, {"use": f"{level}_mask", "low": low, "high": high}]
        return KeyOutcome({"algorithm.correction": both})
    raise UnfitError("no correction is this weight with this mask; see rlsdk plugins correction")


JUDGERS: Mapping[str, Mapping[str, Any]] = {
    "GSM8KJudgerConfig": {"use": "math", "strict": False},
    "DapoMathJudgerConfig": {"use": "math", "strict": False},
}


def work_dir(value: str, given: Given) -> KeyOutcome:
    out, _, name = value.rstrip("/").rpartition("/")
    if value.startswith("${"):
        label = given.get("rollout_config.env")
        values = {"out": value, "name": label if isinstance(label, str) else "xtuner-run"}
        return KeyOutcome(values, "a run's folder is out/name")
    return KeyOutcome({"name": name or "xtuner-run", **({"out": out} if out else {})}, "a run's folder is out/name")


def judged(value: str, given: Given) -> KeyOutcome:
    if value in JUDGERS:
        return KeyOutcome({}, "the nearest built-in reward")
    return KeyOutcome.missing("your own reward (howto/reward.md), code_tests, or judge for a served model")


def agent_loop(value: str, given: Given) -> KeyOutcome:
    if value == "SingleTurnAgentLoopConfig":
        return KeyOutcome({"workflow": "single_turn"})
    return KeyOutcome.missing("workflow: tools, environment or agent, or your own (howto/workflow.md)")


def _tasks(given: Given, manager: str) -> list[str]:
    """Return the prefix of the keys of each task; the first one has no number."""
    numbered = re.compile(rf"{re.escape(manager)}\.(\d+)\.")
    others = {match[1] for key in given.flat if (match := numbered.match(key))}
    return [manager, *(f"{manager}.{number}" for number in sorted(others, key=int))]


def _sources(given: Given, manager: str) -> list[dict[str, Any]]:
    """Return a source for each task; what a variable names cannot be known, and XTuner's annotations are JSON lines."""
    found = []
    tasks = _tasks(given, manager)
    for task in tasks:
        listed = f"{task}.sampler_config.dataloader_cfg.dataset_config_list"
        paths = [given.get(f"{listed}.{number}.dataset.anno_path") for number in range(64)]
        if files := [path for path in paths if isinstance(path, str)]:
            source = dataset(files, "train", {})
            path = files[0] if len(files) == 1 else files
            source = {"use": "jsonl", "path": path} if source["use"] == "hub" else source
            if given.read(f"{task}.{DATA}.dataset.enable_sequential_sampler", flag, False):
                source = unshuffled(source)
            named = {"source": _named(task, given), "weight": given.read(f"{task}.weight", number, 1.0)}
            found.append({**source, **(named if len(tasks) > 1 else {})})
    return found


def _named(task: str, given: Given) -> str:
    return str(given.get(f"{task}.task_name", f"task-{task.rpartition('.')[2]}"))


def _rewards(given: Given) -> dict[str, Any]:
    """Return the reward, or those of several tasks, each for its source."""
    judged = {task: str(given.get(f"{task}.judger_config.{KIND}", "")) for task in _tasks(given, TASK)}
    if len(judged) == 1:
        return {"reward": dict(JUDGERS[judged[TASK]])} if judged[TASK] in JUDGERS else {}
    names = {task: _named(task, given) for task in judged}
    made: list[dict[str, Any]] = []
    for task, judger in judged.items():
        reward = JUDGERS.get(judger, {})
        same_one = next((each for each in made if {**reward, "sources": each["sources"]} == each), None)
        if same_one is not None:
            same_one["sources"].append(names[task])
        elif reward:
            made.append({**reward, "sources": [names[task]]})
    lacking = [names[task] for task, judger in judged.items() if judger not in JUDGERS]
    notes = (f"reward: the tasks of {' and '.join(lacking)} have no reward yet: add one with their `sources`",)
    return {**({"reward": made} if made else {}), **({NOTES: notes} if lacking else {})}


def as_first(key: str) -> KeyRule:
    """Return the rule of a setting of a further task or data set, which rlsdk shares with the first."""

    def give(value: Any, given: Given) -> KeyOutcome:
        task = re.sub(rf"^{re.escape(TASK)}\.\d+", TASK, given.key)
        first = re.sub(r"(dataset_config_list)\.\d+", r"\1.0", task)
        if first in given.flat and given.flat[first] == value:
            return KeyOutcome.ignored(f"as {first}")
        return KeyOutcome.missing("this applies to all tasks in rlsdk; the first one's value is taken")

    return KeyRule(key, "missing", (), "", 1, give=give)


def _greatest(limit: str, given: Given) -> int:
    return max(given.whole(f"{task}.{limit}", 2048) for task in _tasks(given, TASK))


def task_limit(value: int, given: Given) -> KeyOutcome:
    """Report a limit of tokens of a further task; `_lengths` takes the greatest one for all tasks."""
    limit = re.sub(rf"^{re.escape(TASK)}\.\d+\.", "", given.key)
    if value == given.whole(f"{TASK}.{limit}", 2048):
        return KeyOutcome.ignored(f"as {TASK}.{limit}")
    return KeyOutcome({}, f"the greatest of all tasks, {_greatest(limit, given)}, applies to each of them")


def _lengths(given: Given) -> dict[str, Any]:
    response, prompts = _greatest(ANSWER_LIMIT, given), _greatest(PROMPT_LIMIT, given)
    several = {"sampling.max_tokens": response, "max_prompt_tokens": prompts} if len(_tasks(given, TASK)) > 1 else {}
    return {"model.max_length": given.whole("rollout_config.context_length", 0) or response + prompts, **several}


def _data(given: Given) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if train := _sources(given, TASK):
        found["tasks.train"] = train if len(train) > 1 else train[0]
    else:
        found[NOTES] = ("tasks.train: no file of annotations could be read: add {use: jsonl, path: ...}",)
    if given.read("enable_evaluate", flag, True) and (held_out := _sources(given, HELD_OUT)):
        found["tasks.eval"] = held_out if len(held_out) > 1 else held_out[0]
    return found


def _shaping(given: Given) -> dict[str, Any]:
    judger = f"{TASK}.judger_config"
    if not given.read(f"{judger}.enable_overlong_buffer", flag, False):
        return {}
    limit = given.whole(f"{judger}.max_response_len", _greatest(ANSWER_LIMIT, given))
    buffer = given.whole(f"{judger}.overlong_buffer_len", 0) or None
    penalty = given.read(f"{judger}.overlong_penalty_factor", number, 1.0)
    return {"algorithm.shaping": overlong(limit, buffer, penalty)}


def _gpus(given: Given) -> dict[str, Any]:
    per_engine = given.whole("rollout_config.tensor_parallel_size")
    if "train_resources" in given.tree or "rollout_resources" in given.tree:  # engines have GPUs of their own
        learners = given.whole("train_resources.num_workers", 8)
        return layout_apart(given.whole("rollout_resources.num_workers", 8), per_engine, learners)
    return layout(given.whole("resources.num_workers", 8), per_engine)


FINISH = (_lengths, _data, _rewards, _shaping, _gpus)
