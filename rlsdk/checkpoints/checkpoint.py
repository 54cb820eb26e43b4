"""Checkpoints, written to a temporary folder, synced and then renamed, so an unfinished one is never found."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from rlsdk.errors import CheckpointError, DamagedCheckpointError, LearnerError, other_format
from rlsdk.learners.checkpoint import Seen, find_changed, find_damage, hash_files
from rlsdk.preflight import existing_parent, size_text
from rlsdk.runlog.logs import log_console

log = logging.getLogger(__name__)
FORMAT = 2
LEARNER = "learner"
"""Folder within a checkpoint that the learner writes."""
EXPORT = "export"
"""Folder within a checkpoint that holds the model in the format of transformers."""
SECTIONS = ("plugins", "tasks", "production", "components")
"""Keys of `state.json` that resuming requires; each holds an object."""
_REPLACED = ".replaced.partial"
"""Suffix of a checkpoint while a new one of the same step replaces it."""
_NOTHING_LEFT = 2**20
"""Free bytes below which a disk counts as full: it may not be exactly 0 when a write fails."""
_SHOWN = 80
"""Maximum characters of a wrong file in a message."""
_LARGE = 2**28
"""Minimum size in bytes for which the progress of hashing is shown."""
_FREE_SPACE = "Free space, or choose another folder with out=…"
_BAD_DISK = "The disk reports a hardware error (see `dmesg`): copy the run's folder to another disk"
_FILES = "Raise the limit of open files (`ulimit -n`)"
REMEDIES = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: f"The quota is used up. {_FREE_SPACE}",
    errno.EFBIG: "Lift the limit of file sizes (`ulimit -f unlimited`)",
    errno.EROFS: "The file system is read-only: make it writable again (after an error of the disk, see `dmesg`)",
    errno.EACCES: "Give this user permission to write there",
    errno.EIO: _BAD_DISK,
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
}
"""Remedies for errors of the operating system, by `errno`."""


Part = Literal["learner", "model"]
"""Parts of a checkpoint."""


class Checkpoints:
    """The folder `checkpoints/` of a run.

    Args:
        folder: Folder of the run.
        keep: Number of checkpoints to keep; older ones are deleted.
        saved: Called with the step of a new checkpoint, before older ones are deleted.
    """

    def __init__(self, folder: Path, keep: int, saved: Callable[[int], None] | None = None) -> None:
        self._folder = folder / "checkpoints"
        self._keep = max(keep, 1)
        self._saved = saved

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

    def oldest(self) -> int:
        """Step of the oldest complete checkpoint; 0 if there is none."""
        return min(self.steps(), default=0)

    def save(self, step: int, state: dict[str, Any], write: Callable[[Path], None]) -> Path:
        """Write a checkpoint.

        Args:
            step: Number of completed training steps.
            state: State of the run as plain JSON values.
            write: Called with a folder, to write everything else into it.

        Raises:
            CheckpointError: The checkpoint cannot be written; earlier ones are untouched.
        """
        final, partial = self.path(step), self._folder / f".step-{step}.partial"
        replaced = self._folder / f".step-{step}{_REPLACED}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._remove_unfinished()
            partial.mkdir()
            write(partial)
            whole = {"format": FORMAT, "step": step, "files": _sizes(partial / LEARNER), **state}
            whole["export"] = hash_files(partial / EXPORT, _sizes(partial / EXPORT))
            text = json.dumps({**whole, "sha256": _digest(whole)})
            (partial / "state.json").write_text(text, encoding="utf-8")
            for root, _, files in os.walk(partial):
                for path in (*(Path(root) / name for name in files), Path(root)):
                    _sync(path)
            if final.exists():  # deleting takes a while, and one complete checkpoint must exist at all times
                final.rename(replaced)
            partial.rename(final)
            _sync(self._folder)
            shutil.rmtree(replaced, ignore_errors=True)
        except (OSError, LearnerError) as error:
            if replaced.exists() and not final.exists():
                replaced.rename(final)
            cannot = self._cannot(step, error)  # checks the free space, before the next line frees some
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(cannot) from error
        if self._saved is not None:
            self._saved(step)
        for old in self.steps()[: -self._keep]:
            # Rename first, so that a partly deleted folder is not taken for a checkpoint.
            _remove(self.path(old), self._folder / f".step-{old}.removed.partial")
        return final

    def recover(self) -> list[int]:
        """Restore checkpoints that a kill interrupted while they were being replaced, and delete half-written ones.

        Only for the process that writes checkpoints to this folder; another process may be replacing one right now.

        Returns:
            Steps of the restored checkpoints.
        """
        found = []
        for replaced in sorted(self._folder.glob(f".step-*{_REPLACED}")):
            step = int(replaced.name.removeprefix(".step-").removesuffix(_REPLACED))
            if not self.path(step).exists():
                replaced.rename(self.path(step))
                found.append(step)
        self._remove_unfinished()
        return found

    def _remove_unfinished(self) -> None:
        for stale in self._folder.glob(".step-*.partial"):
            _remove(stale)

    def _cannot(self, step: int, error: Exception) -> str:
        kept = self.latest()
        last = f"the checkpoint of step {kept} is kept" if kept is not None else "there is no earlier checkpoint"
        # Learners write in other processes, through libraries that report the cause only as text or not at all.
        code = getattr(error, "errno", None) or next((c for c in REMEDIES if os.strerror(c) in str(error)), None)
        place = existing_parent(self._folder)
        if code is None and os.statvfs(place).f_flag & os.ST_RDONLY:
            code = errno.EROFS
        elif code is None and shutil.disk_usage(place).free < _NOTHING_LEFT:
            code = errno.ENOSPC
        what = f"the disk is full ({free_text(place)})" if code == errno.ENOSPC else str(error)
        return (
            f"the checkpoint of step {step} cannot be written to {self._folder}: {what}; {last}. "
            f"{REMEDIES.get(code or 0, 'Repair this')}, then continue with --resume"
        )

    def newest_whole(self, part: Part = "learner") -> tuple[int | None, dict[int, str]]:
        """Find the newest checkpoint whose files are intact; see `verify` for `part`.

        Returns:
            Its step, or None without any checkpoint; and a mapping step -> fault of the damaged newer ones.

        Raises:
            CheckpointError: All checkpoints are damaged, or one has another format.
        """
        damaged: dict[int, str] = {}
        # List them each time: a run that trains at this moment writes newer checkpoints, and deletes older ones.
        while steps := [step for step in self.steps() if step not in damaged]:
            step = steps[-1]
            try:
                self.verify(step, part)
            except DamagedCheckpointError as error:
                if self.path(step).exists():  # otherwise the run has just deleted it
                    damaged[step] = str(error)
            else:
                return step, damaged
        if damaged:
            faults = [f"  - {fault}" for fault in damaged.values()]
            ways = "restore one from a backup, or start again with --overwrite or another name=…"
            raise CheckpointError("\n".join([f"no checkpoint in {self._folder} is intact:", *faults, ways]))
        return None, {}

    def require(self, step: int, part: Part = "learner") -> None:
        """Raise unless the checkpoint of a step exists and is intact.

        Raises:
            CheckpointError: There is no checkpoint of this step, or one of its files is missing or changed.
        """
        steps = self.steps()
        if step not in steps:
            known = f"there are: {', '.join(map(str, steps))}" if steps else "there are none"
            raise CheckpointError(f"{self._folder} has no checkpoint of step {step}; {known}")
        try:
            self.verify(step, part)
        except DamagedCheckpointError as error:
            if not self.path(step).exists():
                raise CheckpointError(deleted_text(self.path(step))) from error
            others = ", ".join(str(other) for other in steps if other != step)
            raise DamagedCheckpointError(f"{error}; other steps there: {others or 'none'}") from error

    def verify(self, step: int, part: Part = "learner") -> None:
        """Compare the files of a checkpoint with the hashes recorded when it was written.

        Args:
            step: Step of the checkpoint.
            part: Files to compare: `learner` for those needed to resume; `model` for the export or, without one, the
                learner files from which it can be written.

        Raises:
            DamagedCheckpointError: A file is missing or changed.
            CheckpointError: The checkpoint has another format.
        """
        state = self.read(step)
        try:
            if part == "model" and (state.get("export") or (self.path(step) / EXPORT).is_dir()):
                fault = self._export_fault(step, state)
            else:
                fault = self._learner_fault(step, state)
        except OSError as error:
            raise self._unreadable(step, error) from error
        if fault:
            raise DamagedCheckpointError(f"checkpoint {self.path(step)} is damaged: {fault}")

    def _learner_fault(self, step: int, state: Mapping[str, Any]) -> str:
        files, learner = state.get("files", {}), self.path(step) / LEARNER
        sizes = _sizes(learner)
        if short := [name for name, size in files.items() if sizes.get(name) != size]:
            return f"missing, or not as long as written: {', '.join(short)}"
        with _shown(learner, sum(sizes.values())) as seen:
            return find_damage(learner, seen)

    def _export_fault(self, step: int, state: Mapping[str, Any]) -> str:
        digests, folder = state.get("export"), self.path(step) / EXPORT
        if not digests:  # checkpoints of rlsdk 0.1 have no hashes of their export
            return ""
        sizes = _sizes(folder)
        if off := sorted(digests.keys() ^ sizes.keys()):
            return f"missing from {EXPORT}, or added to it: {', '.join(off)}"
        with _shown(folder, sum(sizes.values())) as seen:
            return find_changed(folder, digests, seen)

    def read(self, step: int) -> dict[str, Any]:
        """Read the state of a checkpoint.

        Raises:
            DamagedCheckpointError: `state.json` is missing or has been changed.
            CheckpointError: The checkpoint has another format.
        """
        path = self.path(step) / "state.json"
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise self._unreadable(step, error) from error
        if not isinstance(state, dict):
            raise DamagedCheckpointError(f"{path}: expected a JSON object, got {json.dumps(state)[:_SHOWN]}")
        written = state.get("format")
        if not isinstance(written, int):  # no version of rlsdk wrote this
            raise DamagedCheckpointError(f"{path}: expected a number under format, got {json.dumps(written)[:_SHOWN]}")
        if written != FORMAT:
            raise CheckpointError(other_format(f"checkpoint {self.path(step)}", written, FORMAT))
        digest = state.pop("sha256", None)  # checkpoints of earlier versions have none
        if digest is not None and digest != _digest(state):
            raise DamagedCheckpointError(f"{path} was changed after it was written")
        if wrong := [name for name in SECTIONS if not isinstance(state.get(name), dict)]:
            raise DamagedCheckpointError(f"{path}: expected a JSON object under {', '.join(wrong)}")
        return state

    def _unreadable(self, step: int, error: Exception) -> CheckpointError:
        # If a checkpoint is unreadable for lack of permission, do not fall back to an older one.
        kind = CheckpointError if isinstance(error, PermissionError) else DamagedCheckpointError
        return kind(f"checkpoint {self.path(step)} cannot be read: {error}")

    def set_aside(self, step: int, why: Literal["damaged", "superseded"]) -> Path:
        """Rename a checkpoint to an unused name, so that no run resumes from it; return its new path."""
        names = (f"step-{step}.{why}", *(f"step-{step}.{why}-{again}" for again in range(2, 1000)))
        aside = next(path for path in map(self._folder.joinpath, names) if not path.exists())
        return self.path(step).rename(aside)


@contextmanager
def _shown(folder: Path, size: int) -> Iterator[Seen | None]:
    """Show a progress bar if many bytes are to be hashed."""
    if size < _LARGE:
        yield None
        return
    console = log_console()
    console.print(f"checking the hashes of {folder}, {size / 2**30:.1f} GiB", highlight=False, soft_wrap=True)
    columns = (TextColumn("checking"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield partial(progress.advance, progress.add_task("", total=size))


def deleted_text(checkpoint: Path) -> str:
    """Describe the fault of a checkpoint that disappeared while it was read."""
    return f"{checkpoint} was deleted while it was read: the run keeps checkpoint.keep of them; export a newer one"


def free_text(path: str | os.PathLike[str]) -> str:
    """Return how much space is left where a path is or would be, such as `12 KiB free`."""
    return f"{size_text(shutil.disk_usage(existing_parent(path)).free)} free"


def _remove(folder: Path, renamed: Path | None = None) -> None:
    """Delete a folder, after renaming it if a new path is given.

    Files that cannot be deleted now, such as those open over NFS, are left for a later call.
    """
    try:
        shutil.rmtree(folder if renamed is None else folder.rename(renamed))
    except OSError as error:
        log.warning("%s cannot be deleted: %s; the next checkpoint tries again", folder, error)


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def _sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of every file below a folder, by relative path."""
    return {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def _sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
