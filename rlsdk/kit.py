"""Helpers for plugin authors, in addition to the marks and values of `rlsdk`.

* Policy losses and corrections: `log_ratio`, `bounded`, `credit`, `trained`, `masked_mean`, `at_level`, `mix`,
  `per_fits`, `Metrics`; `in_order`, a check of two options that are a range.
* Algorithms: `Aggregation`, the names of loss aggregation modes.
* Task sources: `TaskList`, `Wording`; for generated arithmetic, `draw`, `pick`, `tokenize`, `evaluate`.
* Renderers: `TextRenderer`, the base of renderers that write conversations as text.
* Agents and tools: `attended`, `within`, `LateError`, `Dialect` (a tool parser), `find` (`FILE.py:FUNCTION`).
* Environments: `ActionPattern`, `PATTERN`.
* Options: `structure`, `nearest`.
* Learners: `TransformersLearner`, the base of learners that shard transformers models across ranks, and
  `TrainedModule`, a model in training; `MovingReference`, a reference model that follows the policy; `LearningRate`,
  `PhaseTimer`, `RankMemory`, `count_parameters`; sequence parallelism: `SharedRows`, `SequenceGroup`,
  `sequence_faults`; files of tensors and plain values: `read_state`, `write_state`.
* Marks: `Component`, and `component_of`, which returns the component of a marked function or class.

Names are imported on first use, so that a light plugin stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlsdk.deprecation import NAMES, replacement

if TYPE_CHECKING:
    from rlsdk.algorithms.losses_data import mix, per_fits
    from rlsdk.algorithms.marking import Aggregation
    from rlsdk.algorithms.packed import Metrics, at_level, credit, in_order, log_ratio, masked_mean, trained
    from rlsdk.batch.arithmetic import bounded
    from rlsdk.components import Component, component_of
    from rlsdk.contracts import TaskList
    from rlsdk.environments.gymnasium import PATTERN, ActionPattern
    from rlsdk.errors import nearest
    from rlsdk.learners.base import TransformersLearner
    from rlsdk.learners.estimate import RankMemory, count_parameters
    from rlsdk.learners.micro_batches import SharedRows
    from rlsdk.learners.reference import MovingReference
    from rlsdk.learners.statefile import read_state, write_state
    from rlsdk.learners.trained import LearningRate, PhaseTimer, TrainedModule
    from rlsdk.learners.ulysses import SequenceGroup, sequence_faults
    from rlsdk.options import structure
    from rlsdk.plugins.discovery import find
    from rlsdk.renderers.text import TextRenderer
    from rlsdk.rewards.countdown import evaluate, tokenize
    from rlsdk.sources.countdown import draw, pick
    from rlsdk.sources.rows import Wording
    from rlsdk.tool_calls import Dialect
    from rlsdk.workflows.agent import attended
    from rlsdk.workflows.limits import LateError, within

_NAMES = {
    "rlsdk.algorithms.marking": ("Aggregation",),
    "rlsdk.algorithms.losses_data": ("mix", "per_fits"),
    "rlsdk.algorithms.packed": ("Metrics", "at_level", "credit", "in_order", "log_ratio", "masked_mean", "trained"),
    "rlsdk.batch.arithmetic": ("bounded",),
    "rlsdk.components": ("Component", "component_of"),
    "rlsdk.contracts": ("TaskList",),
    "rlsdk.environments.gymnasium": ("PATTERN", "ActionPattern"),
    "rlsdk.errors": ("nearest",),
    "rlsdk.learners.base": ("TransformersLearner",),
    "rlsdk.learners.estimate": ("RankMemory", "count_parameters"),
    "rlsdk.learners.micro_batches": ("SharedRows",),
    "rlsdk.learners.reference": ("MovingReference",),
    "rlsdk.learners.statefile": ("read_state", "write_state"),
    "rlsdk.learners.trained": ("LearningRate", "PhaseTimer", "TrainedModule"),
    "rlsdk.learners.ulysses": ("SequenceGroup", "sequence_faults"),
    "rlsdk.options": ("structure",),
    "rlsdk.plugins.discovery": ("find",),
    "rlsdk.renderers.text": ("TextRenderer",),
    "rlsdk.rewards.countdown": ("evaluate", "tokenize"),
    "rlsdk.sources.countdown": ("draw", "pick"),
    "rlsdk.sources.rows": ("Wording",),
    "rlsdk.tool_calls": ("Dialect",),
    "rlsdk.workflows.agent": ("attended",),
    "rlsdk.workflows.limits": ("LateError", "within"),
}
_LAZY = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "PATTERN",
    "ActionPattern",
    "Aggregation",
    "Component",
    "Dialect",
    "LateError",
    "LearningRate",
    "Metrics",
    "MovingReference",
    "PhaseTimer",
    "RankMemory",
    "SequenceGroup",
    "SharedRows",
    "TaskList",
    "TextRenderer",
    "TrainedModule",
    "TransformersLearner",
    "Wording",
    "at_level",
    "attended",
    "bounded",
    "component_of",
    "count_parameters",
    "credit",
    "draw",
    "evaluate",
    "find",
    "in_order",
    "log_ratio",
    "masked_mean",
    "mix",
    "nearest",
    "per_fits",
    "pick",
    "read_state",
    "sequence_faults",
    "structure",
    "tokenize",
    "trained",
    "within",
    "write_state",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        if f"rlsdk.kit.{name}" in NAMES:
            return replacement("rlsdk.kit", name)
        raise AttributeError(f"module 'rlsdk.kit' has no attribute {name!r}; it offers: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
