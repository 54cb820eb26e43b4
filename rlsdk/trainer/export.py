"""From a run's checkpoint to a folder that transformers opens."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs

from rlsdk.config import Plan, check
from rlsdk.contracts import Place
from rlsdk.errors import CheckpointError
from rlsdk.learners.group import LearnerGroup
from rlsdk.trainer.checkpoint import Checkpoints
from rlsdk.trainer.cluster import layout, ray_cluster, roles


def export(run: Path, folder: Path, *, step: int | None = None, plugins: Sequence[str | Path] = ()) -> int:
    """Write a run's model to a folder that `transformers.from_pretrained` opens.

    A checkpoint that was written with an export has it copied; else the run's learner is started to write one.

    Args:
        run: The run's folder.
        folder: Where to; it must not exist, or be empty. What is found there is complete.
        step: Of the checkpoint; left out, the newest.
        plugins: Files of plugins that the run was started with.

    Returns:
        The checkpoint's step.

    Raises:
        CheckpointError: There is no such run or checkpoint, or `folder` holds something.
        ConfigError: The learner must be started, and the run's configuration does not hold any more.
    """
    if not (run / "config.yaml").is_file():
        raise CheckpointError(f"{run} is not the folder of a run: it has no config.yaml")
    checkpoints = Checkpoints(run, keep=1)
    step = _choose(checkpoints, run, step)
    checkpoint = checkpoints.path(step)
    with written_aside(folder) as partial:
        if (checkpoint / "export").is_dir():
            shutil.copytree(checkpoint / "export", partial, dirs_exist_ok=True)
        else:
            _export_by_learner(check(run / "config.yaml", (), plugins), run, checkpoint, partial)
    return step


def _choose(checkpoints: Checkpoints, run: Path, step: int | None) -> int:
    there = checkpoints.steps()
    if not there:
        raise CheckpointError(f"{run} has no complete checkpoint; `checkpoint.every` says when they are written")
    if step is not None and step not in there:
        raise CheckpointError(f"{run} has no checkpoint of step {step}; there are: {', '.join(map(str, there))}")
    return there[-1] if step is None else step


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """A folder beside `folder`, which takes its name when all went well and is removed otherwise.

    Raises:
        CheckpointError: `folder` is there already and holds something, or cannot be made.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise CheckpointError(f"{folder} holds something already; choose a folder that is empty or not there")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made: {error.strerror}") from error
    try:
        yield partial
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _export_by_learner(plan: Plan, run: Path, checkpoint: Path, folder: Path) -> None:
    """Start the run's learner without a reference model, load the checkpoint, have it written."""
    config = plan.config
    alone = attrs.evolve(config.placement, engines=1, gpus_per_engine=1, colocate=True)
    logs, cores = run / "logs" / "export", os.cpu_count() or 1
    with ray_cluster(plan) as gpus:
        found = layout(alone, cores, gpus)
        place = Place(
            role="learner",
            world=config.placement.learners,
            device="cuda" if found.device == "cuda" else "cpu",
            threads=found.learner_threads,
            seed=config.seed,
            cpus=cores,
        )
        learner = LearnerGroup.launch(
            plan.learner,
            attrs.evolve(roles(plan), reference=None),
            plan.loss,
            place,
            total_updates=1,
            gpus=found.learner_gpus,
            log_dir=logs,
            cache=run / "cache",
        )
        try:
            learner.load((checkpoint / "learner").resolve())
            learner.export(folder.resolve())
        finally:
            learner.stop()
