"""Runs at a URL: trained in a local mirror, uploaded after each checkpoint, downloaded to resume or to read them."""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

from rlsdk.checkpoints.checkpoint import Checkpoints
from rlsdk.config import Plan
from rlsdk.errors import CheckpointError, ConfigError, DamagedCheckpointError, RlsdkError, RunError, first_line
from rlsdk.isolation.scratch import scratch_folder
from rlsdk.runlog.folder import MARKER, mark, replace_text
from rlsdk.runlog.store import DATABASE
from rlsdk.storage import copies
from rlsdk.storage.copies import Copy
from rlsdk.storage.location import is_url, mirror_of
from rlsdk.storage.lock import LOCK, RemoteLock
from rlsdk.storage.remote import RemoteFolder, answered
from rlsdk.storage.uploader import Uploader

log = logging.getLogger(__name__)
KNOWN = ".rlsdk-mirror.json"
"""File in a mirror: ids of the uploads that it made or was downloaded from, newest last."""
_KNOWN_AT_MOST = 20
FIRST_ANSWER_SECONDS = 120.0
"""Seconds that a command waits for the first listing of a remote folder; libraries of stores retry for minutes."""
OWN_FILES_SECONDS = 300.0
"""Seconds that the end of a run waits for the upload of its summary and logs."""


class Mirror:
    """Local mirror of a run, with the remote folder that this program has locked.

    Attributes:
        notices: Lines for the run's log.
    """

    def __init__(self, plan: Plan, remote: RemoteFolder, lock: RemoteLock) -> None:
        self._plan, self._remote, self._lock = plan, remote, lock
        self._uploader: Uploader | None = None
        self._finished: dict[str, Any] | None = None
        self.notices: list[str] = []

    def begin(self, step: int | None) -> None:
        """Start uploading; `step` is the one that the run continues from, None for a new run."""
        folder = self._plan.folder
        self._uploader = Uploader(
            folder,
            self._remote,
            self._lock,
            keep=self._plan.config.checkpoint.keep,
            database=DATABASE,
            known=lambda upload: note_known(folder, upload),
        )
        with reached(self._remote):
            uploaded = copies.copies(self._remote)
            copies.withdraw(self._remote, *(each for each in uploaded if each > (step or 0)))
            self._uploader.remove_unfinished()
            self._uploader.send_own_files()
        if step is not None and step not in uploaded:
            self._uploader.submit(step)

    def saved(self, step: int) -> None:
        """Upload a checkpoint that was just written."""
        if self._uploader is not None:
            self._finished = None
            self._uploader.submit(step)

    def finish(self) -> dict[str, Any]:
        """Wait for the last upload; return the outcome of the uploads, with a message for the user under `warning`."""
        if self._finished is None:
            found: dict[str, Any] = {"url": self._remote.url, "uploaded": []}
            if self._uploader is not None:
                found = self._uploader.finish()
            newest = Checkpoints(self._plan.folder, 1).latest()
            whole = newest is None or newest in found["uploaded"] or newest in self._there()
            why = found.get("last_error") or "left out"
            missing = (
                f"the checkpoint of step {newest} is not in {self._remote.url} ({why}); it is in {self._plan.folder}, "
                "and --resume on this machine uploads it"
            )
            found["warning"] = "" if whole else missing
            if found["warning"]:
                log.warning("%s", found["warning"])
            self._finished = found
        return self._finished

    def close(self) -> None:
        """Wait for the last upload, upload the final state of the run's own files, and release the remote folder."""
        try:
            found = self.finish()
            if self._uploader is not None and not found["warning"] and answered(self._lock.is_ours):
                answered(self._uploader.send_own_files, OWN_FILES_SECONDS)
        except Exception as error:  # noqa: BLE001 - network, permissions: each file system raises its own errors
            log.warning("summary and logs are not in %s: %s", self._remote.url, error)
        finally:
            self._lock.release()

    def _there(self) -> dict[int, Copy]:
        try:
            return answered(partial(copies.copies, self._remote))
        except Exception as error:  # noqa: BLE001 - as above: the contents are unknown
            log.debug("%s cannot be listed: %s", self._remote.url, error)
            return {}


