"""One run from a checked plan to its report: folder, actors, steps, checkpoints, and a clean end whatever happens."""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml
from rich.console import Console

from rlsdk import preflight
from rlsdk.config import Plan, check
from rlsdk.contracts import Requires, RequiresPrograms
from rlsdk.errors import ConfigError, PluginError, RunError
from rlsdk.rollout.producer import first_error
from rlsdk.runlog.progress import log_console
from rlsdk.runlog.report import draw_curves, print_report, write_summary
from rlsdk.runlog.store import Address, RolloutStore
from rlsdk.trainer.assembly import explorer_of, parts_of, steps_of, train_tasks, updates_of
from rlsdk.trainer.checkpoint import Checkpoints
from rlsdk.trainer.cluster import exchanged_adapter, ray_cluster, start_actors
from rlsdk.trainer.exchange import plain
from rlsdk.trainer.logs import log_to
from rlsdk.trainer.loop import Loop
from rlsdk.trainer.reaper import reaped
from rlsdk.trainer.rewarding import scoring
from rlsdk.trainer.session import Session
from rlsdk.trainer.worlds import world_workers

log = logging.getLogger(__name__)
T = TypeVar("T")
BYTES_PER_PARAMETER = 16
"""Weights, master weights and two moments in float32: what a checkpoint holds at most for each parameter."""


