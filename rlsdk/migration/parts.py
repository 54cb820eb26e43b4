"""Readers and arithmetic that the tables of several trainers share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Mapping
from pathlib import PurePath
from typing import Any

import attrs

from rlsdk.migration.rows import (
    NOTES,
    Choice,
    Give,
    Given,
    KeyOutcome,
    KeyRule,
    UnfitError,
    count,
    flag,
    interval,
    number,
    text,
    texts,
)
from rlsdk.migration.shell import from_environment

KL = Choice(
    {
        **dict.fromkeys(("kl", "k1"), "k1"),
        **dict.fromkeys(("mse", "k2"), "k2"),
        **dict.fromkeys(("low_var_kl", "k3", "low_var", "corrected_k3"), "low_var"),
        "abs": "abs",
    },
    "the estimator",
)
DTYPE = Choice(
    {
        **dict.fromkeys(("bfloat16", "bf16", "torch.bfloat16"), "bfloat16"),
        **dict.fromkeys(("float16", "fp16", "half", "torch.float16"), "float16"),
        **dict.fromkeys(("float32", "fp32", "float", "torch.float32"), "float32"),
    },
    "the dtype",
)
SCHEDULE = Choice(
    {
        **dict.fromkeys(("constant", "constant_with_warmup"), "constant"),
        "linear": "linear",
        **dict.fromkeys(("cosine", "cosine_with_min_lr", "cosine_with_warmup", "cosine_warmup_with_min_lr"), "cosine"),
        "polynomial": "polynomial",
        **dict.fromkeys(("inverse_sqrt", "inverse-square-root"), "inverse_sqrt"),
        **dict.fromkeys(("wsd", "warmup_stable_decay"), "wsd"),
    },
    "the schedule",
)
DECAY_SHAPE = Choice(
    {"linear": "linear", "cosine": "cosine", **dict.fromkeys(("1-sqrt", "minus_sqrt"), "sqrt")}, "the decay"
)
ATTENTION = Choice(
    {
        **dict.fromkeys(("fa2", "flash_attention_2", "flash_attn", "flash_attention"), "flash_attention_2"),
        **dict.fromkeys(("sdpa", "auto"), "sdpa"),
        "eager": "eager",
    },
    "the attention",
)
TRACKERS = ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")
HAVE_PROJECTS = ("wandb", "swanlab", "trackio")
BUILT_IN = {"console", "stdout", "file", "jsonl", "rich", "none"}
"""Trackers for which rlsdk needs none: it shows steps in the terminal and writes metrics.jsonl."""
KNOWN_TASKS = (
    ("countdown", re.compile(r"countdown|tiny_?zero", re.IGNORECASE)),
    ("math", re.compile(r"gsm8k|math|aime|amc|olympiad|polaris|deepscaler|geo3k|geometry3k", re.IGNORECASE)),
)
"""Reward, and pattern of the names of data sets that it fits."""
KEEP_ALL = 1000
"""Checkpoints to keep where the other trainer keeps all."""
UNREAD = {"csv", "tsv", "txt", "arrow"}
"""Endings of data files that no source reads."""
EVALUATION_NOTE = "section eval has samples, greedy, temperature, top_p, top_k and max_tokens"
TEMPLATE_NOTE = "set model.renderer: {use: template, file: FILE}"
LEARNER_NOTE = "rlsdk's learner is DeepSpeed ZeRO"
CRITIC_WARMUP_NOTE = "critic_warmup is the first step that trains the actor, counted from 1"
OPTIMIZER_NOTE = "learner.optimizer is adamw, sgd, or one of a plugin (howto/optimizer.md)"
OPTIMIZER_OPTIONS_NOTE = "options of an optimiser: learner.optimizer: {use: …} (howto/optimizer.md)"
MUON_NOTE = "learner.optimizer=zoo/muon needs model.dtype=float32 and learner.zero_stage=0"
ZOO = "from a plugin: pip install rlsdk-zoo"


def trackers(value: Any, options: Mapping[str, Mapping[str, Any]]) -> KeyOutcome:
    """Convert the names of trackers; those that rlsdk lacks are noted.

    Args:
        value: The names.
        options: Name of a tracker -> its options; those without a value are left out.
    """
    names = [name.lower() for name in texts(value)]
    made = {name: {key: str(each) for key, each in more.items() if each} for name, more in options.items()}
    found = {
        "trackers": [{"use": name, **made[name]} if made.get(name) else name for name in names if name in TRACKERS]
    }
    lacking = [name for name in names if name not in TRACKERS and name not in BUILT_IN]
    if lacking:
        return KeyOutcome(found, f"there is no tracker {' or '.join(lacking)}: write one (howto/plugin.md)", "missing")
    return KeyOutcome(found, "" if found["trackers"] else "metrics.jsonl and the terminal always get them", "mapped")


def trackers_with(project: str, usual: str = "") -> Give:
    """Return the converter of the names of trackers; a key names the project."""
    return lambda value, given: trackers(value, {key: {"project": given.get(project, usual)} for key in HAVE_PROJECTS})


def of_critic(estimator: str, name: str, to: str, of_actor: str = "") -> Give:
    """Return the converter of a critic's setting.

    Args:
        estimator: Key of the advantage.
        name: The advantage that has a critic.
        to: Path that the value is set to.
        of_actor: Key of the actor's model, from which a critic starts by default.
    """

    def give(value: Any, given: Given) -> KeyOutcome:
        if str(given.get(estimator)) != name:
            return KeyOutcome.ignored("the algorithm has no critic; a reward has its own model: reward_model")
        if of_actor and value == given.get(of_actor):
            return KeyOutcome.ignored("the critic starts from model.path")
        return KeyOutcome({to: value})

    return give


def critic_warmup(estimator: str, name: str, more: int = 0, note: str = "") -> Give:
    """Return the converter of the number of first steps that train the critic alone.

    Args:
        estimator: Key of the advantage.
        name: The advantage that has a critic.
        more: Number of such steps less the given number.
        note: How the other trainer counts, if `more` is not 0.
    """

    def give(value: int, given: Given) -> KeyOutcome:
        steps = value + more
        if value < 0 or steps <= 0:
            return KeyOutcome.ignored("actor and critic are trained from the first step")
        if str(given.get(estimator)) != name:
            return KeyOutcome.ignored("the algorithm has no critic")
        return KeyOutcome({"critic.warmup_steps": steps}, note)

    return give


def minibatches(batch: int, mini: int) -> int:
    """Return the number of optimiser steps that a batch is divided into."""
    return max(1, math.ceil(batch / max(mini, 1)))


def layout(gpus: int, per_engine: int) -> dict[str, Any]:
    """Return the numbers of engines and ranks that share all GPUs."""
    per_engine = max(1, min(per_engine, gpus))
    return {
        "placement.learners": gpus,
        "placement.engines": max(1, gpus // per_engine),
        "placement.gpus_per_engine": per_engine,
    }


def layout_apart(gpus: int, per_engine: int, learners: int) -> dict[str, Any]:
    """Return the numbers of engines on GPUs of their own, and of ranks on others."""
    return {**layout(gpus, per_engine), "placement.learners": learners, "placement.colocate": False}


def checkpoints_kept(saved_every: str) -> Give:
    """Return the converter of the number of checkpoints to keep; 0 or less keeps all.

    Args:
        saved_every: Key of the steps between checkpoints, below 1 for none.
    """

    def give(value: int, given: Given) -> dict[str, Any]:
        if given.read(saved_every, interval, 0) == 0:
            return {}
        return {"checkpoint.keep": value if value > 0 else KEEP_ALL}

    return give


def transformers_schedule(arguments: str) -> Give:
    """Set one of transformers' schedules, which decay to 0.

    Args:
        arguments: Key of the section with the schedule's own arguments.
    """

    def give(value: str, given: Given) -> dict[str, Any]:
        found: dict[str, Any] = {"learner.schedule": value}
        if value != "constant":
            found["learner.final_ratio"] = 0.0
        if value == "polynomial":
            found["learner.decay_power"] = given.read(f"{arguments}.power", number, 1.0)
        if value == "wsd":
            found["learner.decay_shape"] = given.read(f"{arguments}.decay_type", DECAY_SHAPE, "cosine")
            if steps := given.whole(f"{arguments}.num_decay_steps", 0):
                found["learner.decay_steps"] = steps
        return found

    return give


def weight_decay(key: str, sample: float, matrices: Callable[[Given], bool] = lambda _: True) -> KeyRule:
    """Return the rule of AdamW's weight decay.

    Args:
        key: Key of the weight decay.
        sample: Typical value.
        matrices: Tells from the other keys whether biases and norms are left out.
    """

    def give(value: float, given: Given) -> dict[str, Any]:
        left_out = {"learner.weight_decay_on": "matrices"} if value and matrices(given) else {}
        return {"learner.weight_decay": value, **left_out}

    return KeyRule(key, "mapped", ("learner.weight_decay", "learner.weight_decay_on"), "", sample, number, give)


def optimizer(
    key: str, sample: str, adamw: Container[str], betas: Callable[[Given], list[float]] | None = None
) -> KeyRule:
    """Return the rule of the optimiser's name.

    Args:
        key: Key of the name.
        sample: Name of an optimiser.
        adamw: Names of AdamW, in lower case.
        betas: Reads the betas of Lion from the other keys; None for its defaults.
    """

    def give(value: str, given: Given) -> KeyOutcome:
        name = value.lower()
        if name in adamw:
            return KeyOutcome.ignored("AdamW, the default")
        found = optimizer_of(name)
        if betas is not None and found.values == {"learner.optimizer": "zoo/lion"}:
            return attrs.evolve(found, values={"learner.optimizer": {"use": "zoo/lion", "betas": betas(given)}})
        return found

    return KeyRule(key, "mapped", ("learner.optimizer",), "", sample, text, give)


def optimizer_of(name: str) -> KeyOutcome:
    """Convert the name of an optimiser other than AdamW, in lower case."""
    if name == "sgd":
        return KeyOutcome({"learner.optimizer": "sgd"})
    if re.fullmatch(r"(paged_)?lion(_(8|32)bit)?", name):
        return KeyOutcome({"learner.optimizer": "zoo/lion"}, ZOO)
    if "muon" in name:
        return KeyOutcome.missing(MUON_NOTE)
    return KeyOutcome.missing(OPTIMIZER_NOTE)


def lora_of(alpha: str, usual: float) -> Give:
    """Return the converter of an adapter's rank; 0 trains no adapter.

    Args:
        alpha: Key of its alpha.
        usual: The other trainer's default of alpha.
    """

    def give(value: int, given: Given) -> dict[str, Any]:
        return {"learner.lora": {"rank": value, "alpha": given.read(alpha, number, usual)}} if value else {}

    return give


def share_of_steps(steps: int | None, ratio: float) -> KeyOutcome:
    """Convert warm-up steps given as a share of all optimiser steps."""
    if ratio == 0:
        return KeyOutcome({"learner.warmup_steps": 0})
    if steps is None:
        note = f"a share of all steps, which depend on the data: set learner.warmup_steps to {ratio:g} times it"
        return KeyOutcome.missing(note)
    found = round(steps * ratio)
    return KeyOutcome({"learner.warmup_steps": found}, f"in optimiser steps: {ratio:g} of {steps}")


def no_cut(key: str, sample: Any = 0.9, name: str = "top_p") -> KeyRule:
    """Return the rule of a sampling cut such as top_p, which must be off in training: the learner does not know it."""
    off = {"top_p": (1.0,), "top_k": (0.0, -1.0), "min_p": (0.0,), "repetition_penalty": (1.0,)}[name]

    def give(value: Any, _: Given) -> KeyOutcome:
        if number(value) in off:
            known: dict[str, dict[str, Any]] = {"top_p": {"sampling.top_p": 1.0}, "top_k": {"sampling.top_k": 0}}
            return KeyOutcome(known.get(name, {}), "off", "mapped" if name in known else "ignored")
        advice = "the learner would train on probabilities other than those sampled from; lower sampling.temperature"
        return KeyOutcome.missing(f"must be off during training: {advice}")

    return KeyRule(key, "missing", (f"sampling.{name}",) if name in ("top_p", "top_k") else (), "", sample, give=give)


def eval_sampling(section: str, usual: float = 1.0) -> tuple[KeyRule, ...]:
    """Return the rules of temperature, top_p and top_k of evaluations.

    Args:
        section: Section of the other trainer that holds them.
        usual: Its default temperature.
    """

    def give_of(name: str) -> Give:
        return lambda value, given: evaluated(name, value, given.read(f"{section}.temperature", number, usual))

    return tuple(
        KeyRule(f"{section}.{name}", "mapped", to, "", sample, number, give_of(name))
        for name, to, sample in (
            ("temperature", ("eval.temperature", "eval.greedy"), 0.6),
            ("top_p", ("eval.top_p",), 0.95),
            ("top_k", ("eval.top_k",), 20),
        )
    )


def evaluated(name: str, value: float, temperature: float) -> KeyOutcome:
    """Convert a sampling parameter of evaluations: temperature, top_p or top_k.

    Args:
        name: Its name.
        value: Its value.
        temperature: Temperature of the evaluations; at 0, the other trainer takes greedy answers.
    """
    if temperature <= 0:
        return KeyOutcome.ignored("greedy answers are part of every evaluation: eval/greedy")
    if name == "temperature":
        return KeyOutcome({"eval.temperature": value, "eval.greedy": False})
    if name == "top_k":
        return KeyOutcome({"eval.top_k": max(0, int(value))})
    if not 0 < value <= 1:
        raise UnfitError(f"expected a share above 0 and at most 1, got {value:g}")
    return KeyOutcome({"eval.top_p": value})


def dataset(paths: Any, split: str, columns: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """Return a source of tasks from files or a data set of the hub.

    Args:
        paths: Texts: files, folders or the name of a data set.
        split: Split of the data set.
        columns: Column in rlsdk's terms -> its name in the data.
        more: Further options of the source.
    """
    found = [each for each in texts(paths) if each not in ("nan", "")]
    if not found:
        raise UnfitError("no data is given")
    extra = {**({"columns": dict(columns)} if columns else {}), **more}
    endings = {from_environment(name, {}).rsplit("@")[0].rsplit(".", 1)[-1].lower() for name in found}
    path = found[0] if len(found) == 1 else found
    if endings <= {"parquet"}:
        return {"use": "parquet", "path": path, **extra}
    if endings <= {"jsonl", "json", "gz"} or endings & UNREAD:  # a note says that the latter cannot be read
        return {"use": "jsonl", "path": path, **extra}
    if len(found) == 1:
        return {"use": "hub", "name": found[0], "split": split, **extra}
    return {"use": "jsonl", "path": path, "split": split, **extra}


def unshuffled(sources: Any, *, sort_by: str | None = None) -> Any:
    """Return a source of files, or a list of them, whose order training keeps.

    Args:
        sources: Source or sources that `dataset` returned; None if there is none.
        sort_by: Column to sort by, if not the order of the data.
    """
    if isinstance(sources, list):
        return [unshuffled(each, sort_by=sort_by) for each in sources]
    return sources and {**sources, **({"sort_by": sort_by} if sort_by else {"shuffle": False})}


def template_variables(given: Given, section: str) -> dict[str, Any]:
    """Return the variables of the chat template, which the other trainer has in a section."""
    variables = given.section(section)
    return {"model.renderer.variables": dict(variables)} if variables else {}


def template_file(value: Any, _: Given) -> KeyOutcome:
    """Convert the path of a chat template; other trainers also take a template from another model's tokenizer."""
    if PurePath(text(value)).suffix in (".jinja", ".jinja2", ".j2"):
        return KeyOutcome({"model.renderer.file": text(value)})
    return KeyOutcome.missing(f"save the chat_template of its tokenizer to a file, and {TEMPLATE_NOTE}")


