"""A lock on a remote folder: a file with the holder's process id and host, refreshed every few seconds."""

from __future__ import annotations

import datetime
import json
import logging
import os
import threading
import time
import uuid
from typing import Any

from rlsdk.errors import ConfigError
from rlsdk.isolation.vitals import Identity, State, identify, look, machine
from rlsdk.storage.remote import RemoteFolder, answered

log = logging.getLogger(__name__)
LOCK = ".rlsdk-lock"
"""Name of the lock file."""
_READS = 5
"""Maximum number of reads of a lock file that is being written."""
_BETWEEN_READS = 0.05
"""Seconds between them."""
_left: set[str] = set()
"""Ids of locks that this process has released, but could not remove."""


class RemoteLock:
    """A program's lock on a remote folder.

    Only runs of rlsdk respect the lock. A holder that was stopped or offline for longer than the lease may lose it to
    another program; it notices this before it publishes its next upload, and then uploads nothing more. If two programs
    take over the lock of a dead holder at the same moment, each rereads it to see which of them holds it.

    Args:
        folder: Remote folder.
        beat: Seconds between writes of the lock file.
        lease: Seconds without a write after which a holder on another machine counts as dead.
    """

    def __init__(self, folder: RemoteFolder, *, beat: float = 10.0, lease: float = 60.0) -> None:
        self._folder, self._beat, self._lease = folder, beat, lease
        self._id, self._process = uuid.uuid4().hex, identify(os.getpid())
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock, and keep it until `release`.

        Raises:
            ConfigError: Another program holds it.
        """
        if not self._folder.create(LOCK, self._content()):
            self._take_over()
        self._thread = threading.Thread(target=self._keep_alive, name="remote lock", daemon=True)
        self._thread.start()

    def is_ours(self) -> bool:
        """Return whether this program still holds the lock."""
        holder = self._holder()
        # A lock file that a full disk has cut short names no other program; the next beat rewrites it.
        return holder is not None and holder.get("id", self._id) == self._id

    def release(self) -> None:
        """Release the lock, if this program still holds it."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(self._beat)
        try:
            answered(self._remove_own)
        except Exception as error:  # noqa: BLE001 - network: each file system has its own errors
            _left.add(self._id)
            log.warning("the lock of %s could not be removed, and expires by itself: %s", self._folder.url, error)

    def _remove_own(self) -> None:
        if self.is_ours():
            self._folder.remove(LOCK)

    def _take_over(self) -> None:
        """Replace the lock of a dead holder."""
        first = self._holder() or {}
        state = _state(first)
        if state not in ("gone", "zombie", "unknown"):
            raise self._refusal(first)
        if state == "unknown":
            wait = 1.5 * self._lease
            log.warning(
                "process %s on %s holds the lock of %s; waiting %.0f s to see whether it is alive",
                first.get("pid"), first.get("host"), self._folder.url, wait,
            )  # fmt: skip
            end = time.monotonic() + wait
            while time.monotonic() < end:
                time.sleep(min(1.0, self._beat))
                now = self._holder()
                if now is None:
                    break  # it was released
                if now and now != first:
                    raise self._refusal(now)
        self._folder.write(LOCK, self._content())
        time.sleep(min(2.0, self._beat))  # by then, any concurrent takeover has been written
        if not self.is_ours():
            raise self._refusal(self._holder() or {})

    def _refusal(self, holder: dict[str, Any]) -> ConfigError:
        who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')}"
        return ConfigError(
            [
                f"name: {self._folder.url} is in use by {who}, which is training into it (last seen "
                f"{holder.get('time', '?')}); wait until it ends, end it, or choose another name=…"
            ]
        )

    def _holder(self) -> dict[str, Any] | None:
        """Read the lock file; None if there is none, empty if its content is incomplete and remains so."""
        for _ in range(_READS):
            content = self._folder.read(LOCK)
            if content is None:
                return None
            try:
                found = json.loads(content)
            except ValueError:  # most stores do not replace a file at once, so it may be read while it is written
                time.sleep(_BETWEEN_READS)
            else:
                return found if isinstance(found, dict) else {}
        return {}

    def _content(self) -> bytes:
        own, now = self._process, datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        held = {"id": self._id, "pid": own.pid, "host": own.host, "time": now}
        return json.dumps({**held, "started": own.started, "machine": own.machine}).encode()

    def _keep_alive(self) -> None:
        while not self._ended.wait(self._beat):
            try:
                if not answered(self.is_ours, self._lease):
                    return  # the uploader also notices and reports this
                answered(lambda: self._folder.write(LOCK, self._content()), self._lease)
            except Exception as error:  # noqa: BLE001 - network; uploads fail as well, and log warnings
                log.debug("the lock of %s could not be rewritten: %s", self._folder.url, error)


def _state(holder: dict[str, Any]) -> State:
    """Return the state of the process that holds a lock; unknown if this process cannot see it.

    The host's name does not tell: containers may have equal names, and the next one may reuse the process id.
    """
    if holder.get("id") in _left:
        return "gone"
    if holder.get("machine") != machine():
        return "unknown"
    held = Identity(int(holder["pid"]), float(holder["started"]), str(holder["host"]), machine())
    return look([held], measured=False)[0].state
