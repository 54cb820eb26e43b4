"""Evaluation of all checkpoints of a run, one after the other, on its held-out tasks."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsdk.checkpoints.checkpoint import Checkpoints
from rlsdk.config import check
from rlsdk.errors import CheckpointError, DamagedCheckpointError
from rlsdk.evaluation.examination import examine, model_of

log = logging.getLogger(__name__)


def bench(
    config: str | Path | Mapping[str, Any],
    *overrides: str,
    plugins: Sequence[str | Path] = (),
    began: Callable[[int], None] = lambda step: None,
) -> list[dict[str, Any]]:
    """Evaluate the model that a run started from, as step 0, and each of its checkpoints that is whole.

    Args:
        config: Configuration of the run, as for `train`.
        *overrides: `key=value` texts.
        plugins: Files of plugins.
        began: Called with the step whose evaluation begins.

    Returns:
        Content of `bench.json` in the run's folder: for each step, in order, its number and the result of `examine`.

    Raises:
        CheckpointError: The run has no checkpoint, or all are damaged.
        ConfigError: The configuration is wrong, or has no held-out tasks.
        RlsdkError: An engine, a task or a reward failed.
    """
    plan = check(config, overrides, plugins)
    checkpoints = Checkpoints(plan.folder, plan.config.checkpoint.keep)
    if not checkpoints.steps():
        raise CheckpointError(
            f"{plan.folder / 'checkpoints'} holds no checkpoint; train first, or name the run's folder"
        )
    found = []
    for step in [0, *_whole(checkpoints)]:
        began(step)
        folder = plan.folder / "bench" / f"step-{step}"
        shutil.rmtree(folder, ignore_errors=True)
        here = (f"out={json.dumps(str(folder.parent))}", f"name={json.dumps(folder.name)}")
        source = checkpoints.path(step) if step else Path(plan.config.model.path)
        with model_of(source, plugins, plan.tree) as model:
            own = check(config, (*overrides, *here, f"model.path={json.dumps(str(model))}"), plugins)
            found.append({**examine(own, pictures=0), "step": step, "model": str(source)})
    (plan.folder / "bench.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


def _whole(checkpoints: Checkpoints) -> list[int]:
    """Return the steps of the checkpoints that are whole; log a warning for each of the others."""
    found = []
    for step in checkpoints.steps():
        try:
            checkpoints.verify(step, "model")
        except DamagedCheckpointError as error:
            log.warning("%s; it is left out", error)
        else:
            found.append(step)
    if not found:
        checkpoints.newest_whole("model")  # says what is wrong with each
    return found
