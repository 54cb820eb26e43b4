"""`rlsdk score`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import click

from rlsdk.cli import offline
from rlsdk.cli.output import console
from rlsdk.cli.parameters import plugin_files
from rlsdk.contracts import RewardSpec, ScoringLimits
from rlsdk.errors import ArgumentError, ConfigError, DataError, OptionError, PluginError


@click.command()
@click.argument("file")
@click.option("--reward", "name", required=True, metavar="NAME", help="The reward, such as countdown or mylab/exact.")
@click.option("--option", "options", metavar="KEY=VALUE", multiple=True, help="Option of the reward; repeatable.")
@plugin_files
@click.option("--response", default="response", show_default=True, metavar="COLUMN", help="Column of the responses.")
@click.option("--prompt", metavar="COLUMN", help="Column of the prompts, text or messages.  [default: prompt]")
@click.option(
    "--answer",
    metavar="COLUMN",
    help="Column of the reference answers.  [default: reward_model.ground_truth, or answer]",
)
@click.option("--source", metavar="COLUMN", help="Column that names the data source.  [default: data_source]")
@click.option(
    "--task",
    metavar="COLUMN",
    help="Column that identifies the task of a response.  [default: prompt, answer and source]",
)
@click.option(
    "--score", "compare", metavar="COLUMN", help="Column of scores to compare with; shows the largest differences."
)
@click.option(
    "--worst", type=click.IntRange(1), metavar="N", default=5, show_default=True, help="Number of differences to show."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write one JSON line per row to this file.",
)
@click.option("--overwrite", is_flag=True, help="Replace the file given by --out.")
@click.option("--skip-bad", is_flag=True, help="Skip rows that cannot be read.")
@click.option(
    "--workers",
    type=click.IntRange(0),
    metavar="N",
    default=0,
    help="Number of scoring processes.  [default: 0, one per core]",
)
@click.option(
    "--timeout",
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Time limit for one call of the reward.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def score(
    file: str,
    name: str,
    options: tuple[str, ...],
    files: tuple[str, ...],
    compare: str | None,
    worst: int,
    out: Path | None,
    overwrite: bool,
    skip_bad: bool,
    as_json: bool,
    workers: int,
    timeout: float,
    response: str,
    task: str | None,
    **columns: str | None,
) -> None:
    """Score the responses in FILE, parquet or JSON lines, with a reward; other columns become metadata."""
    if not 0 < timeout < math.inf:
        raise click.BadParameter(f"expected seconds above 0, got {timeout:g}", param_hint="--timeout")
    if out is not None and out.exists():
        if Path(file).exists() and out.samefile(file):
            raise click.UsageError(f"--out {out} is the file with the responses, which would be lost; choose another")
        if not overwrite:
            raise click.UsageError(f"{out} exists; choose another file, or replace it with --overwrite")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.redirect_stdout(sys.stderr):  # rewards may print; keep standard output for the summary
        scorer = _scorer(name, options, files, ScoringLimits(workers=workers, timeout=timeout))
    rows, bad = offline.read(file, response, compare, id=task, **columns)
    if not rows and not bad:
        raise DataError(f"{file} has no rows; expected parquet, or one JSON object per line")
    if bad and not skip_bad:
        more = f"\n  … and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise DataError(
            f"{len(bad)} of {len(rows) + len(bad)} rows cannot be scored; --skip-bad leaves them out:"
            + "".join(f"\n  {line}" for line in bad[:5])
            + more
        )
    with contextlib.redirect_stdout(sys.stderr):
        try:
            scored = asyncio.run(offline.score(scorer, rows))
        finally:
            scorer.close()
    if out is not None:
        offline.write(out, scored)
    found = offline.summary(scored, bad, worst if compare else 0)
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        offline.show(found, console())
    if rows and not found["valid"]:
        click.echo("rlsdk: no response could be scored", err=True)
        sys.exit(1)


def _scorer(name: str, options: tuple[str, ...], files: tuple[str, ...], limits: ScoringLimits) -> Any:
    import yaml

    from rlsdk.plugins import Plugins
    from rlsdk.scoring.scorer import RewardTerm, Scorer
    from rlsdk.yaml_values import load_value

    given: dict[str, Any] = {}
    for text in options:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise click.UsageError(f"--option {text!r} is not of the form KEY=VALUE")
        try:
            given[key] = load_value(value)
        except yaml.YAMLError as error:
            raise click.UsageError(f"--option {key}: {value!r} is not YAML: {error}") from error
    try:
        plugins = Plugins(files)
        reference = plugins.reference("reward", name, given)
        part = RewardTerm(RewardSpec(name), plugins.resolve(reference), reference)
    except OptionError as error:
        named = ((f"--option {path}" if path else f"--reward {name}", text) for path, text in error.faults)
        raise ConfigError(f"{given_as}: {text}" for given_as, text in named) from error
    except PluginError as error:
        raise ArgumentError([f"--reward {name}: {error}"]) from error
    return Scorer([part], limits)
