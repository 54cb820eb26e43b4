"""Compilation in actors: what it needs, and how later runs keep programs of torch, Triton, vLLM and DeepSpeed."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

from rlsdk.contracts import ActorSpec

LEAST_ROOM = 2**30
"""Bytes that must be free for the user's cache to be used: a run must not end because a home is full."""


def compiler_programs() -> tuple[str, ...]:
    """Return the compiler that `torch.compile` calls, from `CXX` as torch parses it."""
    return (os.environ.get("CXX", "g++"),)


def compiler_environment(place: ActorSpec, *, compiled: bool) -> dict[str, str]:
    """Return the variables of torch's compiler; those of engines and learner must be equal to fork from one process.

    Args:
        place: Placement of the actor.
        compiled: True if it compiles its models.
    """
    if place.device != "cpu":
        return {}
    if compiled:
        return {"TORCHINDUCTOR_COMPILE_THREADS": str(place.threads)}
    return {"TORCHDYNAMO_DISABLE": "1"}  # DeepSpeed's import of the compiler takes over a second


def keep_compiled(component: Any, place: ActorSpec) -> ActorSpec:
    """Keep what this process compiles in the cache of its user, in a folder that no other process uses until it ends.

    Nothing changes without a folder of the run for it (`place.cache`), if another run's actor of this name uses the
    user's, or if that has no room or others may write to it.

    Args:
        component: Engine or learner of this process.
        place: Its placement.

    Returns:
        The placement with that folder, after the environment variables that name it were set.
    """
    folder = _reserved(Path(place.cache).name) if place.cache else None
    if folder is None:
        return place
    for lock in folder.glob("extensions/**/lock"):  # of a build that was killed, for which others would wait forever
        lock.unlink()
    place = attrs.evolve(place, cache=str(folder))
    os.environ.update({k: v for k, v in component.environment(place).items() if v.startswith(f"{folder}{os.sep}")})
    return place


@cache
def _reserved(name: str) -> Path | None:
    """Lock a folder for the rest of this process; None if it cannot be had."""
    import fcntl  # not on Windows

    import platformdirs

    try:
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        processor = []
    # Programs may use all instructions of the processor that they were compiled on; machines often share homes.
    instructions = sorted({line for line in processor if line.startswith(("model name", "flags", "Features"))})
    parts = (*instructions, platform.machine(), sys.version, metadata.version("torch"))
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    root = platformdirs.user_cache_path("rlsdk") / f"compiled-{key}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022 or shutil.disk_usage(root).free < LEAST_ROOM:
            return None
        (root / name).mkdir(exist_ok=True)
        fcntl.flock(os.open(root / name, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the process ends
    except OSError:
        return None
    return root / name
