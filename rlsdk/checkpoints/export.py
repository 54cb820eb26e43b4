"""Export a run's checkpoint to a folder in transformers format."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs

from rlsdk.checkpoints.checkpoint import EXPORT, LEARNER, Checkpoints, deleted_text
from rlsdk.cluster.placement import layout, ray_cluster
from rlsdk.cluster.watched import watched
from rlsdk.config import Plan, check, read
from rlsdk.config.kept import other_plugins, require_trusted
from rlsdk.config.paths import resolve_paths
from rlsdk.config.tree import normalise
from rlsdk.contracts import ActorSpec
from rlsdk.errors import CheckpointError, RlsdkError
from rlsdk.isolation.reaper import reaped
from rlsdk.isolation.scratch import scratch_folder
from rlsdk.isolation.watching import CURRENT
from rlsdk.learners.apart import roles
from rlsdk.learners.group import LearnerGroup
from rlsdk.runlog.folder import why_no_run

log = logging.getLogger(__name__)
_DATA = frozenset({".json", ".jsonl", ".safetensors", ".txt", ".model", ".jinja", ".md", ".spm", ".tiktoken"})
"""Suffixes of model files that hold only data; other files may hold pickles or code."""


def export(
    run: Path,
    folder: Path,
    *,
    step: int | None = None,
    plugins: Sequence[str | Path] = (),
    named: Mapping[str, Any] | None = None,
) -> int:
    """Write a run's model to a folder that `transformers.from_pretrained` opens.

    The checkpoint's own export is copied; if it has none, the run's learner is started to write one.

    Args:
        run: Folder of the run.
        folder: Target folder; must be empty or not exist, and appears only when it is complete.
        step: Step of the checkpoint; by default, the newest intact one.
        plugins: Plugin files that the run was started with.
        named: The user's configuration, which must also name any code that the run's own configuration names.

    Returns:
        Step of the checkpoint.

    Raises:
        CheckpointError: There is no such run or checkpoint, it is damaged, its export contains code, or `folder`
            is not empty.
        ConfigError: The learner must be started, and the run's configuration is no longer valid, or names code that the
            user did not name.
    """
    if not (run / "config.yaml").is_file():
        raise CheckpointError(why_no_run(run, "config.yaml"))
    checkpoints = Checkpoints(run, keep=1)
    step = _choose(checkpoints, run, step)
    checkpoint = checkpoints.path(step)
    with written_aside(folder) as partial:
        try:
            if (checkpoint / EXPORT).is_dir():
                _check_data(checkpoint / EXPORT)
                shutil.copytree(checkpoint / EXPORT, partial, dirs_exist_ok=True)
            else:
                _export_by_learner(_plan_of(run, plugins, named or {}), run, checkpoint, partial)
        except (OSError, RlsdkError) as error:
            if checkpoint.is_dir():
                raise
            raise CheckpointError(deleted_text(checkpoint)) from error
    return step


def _choose(checkpoints: Checkpoints, run: Path, step: int | None) -> int:
    if step is not None and checkpoints.steps():
        checkpoints.require(step, "model")
        return step
    newest, damaged = checkpoints.newest_whole("model")
    if newest is None:
        raise CheckpointError(f"{run} has no complete checkpoint; checkpoint.every sets when they are written")
    for fault in damaged.values():
        log.warning("%s; step %d is exported, the newest intact checkpoint", fault, newest)
    return newest


def _check_data(folder: Path) -> None:
    """Refuse files that contain or name code, since the run's folder may come from someone else."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_symlink() or not file.is_dir()]
    wrong = [file for file in files if file.suffix not in _DATA or file.is_symlink() or _names_code(file)]
    if wrong:
        names = ", ".join(str(file.relative_to(folder)) for file in wrong)
        raise CheckpointError(
            f"{folder} holds {names}: only safetensors and text files are read from a run's folder, so that nothing "
            f"in it is executed. If you trust these files, pass {folder} itself as the model"
        )


def _names_code(file: Path) -> bool:
    """Return whether this file would make transformers import a module, perhaps from the hub."""
    if file.suffix != ".json":
        return False
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return True  # not JSON after all
    return isinstance(content, dict) and "auto_map" in content


def _plan_of(run: Path, plugins: Sequence[str | Path], named: Mapping[str, Any]) -> Plan:
    """Check a run's own configuration, unless it names code that the user did not name."""
    file = run / "config.yaml"
    tree, _ = read(file)
    tree = normalise(tree)
    tree["plugins"] = other_plugins(tree, plugins)
    advice = (
        "the learner must be started to write the model, but the run's configuration names code that would be "
        "executed. Read it, then pass plugin files with --plugin; for other code, use rlsdk eval or rlsdk train "
        "--mode serve with your own configuration that names it"
    )
    require_trusted(file, tree, plugins, named, advice)
    return check(resolve_paths(tree, file), (), plugins)


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder, whose files appear in `folder` on success; otherwise they are removed.

    One that an earlier, killed process left is removed first.

    Raises:
        CheckpointError: `folder` exists and is not empty, or cannot be created or written to.
    """
    # An existing folder cannot be replaced if it is a mount point or the current folder, so it is filled.
    filled = folder.is_dir()
    partial = folder / ".export.partial" if filled else folder.with_name(f".{folder.name}.partial")
    if folder.is_file():
        raise CheckpointError(f"{folder} is a file; choose an empty folder, or one that does not exist")
    if filled and any(path != partial for path in folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty; choose an empty folder, or one that does not exist")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be created: {error.strerror}") from error
    try:
        yield partial
        if filled:
            for path in list(partial.iterdir()):
                path.rename(folder / path.name)
        else:
            partial.rename(folder)
    except OSError as error:
        said = error.args[0][0][2] if isinstance(error, shutil.Error) else error  # which lists all files
        raise CheckpointError(f"{folder} cannot be written: {said}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _export_by_learner(plan: Plan, run: Path, checkpoint: Path, folder: Path) -> None:
    """Start the run's learner without a reference model, load the checkpoint, and have it export the model."""
    config = plan.config
    logs, cores = run / "logs" / "export", os.cpu_count() or 1
    with ExitStack() as stack:
        if CURRENT.get() is None:  # otherwise a server exports, which is watched, and whose processes all end with it
            stack.enter_context(watched(config.watchdog, "the export"))
            stack.enter_context(reaped())
        compiled = stack.enter_context(scratch_folder("rlsdk-export-"))
        gpus = stack.enter_context(ray_cluster(plan))
        found = layout(plan, cores, gpus, roles=["learner"])
        place = ActorSpec(
            role="learner",
            world_size=config.placement.learners,
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
            seats=found.learners,
            log_dir=logs,
            cache=compiled,
        )
        try:
            learner.load((checkpoint / LEARNER).resolve())
            learner.export(folder.resolve())
        finally:
            learner.stop()
