"""A remote folder, accessed through an fsspec URL."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.callbacks import Callback

from rlsdk.errors import ConfigError
from rlsdk.storage.location import FOLDERLESS, url_fault

log = logging.getLogger(__name__)


ANSWER_SECONDS = 30.0
"""Seconds that the end of a run waits for one answer of a store."""
CALL_SECONDS = 300.0
"""Seconds after which any other call to a store has failed; their libraries try again for minutes."""
STALL_SECONDS = 1800.0
"""Seconds without progress after which the transfer of a file has failed."""
SLOWEST = 1e6
"""Bytes per second that are expected of libraries that report no progress; a larger file has more time."""
T = TypeVar("T")


def answered(
    call: Callable[[], T], seconds: float = ANSWER_SECONDS, *, moved: Callable[[], float] = lambda: float("-inf")
) -> T:
    """Return the result of a call to a store, which may never answer; such a call is left to a daemon thread.

    Args:
        call: The call.
        seconds: Seconds until it must have answered, counted from its last progress.
        moved: Returns the time of its last progress on the monotonic clock.

    Raises:
        TimeoutError: It did not answer in time.
    """
    outcome: Future[T] = Future()

    def work() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            outcome.set_exception(error)

    threading.Thread(target=work, name="remote call", daemon=True).start()
    end = time.monotonic() + seconds
    while True:
        try:
            return outcome.result(max(end - time.monotonic(), 0.0))
        except FutureTimeout as error:
            if outcome.done():  # the call itself timed out
                raise
            end = moved() + seconds
            if end <= time.monotonic():
                raise TimeoutError(f"no answer within {seconds:g} s") from error


class RemoteFolder:
    """Files below a URL; their names are relative to it, with slashes between folders.

    Credentials and endpoints come from where fsspec's file system for the protocol reads them. Each call has a time
    limit, since a network that swallows packets answers neither yes nor no; then it raises TimeoutError.
    """

    def __init__(self, url: str) -> None:
        """Open the file system of a URL.

        Raises:
            ConfigError: Its package is not installed, or fsspec does not support the protocol.
        """
        if fault := url_fault(url):
            raise ConfigError([f"out: {fault}"])
        self.url = url.rstrip("/")
        self._fs, self._root = fsspec.core.url_to_fs(self.url)
        self._root = self._root.rstrip("/")
        protocols = {self._fs.protocol} if isinstance(self._fs.protocol, str) else set(self._fs.protocol)
        self._has_folders = not protocols & FOLDERLESS

    def names(self, below: str = "") -> dict[str, int]:
        """Return the names of all files below a folder, with their sizes in bytes."""
        self._fs.invalidate_cache()
        top = self._path(below) if below else self._root
        found = answered(partial(self._fs.find, top, detail=True), CALL_SECONDS)
        cut = len(self._root) + 1
        return {path[cut:]: int(entry.get("size") or 0) for path, entry in found.items() if path.startswith(f"{top}/")}

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist."""
        self._fs.invalidate_cache()
        try:
            content: bytes = answered(partial(self._fs.cat_file, self._path(name)), CALL_SECONDS)
        except FileNotFoundError:
            return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a small file; an existing one is replaced."""
        answered(lambda: self._fs.pipe_file(self._made(name), content), CALL_SECONDS)

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file unless it exists; return whether it was written.

        On S3 this is atomic: of several writers, only one succeeds. Other stores may check first and then write.
        """
        if self.read(name) is not None:
            return False
        try:
            answered(lambda: self._fs.pipe_file(self._made(name), content, mode="create"), CALL_SECONDS)
        except TypeError:  # the file system does not have this mode
            self.write(name, content)
        except OSError:
            if self.read(name) is None:
                raise
            return False
        return True

    def upload(self, file: Path, name: str, moved: Callable[[], None] | None = None) -> None:
        """Upload a local file; `moved` is called from time to time during the transfer."""
        pulse = _Pulse(moved)
        seconds = STALL_SECONDS + file.stat().st_size / SLOWEST
        answered(
            lambda: self._fs.put_file(str(file), self._made(name), callback=pulse), seconds, moved=lambda: pulse.last
        )

    def download(self, name: str, file: Path) -> None:
        """Download a file to a local path, whose folder is created."""
        file.parent.mkdir(parents=True, exist_ok=True)
        pulse, size = _Pulse(None), 0

        def moved() -> float:
            nonlocal size
            before, size = size, file.stat().st_size if file.exists() else 0
            return time.monotonic() if size > before else pulse.last

        get = partial(self._fs.get_file, self._path(name), str(file), callback=pulse)
        answered(get, CALL_SECONDS, moved=moved)

    def remove(self, *names: str) -> None:
        """Delete files; missing ones are ignored."""
        for name in names:
            try:
                answered(partial(self._fs.rm_file, self._path(name)), CALL_SECONDS)
            except FileNotFoundError:
                log.debug("%s/%s was already gone", self.url, name)

    def remove_below(self, name: str) -> None:
        """Delete a folder with all its content."""
        self.remove(*self.names(name))
        if self._has_folders and answered(partial(self._fs.isdir, self._path(name)), CALL_SECONDS):
            answered(partial(self._fs.rm, self._path(name), recursive=True), CALL_SECONDS)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _made(self, name: str) -> str:
        """Return the path of a file; its folder is created if the store has folders."""
        path = self._path(name)
        if self._has_folders:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        return path


class _Pulse(Callback):
    """Calls a function whenever data was transferred."""

    def __init__(self, moved: Callable[[], None] | None) -> None:
        super().__init__()
        self._moved, self.last = moved, time.monotonic()

    def call(self, *args: Any, **kwargs: Any) -> None:
        self.last = time.monotonic()
        if self._moved is not None:
            self._moved()
