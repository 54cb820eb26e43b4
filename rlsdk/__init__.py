"""rlsdk trains language models by reinforcement learning; everything a researcher changes is a plugin.

Importing this package is cheap: torch, ray, vllm, deepspeed and transformers are imported only when they are used.
pytest imports it in every project, for the plugin `rlsdk.testing.pytest_plugin`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlsdk.algorithms import Algorithm as Algorithm
    from rlsdk.algorithms import algorithm as algorithm
    from rlsdk.batch import Credit as Credit
    from rlsdk.batch import CreditInputs as CreditInputs
    from rlsdk.batch import LossInputs as LossInputs
    from rlsdk.batch import Totals as Totals
    from rlsdk.batch import aggregate as aggregate
    from rlsdk.components import Use as Use
    from rlsdk.config import Config as Config
    from rlsdk.errors import ConfigError as ConfigError
    from rlsdk.errors import PluginError as PluginError
    from rlsdk.errors import RlsdkError as RlsdkError
    from rlsdk.hookspecs import hookimpl as hookimpl
    from rlsdk.limits import above as above
    from rlsdk.limits import at_least as at_least
    from rlsdk.limits import at_most as at_most
    from rlsdk.limits import below as below
    from rlsdk.marks import advantage as advantage
    from rlsdk.marks import buffer as buffer
    from rlsdk.marks import correction as correction
    from rlsdk.marks import diagnosis as diagnosis
    from rlsdk.marks import engine as engine
    from rlsdk.marks import environment as environment
    from rlsdk.marks import field as field
    from rlsdk.marks import filter as filter
    from rlsdk.marks import kl as kl
    from rlsdk.marks import learner as learner
    from rlsdk.marks import lr_schedule as lr_schedule
    from rlsdk.marks import optimizer as optimizer
    from rlsdk.marks import policy_loss as policy_loss
    from rlsdk.marks import renderer as renderer
    from rlsdk.marks import reward as reward
    from rlsdk.marks import sampler as sampler
    from rlsdk.marks import shaping as shaping
    from rlsdk.marks import stop as stop
    from rlsdk.marks import tasks as tasks
    from rlsdk.marks import tool_parser as tool_parser
    from rlsdk.marks import tracker as tracker
    from rlsdk.marks import weight_transfer as weight_transfer
    from rlsdk.marks import workflow as workflow
    from rlsdk.plugins import Plugins as Plugins
    from rlsdk.plugins import load as load
    from rlsdk.plugins import names as names
    from rlsdk.runlog.query import rollouts as rollouts
    from rlsdk.trainer import Callback as Callback
    from rlsdk.trainer import StepBatch as StepBatch
    from rlsdk.trainer import Trainer as Trainer
    from rlsdk.trainer import train as train
    from rlsdk.types import Group as Group
    from rlsdk.types import Image as Image
    from rlsdk.types import Message as Message
    from rlsdk.types import Observation as Observation
    from rlsdk.types import Rollout as Rollout
    from rlsdk.types import Score as Score
    from rlsdk.types import Step as Step
    from rlsdk.types import Task as Task
    from rlsdk.types import ToolCall as ToolCall

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
        "lr_schedule",
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

__all__ = [name for names in _NAMES.values() for name in names]


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
