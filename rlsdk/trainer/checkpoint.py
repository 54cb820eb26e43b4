"""Checkpoints: written aside, synced to the disk, renamed. One that did not finish is never found."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlsdk.errors import CheckpointError, LearnerError

FORMAT = 2
_NOTHING_LEFT = 2**20
"""Bytes below which a disk is full: what did not fit is not always counted."""


class Checkpoints:
    """The folder `checkpoints/` of a run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder / "checkpoints"
        self._keep = max(keep, 1)

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, ascending."""
        named = (re.fullmatch(r"step-(\d+)", p.name) for p in self._folder.glob("step-*"))
        return sorted(int(m.group(1)) for m in named if m)

    def path(self, step: int) -> Path:
        """Folder of the checkpoint of a step."""
        return self._folder / f"step-{step}"

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: dict[str, Any], write: Callable[[Path], None]) -> Path:
        """Write a checkpoint.

        Args:
            step: Steps done.
            state: Plain JSON.
            write: Called with the folder to write everything else into.

        Raises:
            CheckpointError: It cannot be written; the ones before stand untouched.
        """
        final, partial = self.path(step), self._folder / f".step-{step}.partial"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for stale in self._folder.glob(".step-*.partial"):
                shutil.rmtree(stale)
            partial.mkdir()
            write(partial)
            (partial / "state.json").write_text(json.dumps({"format": FORMAT, "step": step, **state}), encoding="utf-8")
            _sync(partial)
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            _sync_folder(self._folder)
        except (OSError, LearnerError) as error:
            cannot = self._cannot(step, error)  # looks at the disk, which the next line frees
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(cannot) from error
        for old in self.steps()[: -self._keep]:
            shutil.rmtree(self.path(old))
        return final

    def _cannot(self, step: int, error: Exception) -> str:
        kept = self.latest()
        last = f"the checkpoint of step {kept} is kept" if kept is not None else "there is no earlier checkpoint"
        # A learner writes from processes of its own, through libraries that do not say why they failed.
        full = getattr(error, "errno", None) == errno.ENOSPC or shutil.disk_usage(self._folder).free < _NOTHING_LEFT
        what = "the disk is full" if full else str(error)
        return (
            f"the checkpoint of step {step} cannot be written to {self._folder}: {what}; {last}. Free space, or choose "
            "another folder with out=…, then go on with --resume"
        )

    def read(self, step: int) -> dict[str, Any]:
        """The state of a checkpoint.

        Raises:
            CheckpointError: It is missing, damaged or of another format.
        """
        path = self.path(step) / "state.json"
        try:
            state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"checkpoint {self.path(step)} cannot be read: {error}") from error
        if state.get("format") != FORMAT:
            raise CheckpointError(
                f"checkpoint {self.path(step)} has format {state.get('format')}; this rlsdk reads {FORMAT}"
            )
        return state

    def drop_after(self, step: int) -> None:
        """Remove checkpoints behind a step (a run that starts anew in the same folder)."""
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.path(later))


def _sync(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for name in files:
            with (Path(root) / name).open("rb") as file:
                os.fsync(file.fileno())
        _sync_folder(Path(root))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
