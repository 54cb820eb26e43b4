"""rlsdk trains language models by reinforcement learning; everything a researcher changes is a plugin.

Importing this package loads nothing else, and none of torch, ray, vllm, deepspeed and transformers before they are
used. pytest imports it in every project, for the plugin `rlsdk.testing.pytest_plugin`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsdk.algorithms import Algorithm
    from rlsdk.batch import Credit, CreditInputs, LossInputs, Totals, aggregate
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
    from rlsdk.runlog.query import rollouts
    from rlsdk.trainer import train
    from rlsdk.types import Group, Message, Observation, Rollout, Score, Step, Task

_NAMES = {
    "rlsdk.algorithms": ("Algorithm",),
    "rlsdk.batch": ("Credit", "CreditInputs", "LossInputs", "Totals", "aggregate"),
    "rlsdk.components": (
        "Use",
        "advantage",
        "algorithm",
        "buffer",
        "correction",
        "engine",
        "environment",
        "filter",
        "kl",
        "learner",
        "policy_loss",
        "reward",
        "shaping",
        "stop",
        "tasks",
        "tracker",
        "workflow",
    ),
    "rlsdk.errors": ("ConfigError", "PluginError", "RlsdkError"),
    "rlsdk.hookspecs": ("hookimpl",),
    "rlsdk.plugins": ("Plugins", "load", "names"),
    "rlsdk.runlog.query": ("rollouts",),
    "rlsdk.trainer": ("train",),
    "rlsdk.types": ("Group", "Message", "Observation", "Rollout", "Score", "Step", "Task"),
}
_LAZY = {name: module for module, names in _NAMES.items() for name in names}

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
    "rollouts",
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
