"""`rlsdk what-if`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any

import click

from rlsdk.cli.parameters import RunPath, SettingsCommand, json_output, plugin_files
from rlsdk.errors import ArgumentError, visible


@click.command(cls=SettingsCommand)
@click.argument("run", type=RunPath())
@click.argument("settings", metavar="[KEY=VALUE]...", nargs=-1)
@click.option(
    "--reward",
    "rewards",
    metavar="REWARD",
    multiple=True,
    help="Rescore the rollouts with this reward: a name, or as in a configuration; repeat for a sum.",
)
@click.option("--algorithm", metavar="ALGORITHM", help="Assign credit with this algorithm instead of the run's.")
@click.option(
    "--filter",
    "filters",
    metavar="FILTER",
    multiple=True,
    help="Replace the algorithm's filters; `none` for no filter.",
)
@click.option(
    "--checkpoint",
    is_flag=False,
    flag_value="newest",
    metavar="[STEP|DIR]",
    help="Also compare gradients, computed with this checkpoint or model.  [default: no gradients]",
)
@click.option("--steps", metavar="A-B", help="Only these steps: 5, 3-8, 3- or -8.  [default: all stored steps]")
@click.option(
    "--examples", type=click.IntRange(0), metavar="N", default=5, show_default=True, help="Number of rollouts to show."
)
@plugin_files
@json_output
def what_if(
    run: str,
    settings: tuple[str, ...],
    rewards: tuple[str, ...],
    algorithm: str | None,
    filters: tuple[str, ...],
    checkpoint: str | None,
    steps: str | None,
    examples: int,
    files: tuple[str, ...],
    as_json: bool,
) -> None:
    """Apply another reward, algorithm or filter to the stored rollouts of RUN, and show the changes.

    Nothing is sampled or trained, and Ray is not started. Shown are rewards, groups that would have been trained,
    tokens whose advantage changes sign, and the rollouts whose reward changes most; with --checkpoint, also the cosine
    similarity of the two gradients. REWARD, ALGORITHM and FILTER are names or YAML, such as '{use: countdown,
    format_score: 0.2}'.
    """
    from rlsdk.checkpoints.mirror import local_copy
    from rlsdk.runlog.query import why_none
    from rlsdk.whatif.comparison import Comparison
    from rlsdk.whatif.question import Asked, question

    first, last = _bounds(steps)
    asked = Asked(rewards, algorithm, filters, settings, files, model=checkpoint is not None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # rewards may print
        folder = stack.enter_context(local_copy(run, checkpoint=checkpoint is not None))
        checked = question(folder, asked)
        gradients = None
        if checkpoint is not None:
            from rlsdk.whatif.gradients import Gradients, checkpoint_model  # imports torch

            gradients = Gradients(checked, stack.enter_context(checkpoint_model(folder, checkpoint)))
        comparison = Comparison(folder, checked, gradients=gradients, examples=examples)
        found = asyncio.run(comparison.run(first, last))
        if not found["groups"] and not steps:
            raise ArgumentError([why_none(folder, name=run)])
    if not found["groups"]:
        every = checked.before.config.save_rollouts
        rest = f"; with save_rollouts={every} it stores one step in {every}" if every > 1 else ""
        raise ArgumentError([f"{run} has stored no groups of steps {steps} yet{rest}"])
    if as_json:
        click.echo(json.dumps({"run": run, **found}, indent=2, default=str))
    else:
        _show(found)


def _bounds(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    first, dash, last = text.partition("-")
    if not all(part.isdecimal() or not part for part in (first, last)) or not (first or last):
        raise ArgumentError([f"--steps: {text!r} given; expected a step or a range: 5, 3-8, 3- or -8"])
    if first and last and int(first) > int(last):
        raise ArgumentError([f"--steps: {text!r} given, which ends before it begins"])
    start = int(first) if first else None
    return start, (int(last) if last else None) if dash else start


_COLUMNS = (
    "step", "reward", "→", "groups", "train", "→", "teach", "→", "signs differ", "of tokens", "correlation", "cosine",
)  # fmt: skip


def _show(found: Mapping[str, Any]) -> None:
    from rich.text import Text

    from rlsdk.cli.output import borderless, console, print_rows

    out = console()
    changes = [
        (path, *("–" if value is None else str(value) for value in (each["before"], each["after"])))
        for path, each in found["changes"].items()
    ]
    print_rows(out, "settings that differ", ("setting", "before", "after"), changes)
    table = borderless(*_COLUMNS, title="by step: before → after")
    for row in [*found["steps"], {"step": "all", **found}]:
        table.add_row(*map(Text, _cells(row)))
    out.print(table)
    zero = f"{found['became_zero']} tokens lose their advantage, {found['became_nonzero']} get one"
    change = found["advantages"]["mean_change"]
    out.print(f"{zero}; mean change of an advantage: {_number(change)}", markup=False)
    changed = [tuple(str(each[k]) for k in ("step", "task", "before", "after")) for each in found["changed_groups"]]
    print_rows(out, "groups with a different outcome", ("step", "task", "before", "after"), changed)
    for reason, count in found["invalid"].items():
        out.print(f"could not be scored: {count} × {reason}", markup=False)
    if found["examples"]:
        out.print("rollouts whose reward changes most", style="italic")
    for each in found["examples"]:
        old, new = (("invalid" if each[side] is None else f"{each[side]:g}") for side in ("before", "after"))
        reason = f" ({visible(each['reason'])})" if each["reason"] else ""
        head = f"step {each['step']}, task {visible(each['task'])}: {old} → {new}{reason}"
        out.print(head, markup=False, soft_wrap=True)
        for name in ("prompt", "response"):
            out.print(f"  {name}: {visible(each[name])}", markup=False, soft_wrap=True, style="dim")
    for note in found["notes"]:
        out.print(f"note: {note}", markup=False)


def _cells(row: Mapping[str, Any]) -> list[str]:
    rewards, trained, teaching = row["rewards"], row["trained"], row["teaching"]
    return [
        str(row["step"]),
        _number(rewards["before"]),
        _number(rewards["after"]),
        str(row["groups"]),
        str(trained["before"]),
        str(trained["after"]),
        str(teaching["before"]),
        str(teaching["after"]),
        str(row["sign_changes"]),
        str(row["tokens"]),
        _number(row["advantages"]["correlation"]),
        _number(row["cosine"]),
    ]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