def likely_reward(*hints: Any) -> dict[str, Any]:
    """Guess a built-in reward from names of data sets or projects; the settings come with a note that says so."""
    for name, pattern in KNOWN_TASKS:
        found = next((str(hint) for hint in hints if hint is not None and pattern.search(str(hint))), None)
        if found is not None:
            reward = {"use": name} if name == "countdown" else {"use": name, "strict": False}
            return {"reward": reward, NOTES: (f"reward: {name} is a guess from the name {found!r}: please check",)}
    return {NOTES: ("reward: no key names one; add one (`rlsdk plugins reward` lists the available rewards)",)}


def function(path: Any, name: Any, style: str, arguments: Any = None) -> dict[str, Any]:
    """Return the reward that calls another trainer's function, given by file and name."""
    found = {"use": "foreign", "path": f"{text(path)}:{text(name)}", "style": style}
    return {**found, "arguments": dict(arguments)} if isinstance(arguments, Mapping) and arguments else found


ENGINE_FIELDS = frozenset({
    "attention_backend", "block_size", "compilation_config", "cpu_offload_gb", "cudagraph_capture_sizes",
    "disable_cascade_attn", "disable_custom_all_reduce", "enable_chunked_prefill", "enable_expert_parallel",
    "enable_prefix_caching", "generation_config", "hf_overrides", "kv_cache_dtype", "limit_mm_per_prompt",
    "long_prefill_token_threshold", "mamba_cache_mode", "mamba_ssm_cache_dtype", "max_cudagraph_capture_size",
    "max_logprobs", "mm_encoder_tp_mode", "mm_processor_cache_gb", "mm_processor_kwargs", "moe_backend",
    "num_gpu_blocks_override", "optimization_level", "quantization", "scheduling_policy", "skip_mm_profiling",
    "speculative_config",
})  # fmt: skip
"""Fields of vLLM's EngineArgs that rlsdk leaves to `engine.args`; for others, see `rlsdk.engines.vllm_arguments`."""


