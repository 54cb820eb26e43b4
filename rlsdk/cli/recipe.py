"""`rlsdk recipe`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import attrs
import click
from rich.markup import escape

from rlsdk.cli.lazy import FAILED
from rlsdk.cli.output import borderless
from rlsdk.cli.output import show as show_table
from rlsdk.cli.parameters import json_output
from rlsdk.errors import EnvironmentFault
from rlsdk.recipes import catalogue
from rlsdk.recipes.catalogue import Recipe, RecipeRun

RUNS = Path("runs") / "recipes"
WIDTH = 40
"""Width of the bars of a curve."""
NUMBERS = {"minutes": "{:.0f}", "from": "{:.2f}", "ceiling": "{:.2f}", "to": "{:.2f}"}
"""Numeric column -> its format; `ceiling` is the best accuracy that the warm start reaches."""
LEFT_OUT = ("_reward", "/invalid")
"""Suffixes of metrics that are not accuracies."""


@click.group()
def recipe() -> None:
    """List, show and run recipes: complete training runs with measured results."""


@recipe.command("list", short_help="List the recipes.")
@json_output
def list_(as_json: bool) -> None:
    """List the recipes: task, algorithm, hardware, minutes, and held-out accuracy before and after.

    If training must go beyond its demonstrations, `ceiling` is the best accuracy that the warm start reaches.
    """
    found = [summary(catalogue.read(name)) for name in catalogue.names()]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    table = borderless()
    table.add_column("recipe", no_wrap=True, min_width=max((len(row["name"]) for row in found), default=0))
    for name in ("task", "algorithm", "hardware", *NUMBERS, "measured"):
        table.add_column(name, justify="right" if name in NUMBERS else "left", overflow="fold")
    for row in found:
        numbers = ["-" if row[name] is None else form.format(row[name]) for name, form in NUMBERS.items()]
        cells = [row["task"], row["algorithm"], row["hardware"], *numbers, row["measured"]]
        table.add_row(f"[cyan]{row['name']}[/cyan]", *(escape(cell) for cell in cells))
    show_table(table, 140)


def summary(found: Recipe) -> dict[str, Any]:
    """Return a recipe's row of the list, as plain values."""
    measured = found.measurement()
    start, end = ends(found, measured)
    return {
        "name": found.name,
        "title": found.title,
        "task": found.task,
        "algorithm": found.algorithm,
        "hardware": found.hardware,
        "minutes": measured.minutes if measured else None,
        "metric": found.expected.metric,
        "from": start,
        "to": end,
        "ceiling": ceiling(measured, found.expected.metric) if measured and found.finds else None,
        "band": list(found.expected.band),
        "finds": found.finds,
        "needs": found.needs,
        "measured": f"{measured.date}, {measured.commit}" if measured else catalogue.NEVER_RUN,
    }


def ends(found: Recipe, measured: RecipeRun | None) -> tuple[float | None, float | None]:
    """Return the accuracy before and after: as measured or, if the recipe was never run, as reported elsewhere."""
    expected = found.expected
    if measured is None:
        return (expected.start, expected.end)
    return measured.points[0].get(expected.metric), measured.points[-1].get(expected.metric)


def ceiling(measured: RecipeRun, metric: str) -> float:
    """Return the best accuracy of the warm start: greedy, sampled, or with several attempts.

    Args:
        measured: Measured run.
        metric: Metric of the recipe: an accuracy, or a mean reward, which is not defined for several attempts.
    """
    is_reward = metric.endswith("_reward")
    named = {k: v for k, v in measured.points[0].items() if k.startswith("eval/") and not k.endswith("/invalid")}
    return max(value for key, value in named.items() if key.endswith("_reward") == is_reward)


