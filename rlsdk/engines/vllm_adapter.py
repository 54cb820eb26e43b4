"""Adapters in vLLM: one LoRA under one id that every request names, replaced in place."""

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
"""vLLM's `MaxLoRARanks`: what it makes room for; a smaller adapter fits into a larger room."""


def arguments(adapter: Adapter) -> dict[str, Any]:
    """Fields of vLLM's `EngineArgs` that make room for one adapter.

    Raises:
        EngineError: Its rank is above what vLLM can serve.
    """
    ranks = [rank for rank in _RANKS if rank >= adapter.rank]
    if not ranks:
        raise EngineError(
            f"an adapter of rank {adapter.rank}: vLLM serves ranks up to {_RANKS[-1]}; choose a smaller one, or have "
            "whole models sent (learner.lora.sync: merged)"
        )
    return {"enable_lora": True, "max_lora_rank": ranks[0], "max_loras": 1}


def request() -> Any:
    """Return the LoRA request attached to every request: the id of the adapter, which the engine has loaded."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(_NAME, _ID, _NAME)


def load_blank(llm: Any) -> None:
    """Load an adapter of zeros under the id, so that requests before the first real one sample from the base."""
    llm.collective_rpc("rlsdk_blank_adapter", args=(_NAME, _ID))


def load(llm: Any, weights: Weights) -> None:
    """Replace the adapter on every worker; requests in flight keep its id, and so continue with the new one.

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
    """A folder in shared memory as peft writes it: what vLLM reads, whichever process its workers are in."""
    from safetensors.torch import save_file

    assert weights.adapter is not None
    # What vLLM reads of it; which layers there are, the tensors' names say.
    config = {"r": weights.adapter.rank, "lora_alpha": weights.adapter.alpha, "target_modules": "all-linear"}
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="rlsdk-adapter-") as name:
        folder = Path(name)
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(dict(from_weights(weights)), str(folder / "adapter_model.safetensors"))
        yield folder
