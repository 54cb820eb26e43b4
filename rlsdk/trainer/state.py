"""The state of a trainer: taken for a checkpoint, and restored from one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlsdk.checkpoints.checkpoint import LEARNER
from rlsdk.runlog.store import RolloutStore
from rlsdk.runlog.tables import Entry
from rlsdk.trainer.ledger import replayed_entry, waiting_entry
from rlsdk.types import Group

if TYPE_CHECKING:
    from rlsdk.trainer.trainer import Trainer

log = logging.getLogger(__name__)


async def snapshot(trainer: Trainer) -> tuple[dict[str, Any], list[Entry]]:
    """Return the state of a run as plain JSON, and the groups that its checkpoint refers to.

    These are the groups that wait for the trainer, and those that may be trained on again.
    """
    found = await trainer.rollouts.snapshot()
    state = {
        **found.state,
        "replay": trainer.replay.state(),
        "components": trainer.credit.state(),
        "learning": trainer.monitor.state(),
        "counters": trainer.counters.state(),
        "plugins": trainer.plan.code,
        "models": trainer.base_models,
        "data": trainer.data_files,
    }
    waiting = [waiting_entry(record, trainer.version) for record in found.waiting]
    return state, [*waiting, *(replayed_entry(used, trainer.version) for used in trainer.replay.held)]


def write_checkpoint(trainer: Trainer, state: dict[str, Any], *, last: bool) -> Path:
    """Write a checkpoint with the learner's files and, if configured, an export."""
    wanted = trainer.plan.config.checkpoint.export

    def write(folder: Path) -> None:
        trainer.learner.save(folder / LEARNER)
        if wanted == "every" or (wanted == "last" and last):
            trainer.learner.export(folder / "export")

    return trainer.checkpoints.save(trainer.version, state, write)


async def restore(trainer: Trainer, step: int, store: RolloutStore | None) -> None:
    """Restore a trainer, its rollouts, learner and rollout store from a checkpoint."""
    state = trainer.checkpoints.read(step)
    replay, kept = state.get("replay", ()), state["production"].get("kept", ())
    await asyncio.to_thread(trainer.learner.load, trainer.checkpoints.path(step) / LEARNER)
    trainer.credit.restore(state["components"])
    trainer.monitor.restore(state.get("learning", {"taught": step, "empty": 0}))
    trainer.counters.restore(state.get("counters", {}))
    groups: Mapping[int, Group] = {}
    if store is not None:
        waiting = {n: ("completed", None, 0) for *_, n in kept}
        used = {u["number"]: ("trained", u["step"], u["uses"]) for u in replay}
        places = {n: (source, position) for source, position, n in kept} | trainer.replay.places(replay)
        tasks = await trainer.rollouts.tasks(places)
        # Delete the rows of later steps first, since their record numbers are reused.
        await asyncio.to_thread(store.rewind, step, {**waiting, **used})
        groups = await asyncio.to_thread(store.recall, tasks, step)
    back, again = await trainer.rollouts.restore(step, state, {n: groups[n] for *_, n in kept if n in groups})
    trainer.replay.restore(replay, groups)
    trainer.version = step
    log.info(
        "restored %d groups that were waiting at the checkpoint; %d unfinished tasks will be sampled again", back, again
    )
    log.info("continuing from step %d", step)
    if not trainer.sync_due:
        log.warning(
            "step %d is between two weight syncs (rollout.sync_interval=%d): the next rollouts are sampled with its "
            "weights, and not with the older ones that the run would have used without the interruption",
            step,
            trainer.plan.config.rollout.sync_interval,
        )