def routing_replay(key: str, *off: str) -> KeyRule:
    """Return the rule of a switch with which the learner uses the experts that the engine chose.

    Args:
        key: The key.
        off: Its values, in lower case, that turn this off.
    """
    note = "routing_replay, with the engine's experts; R2 takes those of the learner's first forward pass"

    def give(value: Any, _: Given) -> KeyOutcome:
        if str(value).lower() in off:
            return KeyOutcome.ignored("off, as by default")
        replayed = {"algorithm.correction[]": {"use": "routing_replay", "cap": None}}
        return KeyOutcome(replayed, note if str(value).upper() == "R2" else "")

    return KeyRule(key, "changed", ("algorithm.correction",), note, "R3", give=give)


def experts_sharded(key: str, tensor_parallel: str) -> KeyRule:
    """Return the rule of the number of an engine's GPUs that share the experts of a mixture; vLLM takes all or none.

    Args:
        key: The key.
        tensor_parallel: Key of the number of GPUs of an engine.
    """

    def give(value: int, given: Given) -> KeyOutcome:
        if value == 1:
            return KeyOutcome.ignored("off, as by default")
        everywhere = given.whole(tensor_parallel) == value
        note = "" if everywhere else "vLLM shares the experts among all GPUs of an engine: engine.tensor_parallel_size"
        return KeyOutcome({"engine.args.enable_expert_parallel": True}, note)

    return KeyRule(key, "changed", ("engine.args",), "among all GPUs of an engine", 2, count, give)


