"""rlsdk trains language models by reinforcement learning; everything a researcher changes is a plugin.

Importing this package loads none of torch, ray, vllm, deepspeed and transformers: they are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlsdk.components import (
    Use,
    advantage,
    algorithm,
    buffer,
    correction,
    engine,
    environment,
    filter,
    kl,
    learner,
    policy_loss,
    reward,
    shaping,
    stop,
    tasks,
    tracker,
    workflow,
)
from rlsdk.errors import ConfigError, PluginError, RlsdkError
from rlsdk.hookspecs import hookimpl
from rlsdk.plugins import Plugins, load, names
from rlsdk.types import Group, Message, Observation, Rollout, Score, Step, Task

if TYPE_CHECKING:
    from rlsdk.algorithms import Algorithm
    from rlsdk.batch import Credit, CreditInputs, LossInputs, Totals, aggregate
    from rlsdk.trainer import train

_LAZY = {
    "Algorithm": "rlsdk.algorithms",
    "Credit": "rlsdk.batch",
    "CreditInputs": "rlsdk.batch",
    "LossInputs": "rlsdk.batch",
    "Totals": "rlsdk.batch",
    "aggregate": "rlsdk.batch",
    "train": "rlsdk.trainer",
}

__all__ = [
    "Algorithm",
    "ConfigError",
    "Credit",
    "CreditInputs",
    "Group",
    "LossInputs",
    "Message",
    "Observation",
    "PluginError",
    "Plugins",
    "RlsdkError",
    "Rollout",
    "Score",
    "Step",
    "Task",
    "Totals",
    "Use",
    "advantage",
    "aggregate",
    "algorithm",
    "buffer",
    "correction",
    "engine",
    "environment",
    "filter",
    "hookimpl",
    "kl",
    "learner",
    "load",
    "names",
    "policy_loss",
    "reward",
    "shaping",
    "stop",
    "tasks",
    "tracker",
    "train",
    "workflow",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'rlsdk' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
