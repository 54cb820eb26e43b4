"""`rlsdk debug engine` and `rlsdk debug workflow`, whose rollouts are shown as readable text or JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from rich.console import Console
from rich.text import Text

from rlsdk.cli.output import console
from rlsdk.cli.parameters import SettingsCommand, config_and_settings, plugin_files
from rlsdk.config import check
from rlsdk.errors import visible
from rlsdk.plurals import counted
from rlsdk.runlog.folder import write_output
from rlsdk.runlog.serialization import transcript
from rlsdk.types import Rollout

if TYPE_CHECKING:
    from rlsdk.serving.debug import Debugged

SAMPLED, GIVEN = "green", "dim"


@click.group()
def debug() -> None:
    """Try a workflow without training: serve the engine in one terminal and run the workflow in another."""


@debug.command(cls=SettingsCommand, short_help="Serve the engine of a configuration.")
@config_and_settings
@plugin_files
def engine(config: Path, settings: tuple[str, ...], files: tuple[str, ...]) -> None:
    """Serve the engine of the YAML file CONFIG on this machine until Ctrl-C; nothing is trained."""
    from rlsdk.serving.debug import serve_engines

    def ready(url: str) -> None:
        out.write(f"{url}\n")
        out.flush()
        click.echo(f"rlsdk: {plan.config.model.path} is served there; Ctrl-C stops the server", err=True)

    plan, out = check(config, settings, files), sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # libraries print banners to standard output, which is for the URL
        serve_engines(plan, ready)


@debug.command(cls=SettingsCommand, short_help="Run the workflow on one task.")
@config_and_settings
@plugin_files
@click.option("--task", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Index in tasks.train.")
@click.option("--samples", type=click.IntRange(1), default=1, show_default=True, metavar="N", help="Rollouts to run.")
@click.option(
    "--url",
    metavar="URL",
    default="",
    help="Base URL of an OpenAI-compatible server.  [default: that of `debug engine`]",
)
@click.option(
    "--api-key", metavar="KEY", default="", envvar="RLSDK_API_KEY", show_envvar=True, help="API key for that server."
)
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
    rows = rows_of(found)
    if as_json:
        click.echo(json.dumps(summary(found, rows), indent=2, ensure_ascii=False))
    else:
        show(found, console())
    if out is not None:  # last, so that the rollouts are shown even if the file cannot be written
        lines = (json.dumps(row, ensure_ascii=False) for row in rows)
        write_output(out, "".join(f"{line}\n" for line in lines))


def rows_of(found: Debugged) -> list[dict[str, Any]]:
    """Return a mapping of JSON values per rollout: conversation, score, and every token with its mask."""
    pairs = zip(found.group.rollouts, found.group.scores, found.seconds, strict=True)
    return [{**transcript(rollout, score), "seconds": round(seconds, 4)} for rollout, score, seconds in pairs]


def summary(found: Debugged, rollouts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return all results as JSON values."""
    return {"task": found.group.task.id, "requests": _requests(found), "notes": list(found.notes), "rollouts": rollouts}


def _requests(found: Debugged) -> dict[str, float]:
    seconds, tokens = sum(r.seconds for r in found.requests), sum(r.tokens for r in found.requests)
    longest = max((r.seconds for r in found.requests), default=0.0)
    return {
        "count": len(found.requests),
        "tokens": tokens,
        "seconds": round(seconds, 4),
        "longest_seconds": round(longest, 4),
    }


def show(found: Debugged, out: Console) -> None:
    """Print messages, tokens with their mask, rewards and timings."""
    group = found.group
    out.print(f"[bold]task[/bold] {Text(visible(group.task.id)).markup}, answer {Text(repr(group.task.answer)).markup}")
    for i, (rollout, score, seconds) in enumerate(zip(group.rollouts, group.scores, found.seconds, strict=True), 1):
        part = f", step {rollout.step} of {rollout.trajectory}" if rollout.trajectory else ""
        out.rule(f"rollout {i} of {len(group)}{part}: {rollout.status}")
        for message in rollout.messages:
            name = f" {visible(message.name)}" if message.name else ""
            name += " (prompt)" if message.prompt else ""
            out.print(Text.assemble((f"{message.role}{name}: ", "bold"), _lines(message.text)), soft_wrap=True)
        out.print(_tokens(rollout, found), soft_wrap=True)
        value = f"{score.value:g}" if score.valid else "invalid"
        out.print(Text.assemble(("reward: ", "bold"), value, f" ({_lines(score.reason)})" if score.reason else ""))
        for position, given in rollout.rewards:
            out.print(f"  {given:g} at token {position}")
        metrics = "  ".join(f"{name} {number:g}" for name, number in {**rollout.metrics, **score.metrics}.items())
        out.print(Text.assemble(("metrics: ", "bold"), metrics), soft_wrap=True)
        out.print(Text.assemble(("time: ", "bold"), f"{seconds:.2f} s from the start, scoring included"))
    r = _requests(found)
    out.rule()
    rate = r["tokens"] / r["seconds"] if r["seconds"] else 0.0
    out.print(
        f"{counted(r['count'], 'request')}: {counted(r['tokens'], 'token')}, {rate:.0f} a second within a request, "
        f"the longest {r['longest_seconds']:.2f} s"
    )
    for note in found.notes:
        out.print(f"note: {_lines(note)}", markup=False)


def _lines(text: str) -> str:
    """Return a model's text with its line breaks, but without other terminal control sequences."""
    return visible(text, keep="\n\t")


def _tokens(rollout: Rollout, found: Debugged) -> Text:
    """Return all tokens as text that distinguishes sampled (trained) tokens from given ones."""
    ids, mask = rollout.token_ids, rollout.loss_mask
    count = f"{len(ids)}, {mask.sum()} of them "
    text = Text.assemble(("tokens", "bold"), f" ({count}", ("sampled, in ⟦ ⟧", SAMPLED), "): ")
    if not len(ids):
        return text
    changes = np.flatnonzero(np.diff(mask)) + 1  # where sampled tokens begin or end
    for part, trained in zip(np.split(ids, changes), np.split(mask, changes), strict=True):
        shown = _lines(found.codec.shown(part))
        # Without colours, brackets distinguish them.
        text.append(f"⟦{shown}⟧" if trained[0] else shown, style=SAMPLED if trained[0] else GIVEN)
    return text