_OWNED = {
    "async_scheduling": "it is off: a token's weight version must be that of the weights that sampled it",
    "enable_sleep_mode": "engines that share GPUs sleep while the learner works",
    "max_model_len": "model.max_length counts prompt and response together",
    "sleep_level": "engines that share GPUs sleep while the learner works",
    **dict.fromkeys(("distributed_executor_backend", "logprobs_mode", "skip_tokenizer_init", "worker_extension_cls"),
                    "rlsdk sets it"),
}  # fmt: skip
"""Engine arguments that `engine.args` may not set -> why they need nothing."""


def of_vllm(value: Any, given: Given) -> KeyOutcome:
    """Convert an argument of vLLM's engine, which a key ends with."""
    name = given.key.rpartition(".")[2].replace("-", "_")
    if name in ENGINE_FIELDS:
        return KeyOutcome({f"engine.args.{name}": value})
    if name in _OWNED:
        return KeyOutcome.ignored(_OWNED[name])
    if name == "disable_mm_preprocessor_cache":  # its name before vLLM 0.11
        if flag(value):
            return KeyOutcome({"engine.args.mm_processor_cache_gb": 0})
        return KeyOutcome.ignored("off, as by default")
    return KeyOutcome.missing("put it into engine.args if vLLM's EngineArgs has it")


def switched(values: Mapping[str, Any], note: str = "") -> Give:
    """Return a converter for a flag that sets these values; if it is off, it sets nothing."""

    def give(value: Any, _: Given) -> KeyOutcome:
        if flag(value):
            return KeyOutcome(values, note)
        return KeyOutcome.ignored("off")

    return give