@recipe.command(short_help="Show a recipe.")
@click.argument("name")
@json_output
def show(name: str, as_json: bool) -> None:
    """Show the recipe NAME: its README, its commands, expected and measured results."""
    found = catalogue.read(name)
    steps = [str(step) for step in catalogue.commands(found, RUNS / name)]
    measured = found.measurement()
    if as_json:
        more = {"commands": steps, "folder": str(found.folder), "curve": attrs.asdict(measured) if measured else None}
        click.echo(json.dumps(summary(found) | more, indent=2))
        return
    click.echo(found.text("README.md").strip())
    click.echo(f"\nFiles: {found.folder}\n\n`rlsdk recipe run {name}` runs:\n")
    click.echo("\n".join(f"  {step}" for step in steps) + "\n")
    least, most = found.expected.band
    source = f" {found.expected.source}" if found.expected.source else ""
    click.echo(f"Expected: {found.expected.metric} from {least:g} to {most:g} at the end.{source}")
    if measured is None:
        click.echo("Measured: never run.")
        return
    about = f"commit {measured.commit}, {measured.minutes:.1f} minutes, {measured.machine}"
    click.echo(f"Measured: {measured.date}, {about}.\n")
    click.echo("\n".join(curve(measured, found.expected.metric)))
    if found.finds:
        best = ceiling(measured, found.expected.metric)
        click.echo(f"\nFound: {found.finds}. Ceiling of the warm start: {best:.2f}.")
    click.echo("\nSamples, from the first step and the last:\n\n" + found.text("transcript.txt").rstrip())


def curve(measured: RecipeRun, metric: str) -> list[str]:
    """Return a curve as lines with step, bar, value and the other accuracies."""
    others = [n for n in measured.points[0] if n.startswith("eval/") and n != metric and not n.endswith(LEFT_OUT)]
    shown = [metric, *others]
    lines = [f"{'step':>5}  {'':<{WIDTH}}  {'  '.join(n.removeprefix('eval/') for n in shown)}"]
    for point in measured.points:
        cells = [f"{point[n]:<{len(n.removeprefix('eval/'))}.2f}" for n in shown]
        bar = "█" * round(point[metric] * WIDTH)
        lines.append(f"{point['step']:>5g}  {bar:<{WIDTH}}  {'  '.join(cells)}".rstrip())
    return lines


@recipe.command(short_help="Run a recipe.")
@click.argument("name")
@click.argument("settings", metavar="[KEY=VALUE]...", nargs=-1)
@click.option("--quick", is_flag=True, help="Two steps per stage, to test that everything starts on this machine.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder of runs.  [default: runs/recipes/NAME]",
)
@click.option("--overwrite", is_flag=True, help="Delete earlier runs and start from scratch.")
@click.option("--dry-run", is_flag=True, help="Print the commands without running them.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
def run(
    name: str, settings: tuple[str, ...], quick: bool, out: Path | None, overwrite: bool, dry_run: bool, as_json: bool
) -> None:
    """Run the recipe NAME; the exit status is 0 if its accuracy is in the expected range, else 1.

    KEY=VALUE changes a setting of the last stage. Finished stages are skipped, and an interrupted training is resumed.
    """
    found = catalogue.read(name)
    from rlsdk.plugins.discovery import discover

    out = out or RUNS / (f"{name}-quick" if quick else name)
    steps = catalogue.commands(found, out, settings, quick=quick)
    if dry_run:
        click.echo("\n".join(map(str, steps)))
        return
    if lacking := {plugin: how for plugin, how in found.needs.items() if plugin not in discover()}:
        wanted = "; ".join(f"the plugin {plugin}: {how}" for plugin, how in lacking.items())
        raise EnvironmentFault(f"recipe {name} needs {wanted}")
    try:
        catalogue.run(found, out, steps, lambda line: click.echo(line, err=True), overwrite=overwrite, quick=quick)
    except catalogue.StageError as error:
        click.echo(f"rlsdk: {error}", err=True)
        sys.exit(error.status)
    points = catalogue.evaluations(steps[-1].result.parent)
    good, words = catalogue.verdict(found.expected, points)
    if quick:
        good, words = True, "two steps of each stage, which say nothing about the accuracy"
    if as_json:
        click.echo(json.dumps({"recipe": name, "in_band": None if quick else good, "points": points, "out": str(out)}))
    click.echo(f"recipe {name}: {words}", err=as_json)
    if not good:
        sys.exit(FAILED)
