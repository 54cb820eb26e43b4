"""The one HTTP server of an event loop: OpenAI-compatible, on loopback, each user of it behind a secret of its own."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from rlsdk.errors import RlsdkError
from rlsdk.rollout.wire import Refusal, Reply

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)
MAX_BODY = 2**23
"""Bytes of a request."""

Routes = Mapping[str, Callable[[Any], Awaitable[Reply]]]
"""`"POST /chat/completions"` -> what answers a body of JSON (None for GET)."""


@attrs.frozen
class Mount:
    """A place at the server.

    Attributes:
        base_url: `http://127.0.0.1:PORT/SECRET/v1`.
        secret: 192 bits, which whoever may use it was told.
    """

    base_url: str
    secret: str = attrs.field(repr=False)


class Endpoint:
    """Serves what is mounted. It starts with the first use in an event loop, and ends with the loop."""

    def __init__(self) -> None:
        self._mounted: dict[bytes, Routes] = {}
        self._address = ""

    async def start(self) -> None:
        """Listen on 127.0.0.1, at a port that the system chooses."""
        from aiohttp import web

        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._answer)
        # A client that goes away ends the sampling of its answer.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        self._address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._until = asyncio.get_running_loop().create_task(self._live(runner))

    def mount(self, routes: Routes) -> Mount:
        """Serve these under a new secret."""
        secret = secrets.token_urlsafe(24)
        self._mounted[_digest(secret)] = routes
        return Mount(f"{self._address}/{secret}/v1", secret)

    def unmount(self, mount: Mount) -> None:
        """Serve nothing there any more."""
        self._mounted.pop(_digest(mount.secret), None)

    async def _live(self, runner: web.AppRunner) -> None:
        """Wait until the loop ends, which cancels what still runs in it."""
        try:
            await asyncio.Event().wait()
        finally:
            _ENDPOINTS.pop(asyncio.get_running_loop(), None)
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        try:
            reply = await self._reply(request)
        except Refusal as refusal:
            return _refused(refusal)
        except web.HTTPRequestEntityTooLarge:
            return _refused(Refusal(f"the request has more than {MAX_BODY} bytes; send less", status=413))
        except Exception as error:  # the client is told, and a person by the log
            log.exception("%s %s failed", request.method, request.path.rpartition("/v1")[2])
            said = f": {error}" if isinstance(error, RlsdkError) else ""
            return _refused(Refusal(f"{type(error).__name__}{said}", status=500))
        return web.json_response(reply.body) if reply.events is None else await _stream(request, reply.events)

    async def _reply(self, request: web.Request) -> Reply:
        secret, _, path = request.match_info["path"].partition("/")
        # Looked up by its digest: how long that takes tells nothing of a secret.
        routes = self._mounted.get(_digest(secret))
        if routes is None:
            raise Refusal(
                "this URL serves nothing: it is not one that rlsdk gave, or it belonged to a rollout that has ended",
                status=404,
                code="rollout_ended",
            )
        answer = routes.get(f"{request.method} /{path.removeprefix('v1/')}") if path.startswith("v1/") else None
        if answer is None:
            there = ", ".join(each.replace(" /", " …/v1/") for each in routes)
            raise Refusal(f"there is no {request.method} …/{path}; there are: {there}", status=404, code="not_found")
        return await answer(await _json(request) if request.method == "POST" else None)


_ENDPOINTS: dict[asyncio.AbstractEventLoop, asyncio.Task[Endpoint]] = {}


async def endpoint() -> Endpoint:
    """The endpoint of this event loop."""
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


def _refused(refusal: Refusal) -> web.Response:
    from aiohttp import web

    return web.json_response(refusal.body, status=refusal.status)


async def _json(request: web.Request) -> Any:
    body = await request.read()
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is not JSON: {error}") from error


async def _stream(request: web.Request, events: tuple[Mapping[str, Any], ...]) -> web.StreamResponse:
    from aiohttp import web

    response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-store"})
    await response.prepare(request)
    for event in events:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
