"""Checkpoints of a learner's trained models: each rank writes its part, and either all ranks resume or none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsdk.contracts import TrainedRole
from rlsdk.errors import CheckpointError
from rlsdk.learners import shards
from rlsdk.learners.ranks import Ranks
from rlsdk.learners.trained import TrainedModule

Models = Mapping[TrainedRole, TrainedModule]


def save_models(
    folder: Path, models: Models, ranks: Ranks, facts: Mapping[str, Any], *, memory: Mapping[str, Any], frozen: bool
) -> None:
    """Write each rank's part of all models, and a manifest of hashes; a collective.

    Args:
        folder: Folder visible to all ranks.
        models: Trained modules by role.
        ranks: Ranks of the learner.
        facts: Settings that must be equal in `load_models`.
        memory: State of the loss components, as plain JSON, equal on all ranks; saved with the actor.
        frozen: True to save untrained parameters as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for role, trained in models.items():
        trained.save(folder / role, ranks.rank, {"memory": memory} if role == "actor" else {}, frozen=frozen)
    ranks.gather(None)  # a barrier: all files are written
    shards.write_manifest(folder, ranks.rank, ranks.world, facts)
    ranks.gather(None)


def load_models(
    folder: Path, models: Models, ranks: Ranks, facts: Mapping[str, Any], *, frozen: bool, same_ranks: bool
) -> dict[str, Any]:
    """Resume from what `save_models` wrote; files are opened only if all hashes match, and nothing is executed.

    Args:
        folder: Folder visible to all ranks.
        models: Trained modules by role.
        ranks: Ranks of the learner.
        facts: Settings that must equal those of the checkpoint.
        frozen: True if the checkpoint also holds untrained parameters of the actor.
        same_ranks: False if another number of ranks may have written it.

    Returns:
        State of the loss components.

    Raises:
        CheckpointError: A file is missing or changed, or the settings differ.
    """
    faults = ranks.gather(shards.check_manifest(folder, ranks.rank, ranks.world, facts, same_ranks=same_ranks))
    if wrong := [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault]:
        raise CheckpointError(f"checkpoint {folder} is damaged and was not opened: {'; '.join(wrong)}")
    memory: dict[str, Any] = {}
    for role, trained in models.items():
        states, fault = None, ""
        try:
            states = trained.read(folder / role, ranks.rank)
        except CheckpointError as error:
            fault = str(error)
        # If one rank fails, all must: the others would wait for it.
        if wrong := [fault for fault in ranks.gather(fault) if fault]:
            raise CheckpointError(wrong[0])
        assert states is not None
        state = trained.restore(*states, ranks.rank, strict=frozen or role != "actor")
        if role == "actor":
            memory = state.get("memory", {})
    return memory
