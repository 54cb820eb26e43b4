"""`rlsdk train`."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import click

from rlsdk.cli.lazy import INTERRUPTED
from rlsdk.cli.settings import SettingsCommand


@click.command(cls=SettingsCommand)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("settings", metavar="[KEY=VALUE]...", nargs=-1)
@click.option(
    "--mode",
    type=click.Choice(["both", "explore", "train", "bench", "serve"]),
    default="both",
    show_default=True,
    help="both: train. explore and train: make rollouts, and train on them, as two programs on one Ray cluster. bench: "
    "evaluate the model it started from and each checkpoint. serve: answer requests with the newest checkpoint.",
)
@click.option("--plugin", "files", metavar="FILE", multiple=True, help="A Python file as a plugin, named by its stem.")
@click.option("--resume", is_flag=True, help="Go on from the run's last checkpoint.")
@click.option("--overwrite", is_flag=True, help="Delete what an earlier run left in the run's folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on standard output.")
def train(
    config: Path,
    settings: tuple[str, ...],
    mode: str,
    files: tuple[str, ...],
    resume: bool,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Train a model as the YAML file CONFIG says; KEY=VALUE changes a setting.

    Ctrl-C finishes and saves the step, and ends with status 130; once more ends at once.
    """
    if resume and overwrite:
        raise click.UsageError("--resume keeps what --overwrite deletes; give one of them.")
    if mode not in ("both", "train"):
        if resume or overwrite:
            raise click.UsageError(f"--mode {mode} writes no checkpoints; leave --resume and --overwrite out.")
        from rlsdk.cli import modes

        if mode == "explore":
            status = modes.explore(config, settings, files, as_json=as_json)
            sys.exit(INTERRUPTED if status == "interrupted" else 0)
        elif mode == "serve":
            modes.serve_newest(config, settings, files)
        else:
            modes.bench_all(config, settings, files, as_json=as_json)
        return
    from rlsdk.config import check
    from rlsdk.trainer.halves import train_half
    from rlsdk.trainer.run import run

    with contextlib.redirect_stdout(sys.stderr):  # libraries greet on standard output, which is the summary's
        plan = check(config, settings, files)
        summary = (train_half if mode == "train" else run)(plan, resume=resume, overwrite=overwrite)
    if as_json:
        click.echo(json.dumps(summary, indent=2, default=str))
    if summary["status"] == "interrupted":
        sys.exit(INTERRUPTED)
