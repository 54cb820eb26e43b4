"""OpenAI-compatible HTTP server of an event loop, on loopback; each user has its own secret path."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from rlsdk.serving.http_server import HttpServer, read_json
from rlsdk.serving.messages import APIError
from rlsdk.serving.replies import HttpReply

if TYPE_CHECKING:
    from aiohttp import web

Routes = Mapping[str, Callable[[Any], Awaitable[HttpReply]]]
"""`"POST /chat/completions"` -> handler of a JSON body (None for GET)."""


def _ignore(_: APIError) -> None:
    """Ignore an error."""


@attrs.frozen
class Mount:
    """A path prefix of the server with its own secret.

    Attributes:
        base_url: `http://127.0.0.1:PORT/SECRET/v1`.
        secret: 192 bits, known only to authorized clients.
    """

    base_url: str
    secret: str = attrs.field(repr=False)


class Endpoint:
    """Server of mounted routes. It starts on first use in an event loop and ends with the loop."""

    def __init__(self) -> None:
        self._mounted: dict[bytes, tuple[Routes, Callable[[APIError], None]]] = {}
        self._address = ""

    async def start(self) -> None:
        """Listen on 127.0.0.1, on a free port."""
        server = HttpServer(self._reply)
        self._address = await server.start()
        self._until = asyncio.get_running_loop().create_task(self._live(server))

    def mount(self, routes: Routes, refused: Callable[[APIError], None] = _ignore) -> Mount:
        """Serve routes under a new secret.

        Args:
            routes: Handlers of requests.
            refused: Called with each error sent to a client there.
        """
        secret = secrets.token_urlsafe(24)
        self._mounted[_digest(secret)] = routes, refused
        return Mount(f"{self._address}/{secret}/v1", secret)

    def unmount(self, mount: Mount) -> None:
        """Stop serving a mount."""
        self._mounted.pop(_digest(mount.secret), None)

    async def _live(self, server: HttpServer) -> None:
        """Wait until the loop ends, which cancels this task."""
        try:
            await asyncio.Event().wait()
        finally:
            _ENDPOINTS.pop(asyncio.get_running_loop(), None)
            await server.stop()

    async def _reply(self, request: web.Request) -> HttpReply:
        secret, _, path = request.match_info["path"].partition("/")
        # Looked up by digest, so that the time taken reveals nothing about a secret.
        mounted = self._mounted.get(_digest(secret))
        if mounted is None:
            raise APIError(
                "nothing is served at this URL: it is not from rlsdk, or belonged to a rollout that has ended",
                status=404,
                code="rollout_ended",
            )
        routes, refused = mounted
        try:
            return await self._routed(request, path, routes)
        except APIError as refusal:
            refused(refusal)
            raise

    async def _routed(self, request: web.Request, path: str, routes: Routes) -> HttpReply:
        answer = routes.get(f"{request.method} /{path.removeprefix('v1/')}") if path.startswith("v1/") else None
        if answer is None:
            offered = ", ".join(each.replace(" /", " …/v1/") for each in routes)
            raise APIError(f"there is no {request.method} …/{path}; available: {offered}", status=404, code="not_found")
        return await answer(await read_json(request) if request.method == "POST" else None)


_ENDPOINTS: dict[asyncio.AbstractEventLoop, asyncio.Task[Endpoint]] = {}


async def endpoint() -> Endpoint:
    """Return the endpoint of this event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _ENDPOINTS:
        _ENDPOINTS[loop] = loop.create_task(_started())
    return await asyncio.shield(_ENDPOINTS[loop])


async def _started() -> Endpoint:
    made = Endpoint()
    try:
        await made.start()
    except BaseException:
        _ENDPOINTS.pop(asyncio.get_running_loop(), None)
        raise
    return made


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
