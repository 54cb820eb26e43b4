"""Estimate the disk space of a run before it starts, from the model's config, not from its files."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import Any

import attrs

from rlsdk import preflight
from rlsdk.config import Config, Plan
from rlsdk.config.rules import fresh_groups, steps_of_epochs
from rlsdk.contracts import SizesCheckpoints
from rlsdk.contracts.generation import DTYPE_BYTES
from rlsdk.conversion import without_weights
from rlsdk.errors import first_line
from rlsdk.storage.location import is_url

BYTES_PER_PARAMETER = 16
"""Default size of a learner's checkpoint: weights, master weights and two moments in float32."""
ROLLOUT_BYTES, PROMPT_TOKEN_BYTES, RESPONSE_TOKEN_BYTES = 400, 7, 15
"""Stored bytes per rollout, prompt token and response token: text, and compressed ids and logprobs."""
USUAL_LENGTH = 0.5
"""Expected length of a prompt or response, as a share of the maximum."""
HELD_FOR_UPLOADS = 2
"""Number of checkpoints kept longer because they are being uploaded, or waiting for it."""
LOG_BYTES_PER_STEP, LOG_BYTES_PER_ACTOR = 16 * 2**10, 2**20


@attrs.frozen(kw_only=True)
class DiskEstimate:
    """Bytes that a run will write below its folder.

    Attributes:
        parameters: Parameters of the model; None if its config could not be read.
        checkpoint: Size of one checkpoint, without an export.
        checkpoints: Maximum number of checkpoints at once: those kept, written and, for a remote folder, uploaded.
        export: Size of one exported model.
        exports: Maximum number of exports at once.
        rollouts: Size of the store of rollouts at the end of the run.
        logs: Size of logs and metrics at the end of the run.
        present: Current size of the run's folder.
        unknown: Sentences about sizes that could not be estimated and are counted as 0.
    """

    parameters: int | None = None
    checkpoint: int = 0
    checkpoints: int = 1
    export: int = 0
    exports: int = 0
    rollouts: int = 0
    logs: int = 0
    present: int = 0
    unknown: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Peak size of the run's folder."""
        return self.checkpoint * self.checkpoints + self.export * self.exports + self.rollouts + self.logs

    @property
    def needed(self) -> int:
        """Free bytes required in addition to the folder's present content."""
        return max(0, self.total - self.present)


def estimate(
    plan: Plan, *, tasks: int | None = None, download: bool = False, built: tuple[Any, str] | None = None
) -> DiskEstimate:
    """Estimate the disk space of a run.

    Args:
        plan: Checked plan.
        tasks: Total tasks of all sources, for a run whose length is given in epochs; None if not counted.
        download: Download the config of a model that is not in this machine's cache.
        built: Result of `skeleton`, if already available.
    """
    config, unknown = plan.config, []
    model, cause = skeleton(plan, download=download) if built is None else built
    parameters = checkpoint = export = None
    if model is None:
        unknown.append(f"checkpoints and exports are not counted: {cause}")
    else:
        parameters = sum(p.numel() for p in model.parameters())
        learner, dtype = plan.plugins.resolve(plan.learner), config.model.dtype
        roles = ["actor", *(["critic"] if plan.algorithm.critic else [])]
        if isinstance(learner, SizesCheckpoints):
            checkpoint = sum(learner.checkpoint_bytes(model, dtype, critic=role == "critic") for role in roles)
        else:
            checkpoint = parameters * BYTES_PER_PARAMETER * len(roles)
        if config.reference.update_every:
            narrow = config.reference.mix == 1  # otherwise it is saved in float32
            checkpoint += parameters * (DTYPE_BYTES[plan.reference.dtype] if narrow else 4)
        export = parameters * DTYPE_BYTES[dtype]
    uploaded = is_url(config.out)
    steps = config.steps
    if steps is None and tasks is not None:
        steps = steps_of_epochs(config, tasks)
    count = kept(config, steps) + 1 + (HELD_FOR_UPLOADS if uploaded else 0)
    if steps is None:
        unknown.append("rollouts and logs are not counted: the number of tasks is known only after they are read")
    present = 0
    for folder, _, files in os.walk(plan.folder):
        for file in files:
            with suppress(OSError):  # a run that still trains in the folder has removed it, or it is a broken link
                present += os.path.getsize(os.path.join(folder, file))
    return DiskEstimate(
        parameters=parameters,
        checkpoint=checkpoint or 0,
        checkpoints=count,
        export=export or 0,
        exports={"last": 1, "every": count, "never": 0}[config.checkpoint.export],
        rollouts=_rollouts(plan, steps or 0) * (2 if uploaded else 1),  # plus a copy for the upload
        logs=(steps or 0) * LOG_BYTES_PER_STEP
        + (config.placement.engines + config.placement.learners) * LOG_BYTES_PER_ACTOR,
        present=present,
        unknown=tuple(unknown),
    )


