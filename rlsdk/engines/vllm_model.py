"""Facts about a model that the engine `vllm` reads before and after vLLM loads it."""

from __future__ import annotations

from pathlib import Path

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


def checkpoint_shapes(path: str) -> dict[str, tuple[int, ...]] | None:
    """Read names and shapes of the tensors in a model's safetensors files; None if there are no such files."""
    from huggingface_hub import snapshot_download
    from safetensors import safe_open

    # A hub id: vLLM has just downloaded it.
    folder = Path(path) if Path(path).is_dir() else Path(snapshot_download(path, local_files_only=True))
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="np") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes or None
