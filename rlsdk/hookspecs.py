"""Hooks that observe a run. They are broadcast to all active plugins and cannot change the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from rlsdk.types import Rollout, Score

PROJECT = "rlsdk"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Mark a plugin function as an implementation of the hook it is named after; it may take any subset of arguments."""


@hookspec
def rlsdk_run_start(config: Mapping[str, Any], folder: Path) -> None:
    """Called when a run starts, with its resolved configuration and its folder."""


@hookspec
def rlsdk_rollout_done(rollout: Rollout, score: Score, step: int) -> None:
    """Called when a rollout was scored for trainer step `step`."""


@hookspec
def rlsdk_step_end(step: int, metrics: Mapping[str, float]) -> None:
    """Called when trainer step `step` ended, with its metrics."""


@hookspec
def rlsdk_checkpoint_saved(step: int, folder: Path) -> None:
    """Called when a checkpoint is complete in `folder`."""


@hookspec
def rlsdk_run_end(status: str, summary: Mapping[str, Any]) -> None:
    """Called when the run ended: `finished`, `interrupted` or `failed`."""
