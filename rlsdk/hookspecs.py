"""The hooks that observe a run. They are broadcast to every active plugin and change nothing."""

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
"""Mark a function of a plugin as an implementation of the hook of its name; it may take any subset of the arguments."""


@hookspec
def rlsdk_run_start(config: Mapping[str, Any], folder: Path) -> None:
    """A run starts: its resolved configuration and its folder."""


@hookspec
def rlsdk_rollout_done(rollout: Rollout, score: Score, step: int) -> None:
    """A rollout was scored for trainer step `step`."""


@hookspec
def rlsdk_step_end(step: int, metrics: Mapping[str, float]) -> None:
    """Trainer step `step` ended with these metrics."""


@hookspec
def rlsdk_checkpoint_saved(step: int, folder: Path) -> None:
    """A checkpoint stands complete in `folder`."""


@hookspec
def rlsdk_run_end(status: str, summary: Mapping[str, Any]) -> None:
    """The run ended: `finished`, `interrupted` or `failed`."""
