"""The interface that a component of each kind must have, if its kind is not called like a function."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from rlsdk.contracts.generation import Engine
from rlsdk.contracts.rendering import Renderer, ToolParser
from rlsdk.contracts.running import Environment, Tracker
from rlsdk.contracts.tasks import TaskSampler
from rlsdk.contracts.training import Learner
from rlsdk.contracts.transferring import WeightTransfer
from rlsdk.kinds import Kind

REQUIRED: Mapping[Kind, type] = {
    "sampler": TaskSampler,
    "engine": Engine,
    "learner": Learner,
    "environment": Environment,
    "tracker": Tracker,
    "renderer": Renderer,
    "tool_parser": ToolParser,
    "weight_transfer": WeightTransfer,
}


ALWAYS_CALLED: tuple[Kind, ...] = ("sampler", "tracker", "weight_transfer")
"""Kinds of which every run calls all methods. An engine, say, may lack what its run never calls, such as `sleep`."""


def missing_members(kind: Kind, made: Any) -> tuple[str, ...]:
    """Return the names of the methods of its kind that an instance lacks, and without which every run fails."""
    members = [name for name in vars(REQUIRED[kind]) if not name.startswith("_")] if kind in ALWAYS_CALLED else []
    absent = [name for name in members if inspect.getattr_static(made, name, None) is None]
    return tuple(name for name in absent if not hasattr(made, name))  # it may pass attributes on by `__getattr__`
