"""Arguments of XTuner's RL trainer configurations (RLColocateTrainerConfig), which are Python files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rlsdk.migration.parts import (
    DTYPE,
    EVALUATION_NOTE,
    KEEP_ALL,
    KL,
    LEARNER_NOTE,
    SCHEDULE,
    checkpoints_kept,
    dataset,
    eval_sampling,
    experts_sharded,
    layout,
    layout_apart,
    no_cut,
    optimizer,
    routing_replay,
    share_of_steps,
    switched,
    trackers,
    unshuffled,
)
from rlsdk.migration.python_files import KIND
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
    part,
    same,
    text,
    texts,
    two,
    unless,
    whole,
)

WORKER, LOSS = "train_worker_cfg", "train_worker_cfg.loss_cfg"
TASK, HELD_OUT = "agent_loop_manager_cfg.tasks", "eval_agent_loop_manager_cfg.tasks"
SAMPLE = f"{TASK}.agent_loop_config.sample_params"
PRODUCE = f"{TASK}.produce_strategy_config"
DATA = "sampler_config.dataloader_cfg.dataset_config_list.0"
ADVANTAGES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "GRPOAdvantageConfig": ("grpo", {"use": "grpo", "std_normalize": True}),
    "DrGRPOAdvantageConfig": ("dr_grpo", {"use": "grpo", "std_normalize": False}),
    "RLOOAdvantageConfig": ("rloo", {"use": "rloo"}),
    "OPOAdvantageConfig": ("opo", {"use": "opo"}),
    "PassKAdvantageConfig": ("grpo", {"use": "pass_at_k"}),
}
JUDGERS: Mapping[str, Mapping[str, Any]] = {
    "GSM8KJudgerConfig": {"use": "math", "strict": False},
    "DapoMathJudgerConfig": {"use": "math", "strict": False},
}


def _advantage(name: str, given: Given) -> KeyOutcome:
    algorithm, advantage = ADVANTAGES[name]
    note = "XTuner deviates from the paper; rlsdk follows the paper" if name == "DrGRPOAdvantageConfig" else ""
    values = {"algorithm.use": algorithm, "algorithm.advantage": dict(advantage), "algorithm.shaping": []}
    return KeyOutcome(values, note)


def _loss(kind: str, given: Given) -> dict[str, Any]:
    cap = given.read(f"{LOSS}.policy_loss_cfg.clip_ratio_c", number, 3.0)
    bounds = {
        f"clip_{end}": given.read(f"{LOSS}.policy_loss_cfg.cliprange_{end}", number, 0.2) for end in ("low", "high")
    }
    return {"algorithm.policy_loss": {"use": "ppo", **bounds, "dual_clip": cap}, "algorithm.aggregate": "token-mean"}


def _kl(value: bool, given: Given) -> dict[str, Any]:
    if not value:
        return {"algorithm.kl_coef": 0.0}
    estimator = given.read(f"{LOSS}.kl_loss_type", KL, "low_var")
    return {"algorithm.kl_coef": given.read(f"{LOSS}.kl_loss_coef", number, 0.001), "algorithm.kl": estimator}


def _warmup(value: float, given: Given) -> KeyOutcome:
    steps = given.whole("total_train_steps", 0) * given.whole(f"{WORKER}.optimizer_steps")
    return share_of_steps(steps or None, value)


def _least_rate(value: float, given: Given) -> dict[str, Any]:
    peak = given.read(f"{WORKER}.optim_cfg.lr", number, 1e-5)
    return {"learner.final_ratio": min(1.0, value / peak)} if peak else {}


def _importance(value: Any, given: Given) -> KeyOutcome:
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


def _work_dir(value: str, given: Given) -> KeyOutcome:
    out, _, name = value.rstrip("/").rpartition("/")
    if value.startswith("${"):
        label = given.get("rollout_config.env")
        values = {"out": value, "name": label if isinstance(label, str) else "xtuner-run"}
        return KeyOutcome(values, "a run's folder is out/name")
    return KeyOutcome({"name": name or "xtuner-run", **({"out": out} if out else {})}, "a run's folder is out/name")


def _judged(value: str, given: Given) -> KeyOutcome:
    if value in JUDGERS:
        return KeyOutcome({}, "the nearest built-in reward")
    return KeyOutcome.missing("your own reward (howto/reward.md), code_tests, or judge for a served model")


def _loop(value: str, given: Given) -> KeyOutcome:
    if value == "SingleTurnAgentLoopConfig":
        return KeyOutcome({"workflow": "single_turn"})
    return KeyOutcome.missing("workflow: tools, environment or agent, or your own (howto/workflow.md)")


def _exported(value: int, given: Given) -> dict[str, Any]:
    if not value:
        return {}
    kept = given.whole("hf_max_keep", -1)
    alone = {"checkpoint.every": value, "checkpoint.keep": kept if kept > 0 else KEEP_ALL}
    return {"checkpoint.export": "every", **({} if given.whole("checkpoint_interval", -1) > 0 else alone)}


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


def _as_first(key: str) -> KeyRule:
    """Return the rule of a setting of a further task or data set, which rlsdk shares with the first."""

    def give(value: Any, given: Given) -> KeyOutcome:
        task = re.sub(rf"^{re.escape(TASK)}\.\d+", TASK, given.key)
        first = re.sub(r"(dataset_config_list)\.\d+", r"\1.0", task)
        if first in given.flat and given.flat[first] == value:
            return KeyOutcome.ignored(f"as {first}")
        return KeyOutcome.missing("this applies to all tasks in rlsdk; the first one's value is taken")

    return KeyRule(key, "missing", (), "", 1, give=give)


def _finish(given: Given) -> dict[str, Any]:
    explicit = given.whole("rollout_config.context_length", 0)
    response = given.whole(f"{SAMPLE}.max_tokens", 2048)
    length = explicit or response + given.whole(f"{TASK}.{DATA}.tokenize_fn.max_length", 2048)
    found: dict[str, Any] = {"model.max_length": length}
    for where, to in ((TASK, "tasks.train"), (HELD_OUT, "tasks.eval")):
        sources = _sources(given, where) if to == "tasks.train" or given.read("enable_evaluate", flag, True) else []
        if sources:
            found[to] = sources if len(sources) > 1 else sources[0]
        elif to == "tasks.train":
            found[NOTES] = ("tasks.train: no file of annotations could be read: add {use: jsonl, path: ...}",)
    rewards = _rewards(given)
    found |= {**rewards, NOTES: (*found.get(NOTES, ()), *rewards.get(NOTES, ()))}
    judger = f"{TASK}.judger_config"
    if given.read(f"{judger}.enable_overlong_buffer", flag, False):
        found["algorithm.shaping"] = [{
            "use": "overlong",
            "max_length": given.whole(f"{judger}.max_response_len", response),
            "buffer": given.whole(f"{judger}.overlong_buffer_len", 0) or None,
            "penalty": given.read(f"{judger}.overlong_penalty_factor", number, 1.0),
        }]  # fmt: skip
    per_engine = given.whole("rollout_config.tensor_parallel_size")
    if "train_resources" in given.tree or "rollout_resources" in given.tree:  # engines have GPUs of their own
        learners = given.whole("train_resources.num_workers", 8)
        return found | layout_apart(given.whole("rollout_resources.num_workers", 8), per_engine, learners)
    return found | layout(given.whole("resources.num_workers", 8), per_engine)


_ENGINE = "the engine's default is kept; engine.args accepts vLLM's settings"
_CLASS = "class name"
_CPU = "placement and scoring set the numbers of processes"

ROWS = (
    same(f"{TASK}.*.judger_config.{KIND}", "reward", text, "GSM8KJudgerConfig", _judged),
    ignored(f"**.{KIND}", _CLASS, "x"),
    # Run
    same("seed", "seed", whole, 42),
    changed("work_dir", "out name", text, "work_dirs/my-run", "a run's folder is out/name", _work_dir),
    same("load_from", "model.path", text, "Qwen/Qwen3-8B"),
    changed("tokenizer_path", "model.tokenizer", text, "Qwen/Qwen3-8B", "null uses the model's",
            lambda v, given: {"model.tokenizer": v} if v != given.get("load_from")
            else KeyOutcome.ignored("the model's own")),
    same("total_train_steps", "steps", count, 100),
    changed("total_epochs", "epochs", number, 1, "total_train_steps takes precedence if both are set",
            lambda v, given: {} if given.get("total_train_steps") else {"epochs": v}),
    same("train_batch_size", "batch_size", count, 64),
    same("sync_weights_interval", "rollout.sync_interval", count, 1),
    same("enable_initial_evaluate", "eval.before", flag, False),
    same("evaluate_step", "eval.every", interval, 10),
    part("enable_evaluate", "tasks.eval", flag, True),
    same("checkpoint_interval", "checkpoint.every", interval, 50),
    same("checkpoint_maxkeep", "checkpoint.keep", whole, 2, checkpoints_kept("checkpoint_interval")),
    changed("hf_interval", "checkpoint.export checkpoint.every", interval, 50, "a model export with every checkpoint",
            _exported),
    part("hf_max_keep", "checkpoint.keep", whole, 2),
    ignored("auto_resume", "rlsdk resumes only on request: rlsdk train CONFIG --resume", True),
    missing("load_checkpoint_cfg.**", "set model.path to an export of that checkpoint in transformers format", "x"),
    ignored("checkpoint_no_save_*", "checkpoints contain everything", False),
    ignored("skip_checkpoint_validation", "checkpoints are always validated", False),
    ignored("log_dir", "logs are written to the run's folder", "x"),
    same("exp_tracker", "trackers", texts, "tensorboard", lambda v, _: trackers(v, {})),
    ignored("debug_rollout_dir", "rollouts are saved: see `rlsdk rollouts RUN`", "x"),
    unless("debug_*", (False,), "`rlsdk debug` serves the engine and runs the workflow", True),
    ignored("trace_config.**", "rollouts are saved: see `rlsdk rollouts RUN`", "x"),
    # Optimisation
    same(f"{WORKER}.optim_cfg.lr", "learner.lr", number, 1e-6),
    same(f"{WORKER}.optim_cfg.weight_decay", "learner.weight_decay", number, 0.1),
    same(f"{WORKER}.optim_cfg.betas", "learner.betas", numbers, [0.9, 0.95]),
    same(f"{WORKER}.optim_cfg.eps", "learner.eps", number, 1e-8),
    same(f"{WORKER}.optim_cfg.max_grad_norm", "learner.grad_clip", number, 1.0),
    optimizer(f"{WORKER}.optim_cfg.{KIND}", "MuonConfig", ("adamwconfig",)),
    ignored(f"{WORKER}.optim_cfg.**", "rlsdk creates the optimiser", False),
    same(f"{WORKER}.lr_cfg.lr_type", "learner.schedule", SCHEDULE, "cosine"),
    changed(f"{WORKER}.lr_cfg.warmup_ratio", "learner.warmup_steps", number, 0.0, "in optimiser steps", _warmup),
    changed(f"{WORKER}.lr_cfg.lr_min", "learner.final_ratio", number, 1e-7, "as a share of the peak", _least_rate),
    same(f"{WORKER}.optimizer_steps", "minibatches", count, 1),
    changed(f"{WORKER}.pack_max_length", "learner.micro_batch_tokens", count, 32768, "includes padding, unless rows are packed",
            lambda v, given: {"learner.micro_batch_tokens": v, "learner.rows": "packed"}),
    changed(f"{WORKER}.sp_size", "learner.sequence_parallel", whole, 1, "must divide placement.learners",
            lambda v, given: {"learner.sequence_parallel": max(1, v)}),
    changed(f"{WORKER}.fsdp_cfg.cpu_offload", "learner.offload", flag, True, LEARNER_NOTE,
            lambda v, given: {"learner.zero_stage": 3, "learner.offload": "all"} if v else {"learner.zero_stage": 3}),
    same(f"{WORKER}.fsdp_cfg.torch_compile", "learner.compile", flag, False),
    unless(f"{WORKER}.fsdp_cfg.ep_size", (1,), "experts are not sharded over ranks", 4),
    *(changed(f"{place}.fp32_lm_head", "model.head_dtype", flag, True, "in engines and learner alike",
              switched({"model.head_dtype": "float32"}, "in engines and learner alike"))
      for place in (f"{WORKER}.fsdp_cfg", "rollout_config")),
    unless(f"{WORKER}.model_cfg.freeze_vision", (False,), "the vision tower is trained with the rest; adapters leave it as it is", True),
    unless(f"{WORKER}.model_cfg.freeze_projector", (False,), "the projector is trained with the rest; adapters leave it as it is", True),
    routing_replay("rollout_config.enable_return_routed_experts", "false"),
    ignored(f"{WORKER}.fsdp_cfg.**", LEARNER_NOTE, "x"),
    same(f"{WORKER}.load_from", "model.path", text, "Qwen/Qwen3-8B"),
    same(f"{WORKER}.ref_load_from", "model.reference", text, "Qwen/Qwen3-8B"),
    ignored(f"{WORKER}.ref_model_fsdp_cfg.**", "the reference model runs with the learner", "x"),
    ignored(f"{WORKER}.model_cfg.**", "the model's own config.json is read", "x"),
    ignored(f"{WORKER}.model_cfg", "the model's own config.json is read", "x"),
    missing(f"{WORKER}.sft_*", "algorithm: mix trains on demonstrations in addition to rollouts", "x"),
    missing(f"{WORKER}.sft_dataloader_cfg.**", "algorithm: mix trains on demonstrations in addition to rollouts", "x"),
    # Objective
    same(f"advantage_estimator_config.{KIND}", "algorithm.use algorithm.advantage",
         choice(ADVANTAGES, "the advantage"), "GRPOAdvantageConfig", _advantage),
    ignored("advantage_estimator_config.eps", "1e-6, as in the paper's code", 1e-8),
    ignored("advantage_estimator_config.max_length", "algorithm.norm of dr_grpo is sampling.max_tokens", 32768),
    same(f"{LOSS}.policy_loss_cfg.loss_type", "algorithm.policy_loss",
         Choice({"vanilla": "vanilla"}, "the loss"), "vanilla", _loss),
    part(f"{LOSS}.policy_loss_cfg.cliprange_low", "algorithm.policy_loss.clip_low", number, 0.2),
    part(f"{LOSS}.policy_loss_cfg.cliprange_high", "algorithm.policy_loss.clip_high", number, 0.28),
    part(f"{LOSS}.policy_loss_cfg.clip_ratio_c", "algorithm.policy_loss.dual_clip", number, 10.0),
    ignored(f"{LOSS}.policy_loss_cfg.log_prob_diff_*", "rlsdk also bounds ratios by e^20", -20.0),
    missing(f"{LOSS}.policy_loss_cfg.*", "see rlsdk plugins policy_loss", 1),
    same(f"{LOSS}.use_kl_loss", "algorithm.kl_coef algorithm.kl", flag, True, _kl),
    part(f"{LOSS}.kl_loss_coef", "algorithm.kl_coef", number, 0.001),
    part(f"{LOSS}.kl_loss_type", "algorithm.kl", KL, "low_var_kl"),
    same(f"{LOSS}.rollout_is.rollout_is_threshold", "algorithm.correction", two, [2.0, 0.5], _importance),
    part(f"{LOSS}.rollout_is.rollout_is_mask_threshold", "algorithm.correction", two, [2.0, 0.5]),
    part(f"{LOSS}.rollout_is.rollout_is_level", "algorithm.correction", text, "token"),
    part(f"{LOSS}.rollout_is.rollout_is_mode", "algorithm.correction", text, "truncate"),
    missing(f"{LOSS}.rollout_is.rollout_is_veto_threshold",
            "a single outlier does not mask an answer; see correction: geometric", [20.0, 0.0]),
    missing(f"{LOSS}.rollout_is.*", "see rlsdk plugins correction", 1),
    ignored(f"{LOSS}.mode", "losses never hold all logits at once", "chunk"),
    ignored(f"{LOSS}.chunk_size", "losses never hold all logits at once", 512),
    ignored(f"{LOSS}.ignore_idx", "the loss mask marks trained tokens", -100),
    unless(f"{LOSS}.{KIND}", ("GRPOLossConfig",), "see rlsdk plugins policy_loss", "OrealLossConfig"),
    # Rollouts
    same("rollout_config.dtype", "model.dtype", DTYPE, "bfloat16"),
    same("rollout_config.tensor_parallel_size", "engine.tensor_parallel_size", count, 1),
    same("rollout_config.gpu_memory_utilization", "engine.gpu_memory_utilization", number, 0.8),
    part("rollout_config.context_length", "model.max_length", count, 4096),
    same("rollout_config.rollout_max_batch_size_per_instance", "engine.max_num_seqs", count, 256),
    ignored("rollout_config.model_path", "model.path", "Qwen/Qwen3-8B"),
    experts_sharded("rollout_config.expert_parallel_size", "rollout_config.tensor_parallel_size"),
    ignored("rollout_config.rollout_timeout", "an answer ends at sampling.max_tokens; workflows with turns have a timeout", 3600),
    ignored("rollout_config.**", _ENGINE, "x"),
    same(f"{SAMPLE}.max_tokens", "sampling.max_tokens", count, 1024),
    same(f"{SAMPLE}.temperature", "sampling.temperature", number, 1.0),
    no_cut(f"{SAMPLE}.top_p", 1.0),
    no_cut(f"{SAMPLE}.top_k", 0, "top_k"),
    no_cut(f"{SAMPLE}.repetition_penalty", 1.0, "repetition_penalty"),
    same(f"{SAMPLE}.stops", "sampling.stop", texts, ["</answer>"]),
    ignored(f"{SAMPLE}.min_tokens", "the policy decides where an answer ends", 0),
    ignored(f"{SAMPLE}.*", "engines return what the learner needs", True),
    changed(f"{TASK}.agent_loop_config.{KIND}", "workflow", text, "SingleTurnAgentLoopConfig", "a workflow", _loop),
    ignored(f"{TASK}.agent_loop_config.hf_checkpoint", "model.path", "x"),
    missing(f"{TASK}.agent_loop_config.max_turns", "set max_turns of the workflow", 5),
    ignored(f"{TASK}.agent_loop_config.**", _CPU, 1),
    same(f"{TASK}.sampler_config.prompt_repeat_k", "group_size", count, 8),
    part(f"{TASK}.{DATA}.dataset.anno_path", "tasks.train", text, "data/train.jsonl", "becomes a task source"),
    same(f"{TASK}.{DATA}.tokenize_fn.max_length", "max_prompt_tokens", count, 2048),
    ignored(f"{TASK}.{DATA}.dataset.name", "sources are named by `source`", "x"),
    unless(f"{TASK}.{DATA}.dataset.sample_ratio", (1, 1.0), "use part of the data, or give the source a weight", 0.5),
    unless(f"{TASK}.{DATA}.dataset.class_name", ("JsonlDataset",),
           "images are parts of a prompt's messages: docs/howto/vision.md", "VLMJsonlDataset"),
    part(f"{TASK}.{DATA}.dataset.enable_sequential_sampler", "tasks.train.shuffle", flag, True),
    ignored(f"{TASK}.{DATA}.dataset.cache_*", "tasks are read on demand", "x"),
    ignored(f"{TASK}.{DATA}.dataset.enable_mmap_shared", "tasks are read on demand", True),
    missing(f"{TASK}.{DATA}.tokenize_fn.tools_schema.**", "list functions: workflow: {use: tools, tools: [...]}", "x"),
    missing(f"{TASK}.{DATA}.**", "see rlsdk plugins tasks", "x"),
    part(f"{TASK}.sampler_config.dataloader_cfg.dataset_config_list.*.dataset.anno_path", "tasks.train", text,
         "data/more.jsonl", "becomes a task source"),
    ignored(f"{TASK}.sampler_config.dataloader_cfg.dataset_config_list.*.dataset.name", "sources are named by `source`", "x"),
    *(_as_first(f"{TASK}.sampler_config.dataloader_cfg.dataset_config_list.*.{name}") for name in (
        "tokenize_fn.*", "dataset.*")),
    missing(f"{TASK}.sampler_config.dataloader_cfg.dataset_config_list.*.**", "see rlsdk plugins tasks", "x"),
    ignored(f"{TASK}.sampler_config.**", "tasks are read on demand", "x"),
    changed(f"{TASK}.judger_config.{KIND}", "reward", text, "GSM8KJudgerConfig", "a reward", _judged),
    ignored(f"{TASK}.judger_config.judger_name", "rewards are named by their component", "x"),
    missing(f"{TASK}.judger_config.reward_handler", "reward: {use: foreign, path: 'FILE.py:FUNCTION'}, or mark it with @rlsdk.reward", "x"),
    missing(f"{TASK}.judger_config.extra_info.**", "arguments: {extra_info: {…}} of reward: {use: foreign, path: 'FILE.py:FUNCTION'}", 1),
    part(f"{TASK}.judger_config.enable_overlong_buffer", "algorithm.shaping", flag, True),
    part(f"{TASK}.judger_config.max_response_len", "algorithm.shaping", count, 8192),
    part(f"{TASK}.judger_config.overlong_buffer_len", "algorithm.shaping", count, 4096),
    part(f"{TASK}.judger_config.overlong_penalty_factor", "algorithm.shaping", number, 1.0),
    ignored(f"{TASK}.judger_config.**", _CPU, 1),
    same(f"{PRODUCE}.over_sample_threshold", "rollout.oversample", number, 0.2),
    same(f"{PRODUCE}.max_staleness", "rollout.max_staleness", whole, 1),
    changed(f"{PRODUCE}.max_token_staleness", "rollout.max_token_staleness", whole, 1, "if rollouts run ahead",
            lambda v, given: {"rollout.max_token_staleness": min(v, given.whole(f"{PRODUCE}.max_staleness", 0))}
            if given.whole(f"{PRODUCE}.max_staleness", 0) else {}),
    changed(f"{PRODUCE}.enable_partial_rollout", "rollout.in_flight rollout.partial_rollouts", flag, False,
            "false: answers are resampled with new weights",
            lambda v, given: {"rollout.in_flight": v, "rollout.partial_rollouts": v}),
    changed(f"{PRODUCE}.tail_batch_trigger_size", "rollout.tail_batch", whole, 0, "if rollouts run ahead",
            lambda v, given: {"rollout.tail_batch": v} if given.whole(f"{PRODUCE}.max_staleness", 0)
            or given.read(f"{PRODUCE}.over_sample_threshold", number, 0.0) else {}),
    missing(f"{PRODUCE}.is_valid_sample_fn", "algorithm.filters: [nonzero_variance] drops groups of equal rewards; with "
            "rollout.dynamic_sampling: true, another task replaces each", "x"),
    missing(f"{PRODUCE}.should_continue_fn", "rollout.stop, see rlsdk plugins stop", "x"),
    ignored(f"{PRODUCE}.{KIND}", "rollout.max_staleness: 0 is synchronous", "AsyncProduceStrategyConfig"),
    ignored(f"{TASK}.task_name", "sources are named by `source`", "train_task"),
    part(f"{TASK}.weight", "tasks.train", number, 1.0),
    part(f"{TASK}.*.weight", "tasks.train", number, 1.0),
    ignored(f"{TASK}.*.task_name", "the name of its source", "x"),
    part(f"{TASK}.*.{DATA}.dataset.anno_path", "tasks.train", text, "data/more.jsonl", "becomes a task source"),
    ignored(f"{TASK}.*.{DATA}.dataset.name", "the name of its source", "x"),
    _as_first(f"{TASK}.*.**"),
    ignored("agent_loop_manager_cfg.**", "rlsdk's scheduler needs no such setting", "x"),
    part(f"{HELD_OUT}.{DATA}.dataset.anno_path", "tasks.eval", text, "data/test.jsonl", "becomes a task source"),
    *eval_sampling(f"{HELD_OUT}.agent_loop_config.sample_params"),
    changed(f"{HELD_OUT}.agent_loop_config.sample_params.max_tokens", "eval.max_tokens", count, 1024, "if it differs",
            lambda v, given: {} if v == given.whole(f"{SAMPLE}.max_tokens") else {"eval.max_tokens": v}),
    unless(f"{HELD_OUT}.agent_loop_config.sample_params.min_tokens", (0,), EVALUATION_NOTE, 8),
    missing(f"{HELD_OUT}.agent_loop_config.sample_params.*", EVALUATION_NOTE, 0.0),
    ignored("eval_agent_loop_manager_cfg.**", "evaluations use the training's workflow and reward", "x"),
    missing("evaluator_config.compute_metric_func", "rewards and workflows define the evaluation metrics", "x"),
    changed("evaluator_config.eval_sample_num", "eval.limit", whole, 100, "tasks per source",
            lambda v, given: {"eval.limit": v} if v > 0 else {}),
    unless("evaluator_config.eval_sample_ratio", (0, 1), "eval.limit limits the tasks per source", 0.5),
    ignored("evaluator_config.**", "eval.limit limits the tasks per source", "x"),
    ignored("replay_buffer_config.**", "rollout.buffer orders groups, rollout.replay reuses them", "x"),
    # Older versions
    unless("dataflow_config.staleness_threshold", (0, 0.0), "rollout.max_staleness, in steps", 0.5),
    ignored("dataflow_config.**", "rlsdk's scheduler needs no such setting", 1),
    ignored("judger_config.**", _CPU, 1),
    # Resources
    part("resources.num_workers", "placement.learners placement.engines", count, 8),
    ignored("resources.**", _CPU, 1),
    part("train_resources.num_workers", "placement.learners", count, 4),
    part("rollout_resources.num_workers", "placement.engines", count, 4),
    ignored("train_resources.**", _CPU, 1),
    ignored("rollout_resources.**", _CPU, 1),
    ignored(KIND, _CLASS, "x"),
    ignored(f"{WORKER}.*", "rlsdk's learner needs no such setting", 1),
)  # fmt: skip

DEFAULTS: Mapping[str, Any] = {
    "work_dir": "work_dirs/xtuner-run",
    "seed": 42,
    "evaluate_step": 1,
    "enable_initial_evaluate": False,
    f"{WORKER}.optim_cfg.lr": 1e-5,
    f"{WORKER}.optim_cfg.weight_decay": 0.01,
    f"{WORKER}.lr_cfg.lr_min": 1e-6,
    f"{WORKER}.lr_cfg.warmup_ratio": 0.03,
    f"advantage_estimator_config.{KIND}": "GRPOAdvantageConfig",
    f"{LOSS}.policy_loss_cfg.loss_type": "vanilla",
    f"{LOSS}.use_kl_loss": False,
    f"{SAMPLE}.max_tokens": 2048,
    f"{TASK}.sampler_config.prompt_repeat_k": 1,
    f"{TASK}.{DATA}.tokenize_fn.max_length": 2048,
    "exp_tracker": "tensorboard",
    "checkpoint_maxkeep": -1,
}

RENAMED: Mapping[str, str] = {
    **{f"{held}agent_loop_manager_cfg.tasks.0.": f"{held}agent_loop_manager_cfg.tasks." for held in ("", "eval_")},
    **{f"{held}agent_loop_manager_cfg.{section}.": f"{held}agent_loop_manager_cfg.tasks.{section}."
       for held in ("", "eval_")
       for section in ("agent_loop_config", "judger_config", "sampler_config", "produce_strategy_config")},
    "train_worker_config.": f"{WORKER}.",
    "dataflow_config.prompt_repeat_k": f"{TASK}.sampler_config.prompt_repeat_k",
    "dataflow_config.global_batch_size": "train_batch_size",
    "dataflow_config.sample_params.": f"{SAMPLE}.",
    "dataflow_config.enable_partial_rollout": f"{PRODUCE}.enable_partial_rollout",
    "dataflow_config.tail_batch_trigger_size": f"{PRODUCE}.tail_batch_trigger_size",
    "replay_buffer_config.dataset_cfg.0.": f"{TASK}.{DATA}.",
    "judger_config.reward_judger_configs.0.": f"{TASK}.judger_config.",
    "evaluator_config.dataset_cfg.0.": f"{HELD_OUT}.{DATA}.",
    "evaluator_config.sample_params.": f"{HELD_OUT}.agent_loop_config.sample_params.",
    "evaluator_config.enable_evaluate": "enable_evaluate",
    "evaluator_config.enable_initial_evaluate": "enable_initial_evaluate",
    "evaluator_config.evaluate_step": "evaluate_step",
    "rollout_steps": "total_train_steps",
}  # fmt: skip
"""Arguments of RLTrainerConfig, up to version 1.0.1, and of managers of a single task -> today's."""

FRAMEWORK = Framework(
    name="xtuner",
    title="XTuner",
    rows=ROWS,
    defaults=DEFAULTS,
    finish=_finish,
    renamed=RENAMED,
    constructors=dict.fromkeys(("RLColocateTrainerConfig", "RLDisaggregatedTrainerConfig", "RLTrainerConfig"), ()),
)
