"""LoRA adapters in vLLM: one adapter with a fixed id, used by all requests and replaced in place."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlsdk.contracts import Adapter, Weights
from rlsdk.errors import EngineError
from rlsdk.weights import from_weights

_NAME, _ID = "rlsdk", 1
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM's `MaxLoRARanks`: the maximum ranks that it can reserve memory for; lower ranks also fit."""


def arguments(adapter: Adapter) -> dict[str, Any]:
    """Return the fields of vLLM's `EngineArgs` that reserve memory for one adapter.

    Raises:
        EngineError: The rank is higher than vLLM supports.
    """
    ranks = [rank for rank in _RANKS if rank >= adapter.rank]
    if not ranks:
        raise EngineError(
            f"an adapter of rank {adapter.rank}: vLLM supports ranks up to {_RANKS[-1]}; choose a lower rank, or send "
            "whole models (learner.lora.sync: merged)"
        )
    return {"enable_lora": True, "max_lora_rank": ranks[0], "max_loras": 1}


def request() -> Any:
    """Return the LoRA request to attach to every request: the id of the loaded adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(_NAME, _ID, _NAME)


def load_blank(llm: Any) -> None:
    """Load a zero adapter under the id, so that requests before the first real adapter sample from the base model."""
    llm.collective_rpc("rlsdk_blank_adapter", args=(_NAME, _ID))


def load(llm: Any, weights: Weights) -> None:
    """Replace the adapter on every worker; in-flight requests keep its id, so they continue with the new adapter.

    Args:
        llm: vLLM's `LLMEngine`.
        weights: Weights of the adapter.

    Raises:
        EngineError: vLLM rejected the adapter.
    """
    from vllm.lora.request import LoRARequest

    with _written(weights) as folder:
        if not llm.add_lora(LoRARequest(_NAME, _ID, str(folder), load_inplace=True)):
            raise EngineError(f"vLLM did not load the adapter of version {weights.version}")


@contextmanager
def _written(weights: Weights) -> Iterator[Path]:
    """Write the adapter in peft's format to a folder in shared memory, which vLLM's workers read in any process."""
    from safetensors.torch import save_file

    assert weights.adapter is not None
    # The fields that vLLM reads; it finds the adapted layers by the tensors' names.
    config = {"r": weights.adapter.rank, "lora_alpha": weights.adapter.alpha, "target_modules": "all-linear"}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rlsdk-adapter-") as name:
        folder = Path(name)
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(dict(from_weights(weights)), str(folder / "adapter_model.safetensors"))
        yield folder
