"""Modes of `rlsdk train --mode` other than training."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

from rlsdk.cli.lazy import INTERRUPTED
from rlsdk.cli.listing import console
from rlsdk.config import Plan, check


def serve(plan: Plan) -> None:
    """Serve a plan's engines until Ctrl-C; print the URL to standard output."""
    from rlsdk.serving.debug import serve_engines

    def ready(url: str) -> None:
        out.write(f"{url}\n")
        out.flush()
        click.echo(f"rlsdk: {plan.config.model.path} is served there; Ctrl-C stops the server", err=True)

    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # libraries print banners to standard output, which is for the URL
        serve_engines(plan, ready)


def run_mode(
    mode: str,
    config: Path,
    settings: tuple[str, ...],
    files: tuple[str, ...],
    server: Mapping[str, Any],
    *,
    as_json: bool,
) -> None:
    """Run `explore`, `serve` or `bench`; if interrupted, exit with the status for that."""
    if mode == "explore":
        status = explore(config, settings, files, as_json=as_json)
        sys.exit(INTERRUPTED if status == "interrupted" else 0)
    if mode == "serve":
        serve_checkpoints(config, settings, files, {"api_key": os.environ.get("RLSDK_API_KEY", ""), **server})
    else:
        bench_all(config, settings, files, as_json=as_json)


def serve_checkpoints(
    config: Path, settings: tuple[str, ...], files: tuple[str, ...], server: Mapping[str, Any]
) -> None:
    """Serve a run's newest checkpoint, and newer ones as they appear; print the URL to standard output."""
    from rlsdk.checkpoints.serve import serve_run
    from rlsdk.serving.server import ServerOptions

    def ready(url: str, step: int | None) -> None:
        out.write(f"{url}\n")
        out.flush()
        name = server.get("name") or plan.config.model.path
        click.echo(f"rlsdk: {name} (step {step}) is served there; Ctrl-C stops the server", err=True)

    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # libraries print banners to standard output, which is for the URL
        plan = check(config, settings, files)
        serve_run(plan, files, ServerOptions(**server), ready)


def explore(config: Path, settings: tuple[str, ...], files: tuple[str, ...], *, as_json: bool) -> str:
    """Sample rollouts for a trainer in another program until the run ends; return how it ended."""
    from rlsdk.trainer.run import explore as run

    with contextlib.redirect_stdout(sys.stderr):
        status = run(config, *settings, plugins=files)
    if as_json:
        click.echo(json.dumps({"status": status}))
    return status


def bench_all(config: Path, settings: tuple[str, ...], files: tuple[str, ...], *, as_json: bool) -> None:
    """Evaluate all checkpoints of a run and print a table, or JSON."""
    from rlsdk.evaluation.models import bench
    from rlsdk.runlog.report import figure_text

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
        accuracies = (figure_text(row["accuracy"][name]) for name in names)
        table.add_row(str(row["step"]), *accuracies, figure_text(reward, ".3f"))
    console().print(table)
