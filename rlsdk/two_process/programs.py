"""The two programs of a run on a Ray cluster: one samples rollouts, one trains on them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from rlsdk import preflight
from rlsdk.cluster.actors import cause_of, died, kill, not_created, reason
from rlsdk.cluster.placement import Layout, layout, ray_cluster
from rlsdk.cluster.watched import watching
from rlsdk.config import Plan, Source, check
from rlsdk.engines.starting import exchanged_adapter
from rlsdk.errors import RunError
from rlsdk.isolation.watching import stage
from rlsdk.learners.apart import start_learner
from rlsdk.loops.signals import handled
from rlsdk.opening.record import RunRecord, open_run
from rlsdk.readiness.checks import machine, space
from rlsdk.readiness.disk import estimate
from rlsdk.rollout.generator import first_error
from rlsdk.runlog.logs import log_console, log_to
from rlsdk.trainer.assembly import examined, steps_of
from rlsdk.trainer.interactive import run_async
from rlsdk.trainer.run import finished
from rlsdk.trainer.trainer import Trainer
from rlsdk.two_process.actor import ExplorerActor, ExplorerSetup
from rlsdk.two_process.agreement import PeerInfo, require_cluster, spawn_named
from rlsdk.two_process.remote import ExplorerRegistry, RemoteExplorer

log = logging.getLogger(__name__)
NOTICE = (
    "interrupted: the trainer, if one has connected, finishes and saves its step, then both programs end; "
    "interrupt again to end this one at once"
)


def train_apart(
    plan: Plan,
    *,
    resume: bool | int = False,
    overwrite: bool = False,
    allow_changes: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train from a checked plan on rollouts that an explorer samples in another program; see `rlsdk.train`.

    A resumed run that has trained all its steps waits for no explorer: its earlier summary is returned.

    Raises:
        ConfigError: The configuration names no Ray cluster.
        RlsdkError: The run failed, or no explorer connected in time.
    """
    require_cluster(plan)
    exchanged_adapter(plan)
    if (ended := finished(plan, resume, console)) is not None:
        return ended
    preflight.require(map(str, [*machine(plan), *space(plan, estimate(plan, download=True))]))
    with open_run(plan, resume=resume, overwrite=overwrite, allow_changes=allow_changes, console=console) as record:
        found = layout(plan, os.cpu_count() or 1, record.gpus, roles=["learner", "critic", "reference"], apart=True)
        run_async(_train(record, found))
    return record.summary


def explore(
    config: Source,
    *overrides: str,
    plugins: Sequence[str | Path] = (),
    console: Console | None = None,
) -> str:
    """Sample rollouts for a trainer in another program until its run ends.

    Args:
        config: A YAML file, an `rlsdk.Config` or a mapping, equal to the trainer's.
        *overrides: Settings as `key=value` strings.
        plugins: Plugin files.
        console: Console for the log; default: standard error.

    Returns:
        How the run ended: "finished" or "interrupted".

    Raises:
        ConfigError: The configuration is wrong, names no Ray cluster, or differs from the trainer's.
        RlsdkError: The run failed, or no trainer connected in time.
    """
    plan = check(config, overrides, plugins)
    require_cluster(plan)
    _, rehearsed = examined(plan, trains=False)
    console = console or log_console()
    log_to(plan, console)
    rehearsed.log()
    with watching(plan.config.watchdog, partial(log.error, "the explorer did not end when asked to: %s")) as watchdog:
        try:
            with ray_cluster(plan) as gpus:
                return run_async(_explorer(plan, ExplorerSetup(config, overrides, plugins, gpus)))
        except BaseException as error:
            cause = watchdog.explain(first_error(error), "the trainer keeps the checkpoints")
            if cause is error:
                raise
            raise cause from error


async def _train(record: RunRecord, found: Layout) -> None:
    """Train in this program, on rollouts from explorers in other programs."""
    plan, status, trainer = record.plan, "failed", None
    explorers = ExplorerRegistry(plan)
    rollouts = RemoteExplorer(plan, explorers, await explorers.meet())
    try:
        steps = steps_of(plan)
        learner = await asyncio.to_thread(start_learner, plan, found, exchanged_adapter(plan), steps)
        try:
            await rollouts.start()
            trainer = Trainer.of_run(record, rollouts, learner, steps)
            rollouts.interrupt, rollouts.ending = trainer.interrupt, lambda: trainer.interrupted
            await trainer.train_async()
            status = record.summary["status"]
        finally:
            learner.stop()
    except asyncio.CancelledError:
        if trainer is None or trainer.interrupted:  # by Ctrl-C; otherwise by the watchdog
            status = "interrupted"
        raise
    finally:
        await rollouts.shutdown(status)


async def _explorer(plan: Plan, setup: ExplorerSetup) -> str:
    """Run an explorer actor until its run ends, and show its log."""
    explorer = spawn_named(plan, "explorer", ExplorerActor, PeerInfo.of(plan), setup, watched_as="explorer")
    shown = asyncio.ensure_future(_show_log(explorer))
    try:
        with stage("exploration"), handled(NOTICE, explorer.interrupt.remote):
            status: str = await explorer.run.remote()
        await shown
    except Exception as error:
        await shown
        if not_created(error):
            raise RunError(f"the explorer did not start: {reason(error)}") from error
        if died(error):
            raise RunError(
                f"this explorer has ended, or the trainer has stopped waiting for it: {reason(error)}"
            ) from error
        raise cause_of(error) from error
    finally:
        shown.cancel()
        kill(explorer)
    return status


async def _show_log(explorer: Any) -> None:
    """Copy an explorer's log records to this program's log until the explorer ends."""
    try:
        while True:
            for record in await explorer.next_records.remote():
                if record is None:
                    return
                logging.getLogger(record.name).handle(record)
    except Exception as error:
        if not (died(error) or not_created(error)):
            raise