@contextmanager
def mirrored(plan: Plan, *, resume: bool | int, overwrite: bool) -> Iterator[Mirror | None]:
    """Lock the remote folder of a run whose `out` is a URL, and update its mirror; None for a local run.

    Raises:
        ConfigError: The URL is in use, already holds a run, or holds something other than a run.
        RunError: The URL cannot be reached.
    """
    if not is_url(plan.config.out):
        yield None
        return
    remote = RemoteFolder(plan.location)
    lock = RemoteLock(remote)
    with reached(remote):
        answered(partial(_require_run_or_nothing, remote), FIRST_ANSWER_SECONDS)
        lock.acquire()
    try:
        with reached(remote):
            mirror = Mirror(plan, remote, lock)
            if resume is not False:
                mirror.notices += pull(remote, plan.folder, None if isinstance(resume, bool) else resume)
            elif overwrite:
                # Delete the manifests first, without which no checkpoint is found, and the marker last.
                copies.withdraw(remote, *copies.copies(remote))
                remote.remove(*(name for name in remote.names() if name not in (LOCK, MARKER)))
            elif (remote.read("config.yaml") is not None) or copies.copies(remote):
                ways = "continue it with --resume, delete it with --overwrite, or choose another name=…"
                raise ConfigError([f"name: {remote.url} already holds a run; {ways}"])
            remote.write(MARKER, b"")
    except BaseException:
        lock.release()
        raise
    try:
        yield mirror
    finally:
        mirror.close()


def _require_run_or_nothing(remote: RemoteFolder) -> None:
    names = set(remote.names()) - {LOCK}
    if names and MARKER not in names:
        raise ConfigError(
            [
                f"name: {remote.url} has files, such as {min(names)}, but is not a run of rlsdk (it has no {MARKER}); "
                "choose another name=…"
            ]
        )


def pull(remote: RemoteFolder, folder: Path, step: int | None = None) -> list[str]:
    """Download a checkpoint of a remote run, unless the mirror has it.

    Args:
        remote: Remote folder of the run.
        folder: Local mirror; one that another machine has overtaken is moved aside.
        step: Step of the checkpoint; by default, the newest complete one.

    Returns:
        Lines for the run's log.
    """
    for left in folder.parent.glob(f".{escape(folder.name)}.download-*"):
        shutil.rmtree(left)
    uploaded = copies.copies(remote)
    if not uploaded:
        return []
    newest = uploaded[max(uploaded)]
    here, notices = _intact(folder, step) if newest.id in known(folder) else (None, [])
    if here is not None and here >= (newest.step if step is None else step):
        return []
    if step is not None and step not in uploaded:
        if notices:  # the error about the damaged one in the mirror says more
            return []
        listed = ", ".join(map(str, uploaded))
        raise CheckpointError(f"{remote.url} has no complete checkpoint of step {step}; there are: {listed}")
    newer = [copy for copy in reversed(uploaded.values()) if here is None or copy.step > here]
    wanted = newer if step is None else [uploaded[step]]
    for copy in wanted:
        partial = folder.parent / f".{folder.name}.download-{uuid.uuid4().hex[:8]}"
        partial.mkdir(parents=True)
        try:
            copies.fetch(remote, copy, partial)
            Checkpoints(partial, 1).verify(copy.step)
        except DamagedCheckpointError as error:
            notices.append(f"the checkpoint of step {copy.step} in {remote.url} is skipped: {error}")
            shutil.rmtree(partial)
            continue
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        mark(partial)
        note_known(partial, copy.id)
        if folder.exists() and any(folder.iterdir()):
            aside = folder.with_name(f"{folder.name}.overtaken-{uuid.uuid4().hex[:8]}")
            folder.rename(aside)
            notices.append(f"{folder} is replaced by the contents of {remote.url}, and is kept as {aside.name}")
        elif folder.exists():
            folder.rmdir()
        partial.rename(folder)
        return [*notices, f"downloaded the checkpoint of step {copy.step} from {remote.url}"]
    if here is not None:
        return notices
    raise CheckpointError(
        "\n".join([f"no checkpoint in {remote.url} is intact:", *(f"  - {text}" for text in notices)])
    )


