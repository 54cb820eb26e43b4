"""An OpenAI-compatible server with its own address and API key, for clients that rlsdk did not start."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

import attrs

from rlsdk.errors import ConfigError, EnvironmentFault
from rlsdk.serving.http_server import HttpServer, digest, read_json
from rlsdk.serving.messages import APIError, HttpReply
from rlsdk.serving.stateless import EngineService

if TYPE_CHECKING:
    from aiohttp import web

GRACE = 60.0
"""Seconds that in-flight requests get to finish when the server stops."""
_METRICS = "text/plain; version=0.0.4; charset=utf-8"


@attrs.frozen(kw_only=True)
class ServerOptions:
    """Address of a server, and its access control.

    Attributes:
        host: Network address of this machine to listen on.
        port: Port to listen on; 0 picks any free port.
        name: Model name for clients; empty for the model's path.
        api_key: Key that clients must send; it may be empty only if `host` is loopback.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str = ""
    api_key: str = attrs.field(default="", repr=False)

    def check(self) -> None:
        """Require an API key if other machines can connect.

        Raises:
            ConfigError: There is no key, and the host is not loopback.
        """
        if not self.api_key and not _is_loopback(self.host):
            raise ConfigError(
                [
                    f"--host {self.host} would let other machines connect without a key: pass --api-key KEY, or "
                    "set RLSDK_API_KEY, or omit --host (127.0.0.1)"
                ]
            )

    def bind(self) -> socket.socket:
        """Bind the address, so that a conflict is reported before anything slow starts.

        Raises:
            EnvironmentFault: The address cannot be bound.
        """
        try:
            family, _, _, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            with ExitStack() as unless_bound:
                taken = unless_bound.enter_context(socket.socket(family, socket.SOCK_STREAM))
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                taken.bind(address)
                unless_bound.pop_all()
        except OSError as error:
            reason = error.strerror or error
            raise EnvironmentFault(
                f"cannot listen on {self.host}, port {self.port}: {reason}; choose another address with --host and "
                "--port (0 picks any free port)"
            ) from error
        return taken


class PublicServer:
    """Serves `/v1/…`, `/health` and `/metrics`."""

    def __init__(
        self, service: EngineService, options: ServerOptions, counters: Callable[[], Mapping[str, float]] = dict
    ) -> None:
        """Create a server without starting it."""
        self._service, self._options, self._counters = service, options, counters
        self._key = digest(f"Bearer {options.api_key}") if options.api_key else b""
        self._requests = 0
        self._http = HttpServer(self._answer, grace=GRACE)

    async def start(self, taken: socket.socket) -> str:
        """Listen on a bound socket; return the base URL for clients."""
        return f"{await self._http.start(taken)}/v1"

    async def stop(self) -> None:
        """Stop accepting requests, and let in-flight ones finish within the grace period."""
        await self._http.stop()

    async def _answer(self, request: web.Request) -> HttpReply:
        path = f"/{request.match_info['path']}"
        if (request.method, path) == ("GET", "/health"):
            return HttpReply(body={"status": "ok", "step": self._service.step})
        self._admit(request)
        self._requests += 1
        if (request.method, path) == ("GET", "/metrics"):
            found = {"requests_total": self._requests, "step": self._service.step or 0, **self._counters()}
            lines = (f"rlsdk_serve_{name} {value:.15g}\n" for name, value in found.items())
            return HttpReply(text="".join(lines), headers={"content-type": _METRICS})
        if request.method == "GET" and path.startswith("/v1/models/"):
            return self._service.model(path.removeprefix("/v1/models/"))
        route = f"{request.method} {path.removeprefix('/v1')}" if path.startswith("/v1/") else ""
        answer = self._service.routes.get(route)
        if answer is None:
            offered = ", ".join(each.replace(" /", " /v1/") for each in self._service.routes)
            raise APIError(
                f"there is no {request.method} {path}; there are: {offered}, GET /health, GET /metrics",
                status=404,
                code="not_found",
            )
        return await answer(await read_json(request) if request.method == "POST" else None)

    def _admit(self, request: web.Request) -> None:
        """Reject requests without the key or, if the server has none, requests that a web page could have sent."""
        if self._key:
            if not hmac.compare_digest(digest(request.headers.get("authorization", "")), self._key):
                raise APIError(
                    "this server requires its API key: `Authorization: Bearer KEY`", status=401, code="invalid_api_key"
                )
            return
        # A web page cannot forge these: the browser sets the host, and sends JSON across origins only if allowed.
        host = request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdigit() else request.host
        if not _is_loopback(host.strip("[]")):
            raise APIError(
                f"without an API key this server only serves 127.0.0.1 or localhost, not {request.host!r}",
                status=403,
                code="wrong_host",
            )
        if request.method == "POST" and request.content_type != "application/json":
            raise APIError(
                f"content-type: expected application/json, got {request.content_type}", status=415, code="wrong_type"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
