"""The kinds of components, and the parts of an algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

Kind = Literal[
    "reward",
    "shaping",
    "advantage",
    "policy_loss",
    "correction",
    "kl",
    "algorithm",
    "filter",
    "buffer",
    "stop",
    "workflow",
    "environment",
    "tasks",
    "sampler",
    "engine",
    "learner",
    "optimizer",
    "lr_schedule",
    "tracker",
    "renderer",
    "tool_parser",
    "diagnosis",
    "weight_transfer",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
OTHER_NAMES: Mapping[str, Kind] = {
    "loss": "policy_loss",
    "scorer": "reward",
    "reward_function": "reward",
    "estimator": "advantage",
    "importance_sampling": "correction",
    "agent": "workflow",
    "agent_loop": "workflow",
    "rollout": "workflow",
    "env": "environment",
    "data": "tasks",
    "dataset": "tasks",
    "source": "tasks",
    "backend": "engine",
    "inference": "engine",
    "optimiser": "optimizer",
    "schedule": "lr_schedule",
    "scheduler": "lr_schedule",
    "lr_scheduler": "lr_schedule",
    "logger": "tracker",
    "chat_template": "renderer",
    "template": "renderer",
    "parser": "tool_parser",
    "tool": "environment",
    "alert": "diagnosis",
    "weight_sync": "weight_transfer",
}
"""Names under which other trainers, or their users, know a kind."""
SUPPLIED: Mapping[str, tuple[str, ...]] = {"buffer": ("step", "uses"), "stop": ("available", "target")}
"""Kind -> keyword arguments that rlsdk passes in each call; these are not options."""
PARTS: Mapping[str, Kind] = {
    "advantage": "advantage",
    "policy_loss": "policy_loss",
    "correction": "correction",
    "kl": "kl",
}
"""Single parts of an algorithm -> their kind."""
COMBINED: tuple[str, ...] = ("correction",)
"""Those of them that may also be a list, whose components act as one."""
PART_LISTS: Mapping[str, Kind] = {"shaping": "shaping", "filters": "filter"}
"""Parts of an algorithm that are lists -> their kind."""
SCHEDULED: tuple[Kind, ...] = (*PARTS.values(), "shaping", "algorithm")
"""Kinds whose float options may be schedules."""
