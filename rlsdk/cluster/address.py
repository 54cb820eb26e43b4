"""Join a running Ray cluster: find its address, and connect within a timeout."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import attrs

from rlsdk.cluster.health import CONNECT_SECONDS, unreachable
from rlsdk.cluster.tokens import MODE, token_fault
from rlsdk.config.schema import PlacementSection
from rlsdk.errors import RunError

log = logging.getLogger(__name__)
JOIN_SECONDS = 60.0
"""Timeout in seconds for joining a cluster whose address accepts connections."""


@attrs.frozen
class RayAddress:
    """Address of a running cluster.

    Attributes:
        address: Address in Ray's form: `HOST:PORT`, or `auto`.
        origin: Setting or environment variable that names it.
    """

    address: str
    origin: str

    @classmethod
    def find(cls, placement: PlacementSection) -> RayAddress | None:
        """Return the address from the configuration or the environment; None to start Ray for the run."""
        if placement.ray and placement.ray != "local":
            return cls(placement.ray, "placement.ray")
        found = None if placement.ray else os.environ.get("RAY_ADDRESS")
        return cls(found, "the environment variable RAY_ADDRESS") if found and found != "local" else None

    def join(self, **options: Any) -> None:
        """Connect this process to the cluster.

        Args:
            **options: Options of `ray.init`.

        Raises:
            RunError: The cluster does not exist or does not answer in time; the message names the origin.
        """
        log.info("Ray is at %s, from %s", self.address, self.origin)
        target = self._gcs()
        if target:
            if why := unreachable(target, CONNECT_SECONDS):
                raise self._error(f"cannot be reached: {why}")
            if why := token_fault(target):
                raise RunError(f"the Ray cluster {self.address!r}, set by {self.origin}, {why}")
        failures: list[Exception] = []

        def init() -> None:
            import ray

            # In a thread, Ray warns that it does not handle SIGTERM; the run does.
            ray_log = logging.getLogger("ray._private.worker")
            ray_log.addFilter(lambda record: not record.getMessage().startswith("SIGTERM handler"))
            try:
                ray.init(address=self.address, **options)
            except Exception as error:  # noqa: BLE001 - raised below, by the thread that waits for this one
                failures.append(error)

        joining = threading.Thread(target=init, daemon=True)
        joining.start()
        joining.join(JOIN_SECONDS)
        if joining.is_alive():
            raise self._error(f"accepts connections, but Ray did not answer within {JOIN_SECONDS:g} s")
        if failures:
            said = next(iter(str(failures[0]).splitlines()), "")
            mode = os.environ.get(MODE, "disabled")
            raise self._error(f"cannot be joined: {said} ({MODE} is {mode})") from failures[0]

    def _gcs(self) -> str:
        """Return `HOST:PORT` of the cluster's GCS; empty for an address of Ray Client."""
        if self.address == "auto":
            from ray._private.services import canonicalize_bootstrap_address

            try:
                found = canonicalize_bootstrap_address("auto")
            except ConnectionError as error:
                raise self._error(f"was not found: {' '.join(str(error).split())}") from error
            return str(found)
        host, _, port = self.address.removeprefix("ray://").rpartition(":")
        if not host or not port.isdecimal():
            raise self._error("is not an address: expected HOST:PORT, such as 10.0.0.1:6379, or auto")
        return "" if self.address.startswith("ray://") else self.address

    def _error(self, what: str) -> RunError:
        return RunError(
            f"the Ray cluster {self.address!r}, set by {self.origin}, {what}. Start it with `ray start --head`, set "
            f"another address, or unset {self.origin.split()[-1]} to have Ray started for this run"
        )
