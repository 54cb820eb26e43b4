"""The trainer, which runs the training loop on Ray, from tasks to new weights."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsdk.rollout.step_batch import StepBatch
    from rlsdk.trainer.callbacks import Callback
    from rlsdk.trainer.run import train
    from rlsdk.trainer.trainer import Trainer

_LAZY = {
    "Callback": "rlsdk.trainer.callbacks",
    "StepBatch": "rlsdk.rollout.step_batch",
    "Trainer": "rlsdk.trainer.trainer",
    "train": "rlsdk.trainer.run",
}

__all__ = ["Callback", "StepBatch", "Trainer", "train"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'rlsdk.trainer' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
