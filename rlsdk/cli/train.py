"""`rlsdk train`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

from rlsdk.cli.lazy import INTERRUPTED
from rlsdk.cli.parameters import SettingsCommand, config_and_settings, plugin_files
from rlsdk.config import check


class _TrainCommand(SettingsCommand):
    """`rlsdk train`, where the value of `--resume` is optional, and must be attached with `=`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; `--resume` alone is `--resume=newest`."""
        end = args.index("--") if "--" in args else len(args)
        written = ["--resume=newest" if arg == "--resume" else arg for arg in args[:end]]
        return super().parse_args(ctx, written + args[end:])


class _Step(click.ParamType[int]):
    """Step of a checkpoint, or True for the newest."""

    name = "step"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> bool | int:
        """Read `--resume=STEP`."""
        if value == "newest" or isinstance(value, bool):
            return value if isinstance(value, bool) else True
        if not re.fullmatch(r"\d+", str(value)):
            self.fail(f"expected the step of a checkpoint, as in --resume=200; got {value!r}", param, ctx)
        return int(value)


@click.command(cls=_TrainCommand)
@config_and_settings
@click.option(
    "--mode",
    type=click.Choice(["both", "explore", "train", "bench", "serve"]),
    default="both",
    show_default=True,
    help="both: train. explore, train: sample rollouts and train on them, as two programs on one Ray cluster. bench: "
    "evaluate the initial model and each checkpoint. serve: answer requests with the newest checkpoint.",
)
@plugin_files
@click.option(
    "--resume",
    type=_Step(),
    metavar="[=STEP]",
    default=False,
    help="Continue from the newest complete checkpoint, or from that of the given step; newer ones are set aside.",
)
@click.option("--overwrite", is_flag=True, help="First delete an earlier run in the same folder.")
@click.option(
    "--allow-changes", is_flag=True, help="Resume even if changed settings or code make it a different training."
)
@click.option(
    "--show",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    help="Print N rollouts after each step, with their rewards.",
)
@click.option("--host", metavar="HOST", help="--mode serve: address to listen on.  [default: 127.0.0.1]")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="--mode serve: port; 0 for any free one.  [default: 8000]",
)
@click.option(
    "--served-name", "name", metavar="NAME", help="--mode serve: model name in requests.  [default: model.path]"
)
@click.option("--api-key", metavar="KEY", help="--mode serve: key that clients must send.  [env var: RLSDK_API_KEY]")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON on standard output.")
def train(
    config: Path,
    settings: tuple[str, ...],
    mode: str,
    files: tuple[str, ...],
    resume: bool | int,
    overwrite: bool,
    allow_changes: bool,
    show: int,
    as_json: bool,
    **server: Any,
) -> None:
    """Train a model according to the YAML file CONFIG; KEY=VALUE changes a setting.

    Ctrl-C finishes the step, saves a checkpoint and exits with status 130; a second Ctrl-C exits at once.

    A resumed run may have more steps, and different trackers, placement, evaluations and checkpoints. Other changes are
    shown, and refused without --allow-changes. The previous configuration is kept as config.step-N.yaml. A run that has
    trained all its steps is not started again; the exit status is then 0.
    """
    resumes = resume is not False
    if resumes and overwrite:
        raise click.UsageError("--resume keeps what --overwrite deletes; give only one of them.")
    if allow_changes and not resumes:
        raise click.UsageError("--allow-changes applies only to a resumed run; also give --resume.")
    server = {name: value for name, value in server.items() if value is not None}
    if server and mode != "serve":
        raise click.UsageError("--host, --port, --served-name and --api-key apply only to --mode serve.")
    if show and mode != "both":
        raise click.UsageError(
            "--show works only with --mode both; `rlsdk rollouts RUN` shows the rollouts of any run."
        )
    if mode not in ("both", "train"):
        if resumes or overwrite:
            raise click.UsageError(f"--mode {mode} writes no checkpoints; leave out --resume and --overwrite.")
        run_mode(mode, config, settings, files, server, as_json=as_json)
        return
    from rlsdk.cluster.template import import_common, warmed
    from rlsdk.isolation.process import importing

    with (
        contextlib.redirect_stdout(sys.stderr),  # libraries print banners to standard output, which is for the summary
        warmed()
        if mode == "both"
        else contextlib.nullcontext() as begun,  # concurrently with the imports of this process
    ):
        with importing():
            from rlsdk.opening.resuming import check_resumed
            from rlsdk.trainer.run import run

            plan = (check_resumed if resumes else check)(config, settings, files)
            import_common()  # for the checks that follow
        if mode == "train":
            from rlsdk.two_process.programs import train_apart as begin
        else:
            begin = partial(run, show=show, begun=begun)
        summary = begin(plan, resume=resume, overwrite=overwrite, allow_changes=allow_changes)
    if as_json:
        click.echo(json.dumps(summary, indent=2, default=str))
    if summary["status"] == "interrupted":
        sys.exit(INTERRUPTED)


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
        from rlsdk.two_process.programs import explore

        with contextlib.redirect_stdout(sys.stderr):
            status = explore(config, *settings, plugins=files)
        if as_json:
            click.echo(json.dumps({"status": status}))
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


def bench_all(config: Path, settings: tuple[str, ...], files: tuple[str, ...], *, as_json: bool) -> None:
    """Evaluate all checkpoints of a run and print a table, or JSON."""
    from rich.console import Console
    from rich.table import Column, Table

    from rlsdk.cli.output import console
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
