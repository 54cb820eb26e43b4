"""Train by a configuration or a plan, from the checks before the start to the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from rlsdk.config import Plan, check
from rlsdk.trainer.assembly import examined, started
from rlsdk.trainer.record import open_run
from rlsdk.trainer.resuming import check_resumed
from rlsdk.trainer.trainer import Trainer


def train(
    config: str | Path | Mapping[str, Any],
    *overrides: str,
    plugins: Sequence[str | Path] = (),
    resume: bool | int = False,
    overwrite: bool = False,
    allow_changes: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train a model.

    Args:
        config: A YAML file, or a mapping in which marked objects may stand where names stand.
        *overrides: `key=value` texts.
        plugins: Files of plugins.
        resume: Continue from the run's newest whole checkpoint (from the beginning, if there is none), or, given a
            number, from that of this step; newer ones are kept under another name.
        overwrite: Delete what an earlier run left in the folder.
        allow_changes: Resume although settings differ that change the meaning of the run.
        console: Console for progress; left out, standard error.

    Returns:
        The summary, as in `summary.json`; `status` is "finished" or "interrupted".

    Raises:
        ConfigError: The configuration is wrong; nothing was started.
        RlsdkError: The run failed; the message names the culprit.
    """
    plan = (check if resume is False else check_resumed)(config, overrides, plugins)
    return run(plan, resume=resume, overwrite=overwrite, allow_changes=allow_changes, console=console)


def run(
    plan: Plan,
    *,
    resume: bool | int = False,
    overwrite: bool = False,
    allow_changes: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train by a checked plan; see `train`."""
    tasks, rehearsed = examined(plan)
    how: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "allow_changes": allow_changes}
    with (
        open_run(plan, console=console, rehearsed=rehearsed, **how) as record,
        started(plan, record.gpus, tasks, record.observers) as parts,
    ):
        Trainer.of_run(record, parts).train()
    return record.summary
