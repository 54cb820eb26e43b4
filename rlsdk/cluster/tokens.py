"""Ray's authentication token: whether a cluster requires one, and whether this process has the right one.

Ray reports a wrong token after a minute of warnings, and a missing one as a failed connection. Here one call asks the
cluster first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import attrs

Access = Literal["open", "granted", "refused", "unknown"]
ASK_SECONDS = 5.0
"""Time limit of a call in seconds; `unreachable` has already shown that something accepts connections."""
_CALL = "/ray.rpc.NodeInfoGcsService/GetClusterId"
MODE = "RAY_AUTH_MODE"


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

    Args:
        target: `HOST:PORT` of the GCS.
        token: Token to present; empty for none.

    Returns:
        `open` if the call succeeded without a token, `granted` with one, `refused` if it was rejected; `unknown` if no
        Ray server answered.
    """
    import grpc

    metadata = [("authorization", f"Bearer {token}")] if token else None
    with grpc.insecure_channel(target) as channel:
        try:
            channel.unary_unary(_CALL)(b"", timeout=ASK_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            return "refused" if error.code() is grpc.StatusCode.UNAUTHENTICATED else "unknown"
    return "granted" if token else "open"


def token_fault(target: str) -> str:
    """Set Ray's token mode to what a cluster requires; return why this process cannot join, or an empty string.

    Args:
        target: `HOST:PORT` of the cluster's GCS.
    """
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
