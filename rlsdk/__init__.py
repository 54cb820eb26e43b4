"""rlsdk trains language models by reinforcement learning; everything a researcher changes is a plugin.

Importing this package is cheap: torch, ray, vllm, deepspeed and transformers are imported only when they are used.
pytest imports it in every project, for the plugin `rlsdk.testing.pytest_plugin`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsdk.algorithms import Algorithm, algorithm
    from rlsdk.batch import Credit, CreditInputs, LossInputs, Totals, aggregate
    from rlsdk.components import Use
    from rlsdk.config import Config
    from rlsdk.errors import ConfigError, PluginError, RlsdkError
    from rlsdk.hookspecs import hookimpl
    from rlsdk.limits import above, at_least, at_most, below
    from rlsdk.marks import (
        advantage,
        buffer,
        correction,
        diagnosis,
        engine,
        environment,
        field,
        filter,
        kl,
        learner,
        optimizer,
        policy_loss,
        renderer,
        reward,
        sampler,
        shaping,
        stop,
        tasks,
        tool_parser,
        tracker,
        weight_transfer,
        workflow,
    )
    from rlsdk.plugins import Plugins, load, names
    from rlsdk.runlog.query import rollouts
    from rlsdk.trainer import Callback, StepBatch, Trainer, train
    from rlsdk.types import Group, Image, Message, Observation, Rollout, Score, Step, Task, ToolCall

_NAMES = {
    "rlsdk.algorithms": ("Algorithm", "algorithm"),
    "rlsdk.batch": ("Credit", "CreditInputs", "LossInputs", "Totals", "aggregate"),
    "rlsdk.components": ("Use",),
    "rlsdk.config": ("Config",),
    "rlsdk.marks": (
        "advantage",
        "buffer",
        "correction",
        "diagnosis",
        "engine",
        "environment",
        "field",
        "filter",
        "kl",
        "learner",
        "optimizer",
        "policy_loss",
        "renderer",
        "reward",
        "sampler",
        "shaping",
        "stop",
        "tasks",
        "tool_parser",
        "tracker",
        "weight_transfer",
        "workflow",
    ),
    "rlsdk.errors": ("ConfigError", "PluginError", "RlsdkError"),
    "rlsdk.hookspecs": ("hookimpl",),
    "rlsdk.limits": ("above", "at_least", "at_most", "below"),
    "rlsdk.plugins": ("Plugins", "load", "names"),
    "rlsdk.runlog.query": ("rollouts",),
    "rlsdk.trainer": ("Callback", "StepBatch", "Trainer", "train"),
    "rlsdk.types": ("Group", "Image", "Message", "Observation", "Rollout", "Score", "Step", "Task", "ToolCall"),
}
PUBLIC_MODULES = (
    "rlsdk",
    "rlsdk.batch",
    "rlsdk.contracts",
    "rlsdk.errors",
    "rlsdk.kit",
    "rlsdk.limits",
    "rlsdk.nano",
    "rlsdk.testing",
    "rlsdk.types",
    "rlsdk.weights",
)
"""Public modules, for plugins to import; all others may change between versions."""
_LAZY = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Algorithm",
    "Callback",
    "Config",
    "ConfigError",
    "Credit",
    "CreditInputs",
    "Group",
    "Image",
    "LossInputs",
    "Message",
    "Observation",
    "PluginError",
    "Plugins",
    "RlsdkError",
    "Rollout",
    "Score",
    "Step",
    "StepBatch",
    "Task",
    "ToolCall",
    "Totals",
    "Trainer",
    "Use",
    "above",
    "advantage",
    "aggregate",
    "algorithm",
    "at_least",
    "at_most",
    "below",
    "buffer",
    "correction",
    "diagnosis",
    "engine",
    "environment",
    "field",
    "filter",
    "hookimpl",
    "kl",
    "learner",
    "load",
    "names",
    "optimizer",
    "policy_loss",
    "renderer",
    "reward",
    "rollouts",
    "sampler",
    "shaping",
    "stop",
    "tasks",
    "tool_parser",
    "tracker",
    "train",
    "weight_transfer",
    "workflow",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        if name.startswith("_"):
            raise AttributeError(f"module 'rlsdk' has no attribute {name!r}")
        return importlib.import_module("rlsdk.deprecation").replacement("rlsdk", name)
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
