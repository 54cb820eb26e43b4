"""What `rlsdk train --mode` does besides training."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import click
from rich.console import Console
from rich.table import Column, Table

from rlsdk.cli.listing import console
from rlsdk.config import Plan, check


def serve(plan: Plan) -> None:
    """Serve a plan's engines until Ctrl-C; the URL goes to standard output."""
    from rlsdk.trainer.debug import serve_engines

    def ready(url: str) -> None:
        out.write(f"{url}\n")
        out.flush()
        click.echo(f"rlsdk: {plan.config.model.path} is served there; Ctrl-C ends it", err=True)

    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # libraries greet on standard output, which is the URL's
        serve_engines(plan, ready)


def serve_newest(config: Path, settings: tuple[str, ...], files: tuple[str, ...]) -> None:
    """Serve a run's newest checkpoint; before there is one, the model that the run starts from."""
    from rlsdk.trainer.checkpoint import Checkpoints
    from rlsdk.trainer.examination import model_of

    plan = check(config, settings, files)
    if Checkpoints(plan.folder, plan.config.checkpoint.keep).latest() is None:
        serve(plan)
        return
    with model_of(plan.folder, files) as model:
        serve(check(config, (*settings, f"model.path={json.dumps(str(model))}"), files))


def explore(config: Path, settings: tuple[str, ...], files: tuple[str, ...], *, as_json: bool) -> str:
    """Make rollouts for a trainer in another program until the run ends; how it ended."""
    from rlsdk.trainer.halves import explore as run

    with contextlib.redirect_stdout(sys.stderr):
        status = run(config, *settings, plugins=files)
    if as_json:
        click.echo(json.dumps({"status": status}))
    return status


def bench_all(config: Path, settings: tuple[str, ...], files: tuple[str, ...], *, as_json: bool) -> None:
    """Evaluate all checkpoints of a run and print a table, or JSON."""
    from rlsdk.trainer.bench import bench

    progress = Console(stderr=True)
    with contextlib.redirect_stdout(sys.stderr):
        rows = bench(config, *settings, plugins=files, began=lambda step: progress.print(f"evaluating step {step}"))
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    names = list(rows[0]["accuracy"])
    table = Table(Column("step", justify="right"))
    for name in [*names, "mean reward"]:
        table.add_column(name, justify="right")
    for row in rows:
        reward = row["metrics"]["eval/sampled_reward"]
        table.add_row(str(row["step"]), *(f"{row['accuracy'][name]:.1%}" for name in names), f"{reward:.3f}")
    console().print(table)
