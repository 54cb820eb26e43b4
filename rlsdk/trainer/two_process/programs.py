"""The two programs of a run on one Ray cluster: one samples rollouts, one trains on them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from rlsdk import preflight
from rlsdk.cluster.actors import kill
from rlsdk.cluster.placement import Layout, layout, ray_cluster
from rlsdk.config import Plan, check
from rlsdk.engines.starting import exchanged_adapter, start_engines, started_engines
from rlsdk.environments.fleet import world_workers
from rlsdk.errors import ConfigError, RunError
from rlsdk.isolation.reaper import reaped
from rlsdk.learners.group import LearnerGroup
from rlsdk.learners.starting import start_learner
from rlsdk.loops import UserLoop
from rlsdk.readiness.checks import examine, machine, space
from rlsdk.readiness.disk import estimate
from rlsdk.rollout.producer import first_error
from rlsdk.runlog.observers import Observers
from rlsdk.runlog.progress import log_console
from rlsdk.scoring.actors import scoring
from rlsdk.trainer.assembly import Parts, explorer_of, steps_of, train_tasks
from rlsdk.trainer.explorer import Explorer
from rlsdk.trainer.interactive import run_async
from rlsdk.trainer.logs import log_to
from rlsdk.trainer.record import RunRecord, open_run
from rlsdk.trainer.rehearsal import rehearse
from rlsdk.trainer.signals import handled
from rlsdk.trainer.trainer import Trainer
from rlsdk.trainer.two_process.messages import open_mailbox, require_cluster
from rlsdk.trainer.two_process.remote import ExplorerRegistry, RemoteExplorer
from rlsdk.trainer.two_process.server import ExplorerServer
from rlsdk.trainer.watchdog import watching

log = logging.getLogger(__name__)
NOTICE = "interrupted: the trainer finishes and saves its step, then both end; again ends this at once"


def train_apart(
    plan: Plan,
    *,
    resume: bool | int = False,
    overwrite: bool = False,
    allow_changes: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train by a checked plan on rollouts of an explorer in another program; see `rlsdk.train`.

    Raises:
        ConfigError: The configuration names no Ray cluster.
        RlsdkError: The run failed, or there was no explorer in time.
    """
    require_cluster(plan)
    exchanged_adapter(plan)
    preflight.require(map(str, [*machine(plan), *space(plan, estimate(plan, download=True))]))
    with open_run(plan, resume=resume, overwrite=overwrite, allow_changes=allow_changes, console=console) as record:
        run_async(_train(record, _apart(plan, record.gpus)))
    return record.summary


def explore(
    config: str | Path | Mapping[str, Any],
    *overrides: str,
    plugins: Sequence[str | Path] = (),
    console: Console | None = None,
) -> str:
    """Sample rollouts for a trainer in another program, until its run ends.

    Args:
        config: A YAML file, or a mapping; the trainer's is the same.
        *overrides: `key=value` texts.
        plugins: Files of plugins.
        console: Console for the log; left out, standard error.

    Returns:
        How the run ended: "finished" or "interrupted".

    Raises:
        ConfigError: The configuration is wrong, names no Ray cluster, or differs from the trainer's.
        RlsdkError: The run failed, or there was no trainer in time.
    """
    plan = check(config, overrides, plugins)
    require_cluster(plan)
    ready = examine(plan, trains=False).require()
    rehearsed = run_async(rehearse(plan, ready.tasks))
    exchanged_adapter(plan)
    console = console or log_console()
    log_to(plan, console)
    rehearsed.log()
    with watching(
        plan.config.watchdog, partial(log.error, "the explorer did not end when it was told to: %s")
    ) as watchdog:
        try:
            with reaped(), ray_cluster(plan) as gpus:
                return run_async(_explorer(plan, gpus, console))
        except BaseException as error:
            cause = watchdog.explain(first_error(error), "the trainer has the checkpoints")
            if cause is error:
                raise
            raise cause from error


async def _train(record: RunRecord, found: Layout) -> None:
    """Train in this program, on rollouts from explorers in other programs."""
    plan = record.plan
    explorers = ExplorerRegistry(plan, open_mailbox(plan, "trainer"))
    explorers.listen()
    try:
        rollouts = RemoteExplorer(plan, explorers, await explorers.meet())
        status = "failed"
        try:
            steps = steps_of(plan)
            learner = await asyncio.to_thread(_learner, plan, found, steps)
            try:
                await rollouts.start()
                trainer = Trainer.of_run(record, Parts(rollouts, learner, steps))
                explorers.interrupt = trainer.interrupt
                record.finish(await trainer.train_async(), trainer.samples)
                status = record.summary["status"]
            finally:
                learner.stop()
        finally:
            await rollouts.shutdown(status)
    finally:
        await explorers.close()


def _learner(plan: Plan, found: Layout, steps: int) -> LearnerGroup:
    return start_learner(plan, found, exchanged_adapter(plan), steps)


async def _explorer(plan: Plan, gpus: int, console: Console) -> str:
    desk = ExplorerServer(plan, open_mailbox(plan, "explorer"))
    await desk.meet()  # before anything is in the folder: a trainer that overwrites it has done so by then
    (plan.folder / "logs").mkdir(parents=True, exist_ok=True)
    log_to(plan, console, "explorer.log")
    observers = Observers(plan.plugins)
    with ExitStack() as stack:
        try:
            found = _apart(plan, gpus)
            engines = await asyncio.to_thread(_engines, plan, found)
            for engine in engines:
                stack.callback(kill, engine)
            user_loop = stack.enter_context(UserLoop())
            log_file = plan.folder / "logs" / "scoring.log"
            scorer = stack.enter_context(scoring(plan, log_to=log_file, user_loop=user_loop))
            worlds = stack.enter_context(world_workers(plan))
            explorer = explorer_of(plan, engines, found, train_tasks(plan), scorer, worlds, observers, user_loop)
        except Exception as error:
            await desk.fail(first_error(error))
            raise
        status = await _serve(plan, desk, explorer, observers)
    if status == "failed":
        raise RunError("the trainer has failed; its log is logs/driver.log in the run's folder")
    log.info("the run has ended: %s", status)
    return status


def _engines(plan: Plan, found: Layout) -> list[Any]:
    return started_engines(plan, start_engines(plan, found, exchanged_adapter(plan))) if plan.needs_engine else []


async def _serve(plan: Plan, desk: ExplorerServer, explorer: Explorer, observers: Observers) -> str:
    status = "failed"
    asking: set[asyncio.Task[None]] = set()

    def interrupt() -> None:
        asking.add(asyncio.get_running_loop().create_task(desk.interrupt()))

    # A plugin that observes rollouts is told here, too.
    observers.tell("rlsdk_run_start", config=plan.tree, folder=plan.folder)
    try:
        with handled(NOTICE, interrupt):
            status = await desk.serve(explorer)
    finally:
        observers.tell("rlsdk_run_end", status=status, summary={})
        await asyncio.to_thread(observers.close)
    return status


def _apart(plan: Plan, gpus: int) -> Layout:
    """Return the resources of each actor, where neither program shares the other's device.

    Raises:
        ConfigError: The plan shares devices.
    """
    found = layout(plan.config.placement, os.cpu_count() or 1, gpus)
    if found.device == "cuda" and plan.config.placement.colocate:
        raise ConfigError(
            ["placement.colocate: two programs cannot take turns on a device; set placement.colocate=false"]
        )
    return found
