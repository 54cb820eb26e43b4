"""A run at a URL, fetched periodically: the files that its machine uploads after each checkpoint."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack, suppress
from typing import Any

from rlsdk.checkpoints.mirror import reached
from rlsdk.errors import RlsdkError, RunError
from rlsdk.isolation.scratch import scratch_folder
from rlsdk.storage import copies
from rlsdk.storage.location import mirror_of
from rlsdk.storage.remote import RemoteFolder
from rlsdk.viewer.runs import RunFolder

FETCH_SECONDS = 30.0
"""Seconds between fetches."""


class RemoteRun:
    """Local copy of the files of a run at a URL, without its checkpoints; a context manager."""

    def __init__(self, url: str) -> None:
        """Fetch the run.

        Raises:
            RunError: There is no run, or the URL cannot be reached.
        """
        self._url = url
        self._remote = RemoteFolder(url)
        base = mirror_of(url).parent / "viewing"
        base.mkdir(parents=True, exist_ok=True)
        self._open = ExitStack()
        self._scratch = self._open.enter_context(scratch_folder("view-", base))
        self._folder, self._upload, self._fetched = self._scratch / "0", "", float("-inf")
        self._run: RunFolder | None = None
        try:
            self._fetch()
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> RemoteRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def run(self) -> RunFolder:
        """Return the run as last fetched; fetch it again if the copy is too old."""
        if time.monotonic() - self._fetched > FETCH_SECONDS:
            with suppress(RlsdkError):  # if the network fails, keep the current copy
                self._fetch()
        assert self._run is not None
        return self._run

    def _fetch(self) -> None:
        self._fetched = time.monotonic()
        with reached(self._remote):
            there: dict[int, Any] = copies.copies(self._remote)
            if not there:
                raise RunError(f"{self._url} has no complete checkpoint yet; its files appear with the first one")
            newest = there[max(there)]
            if self._run is not None and str(newest) == self._upload:
                return
            folder = self._scratch / str(int(self._folder.name) + 1)
            copies.fetch(self._remote, newest, folder, checkpoint=False)
        before, self._folder, self._upload = self._folder, folder, str(newest)
        self._run = RunFolder(folder, shown=self._url)
        shutil.rmtree(before, ignore_errors=True)
