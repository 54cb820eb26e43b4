"""`rlsdk simulate`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from rlsdk.cli.output import console
from rlsdk.cli.parameters import FiniteRange, SettingsCommand, config_and_settings, json_output, plugin_files
from rlsdk.errors import ArgumentError, ConfigError, ValueFault
from rlsdk.plurals import counted

if TYPE_CHECKING:
    from rlsdk.config import Plan
    from rlsdk.simulation.measure import MeasuredRun
    from rlsdk.simulation.prediction import Assumptions, Prediction

_A_RUN = "the run "
"""Beginning of the origin of measured rates."""
COLUMNS = ("", "step", "95 % below", "staleness", "engines idle", "learner idle", "tokens/s", "wasted", "weights GB/s")


@click.command(cls=SettingsCommand)
@config_and_settings
@plugin_files
@click.option("--engines", type=click.IntRange(1), metavar="N", help="Number of engines.  [default: placement.engines]")
@click.option(
    "--learners", type=click.IntRange(1), metavar="N", help="Number of learner ranks.  [default: placement.learners]"
)
@click.option("--gpus", metavar="N,…", help="GPU counts to divide between engines and learner, such as 8,64,1024.")
@click.option(
    "--learner-share",
    type=FiniteRange(0, 1),
    metavar="SHARE",
    default=0.25,
    show_default=True,
    help="Learner's share of --gpus, if it has its own GPUs.",
)
@click.option(
    "--per-gpu",
    type=click.IntRange(1),
    metavar="N",
    help="With --gpus: tasks per step for each GPU count, instead of batch_size.",
)
@click.option(
    "--hardware",
    metavar="NAME",
    help="Data sheet for rates that were not measured: a100, h100, …  [default: cpu, or h100 with GPUs]",
)
@click.option(
    "--rates", "run", metavar="RUN", type=click.Path(path_type=Path), help="Measure rates from the run in this folder."
)
@click.option(
    "--rate", "given", metavar="NAME=VALUE", multiple=True, help="Set a rate by name; see docs/howto/simulate.md."
)
@click.option(
    "--against",
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Compare the prediction with the run in this folder.",
)
@click.option("--steps", type=click.IntRange(4), metavar="N", default=16, show_default=True, help="Steps to simulate.")
@click.option("--whole", is_flag=True, help="Simulate all engines of a large run instead of a slice.")
@json_output
def simulate(
    config: Path,
    settings: tuple[str, ...],
    files: tuple[str, ...],
    engines: int | None,
    learners: int | None,
    gpus: str | None,
    learner_share: float,
    per_gpu: int | None,
    hardware: str | None,
    run: Path | None,
    given: tuple[str, ...],
    against: Path | None,
    steps: int,
    whole: bool,
    as_json: bool,
) -> None:
    """Predict step time, staleness and idle time of the YAML file CONFIG by simulation, without training.

    The simulation runs the real scheduler with models of engines and learner, whose rates are given or measured.
    """
    from rlsdk.config import check
    from rlsdk.simulation import measure

    if per_gpu is not None and gpus is None:
        raise click.UsageError("--per-gpu is a number of tasks for each GPU of --gpus; give it, or set batch_size.")
    plan = check(config, settings, files)
    on_gpus = gpus is not None or plan.config.placement.device == "cuda"
    used = _assumed(plan, hardware or ("h100" if on_gpus else "cpu"), run, _numbers(given))
    rates = used.rates
    comparison = measure.measure(against, rates) if against is not None else None
    sizes = _sizes(plan, engines, learners, gpus, learner_share)
    predictions = _predicted(plan, used, sizes, per_gpu=per_gpu, steps=steps, whole=whole)
    if comparison is not None:
        batch, group = comparison.batch_size, comparison.group_size
        if others := {(p.setup.batch, p.setup.group) for p in predictions} - {(batch, group)}:
            predicted = ", ".join(f"{other} × {members}" for other, members in sorted(others))
            click.echo(
                f"warning: --against {against}: the run has {batch} × {group} rollouts a step, not {predicted} as "
                f"predicted, so the figures are not comparable; predict batch_size={batch} group_size={group}",
                err=True,
            )
    if as_json:
        report: dict[str, Any] = {
            "rates": attrs.asdict(rates),
            "origins": dict(used.origins),
            "predictions": [p.as_json() for p in predictions],
        }
        if comparison is not None:
            report["measured"] = attrs.asdict(comparison, filter=attrs.filters.exclude("rates", "lengths"))
        click.echo(json.dumps(report, indent=2))
    else:
        _show(predictions, comparison, used)


def _assumed(plan: Plan, hardware: str, run: Path | None, given: Mapping[str, float]) -> Assumptions:
    """Derive rates from the model's size and a data sheet, overridden by measured, then by given rates.

    Raises:
        ConfigError: The size of the model is unknown.
    """
    from rlsdk.options import did_you_mean
    from rlsdk.readiness.disk import skeleton
    from rlsdk.simulation.measure import MEASURED, measure
    from rlsdk.simulation.prediction import Assumptions, assumptions, changed
    from rlsdk.simulation.rates import HARDWARE

    if hardware not in HARDWARE:
        hint = did_you_mean(hardware, HARDWARE)
        raise ArgumentError([f"--hardware {hardware}: unknown; there are {', '.join(HARDWARE)}{hint}"])
    net, why = skeleton(plan, download=False)
    if net is None and run is None and "weights_bytes" not in given:
        raise ConfigError(
            [
                f"model.path: {why}, so its size is unknown and no prediction is possible; set "
                "model.path to a folder on this machine, measure with --rates RUN, or give --rate weights_bytes=N "
                "and the other rates"
            ]
        )
    found = assumptions(plan, net, hardware)
    rates, lengths, origins = found.rates, found.lengths, dict(found.origins)
    if run is not None:
        measured = measure(run, rates)
        rates, lengths = measured.rates, measured.lengths
        origins |= dict.fromkeys([*MEASURED, "median"], f"{_A_RUN}{run}")
    rates, lengths = changed(rates, lengths, given)
    return Assumptions(rates=rates, lengths=lengths, origins=origins | dict.fromkeys(given, "--rate"))


def _numbers(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise click.UsageError(f"--rate {text!r} is not of the form NAME=NUMBER")
    return found


def _sizes(
    plan: Plan, engines: int | None, learners: int | None, gpus: str | None, share: float
) -> list[tuple[int | None, int, int]]:
    """Return (GPUs, engines, ranks) of each prediction."""
    from rlsdk.simulation.prediction import divided, takes_turns

    place = plan.config.placement
    if gpus is None:
        return [(None, engines or place.engines, learners or place.learners)]
    if engines or learners:
        raise click.UsageError(
            "--gpus divides GPUs among engines and learner; give either it, or --engines and --learners."
        )
    try:
        counts = [int(count) for count in gpus.split(",")]
    except ValueError:
        raise click.UsageError(
            f"--gpus {gpus}: expected numbers of GPUs such as 8 or 8,64,1024; four nodes with 8 GPUs each have 32"
        ) from None
    try:
        return [(n, *divided(n, share, place.gpus_per_engine, colocated=takes_turns(plan))) for n in counts]
    except ValueFault as error:
        raise ConfigError([str(error)]) from error


def _predicted(
    plan: Plan,
    assumed: Assumptions,
    sizes: Sequence[tuple[int | None, int, int]],
    *,
    per_gpu: int | None,
    steps: int,
    whole: bool,
) -> list[Prediction]:
    """Predict each size, with a progress bar.

    Args:
        plan: Plan of the run.
        assumed: Rates and lengths.
        sizes: (GPUs, engines, ranks) of each prediction.
        per_gpu: Tasks per step for each GPU; None: the plan's batch size.
        steps: Steps to simulate.
        whole: Simulate all engines of a large run instead of a slice.
    """
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from rlsdk.simulation import prediction

    predictions, most = [], None if whole else prediction.MOST_ROLLOUTS
    with Progress(console=Console(stderr=True), transient=True) as bar:
        for count, engines, learners in sizes:
            setup = prediction.setup_of(
                plan, assumed.rates, assumed.lengths, engines=engines, learners=learners, steps=steps
            )
            if per_gpu is not None and count is not None:
                setup = prediction.resized(setup, per_gpu * count)
            line = bar.add_task("", total=steps)

            def show(name: str, done: int, line: TaskID = line, engines: int = engines) -> None:
                bar.update(line, description=f"{engines} engines, {name}", completed=done)

            predictions.append(prediction.predict(setup, count, most=most, progress=show))
            bar.remove_task(line)
    return predictions


def _show(predictions: Sequence[Prediction], comparison: MeasuredRun | None, used: Assumptions) -> None:
    """Print a table for each prediction, then the value and origin of each rate, those not measured first."""
    from rich.table import Table

    out = console()
    for found in predictions:
        setup = found.setup
        size = f"{counted(found.gpus, 'GPU')}: " if found.gpus else ""
        title = f"{size}{counted(setup.engines, 'engine')}, {counted(setup.learners, 'rank')}, "
        title += f"{setup.batch} × {setup.group} rollouts a step"
        title += f" ({found.share:.1%} of them simulated)" if found.share < 1 else ""
        table = Table(title=title)
        for i, column in enumerate(COLUMNS):
            table.add_column(column, justify="right" if i else "left", no_wrap=not i)  # row names are not wrapped
        table.add_row("as configured", *_cells(attrs.asdict(found.configured)))
        if found.setup.rollout.runs_ahead:
            table.add_row("synchronous", *_cells(attrs.asdict(found.synchronous)))
        if comparison is not None:
            table.add_row(f"measured, {counted(comparison.steps, 'step')}", *_cells(attrs.asdict(comparison)))
        out.print(table)
        bound = max(found.engines_alone, found.learner_alone)
        out.print(
            f"engines alone: {found.engines_alone:.3g} s a step; learner alone: {found.learner_alone:.3g} s; "
            f"as configured: {found.of_bound:.0%} of the throughput at {bound:.3g} s a step",
            highlight=False,
        )
    values = {**attrs.asdict(used.rates), "median": used.lengths.median, "sigma": used.lengths.sigma}
    known: dict[str, list[str]] = {}
    for name, origin in used.origins.items():
        value = values[name]
        known.setdefault(origin, []).append(f"{name} {value:,.0f}" if value >= 1000 else f"{name} {value:.3g}")
    for origin, names in sorted(known.items(), key=lambda item: item[0].startswith((_A_RUN, "--rate"))):
        out.print(f"from {origin}: " if origin != "assumed" else "assumed: ", ", ".join(names), sep="", highlight=False)
    if not any(origin.startswith(_A_RUN) for origin in known):
        out.print("No rate was measured; --rates RUN, with a few steps of a run, predicts far better.", highlight=False)


def _cells(found: dict[str, Any]) -> list[str]:
    def cell(name: str, form: str) -> str:
        value = found.get(name)
        return "" if value is None else format(value, form)

    return [
        f"{cell('step', '.3g')} s",
        f"{cell('step_p95', '.3g')} s",
        f"{cell('staleness', '.2f')}, at most {cell('staleness_max', 'd')}",
        cell("engines_idle", ".1%"),
        cell("learner_idle", ".1%"),
        cell("tokens_per_second", ",.0f"),
        cell("wasted", ".1%"),
        cell("weights_gb_per_second", ".3g"),
    ]
