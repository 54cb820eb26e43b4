"""Fact about a model that the engine `vllm` reads before vLLM loads it."""

from __future__ import annotations

from rlsdk.contracts import Model


def import_architectures(model: Model) -> None:
    """Import the model's class here and now.

    vLLM would import it once more in a process of its own, to learn its properties without touching CUDA; that takes
    7 s where its cache folder is new, as each run's is.
    """
    from transformers import AutoConfig
    from vllm.model_executor.models import ModelRegistry

    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    for name in config.architectures or ():
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
