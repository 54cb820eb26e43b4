"""Train from a configuration or a plan, in one program; `two_process` does it in two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from rlsdk.cluster.template import Template, template
from rlsdk.config import Plan, Source, check
from rlsdk.isolation.process import sigterm_as_interrupt
from rlsdk.opening.record import open_run
from rlsdk.opening.resuming import check_resumed, finished_before
from rlsdk.plurals import counted
from rlsdk.runlog.logs import log_console
from rlsdk.trainer.assembly import examined, started, steps_of
from rlsdk.trainer.observing import ShowSamples
from rlsdk.trainer.trainer import Trainer


def train(
    config: Source,
    *overrides: str,
    plugins: Sequence[str | Path] = (),
    resume: bool | int = False,
    overwrite: bool = False,
    allow_changes: bool = False,
    show: int = 0,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train a model.

    Args:
        config: A YAML file, an `rlsdk.Config`, or a mapping; decorated objects may replace component names.
        *overrides: Settings as `key=value` strings.
        plugins: Plugin files.
        resume: Continue from the newest intact checkpoint (from the beginning if there is none) or, given a number,
            from the checkpoint of that step; newer ones are kept under another name.
        overwrite: Delete an earlier run in the same folder.
        allow_changes: Resume even if settings have changed that affect the training.
        show: Number of rollouts to print after each step.
        console: Console for progress; default: standard error.

    Returns:
        The summary, as in `summary.json`; `status` is "finished" or "interrupted". A resumed run that has trained all
        its steps is not started: its earlier summary is returned.

    Raises:
        ConfigError: The configuration is wrong; nothing was started.
        RlsdkError: The run failed; the message names the cause.
    """
    plan = (check if resume is False else check_resumed)(config, overrides, plugins)
    return run(plan, resume=resume, overwrite=overwrite, allow_changes=allow_changes, show=show, console=console)


def run(
    plan: Plan,
    *,
    resume: bool | int = False,
    overwrite: bool = False,
    allow_changes: bool = False,
    show: int = 0,
    console: Console | None = None,
    begun: Template | None = None,
) -> dict[str, Any]:
    """Train from a checked plan; see `train`. `begun` is a template that was started before the plan was known."""
    how: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "allow_changes": allow_changes}
    with sigterm_as_interrupt(), template(plan, begun) as python:
        if (ended := finished(plan, resume, console)) is not None:
            return ended
        tasks, rehearsed = examined(plan)
        with (
            open_run(plan, console=console, rehearsed=rehearsed, **how) as record,
            started(plan, record.gpus, tasks, record.observers, python=python) as (rollouts, learner, steps),
        ):
            own = [ShowSamples(record.console, show)] if show else []
            Trainer.of_run(record, rollouts, learner, steps, own).train()
    return record.summary


def finished(plan: Plan, resume: bool | int, console: Console | None) -> dict[str, Any] | None:
    """Return the summary of a resumed run that has trained all its steps, and say so; None for any other run."""
    if resume is False or (ended := finished_before(plan, resume, steps := steps_of(plan))) is None:
        return None
    (console or log_console()).print(
        f"nothing is left to train: {plan.folder} has trained all of its {counted(steps, 'step')}; to train further, "
        f"give more steps, such as steps={2 * steps}",
        highlight=False,
    )
    return ended
