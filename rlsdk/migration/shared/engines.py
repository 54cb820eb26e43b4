"""Conversions of the settings of engines, sampling and evaluations, and of their GPUs."""

from __future__ import annotations

from typing import Any

from rlsdk.migration.rows import same, under
from rlsdk.migration.rules import Given, KeyOutcome, KeyRule
from rlsdk.migration.values import UnfitError, count, flag, number

EVALUATION_NOTE = "section eval has samples, greedy, temperature, top_p, top_k and max_tokens"
ENGINE_FIELDS = frozenset({
    "attention_backend", "block_size", "compilation_config", "cpu_offload_gb", "cudagraph_capture_sizes",
    "disable_cascade_attn", "disable_custom_all_reduce", "enable_chunked_prefill", "enable_expert_parallel",
    "enable_prefix_caching", "generation_config", "hf_overrides", "kv_cache_dtype", "limit_mm_per_prompt",
    "long_prefill_token_threshold", "mamba_cache_mode", "mamba_ssm_cache_dtype", "max_cudagraph_capture_size",
    "max_logprobs", "mm_encoder_tp_mode", "mm_processor_cache_gb", "mm_processor_kwargs", "moe_backend",
    "num_gpu_blocks_override", "optimization_level", "quantization", "scheduling_policy", "skip_mm_profiling",
    "speculative_config",
})  # fmt: skip
"""Fields of vLLM's EngineArgs that rlsdk leaves to `engine.args`; for others, see `rlsdk.engines.vllm_options`."""
_OWNED = {
    "async_scheduling": "it is off: a token's weight version must be that of the weights that sampled it",
    "enable_sleep_mode": "engines that share GPUs sleep while the learner works",
    "max_model_len": "model.max_length counts prompt and response together",
    "sleep_level": "engines that share GPUs sleep while the learner works",
    **dict.fromkeys(("distributed_executor_backend", "logprobs_mode", "skip_tokenizer_init", "worker_extension_cls"),
                    "rlsdk sets it"),
}  # fmt: skip
"""Engine arguments that `engine.args` may not set -> why they need nothing."""


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

    def give(value: float, given: Given) -> KeyOutcome:
        place, _, name = given.key.rpartition(".")
        return evaluated(name, value, given.read(f"{place}.temperature", number, usual))

    return under(
        section,
        same("temperature", "eval.temperature eval.greedy", number, 0.6, give),
        same("top_p", "eval.top_p", number, 0.95, give),
        same("top_k", "eval.top_k", number, 20, give),
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
