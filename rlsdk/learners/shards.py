"""A manifest of the files of a checkpoint: shards are pickles, so they are opened only when their hashes are those written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlsdk.errors import CheckpointError

_PREFIX = "manifest-"


def write_manifest(folder: Path, rank: int, world: int, facts: Mapping[str, Any]) -> None:
    """Hash this rank's share of the files of `folder`; called on every rank when all files are written.

    Args:
        folder: That all ranks see.
        rank: Of this process.
        world: How many share the work.
        facts: What a later `check_manifest` must find equal.
    """
    mine = _files(folder)[rank::world]
    content = {"world": world, "facts": dict(facts), "files": {name: _hash(folder / name) for name in mine}}
    (folder / f"{_PREFIX}{rank}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def check_manifest(folder: Path, rank: int, world: int, facts: Mapping[str, Any]) -> str:
    """Compare this rank's share of the files with the manifest.

    Returns:
        What is wrong; empty if nothing is. Nothing may be opened before every rank found nothing.

    Raises:
        CheckpointError: There is no manifest, or it is of a run that was set up otherwise.
    """
    try:
        content = json.loads((folder / f"{_PREFIX}{rank}.json").read_text(encoding="utf-8"))
        first = json.loads((folder / f"{_PREFIX}0.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder}: no manifest of rank {rank} that can be read: {error}") from error
    written, wanted = {"ranks": first["world"], **first["facts"]}, {"ranks": world, **facts}
    if off := [f"{k} {written.get(k)!r} there, {wanted[k]!r} here" for k in wanted if written.get(k) != wanted[k]]:
        raise CheckpointError(f"checkpoint {folder} is of a learner that was set up otherwise: {'; '.join(off)}")
    expected = {n for r in range(world) for n in json.loads((folder / f"{_PREFIX}{r}.json").read_text(encoding="utf-8"))["files"]}
    found = set(_files(folder))
    if found != expected:
        return f"missing {sorted(expected - found)}, not in the manifest {sorted(found - expected)}"
    changed = [name for name, digest in content["files"].items() if _hash(folder / name) != digest]
    return f"changed since they were written: {', '.join(changed)}" if changed else ""


def _files(folder: Path) -> list[str]:
    names = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(name for name in names if not name.startswith(_PREFIX))


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
