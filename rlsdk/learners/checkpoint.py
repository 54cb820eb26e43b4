"""Checkpoints of learners: each rank writes its part, and files are opened only if the manifests' hashes match."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlsdk.contracts import TrainedRole
from rlsdk.errors import CheckpointError, DamagedCheckpointError
from rlsdk.learners.ranks import Ranks
from rlsdk.learners.trained import TrainedModule

_PREFIX = "manifest-"
_OF_EARLIER_VERSIONS = {"weight_decay_on": "all", "optimizer": "adamw"}
"""Settings that manifests of earlier versions do not name, as those versions had them."""
_SHOWN = 80
"""Maximum characters of an invalid manifest in a message."""
_CHUNK = 2**23
"""Bytes per read."""
Seen = Callable[[int], None]
"""Callback that receives the number of bytes just hashed, called from several threads."""


def write_manifest(folder: Path, rank: int, world: int, facts: Mapping[str, Any]) -> None:
    """Hash this rank's share of the files in `folder`; called on every rank once all files are written.

    Args:
        folder: Folder visible to all ranks.
        rank: Rank of this process.
        world: Number of ranks that share the work.
        facts: Settings that a later `check_manifest` must find equal.
    """
    mine = _files(folder)[rank::world]
    content = {"world": world, "facts": dict(facts), "files": hash_files(folder, mine)}
    (folder / f"{_PREFIX}{rank}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def check_manifest(folder: Path, rank: int, world: int, facts: Mapping[str, Any], *, same_ranks: bool = True) -> str:
    """Compare this rank's share of the files with the manifest.

    Args:
        folder: Folder visible to all ranks.
        rank: Rank of this process.
        world: Number of ranks that share the work.
        facts: Settings that must equal those of the manifest.
        same_ranks: False if a different number of ranks may have written the files.

    Returns:
        Description of the damage; empty if there is none. Load nothing until all ranks have reported none.

    Raises:
        CheckpointError: The manifest is missing, or belongs to a run with different settings.
    """
    first = _read(folder, 0)
    if fault := _other_settings(folder, first, {**({"ranks": world} if same_ranks else {}), **facts}):
        raise CheckpointError(fault)
    shares = [_read(folder, r)["files"] for r in range(first["world"])]
    mine = {name: digest for share in shares[rank::world] for name, digest in share.items()}
    return _misplaced(folder, shares) or find_changed(folder, mine)


def find_other_settings(folder: Path, wanted: Mapping[str, Any]) -> str:
    """Compare settings with those of the learner that wrote a checkpoint.

    Args:
        folder: Folder that the ranks wrote to.
        wanted: Name -> value of settings that must be equal; `ranks` is their number.

    Returns:
        Sentence that names the settings that differ; empty if there are none, or no manifest.

    Raises:
        DamagedCheckpointError: The manifest cannot be read.
    """
    if not (folder / f"{_PREFIX}0.json").exists():
        return ""
    return _other_settings(folder, _read(folder, 0), wanted)


def _other_settings(folder: Path, first: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Compare settings with those in the manifest of rank 0; see `find_other_settings`."""
    written = {**_OF_EARLIER_VERSIONS, "ranks": first["world"], **first["facts"]}
    off = [f"{k} {written.get(k)!r} there, {wanted[k]!r} here" for k in wanted if written.get(k) != wanted[k]]
    if not off:
        return ""
    ways = "restore them, or start another run with name=…"
    return f"checkpoint {folder} was written by a learner with different settings: {'; '.join(off)}; {ways}"


def ranks_of(folder: Path) -> int | None:
    """Return the number of ranks that wrote a checkpoint; None if its learner writes no manifest.

    Raises:
        DamagedCheckpointError: The manifest cannot be read.
    """
    return _read(folder, 0)["world"] if (folder / f"{_PREFIX}0.json").exists() else None


def find_damage(folder: Path, seen: Seen | None = None) -> str:
    """Compare all files of a folder with the manifests of all ranks, in one process.

    Args:
        folder: Folder that the ranks wrote to.
        seen: Callback that receives the number of bytes just read.

    Returns:
        Description of the damage; empty if there is none or no manifest, since not every learner writes one.

    Raises:
        DamagedCheckpointError: A manifest cannot be read.
    """
    if not any(folder.glob(f"{_PREFIX}*.json")):
        return ""
    shares = [_read(folder, rank)["files"] for rank in range(_read(folder, 0)["world"])]
    return _misplaced(folder, shares) or find_changed(
        folder, {k: v for share in shares for k, v in share.items()}, seen
    )


def _misplaced(folder: Path, shares: Sequence[Mapping[str, str]]) -> str:
    expected, present = {name for share in shares for name in share}, set(_files(folder))
    if present == expected:
        return ""
    return f"missing {sorted(expected - present)}, not in the manifest {sorted(present - expected)}"


def find_changed(folder: Path, digests: Mapping[str, str], seen: Seen | None = None) -> str:
    """Compare files with their hashes and return the mismatches as text, empty if there are none."""
    now = hash_files(folder, digests, seen)
    changed = [name for name, digest in digests.items() if now[name] != digest]
    return f"changed since they were written: {', '.join(changed)}" if changed else ""


def hash_files(folder: Path, names: Iterable[str], seen: Seen | None = None) -> dict[str, str]:
    """Compute the SHA-256 of files below a folder in parallel.

    Args:
        folder: The folder.
        names: Paths of the files, relative to the folder.
        seen: Callback that receives the number of bytes just read.
    """

    def digest(name: str) -> str:
        sha256 = hashlib.sha256()
        with (folder / name).open("rb") as file:
            while chunk := file.read(_CHUNK):
                sha256.update(chunk)  # releases the GIL
                if seen is not None:
                    seen(len(chunk))
        return sha256.hexdigest()

    names = list(names)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


def _read(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"{_PREFIX}{rank}.json"
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(
            f"checkpoint {folder}: the manifest of rank {rank} cannot be read: {error}"
        ) from error
    match content:
        case {"world": int(world), "facts": dict(), "files": dict(files)} if world >= 1 and world is not True:
            if all(isinstance(digest, str) for digest in files.values()):
                return content
    raise DamagedCheckpointError(
        f"{path} is not a manifest: expected an object with the number of ranks under `world`, an object under "
        f"`facts`, and names with hashes under `files`; got {json.dumps(content)[:_SHOWN]}"
    )


def _files(folder: Path) -> list[str]:
    names = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(name for name in names if not name.startswith(_PREFIX))


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
    write_manifest(folder, ranks.rank, ranks.world, facts)
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
        same_ranks: False if a different number of ranks may have written it.

    Returns:
        State of the loss components.

    Raises:
        CheckpointError: A file is missing or changed, or the settings differ.
    """
    faults = ranks.gather(check_manifest(folder, ranks.rank, ranks.world, facts, same_ranks=same_ranks))
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
