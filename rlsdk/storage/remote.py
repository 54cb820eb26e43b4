"""A remote folder, accessed through an fsspec URL."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.callbacks import Callback

from rlsdk.errors import ConfigError
from rlsdk.storage.location import FOLDERLESS, url_fault

log = logging.getLogger(__name__)


ANSWER_SECONDS = 30.0
"""Seconds that the end of a run waits for one answer of a store."""
T = TypeVar("T")


def answered(call: Callable[[], T], seconds: float = ANSWER_SECONDS) -> T:
    """Return the result of a call to a store, which may never answer; such a call is left to a daemon thread.

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
    try:
        return outcome.result(seconds)
    except FutureTimeout as error:
        if outcome.done():  # the call itself timed out
            raise
        raise TimeoutError(f"no answer within {seconds:g} s") from error


class RemoteFolder:
    """Files below a URL; their names are relative to it, with slashes between folders.

    Credentials and endpoints come from where fsspec's file system for the protocol reads them.
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
        found = self._fs.find(top, detail=True)
        cut = len(self._root) + 1
        return {path[cut:]: int(entry.get("size") or 0) for path, entry in found.items() if path.startswith(f"{top}/")}

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist."""
        self._fs.invalidate_cache()
        try:
            content: bytes = self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write a small file; an existing one is replaced."""
        self._fs.pipe_file(self._made(name), content)

    def create(self, name: str, content: bytes) -> bool:
        """Write a small file unless it exists; return whether it was written.

        On S3 this is atomic: of several writers, only one succeeds. Other stores may check first and then write.
        """
        if self.read(name) is not None:
            return False
        try:
            self._fs.pipe_file(self._made(name), content, mode="create")
        except TypeError:  # the file system does not have this mode
            self._fs.pipe_file(self._path(name), content)
        except OSError:
            if self.read(name) is None:
                raise
            return False
        return True

    def upload(self, file: Path, name: str, moved: Callable[[], None] | None = None) -> None:
        """Upload a local file; `moved` is called from time to time during the transfer."""
        self._fs.put_file(str(file), self._made(name), callback=_Pulse(moved))

    def download(self, name: str, file: Path) -> None:
        """Download a file to a local path, whose folder is created."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._fs.get_file(self._path(name), str(file))

    def remove(self, *names: str) -> None:
        """Delete files; missing ones are ignored."""
        for name in names:
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                log.debug("%s/%s was already gone", self.url, name)

    def remove_below(self, name: str) -> None:
        """Delete a folder with all its content."""
        self.remove(*self.names(name))
        if self._has_folders and self._fs.isdir(self._path(name)):
            self._fs.rm(self._path(name), recursive=True)

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
        self._moved = moved

    def call(self, *args: Any, **kwargs: Any) -> None:
        if self._moved is not None:
            self._moved()
