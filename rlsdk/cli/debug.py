"""`rlsdk debug engine` and `rlsdk debug workflow`."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import click

from rlsdk.cli import transcripts
from rlsdk.cli.listing import console
from rlsdk.cli.modes import serve
from rlsdk.cli.parameters import plugin_files
from rlsdk.cli.settings import SettingsCommand
from rlsdk.config import check


@click.group()
def debug() -> None:
    """Try a workflow without training: serve the engine in one terminal and run the workflow in another."""


@debug.command(cls=SettingsCommand)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("settings", metavar="[KEY=VALUE]...", nargs=-1)
@plugin_files
def engine(config: Path, settings: tuple[str, ...], files: tuple[str, ...]) -> None:
    """Serve the engine of the YAML file CONFIG on this machine until Ctrl-C; nothing is trained."""
    serve(check(config, settings, files))


@debug.command(cls=SettingsCommand)
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("settings", metavar="[KEY=VALUE]...", nargs=-1)
@plugin_files
@click.option("--task", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Index in tasks.train.")
@click.option("--samples", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Rollouts to run.")
@click.option("--url", default="", help="Base URL of an OpenAI-compatible server.  [default: that of `debug engine`]")
@click.option("--api-key", default="", envvar="RLSDK_API_KEY", show_envvar=True, help="API key for that server.")
@click.option(
    "--model", default="", metavar="NAME", help="Name of the model on that server.  [default: the first one listed]"
)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", help="Write the rollouts to this file as JSON lines."
)
@click.option("--json", "as_json", is_flag=True, help="Print the rollouts as JSON.")
def workflow(
    config: Path,
    settings: tuple[str, ...],
    files: tuple[str, ...],
    task: int,
    samples: int,
    url: str,
    api_key: str,
    model: str,
    out: Path | None,
    as_json: bool,
) -> None:
    """Run the workflow of the YAML file CONFIG on one task; show messages, tokens, rewards and timings.

    The model is served by `rlsdk debug engine CONFIG` in another terminal, or by any server with /completions.
    """
    from rlsdk.serving.debug import debug_workflow

    with contextlib.redirect_stdout(sys.stderr):
        plan = check(config, settings, files)
        found = debug_workflow(plan, task, samples=samples, url=url, api_key=api_key, model=model)
    rows = transcripts.rows(found)
    if out is not None:
        lines = (json.dumps(row, ensure_ascii=False) for row in rows)
        out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(transcripts.summary(found, rows), indent=2, ensure_ascii=False))
    else:
        transcripts.show(found, console())
