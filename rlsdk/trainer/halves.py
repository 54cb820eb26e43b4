"""The two halves of a run as programs of their own on one Ray cluster: one makes rollouts, one trains on them."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from rlsdk import preflight
from rlsdk.config import Plan, check
from rlsdk.errors import ConfigError, RunError
from rlsdk.learners.group import LearnerGroup
from rlsdk.rollout.producer import first_error
from rlsdk.runlog.progress import log_console
from rlsdk.trainer.assembly import explorer_of, parts_of, steps_of, train_tasks, updates_of
from rlsdk.trainer.checkpoint import Checkpoints
from rlsdk.trainer.cluster import (
    Layout,
    exchanged_adapter,
    layout,
    ray_cluster,
    start_engines,
    start_learner,
    started_engines,
)
from rlsdk.trainer.desk import Desk
from rlsdk.trainer.exchange import open_mailbox, require_cluster
from rlsdk.trainer.explorer import Explorer
from rlsdk.trainer.far import Explorers, FarExplorer
from rlsdk.trainer.logs import log_to
from rlsdk.trainer.loop import Loop
from rlsdk.trainer.reaper import reaped
from rlsdk.trainer.rewarding import scoring
from rlsdk.trainer.run import faults, run_async, run_body
from rlsdk.trainer.session import Session, on_interrupt
from rlsdk.trainer.worlds import world_workers

log = logging.getLogger(__name__)


def train_half(
    plan: Plan, *, resume: bool = False, overwrite: bool = False, console: Console | None = None
) -> dict[str, Any]:
    """Train by a checked plan on what an explorer in another program makes; see `trainer.run.train`.

    Raises:
        ConfigError: The configuration names no Ray cluster.
        RlsdkError: The run failed, or there was no explorer in time.
    """
    require_cluster(plan)
    return run_body(_trainer, plan, resume=resume, overwrite=overwrite, console=console)


def explore(
    config: str | Path | Mapping[str, Any],
    *overrides: str,
    plugins: Sequence[str | Path] = (),
    console: Console | None = None,
) -> str:
    """Make rollouts for a trainer in another program, until its run ends.

    Args:
        config: A YAML file, or a mapping; the trainer's is the same.
        *overrides: `key=value` texts.
        plugins: Files of plugins.
        console: For the log; left out, standard error.

    Returns:
        How the run ended: "finished" or "interrupted".

    Raises:
        ConfigError: The configuration is wrong, names no Ray cluster, or differs from the trainer's.
        RlsdkError: The run failed, or there was no trainer in time.
    """
    plan = check(config, overrides, plugins)
    require_cluster(plan)
    preflight.require(faults(plan, trains=False))
    exchanged_adapter(plan)
    console = console or log_console()
    log_to(plan, console)
    try:
        with reaped(), ray_cluster(plan) as gpus:
            return run_async(_explorer(plan, gpus, console))
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors


def _trainer(
    plan: Plan, gpus: int, checkpoints: Checkpoints, begin: Callable[[Loop], Session]
) -> tuple[dict[str, Any], Session]:
    """The half that trains, in this program."""
    return run_async(_train(plan, _apart(plan, gpus), checkpoints, begin))


async def _train(
    plan: Plan, found: Layout, checkpoints: Checkpoints, begin: Callable[[Loop], Session]
) -> tuple[dict[str, Any], Session]:
    explorers = Explorers(plan, open_mailbox(plan, "trainer"))
    explorers.listen()
    try:
        far = FarExplorer(plan, explorers, await explorers.meet())
        status = "failed"
        try:
            steps = steps_of(plan)
            learner = await asyncio.to_thread(_learner, plan, found, steps)
            try:
                await far.start()
                session = begin(Loop(parts_of(plan, learner, far, checkpoints), steps))
                explorers.interrupt = session.interrupt
                summary = await session.go()
                status = summary["status"]
            finally:
                learner.stop()
        finally:
            await far.part(status)
    finally:
        await explorers.close()
    return summary, session


def _learner(plan: Plan, found: Layout, steps: int) -> LearnerGroup:
    return start_learner(plan, found, exchanged_adapter(plan), updates_of(plan, steps))


async def _explorer(plan: Plan, gpus: int, console: Console) -> str:
    desk = Desk(plan, open_mailbox(plan, "explorer"))
    await desk.meet()  # before anything is in the folder: a trainer that overwrites it has done so by then
    (plan.folder / "logs").mkdir(parents=True, exist_ok=True)
    log_to(plan, console, "explorer.log")
    with ExitStack() as stack:
        try:
            found = _apart(plan, gpus)
            engines = await asyncio.to_thread(_engines, plan, found)
            stack.callback(_kill, engines)
            scorer = stack.enter_context(scoring(plan, log_to=plan.folder / "logs" / "scoring.log"))
            worlds = stack.enter_context(world_workers(plan))
            explorer = explorer_of(plan, engines, found, train_tasks(plan), scorer, worlds)
        except Exception as error:
            await desk.fail(first_error(error))
            raise
        status = await _serve(plan, desk, explorer, console)
    if status == "failed":
        raise RunError("the trainer has failed; its log is logs/driver.log in the run's folder")
    log.info("the run has ended: %s", status)
    return status


def _kill(engines: Sequence[Any]) -> None:
    import ray

    for engine in engines:
        ray.kill(engine)


def _engines(plan: Plan, found: Layout) -> list[Any]:
    return started_engines(plan, start_engines(plan, found, exchanged_adapter(plan))) if plan.needs_engine else []


async def _serve(plan: Plan, desk: Desk, explorer: Explorer, console: Console) -> str:
    status, hook = "failed", plan.plugins.hook
    asking: set[asyncio.Task[None]] = set()

    def interrupt() -> None:
        if asking:
            raise KeyboardInterrupt
        asking.add(asyncio.get_running_loop().create_task(desk.interrupt()))
        console.print("interrupted: the trainer finishes and saves its step, then both end; again ends this at once")

    undo = on_interrupt(interrupt)
    hook.rlsdk_run_start(config=plan.tree, folder=plan.folder)  # a plugin that observes rollouts is told here, too
    try:
        status = await desk.serve(explorer)
    finally:
        hook.rlsdk_run_end(status=status, summary={})
        undo()
    return status


def _apart(plan: Plan, gpus: int) -> Layout:
    """What each actor gets, where neither half waits for the other's device.

    Raises:
        ConfigError: The plan shares devices.
    """
    found = layout(plan.config.placement, os.cpu_count() or 1, gpus)
    if found.device == "cuda" and plan.config.placement.colocate:
        raise ConfigError(
            ["placement.colocate: two programs cannot take turns on a device; set placement.colocate=false"]
        )
    return found
