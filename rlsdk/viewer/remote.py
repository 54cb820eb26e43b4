"""A run at a URL, fetched periodically: the files that its machine uploads after each checkpoint."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from rlsdk.checkpoints.mirror import FIRST_ANSWER_SECONDS, reached
from rlsdk.errors import RlsdkError, RunError
from rlsdk.isolation.scratch import scratch_folder
from rlsdk.storage import copies
from rlsdk.storage.location import mirror_of
from rlsdk.storage.remote import RemoteFolder, answered
from rlsdk.viewer.runs import RunFolder

log = logging.getLogger(__name__)
FETCH_SECONDS = 30.0
"""Seconds between fetches."""
WAIT_SECONDS = 2.0
"""Seconds that the viewer waits for a fetch before it shows the current copy."""


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
        self._fetching: threading.Thread | None = None
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
        """Return the run as last fetched; if the copy is too old, start to fetch it again and wait for a moment."""
        is_fetching = self._fetching is not None and self._fetching.is_alive()
        if time.monotonic() - self._fetched > FETCH_SECONDS and not is_fetching:
            self._fetching = threading.Thread(target=self._refresh, name="fetch run", daemon=True)
            self._fetching.start()
            self._fetching.join(WAIT_SECONDS)
        assert self._run is not None
        return self._run

    def _refresh(self) -> None:
        try:
            self._fetch()
        except (RlsdkError, OSError) as error:  # the network fails, or the disk is full: keep the current copy
            log.debug("%s is not fetched: %s", self._url, error)

    def _fetch(self) -> None:
        self._fetched = time.monotonic()
        with reached(self._remote):
            there: dict[int, Any] = answered(partial(copies.copies, self._remote), FIRST_ANSWER_SECONDS)
            if not there:
                raise RunError(f"{self._url} has no complete checkpoint yet; its files appear with the first one")
            newest = there[max(there)]
            if self._run is not None and str(newest) == self._upload:
                return
            folder = self._scratch / str(int(self._folder.name) + 1)
            for left in self._scratch.iterdir():
                if left != self._folder:  # the current one is still being read
                    shutil.rmtree(left, ignore_errors=True)
            copies.fetch(self._remote, newest, folder, checkpoint=False)
        self._folder, self._upload = folder, str(newest)
        self._run = RunFolder(folder, shown=self._url)