def _intact(folder: Path, step: int | None) -> tuple[int | None, list[str]]:
    """Return a mirror's newest intact checkpoint, or the one of a step if it is intact; and faults of damaged ones."""
    checkpoints = Checkpoints(folder, 1)
    damaged = []
    for each in reversed(checkpoints.steps()):
        if step in (None, each):
            try:
                checkpoints.verify(each)
            except DamagedCheckpointError as error:
                damaged.append(str(error))
            else:
                return each, damaged
    return None, damaged


def known(folder: Path) -> list[str]:
    """Return the ids of the uploads that a mirror has made or been downloaded from."""
    try:
        found = json.loads((folder / KNOWN).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    return [str(each) for each in found] if isinstance(found, list) else []


def note_known(folder: Path, upload: str) -> None:
    """Record the id of an upload in a mirror, before the upload becomes visible."""
    replace_text(folder / KNOWN, json.dumps([*known(folder), upload][-_KNOWN_AT_MOST:]))


@contextmanager
def reached(remote: RemoteFolder) -> Iterator[None]:
    """Turn exceptions of a remote folder's library into a RunError that names the folder."""
    try:
        yield
    except RlsdkError:
        raise
    except Exception as error:
        raise RunError(f"{remote.url} cannot be used: {type(error).__name__}: {first_line(error)}") from error


@contextmanager
def local_copy(run: str | Path, *, step: int | None = None, checkpoint: bool = True) -> Iterator[Path]:
    """Yield a local folder to read a run from: its own folder, or a temporary download of its URL.

    Args:
        run: Folder or URL of the run.
        step: Step of the checkpoint; by default, the newest complete one, at a URL the newest intact one.
        checkpoint: False to download only the run's own files: configuration, metrics, rollouts.

    Raises:
        CheckpointError: There is no such run or checkpoint.
        RunError: It cannot be reached.
    """
    if not is_url(str(run)):
        yield Path(run)
        return
    remote = RemoteFolder(str(run))
    base = mirror_of(str(run)).parent / "reading"
    base.mkdir(parents=True, exist_ok=True)
    with scratch_folder("read-", base) as scratch:
        with reached(remote):
            uploaded = answered(partial(copies.copies, remote), FIRST_ANSWER_SECONDS)
            if not uploaded or (step is not None and step not in uploaded):
                which = "has no complete checkpoint" + ("" if step is None else f" of step {step}")
                listed = f"; there are: {', '.join(map(str, uploaded))}" if uploaded else ""
                raise CheckpointError(f"{remote.url} {which}{listed}")
            wanted = [*uploaded.values()] if step is None else [uploaded[step]]
            folder = _newest_intact(remote, wanted, scratch, checkpoint=checkpoint)
        yield folder


def _newest_intact(remote: RemoteFolder, uploaded: Sequence[Copy], scratch: Path, *, checkpoint: bool) -> Path:
    """Download the newest intact checkpoint and return its folder; the oldest is downloaded without a check."""
    left = list(uploaded)
    while True:
        copy, folder = left.pop(), scratch / str(len(left))
        try:
            copies.fetch(remote, copy, folder, checkpoint=checkpoint)
            if checkpoint and left:
                Checkpoints(folder, 1).verify(copy.step, "model")
            return folder
        except DamagedCheckpointError as error:
            if not left:
                raise
            log.warning("the checkpoint of step %d in %s is skipped: %s", copy.step, remote.url, error)
            shutil.rmtree(folder, ignore_errors=True)


def uploads(url: str) -> dict[int, Copy]:
    """Return the complete checkpoints of a run at a URL by step, ascending.

    Raises:
        RunError: The URL cannot be reached.
    """
    remote = RemoteFolder(url)
    with reached(remote):
        return answered(partial(copies.copies, remote), FIRST_ANSWER_SECONDS)
