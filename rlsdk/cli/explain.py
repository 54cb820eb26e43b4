"""`rlsdk explain`."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
from rich.text import Text

from rlsdk.cli.lazy import WRONG_INPUT
from rlsdk.cli.output import borderless, console, show, wrapped
from rlsdk.cli.parameters import FiniteRange, SettingsCommand, config_and_settings, json_output, plugin_files
from rlsdk.cluster.gpus import GPUMap, GPUNode, parse_nodes
from rlsdk.cluster.placement import gpu_map
from rlsdk.components import brief
from rlsdk.config import check
from rlsdk.config.origins import Origin, origins
from rlsdk.errors import ConfigError
from rlsdk.plurals import counted
from rlsdk.readiness.checks import examine, gpu_faults
from rlsdk.readiness.disk import DiskEstimate, in_words
from rlsdk.readiness.explained import batch, describe, finding_of
from rlsdk.readiness.memory import MemoryEstimate, estimate_memory
from rlsdk.readiness.memory import in_words as memory_in_words
from rlsdk.readiness.tasks import PlanFinding


@click.command(cls=SettingsCommand)
@config_and_settings
@plugin_files
@click.option("--full", is_flag=True, help="Show every value with its origin, and the batch arithmetic.")
@click.option(
    "--gpus",
    metavar="GPUS[xNODES],…",
    help="Show which process gets which GPU on these nodes; 8x4 means four nodes with eight GPUs each.",
)
@click.option(
    "--gpu-memory",
    type=FiniteRange(0, min_open=True),
    metavar="GIB",
    help="Plan for GPUs with this much memory, in GiB.",
)
@click.option("--memory/--no-memory", "with_memory", default=True, help="Estimate the memory of the run.")
@json_output
def explain(
    config: Path,
    settings: tuple[str, ...],
    files: tuple[str, ...],
    full: bool,
    gpus: str | None,
    gpu_memory: float | None,
    with_memory: bool,
    as_json: bool,
) -> None:
    """Check the YAML file CONFIG with settings KEY=VALUE and show what it would run, without starting it.

    Faults are wrong on any machine; the exit status is then 2. Warnings are wrong on this machine: a missing GPU or
    package, a model that is not downloaded. `rlsdk train` refuses to start for either, except for too little memory,
    which is an estimate. Notes are informational.
    """
    nodes = None if gpus is None else _nodes(gpus)
    printed = contextlib.redirect_stdout(sys.stderr)  # what libraries and plugins print is not the answer
    try:
        with printed:
            plan = check(config, settings, files)
            found = examine(plan, starts=False, devices=nodes is None)
    except ConfigError as error:
        if not as_json:
            raise
        _print_json(None, [finding_of(text) for text in error.faults])
        sys.exit(WRONG_INPUT)
    with printed:
        plan_text: dict[str, Any] = describe(plan)
        if full:
            plan_text |= {"batch": batch(plan)}
        if nodes is not None:
            misplaced = tuple(PlanFinding("placement", text) for text in gpu_faults(plan, nodes))
            found = attrs.evolve(found, faults=(*found.faults, *misplaced))
            if not misplaced:
                plan_text["gpus"] = _users(gpu_map(plan, nodes))
        memory, refused = MemoryEstimate(), bool(found.warnings)
        if with_memory:
            gpu_bytes = None if gpu_memory is None else int(gpu_memory * 2**30)
            memory = estimate_memory(plan, found.built, nodes=nodes, gpu_bytes=gpu_bytes)
            short = [PlanFinding("memory", text) for text in memory.shortages()]
            found = attrs.evolve(found, warnings=(*found.warnings, *short))
    if as_json:
        values = [attrs.asdict(each, recurse=False) for each in origins(config, settings, plan)] if full else None
        _print_json(plan_text, found.faults, found.warnings, found.notes, found.disk, memory, values)
        sys.exit(WRONG_INPUT if found.faults else 0)
    if not found.faults:
        sizes = {"memory": memory_in_words(memory), "disk": in_words(plan, found.disk) if found.disk else {}}
        sections = {**plan_text, **{section: content for section, content in sizes.items() if content}}
        _print(sections, origins(config, settings, plan) if full else ())
    for warning in found.warnings:
        click.echo(f"rlsdk: warning: {warning}", err=True)
    for note in found.notes:
        click.echo(f"rlsdk: note: {note}", err=True)
    if found.faults:
        raise ConfigError(map(str, found.faults))
    # An estimate of memory may be wrong, so `rlsdk train` only logs it.
    warned = f", but {counted(len(found.warnings), 'warning')}" if found.warnings else ""
    effect = ": `rlsdk train` would not start here" if refused else ""
    click.echo(f"rlsdk: the configuration has no faults{warned}{effect}", err=True)


def _users(found: GPUMap) -> dict[str, str]:
    """Return the users of each GPU, and the number of those without."""
    rows = list(found.rows())
    used = {f"{node}, GPU {gpu}": ", ".join(users) for node, gpu, users in rows if users}
    unused = len(rows) - len(used)
    return {**used, **({"unused": counted(unused, "GPU")} if unused else {})}


def _nodes(text: str) -> list[GPUNode]:
    try:
        return parse_nodes(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--gpus") from error


def _print_json(
    plan: Mapping[str, Any] | None,
    faults: Sequence[PlanFinding],
    warnings: Sequence[PlanFinding] = (),
    notes: Sequence[PlanFinding] = (),
    disk: DiskEstimate | None = None,
    memory: MemoryEstimate | None = None,
    values: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    sizes = disk and {**attrs.asdict(disk), "total": disk.total, "needed": disk.needed}
    kinds = {"faults": faults, "warnings": warnings, "notes": notes}
    listed = {kind: [*map(attrs.asdict, found)] for kind, found in kinds.items()}
    memory = memory or MemoryEstimate()
    needed = {"memory": [*map(attrs.asdict, memory.rows)], "memory_unknown": list(memory.unknown)}
    found = {**listed, "plan": plan, "disk": sizes, **needed, **({} if values is None else {"values": values})}
    click.echo(json.dumps(found, indent=2, default=str))


def _print(plan: Mapping[str, Mapping[str, Any]], values: Sequence[Origin]) -> None:
    out = console()
    for section, content in plan.items():
        out.print(f"[bold]{section}[/bold]")
        for key, value in content.items():
            if isinstance(value, list):
                text = "; ".join(map(str, value)) or "none"
            else:
                text = ("yes" if value else "no") if isinstance(value, bool) else str(value)
            out.print(wrapped(f"  {key}: {text}", indent=4), markup=False, soft_wrap=True)
    if values:
        table = borderless(show_header=False, title="values", title_style="bold")
        table.add_column(ratio=3, overflow="fold")
        table.add_column(ratio=2, overflow="fold", style="dim")
        for each in values:
            value = json.dumps(each.value) if each.value == "" or "\n" in str(each.value) else brief(each.value)
            table.add_row(Text(f"  {each.path}: {value}"), Text(each.origin))
        show(table)