def kept(config: Config, steps: int | None) -> int:
    """Return the number of checkpoints that a run of this many steps keeps: at most `checkpoint.keep`."""
    section = config.checkpoint
    if steps is None:
        return section.keep
    return min(section.keep, ceil(steps / section.every) if section.every else 1)


def skeleton(plan: Plan, *, download: bool) -> tuple[Any, str]:
    """Build the model without its weights (on torch's meta device); None, and the reason, if that is not possible."""
    model = plan.model
    here: dict[str, Any] = {}
    if not Path(model.path).is_dir():
        here["local_files_only"] = not download or preflight.hub_is_offline()
    try:
        return without_weights(model, **here), ""
    except Exception as error:  # noqa: BLE001 - transformers raises anything for a config that it cannot use
        if here.get("local_files_only"):
            return None, f"the config of the model {model.path!r} is not in this machine's cache of the hub"
        unknown = isinstance(error, KeyError)  # of a table of transformers, such as that of rope types
        why = f"it names {error}, which transformers does not know" if unknown else first_line(error)
        return None, f"the model {model.path!r} cannot be built from its config: {why}"


def _rollouts(plan: Plan, steps: int) -> int:
    """Return the bytes of rollouts that a whole run stores in its folder."""
    config = plan.config
    every = config.save_rollouts
    if not every or config.rollout.storage.url is not None:
        return 0
    prompt, response = config.max_prompt_tokens, config.sampling.max_tokens
    if not plan.plugins.component(plan.workflow).one_answer:
        response = max(response, config.model.max_length - prompt)
    length = PROMPT_TOKEN_BYTES * prompt + RESPONSE_TOKEN_BYTES * response
    rollouts = steps // every * fresh_groups(config) * (config.group_size if plan.sampled else 1)
    return int(rollouts * (ROLLOUT_BYTES + USUAL_LENGTH * length))


def in_words(plan: Plan, found: DiskEstimate) -> dict[str, str | list[str]]:
    """Describe an estimate: name -> text."""
    size, config = preflight.size_text, plan.config
    free = shutil.disk_usage(preflight.existing_parent(plan.folder)).free
    words: dict[str, str | list[str]] = {
        "needed": f"{size(found.needed)}, of {size(free)} free"
        + (f" (the run's folder holds {size(found.present)} already)" if found.present else "")
    }
    if found.parameters is not None:
        words["model"] = f"{found.parameters:,} parameters in {config.model.dtype}"
        passing = 1 + (HELD_FOR_UPLOADS if is_url(config.out) else 0)
        purpose = f"{found.checkpoints - passing} kept, {passing} while written"
        purpose += " or uploaded" if is_url(config.out) else ""
        words["checkpoints"] = f"{found.checkpoints} × {size(found.checkpoint)} ({purpose})"
        words["exports"] = f"{found.exports} × {size(found.export)}" if found.exports else "none"
    if found.rollouts:
        words["rollouts"] = f"{size(found.rollouts)}, if answers have half of the maximum length"
    words["logs"] = size(found.logs)
    return {**words, **({"unknown": list(found.unknown)} if found.unknown else {})}
