"""A manifest of the files of a checkpoint: shards are pickles, opened only when their hashes are those written."""

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
    first = _read(folder, 0)
    written, wanted = {"ranks": first["world"], **first["facts"]}, {"ranks": world, **facts}
    if off := [f"{k} {written.get(k)!r} there, {wanted[k]!r} here" for k in wanted if written.get(k) != wanted[k]]:
        raise CheckpointError(f"checkpoint {folder} is of a learner that was set up otherwise: {'; '.join(off)}")
    expected = {name for r in range(world) for name in _read(folder, r)["files"]}
    found = set(_files(folder))
    if found != expected:
        return f"missing {sorted(expected - found)}, not in the manifest {sorted(found - expected)}"
    changed = [name for name, digest in _read(folder, rank)["files"].items() if _hash(folder / name) != digest]
    return f"changed since they were written: {', '.join(changed)}" if changed else ""


def _read(folder: Path, rank: int) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((folder / f"{_PREFIX}{rank}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder}: the manifest of rank {rank} cannot be read: {error}") from error
    return content


def _files(folder: Path) -> list[str]:
    names = (p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    return sorted(name for name in names if not name.startswith(_PREFIX))


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
