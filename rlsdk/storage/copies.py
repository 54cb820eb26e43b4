"""Checkpoints in a remote folder, each with a copy of the run's other files at that time.

A remote run looks like a local one, with three differences. A checkpoint has a manifest, `checkpoints/step-N.json`,
which is written last; without it, the checkpoint does not count. `checkpoints/step-N.run/` holds the run's own files as
they were when the checkpoint was written. The lock is a file in the folder.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import uuid
from pathlib import Path
from typing import Any

import attrs

from rlsdk.errors import CheckpointError, DamagedCheckpointError, RunError, other_format
from rlsdk.storage.remote import RemoteFolder

log = logging.getLogger(__name__)
FORMAT = 1
"""Format of manifests."""
_MANIFEST = re.compile(r"checkpoints/step-(\d+)\.json")
_STEP = re.compile(r"checkpoints/step-(\d+)(\.run|\.json)?(/.*)?")


@attrs.frozen
class Copy:
    """A fully uploaded checkpoint.

    Attributes:
        step: Training step of the checkpoint.
        id: Id that distinguishes uploads of the same step.
        files: File sizes in bytes, by name below `checkpoints/`.
    """

    step: int
    files: dict[str, int]
    id: str = attrs.field(factory=lambda: uuid.uuid4().hex)

    def encode(self) -> bytes:
        """Return the content of the manifest."""
        return json.dumps({"format": FORMAT, **attrs.asdict(self)}).encode()


def copies(remote: RemoteFolder) -> dict[int, Copy]:
    """Return the complete checkpoints by step, ascending.

    Raises:
        CheckpointError: Another version of rlsdk wrote one.
    """
    steps = sorted(int(m[1]) for name in remote.names("checkpoints") if (m := _MANIFEST.fullmatch(name)))
    found = {}
    for step in steps:
        name = _manifest(step)
        content = remote.read(name)
        if content is None:  # the run that writes there has deleted it since it was listed
            continue
        try:
            manifest: dict[str, Any] = json.loads(content)
            if int(manifest["format"]) != FORMAT:
                raise CheckpointError(other_format(f"{remote.url}/{name}", manifest["format"], FORMAT))
            files = {str(file): int(size) for file, size in manifest["files"].items()}
            found[step] = Copy(int(manifest["step"]), files, str(manifest["id"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s/%s is not a manifest, and its checkpoint is ignored: %s", remote.url, name, error)
    return found


def publish(remote: RemoteFolder, copy: Copy) -> None:
    """Write the manifest of a checkpoint whose files are all uploaded, so that it counts."""
    remote.write(_manifest(copy.step), copy.encode())


def withdraw(remote: RemoteFolder, *steps: int) -> None:
    """Delete checkpoints, the manifest of each first."""
    for step in steps:
        remote.remove(_manifest(step))
        remote.remove_below(f"checkpoints/step-{step}")
        remote.remove_below(f"checkpoints/step-{step}.run")


def remove_unfinished(remote: RemoteFolder, *steps: int) -> None:
    """Delete the files of unfinished uploads, and the checkpoints of these steps, if there are any."""
    names = remote.names("checkpoints")
    whole = copies(remote).keys() - {*steps}
    left = {int(m[1]) for name in names if (m := _STEP.fullmatch(name))} - whole
    withdraw(remote, *sorted(left))


def fetch(remote: RemoteFolder, copy: Copy, folder: Path, *, checkpoint: bool = True) -> None:
    """Download a checkpoint into a run's folder: `checkpoints/step-N`, and the run's own files.

    Args:
        remote: Remote folder of the run.
        copy: The checkpoint.
        folder: Local folder of the run.
        checkpoint: False to download only the run's own files.

    Raises:
        DamagedCheckpointError: A file is missing, or its size differs from the manifest's.
        RunError: The disk of the local folder is full.
    """
    prefix, run = f"step-{copy.step}/", f"step-{copy.step}.run/"
    for name, size in copy.files.items():
        if name.startswith(run):
            file = folder / name.removeprefix(run)
        elif checkpoint and name.startswith(prefix):
            file = folder / "checkpoints" / name
        else:
            continue
        if not file.resolve().is_relative_to(folder.resolve()):
            raise DamagedCheckpointError(f"{remote.url}/{_manifest(copy.step)} names a file outside the run: {name}")
        try:
            remote.download(f"checkpoints/{name}", file)
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{remote.url}/checkpoints/{name} is missing") from error
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            mib = -(-sum(copy.files.values()) // 2**20)
            raise RunError(f"the disk of {folder} is full: {remote.url} at step {copy.step} has {mib:,} MiB") from error
        if (written := file.stat().st_size) != size:
            raise DamagedCheckpointError(
                f"{remote.url}/checkpoints/{name} has {written} bytes; its manifest says {size}"
            )


def _manifest(step: int) -> str:
    return f"checkpoints/step-{step}.json"
