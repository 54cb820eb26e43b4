"""Join a running Ray cluster: find its address and its token, and connect within a timeout.

Ray reports a wrong token after a minute of warnings, and a missing one as a failed connection. So one call asks the
cluster first whether it requires a token.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any, Literal

import attrs

from rlsdk.cluster.health import CONNECT_SECONDS, unreachable
from rlsdk.config.schema import PlacementSection
from rlsdk.errors import RunError, first_line
from rlsdk.isolation.process import restore_sigterm

log = logging.getLogger(__name__)
JOIN_SECONDS = 60.0
"""Timeout in seconds for joining a cluster whose address accepts connections."""
Access = Literal["open", "granted", "refused", "unknown"]
ASK_SECONDS = 5.0
"""Time limit of a call in seconds; `unreachable` has already shown that something accepts connections."""
_CALL = "/ray.rpc.NodeInfoGcsService/GetClusterId"
MODE = "RAY_AUTH_MODE"


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

        Raises:
            RunError: The cluster does not exist or does not answer in time; the message names the origin.
        """
        log.info("Ray is at %s, from %s", self.address, self.origin)
        self.check()
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
        restore_sigterm()
        if joining.is_alive():
            raise self._error(f"accepts connections, but Ray did not answer within {JOIN_SECONDS:g} s")
        if failures:
            mode = os.environ.get(MODE, "disabled")
            raise self._error(f"cannot be joined: {first_line(failures[0])} ({MODE} is {mode})") from failures[0]

    def check(self) -> None:
        """Raise if nothing answers at this address, or it requires a token that this process lacks; see `join`."""
        target = self._gcs()
        if not target:
            return
        if why := unreachable(target, CONNECT_SECONDS):
            raise self._error(f"cannot be reached: {why}")
        if why := token_fault(target):
            raise RunError(f"the Ray cluster {self.address!r}, set by {self.origin}, {why}")

    def _gcs(self) -> str:
        """Return `HOST:PORT` of the cluster's GCS; empty for an address of Ray Client."""
        if self.address == "auto":
            from ray._private.services import canonicalize_bootstrap_address

            try:
                found = canonicalize_bootstrap_address("auto")
            except ConnectionError as error:
                raise self._error("was not found: no Ray runs on this machine") from error
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


@attrs.frozen
class RayToken:
    """Token that Ray would use in this process.

    Attributes:
        text: The token; empty if there is none.
        origin: Environment variable or file that holds it, or would hold it.
    """

    text: str
    origin: str

    @classmethod
    def find(cls) -> RayToken:
        """Search the same places as Ray, in order: `RAY_AUTH_TOKEN`, `RAY_AUTH_TOKEN_PATH`, `~/.ray/auth_token`."""
        if text := os.environ.get("RAY_AUTH_TOKEN", "").strip():
            return cls(text, "the environment variable RAY_AUTH_TOKEN")
        file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
        return cls(file.read_text().strip() if file.is_file() else "", str(file))


def access(target: str, token: str = "") -> Access:
    """Ask a cluster's GCS for its id.

    Returns:
        `open` if the call succeeded without a token, `granted` with one, `refused` if it was rejected; `unknown` if no
        Ray server answered.
    """
    import grpc

    metadata = [("authorization", f"Bearer {token}")] if token else None
    # Like Ray's own calls, not through the proxy of the environment.
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_CALL)(b"", timeout=ASK_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            return "refused" if error.code() is grpc.StatusCode.UNAUTHENTICATED else "unknown"
    return "granted" if token else "open"


def token_fault(target: str) -> str:
    """Set Ray's token mode to what a cluster requires; return why this process cannot join, or an empty string."""
    mode = os.environ.get(MODE, "")
    without = access(target)
    if without == "open" and mode == "token":
        return f"requires no token, but with {MODE}=token this process would reject its calls: unset {MODE} here"
    if without != "refused":
        return ""
    token = RayToken.find()
    where = "the first machine's token (there: `ray get-auth-token`, or the file ~/.ray/auth_token)"
    if not token.text:
        return f"requires a token, and {token.origin} does not exist: copy {where} to {token.origin} on this machine"
    if access(target, token.text) == "refused":
        return (
            f"requires another token than the one from {token.origin}: copy {where} to {token.origin} on this machine"
        )
    if mode and mode != "token":
        return f"requires a token, but {MODE}={mode} prevents sending one: set {MODE}=token, or unset it"
    _use_tokens()
    return ""


def _use_tokens() -> None:
    """Enable token authentication in this process, even if Ray is already imported."""
    os.environ[MODE] = "token"
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

    Config.initialize("")  # importing Ray has read the environment once
    AuthenticationTokenLoader.instance().reset_cache()