def train(
    config: str | Path | Mapping[str, Any],
    *overrides: str,
    plugins: Sequence[str | Path] = (),
    resume: bool = False,
    overwrite: bool = False,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train a model.

    Args:
        config: A YAML file, or a mapping in which marked objects may stand where names stand.
        *overrides: `key=value` texts.
        plugins: Files of plugins.
        resume: Go on from the run's last checkpoint (from the beginning, if there is none).
        overwrite: Delete what an earlier run left in the folder.
        console: Where to show progress; left out, standard error.

    Returns:
        The summary, as in `summary.json`; `status` is "finished" or "interrupted".

    Raises:
        ConfigError: The configuration is wrong; nothing was started.
        RlsdkError: The run failed; the message names the culprit.
    """
    plan = check(config, overrides, plugins)
    return run(plan, resume=resume, overwrite=overwrite, console=console)


Body = Callable[[Plan, int, Checkpoints, Callable[[Loop], Session]], tuple[dict[str, Any], Session]]
"""Trains by a plan with so many GPUs of Ray's: makes a loop, has a session made for it, runs it; its summary."""


def run(plan: Plan, *, resume: bool = False, overwrite: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Train by a checked plan; see `train`."""
    return run_body(_both, plan, resume=resume, overwrite=overwrite, console=console)


def run_body(body: Body, plan: Plan, *, resume: bool, overwrite: bool, console: Console | None) -> dict[str, Any]:
    """Train by a checked plan in one program, or the trainer's half of it: folder, books and report are the same."""
    console = console or log_console()
    start = time.perf_counter()
    preflight.require(faults(plan, trains=True))
    exchanged_adapter(plan)  # an adapter that the engine cannot serve is an error before anything starts
    checkpoints = Checkpoints(plan.folder, plan.config.checkpoint.keep)
    resumed = _prepare_folder(plan, checkpoints, resume=resume, overwrite=overwrite)
    log_to(plan, console, "driver.log")
    seconds: dict[str, float] = {}
    try:
        with kept_rollouts(plan) as store, reaped(), ray_cluster(plan) as gpus:

            def begin(loop: Loop) -> Session:
                seconds["start"] = time.perf_counter() - start
                return Session(plan, loop, console, resumed, seconds, store)

            summary, session = body(plan, gpus, checkpoints, begin)
    except BaseException as error:
        cause = _explained(first_error(error), checkpoints)
        _ended(plan, "failed", {"error": str(cause)})
        if cause is error:
            raise
        raise cause from error
    summary["seconds"]["whole"] = time.perf_counter() - start
    curves = draw_curves(plan.folder, plan.config.name)
    summary["curves"] = str(curves) if curves else None
    write_summary(plan.folder, summary)
    print_report(console, summary, session.samples)
    _ended(plan, summary["status"], summary)
    return summary


def _both(
    plan: Plan, gpus: int, checkpoints: Checkpoints, begin: Callable[[Loop], Session]
) -> tuple[dict[str, Any], Session]:
    """Both halves in this program."""
    tasks = train_tasks(plan)
    steps = steps_of(plan, tasks)
    actors = start_actors(plan, gpus, updates_of(plan, steps))
    try:
        with scoring(plan, log_to=plan.folder / "logs" / "scoring.log") as scorer, world_workers(plan) as worlds:
            explorer = explorer_of(plan, actors.engines, actors.layout, tasks, scorer, worlds)
            session = begin(Loop(parts_of(plan, actors.learner, explorer, checkpoints), steps))
            return run_async(session.go()), session
    finally:
        actors.stop()


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; in a notebook, whose event loop is taken, in a thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def _explained(error: BaseException, checkpoints: Checkpoints) -> BaseException:
    """A full disk, wherever it was met, says what is kept and what to do."""
    if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
        return error
    kept = checkpoints.latest()
    last = f"the checkpoint of step {kept} is kept" if kept is not None else "there is no checkpoint yet"
    return RunError(
        f"the disk is full ({error.filename or 'while writing'}); {last}. Free space, then go on with --resume"
    )


def _ended(plan: Plan, status: str, summary: Mapping[str, Any]) -> None:
    plan.plugins.hook.rlsdk_run_end(status=status, summary=summary)


def faults(plan: Plan, *, trains: bool) -> list[str]:
    """What of the machine does not suit a plan.

    Args:
        plan: The plan.
        trains: Whether there is a learner, which writes checkpoints.
    """
    found = preflight.torch_companions()
    if plan.config.placement.device != "cpu":
        found += preflight.gpu_capability()
    for kind, reference in {"engine": plan.engine, **({"learner": plan.learner} if trains else {})}.items():
        component = plan.plugins.resolve(reference)
        what = f"{kind} {reference.name} with these options"
        if isinstance(component, Requires):
            found += preflight.packages(component.requires, what)
        if isinstance(component, RequiresPrograms):
            found += preflight.programs(component.programs, what)
    if not trains:
        return found
    weights = sum(f.stat().st_size for f in Path(plan.config.model.path).glob("*.safetensors"))
    parameters = weights / (4 if plan.config.model.dtype == "float32" else 2)
    models = 2 if plan.algorithm.critic else 1
    needed = parameters * BYTES_PER_PARAMETER * models * (plan.config.checkpoint.keep + 1)
    return [*found, *preflight.free_space(plan.folder, int(needed))]


@contextmanager
def kept_rollouts(plan: Plan) -> Iterator[RolloutStore | None]:
    """Where a plan's rollouts are kept, None if they are not; closed with the block."""
    if not plan.config.save_rollouts:
        yield None
        return
    section = plan.config.production.storage
    store = RolloutStore(Address.make(plan.folder, section.url, section.password_env))
    try:
        yield store
    finally:
        store.close()


def _prepare_folder(plan: Plan, checkpoints: Checkpoints, *, resume: bool, overwrite: bool) -> int | None:
    """Make the run's folder; returns the step to resume from, None for a new run."""
    folder = plan.folder
    if overwrite and not resume and folder.exists():
        shutil.rmtree(folder)
    used = (folder / "config.yaml").exists()
    if used and not resume:
        ways = "go on with it by --resume, delete it by --overwrite, or choose another name=…"
        raise ConfigError([f"name: {folder} holds a run already; {ways}"])
    step = checkpoints.latest() if resume else None
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    if step is not None:
        _same_code(plan, checkpoints.read(step))
    head = "".join(f"# plugin {name}: {' '.join(filter(None, mark.values()))}\n" for name, mark in plan.code.items())
    text = yaml.safe_dump(plain(plan.tree), sort_keys=False, allow_unicode=True)
    (folder / "config.yaml").write_text(head + text, encoding="utf-8")
    return step


def _same_code(plan: Plan, state: Mapping[str, Any]) -> None:
    then, now = state["plugins"], plan.code
    changed = [n for n in sorted({*then, *now} - {"core"}) if then.get(n) != now.get(n)]
    if changed:
        raise PluginError(
            f"the checkpoint was made with other code of: {', '.join(changed)} (was {[then.get(n) for n in changed]}, "
            f"is {[now.get(n) for n in changed]}); install what it was made with, or start a new run"
        )
    if then.get("core") != now.get("core"):
        log.warning("the checkpoint was made by rlsdk %s, this is %s", then.get("core"), now.get("core"))
