"""`rlsdk eval`."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table

from rlsdk.cli.output import console
from rlsdk.cli.parameters import RunPath, SettingsCommand, config_and_settings, json_output, plugin_files
from rlsdk.config import check, read
from rlsdk.errors import ArgumentError

_LEFT_BY_A_FAILURE = frozenset({"cache", "logs", "pictures", "transcripts.jsonl"})
"""Contents of the folder of an evaluation that failed or was killed, which has at least `logs`."""


@click.command(cls=SettingsCommand, name="eval")
@config_and_settings
@click.option(
    "--checkpoint",
    type=RunPath(),
    metavar="PATH",
    help="A run's folder or URL, one of its checkpoints, or a model's folder.  [default: model.path of CONFIG]",
)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Folder to write to.  [default: in the run's folder]"
)
@click.option("--overwrite", is_flag=True, help="First delete an earlier evaluation in that folder.")
@click.option(
    "--pictures",
    type=click.IntRange(0),
    metavar="N",
    default=8,
    show_default=True,
    help="Tasks per source to save as pictures.",
)
@plugin_files
@json_output
def eval(  # noqa: A001 - the command's name
    config: Path,
    settings: tuple[str, ...],
    checkpoint: str | None,
    out: Path | None,
    overwrite: bool,
    pictures: int,
    files: tuple[str, ...],
    as_json: bool,
) -> None:
    """Evaluate a model on tasks.eval of the YAML file CONFIG, without training.

    Each task gets one greedy answer (unless eval.greedy=false) and some sampled ones, which are saved as transcripts;
    episodes in environments are also saved as pictures.
    """
    from rlsdk.evaluation.models import (
        at_folder,
        default_folder,
        evaluate_model,
        model_of,
        refuse_checkpoints,
        samples_elsewhere,
    )

    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # libraries print banners to standard output
        if checkpoint is not None:
            model = stack.enter_context(model_of(checkpoint, files, read(config, settings)[0]))
            settings = (*settings, f"model.path={json.dumps(str(model))}")
        plan = check(config, settings, files)
        if checkpoint is not None:
            refuse_checkpoints(plan, "--checkpoint")
        evaluated = checkpoint or (plan.engine.name if samples_elsewhere(plan) else plan.config.model.path)
        folder = out or default_folder(plan, evaluated)
        _prepare(folder, overwrite=overwrite)
        plan = check(config, (*settings, *at_folder(folder)), files)
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        bar = progress.add_task("rollouts", total=None)
        found = evaluate_model(
            plan,
            model=checkpoint,
            pictures=pictures,
            seen=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _show(found)


def _prepare(folder: Path, *, overwrite: bool) -> None:
    from rlsdk.runlog.folder import finish_removal, remove_whole

    finish_removal(folder)
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    ours = "evaluation.json" in found or {"logs"} <= found <= _LEFT_BY_A_FAILURE
    if found and overwrite and ours:
        remove_whole(folder)
    elif found or (folder.exists() and not folder.is_dir()):
        way = ", or give --overwrite" if ours and not overwrite else ""
        raise ArgumentError([f"--out: {folder} is not empty; choose another folder{way}"])


def _show(found: dict[str, Any]) -> None:
    from rlsdk.runlog.report import figure_text, source_label

    names = list(found["accuracy"])
    table = Table("", Column("tasks", justify="right"), title=f"accuracy of {found['model']}")
    for name in [*names, "mean reward"]:
        table.add_column(name, justify="right")
    whole = {"": sum(found["tasks"].values())}
    rows = {**found["tasks"], **whole} if len(found["tasks"]) > 1 else whole
    for source, count in rows.items():
        at = "/".join(filter(None, ("eval", source)))
        cells = [figure_text(found["metrics"][f"{at}/{name}"]) for name in names]
        reward = figure_text(found["metrics"][f"{at}/sampled_reward"], ".3f")
        table.add_row(source_label(source) or "all", str(count), *cells, reward)
    out = console()
    out.print(table)
    for reason, count in found["invalid"]["reasons"].items():
        out.print(f"could not be scored: {count} × {reason}", markup=False)
    out.print(f"transcripts: {found['transcripts']}", markup=False, soft_wrap=True)
    if found["pictures"]:
        out.print(f"pictures: {Path(found['pictures'][0]).parent}", markup=False, soft_wrap=True)
