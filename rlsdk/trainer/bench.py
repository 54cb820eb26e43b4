"""The checkpoints of a run, evaluated one after the other on its held-out tasks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlsdk.config import check
from rlsdk.errors import CheckpointError
from rlsdk.trainer.checkpoint import Checkpoints
from rlsdk.trainer.examination import examine, model_of


def bench(
    config: str | Path | Mapping[str, Any],
    *overrides: str,
    plugins: Sequence[str | Path] = (),
    began: Callable[[int], None] = lambda step: None,
) -> list[dict[str, Any]]:
    """Evaluate the model that a run started from, as step 0, and each of its checkpoints.

    Args:
        config: The run's, as for `train`.
        *overrides: `key=value` texts.
        plugins: Files of plugins.
        began: Told the step whose evaluation begins.

    Returns:
        What `bench.json` in the run's folder holds: of each step, in order, its number and what `examine` found.

    Raises:
        CheckpointError: The run has no checkpoint.
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
    for step in [0, *checkpoints.steps()]:
        began(step)
        folder = plan.folder / "bench" / f"step-{step}"
        shutil.rmtree(folder, ignore_errors=True)
        here = (f"out={json.dumps(str(folder.parent))}", f"name={json.dumps(folder.name)}")
        source = checkpoints.path(step) if step else Path(plan.config.model.path)
        with model_of(source, plugins) as model:
            own = check(config, (*overrides, *here, f"model.path={json.dumps(str(model))}"), plugins)
            found.append({**examine(own, pictures=0), "step": step, "model": str(source)})
    (plan.folder / "bench.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found
