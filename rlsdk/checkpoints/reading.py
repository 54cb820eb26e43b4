"""Read access to runs in a local folder or at a URL."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from rlsdk.checkpoints.checkpoint import Checkpoints
from rlsdk.errors import CheckpointError, DamagedCheckpointError, RlsdkError, RunError, first_line
from rlsdk.storage import copies
from rlsdk.storage.copies import Copy
from rlsdk.storage.location import is_url, mirror_of
from rlsdk.storage.remote import RemoteFolder

log = logging.getLogger(__name__)


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
    with TemporaryDirectory(dir=base, prefix="run-") as scratch:
        with reached(remote):
            uploaded = copies.copies(remote)
            if not uploaded or (step is not None and step not in uploaded):
                which = "has no complete checkpoint" + ("" if step is None else f" of step {step}")
                listed = f"; there are: {', '.join(map(str, uploaded))}" if uploaded else ""
                raise CheckpointError(f"{remote.url} {which}{listed}")
            wanted = list(uploaded) if step is None else [step]
            while True:
                found, folder = wanted.pop(), Path(scratch) / str(len(wanted))
                try:
                    copies.fetch(remote, uploaded[found], folder, checkpoint=checkpoint)
                    if checkpoint and wanted:
                        Checkpoints(folder, 1).verify(found, "model")
                    break
                except DamagedCheckpointError as error:
                    if not wanted:
                        raise
                    log.warning("the checkpoint of step %d in %s is skipped: %s", found, remote.url, error)
                    shutil.rmtree(folder, ignore_errors=True)
        yield folder


def uploads(url: str) -> dict[int, Copy]:
    """Return the complete checkpoints of a run at a URL by step, ascending.

    Raises:
        RunError: The URL cannot be reached.
    """
    remote = RemoteFolder(url)
    with reached(remote):
        return copies.copies(remote)
