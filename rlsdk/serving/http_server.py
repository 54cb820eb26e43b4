"""The HTTP server of rlsdk: JSON and event streams, limits, and errors in the format of OpenAI's servers.

An event loop has one such server on loopback, in which each user has a secret path.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import resource
import secrets
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import attrs

from rlsdk.errors import RlsdkError
from rlsdk.preflight import url_host
from rlsdk.serving.messages import APIError, HttpReply

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)
MAX_BODY = 2**23
"""Maximum bytes of a request."""
HEADER_SECONDS = 30.0
"""Seconds in which a client must send the headers of a request; also the time a connection may idle."""
READ_SECONDS = 30.0
"""Seconds in which a client must send the body of a request."""
MAX_CONNECTIONS = 4096
"""Maximum concurrent connections, and at most half the limit of open files; more are rejected."""
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"

Answer = Callable[["web.Request"], Awaitable[HttpReply]]


class HttpServer:
    """Listens at one address and answers requests."""

    def __init__(self, answer: Answer, *, grace: float = 1.0) -> None:
        """Prepare a server; `start` listens.

        Args:
            answer: Function that answers a request, or raises an `APIError`.
            grace: Seconds that requests in progress get when the server ends.
        """
        self._handle, self._grace = answer, grace
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._connections = min(MAX_CONNECTIONS, max(files // 2, 16))
        self._listener: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, taken: socket.socket | None = None) -> str:
        """Start to listen.

        Args:
            taken: Socket bound to an address; by default, 127.0.0.1 and a free port.

        Returns:
            `http://HOST:PORT`.
        """
        from aiohttp import web

        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._answer)
        # If a client disconnects, the sampling of its answer ends. `keepalive_timeout` counts from the start of a
        # connection, so that it also limits the wait for headers.
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=self._grace,
            keepalive_timeout=HEADER_SECONDS,
        )
        await self._runner.setup()
        server = self._runner.server
        assert server is not None

        def connect() -> asyncio.Protocol:
            return server() if len(server.connections) < self._connections else _Full()

        loop = asyncio.get_running_loop()
        if taken is None:
            self._listener = await loop.create_server(connect, "127.0.0.1", 0, backlog=1024)
        else:
            self._listener = await loop.create_server(connect, sock=taken, backlog=1024)
        host, port = self._listener.sockets[0].getsockname()[:2]
        return f"http://{url_host(host)}:{port}"

    async def stop(self) -> None:
        """Stop listening, let requests in progress finish within the grace period, and end."""
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        try:
            reply = await self._handle(request)
            if reply.events is not None:
                return await _stream(request, reply.events, reply.headers)
            if reply.text:
                return web.Response(text=reply.text, headers=reply.headers)
            return web.json_response(reply.body, headers=reply.headers)
        except web.HTTPRequestEntityTooLarge:
            refusal = APIError(f"the request has more than {MAX_BODY} bytes; send less", status=413)
        except Exception as error:  # noqa: BLE001 - reported to the client and in the log
            refusal = refusal_of(error, f"{request.method} {request.path.rpartition('/v1')[2]}")
        return web.json_response(refusal.body, status=refusal.status)


class _Full(asyncio.Protocol):
    """Reject a connection beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(_FULL)
        transport.close()


def refusal_of(error: Exception, what: str) -> APIError:
    """Convert an error to a reply for the client; errors that the client did not cause are logged with traceback."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RecursionError):  # only a client's JSON can be nested without limit
        return APIError("the tools or the arguments of a call are nested too deeply")
    log.error("%s failed", what, exc_info=error)
    detail = f": {error}" if isinstance(error, RlsdkError) else ""
    return APIError(f"{type(error).__name__}{detail}", status=500)


async def read_json(request: web.Request) -> Any:
    """Read the body of a request.

    Raises:
        APIError: The body is not JSON, contains text that is not Unicode, or does not arrive in time.
    """
    try:
        async with asyncio.timeout(READ_SECONDS):
            body = await request.read()
    except TimeoutError as error:
        raise APIError(f"the body did not arrive within {READ_SECONDS:g} s", status=408) from error
    try:
        value = json.loads(body.decode())  # strict, unlike `json.loads(body)`, which accepts lone surrogates
        if b"\\u" in body:  # an escape may be a lone surrogate, which tokenizers reject
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise APIError(f"the body contains text that is not Unicode: {error}") from error
    except (ValueError, RecursionError) as error:
        raise APIError(f"the body is not JSON: {error}") from error
    return value


async def _stream(
    request: web.Request, events: AsyncGenerator[Mapping[str, Any], None], headers: Mapping[str, str]
) -> web.StreamResponse:
    from aiohttp import web

    kind = {"content-type": "text/event-stream", "cache-control": "no-store"}
    response = web.StreamResponse(headers={**kind, **headers})
    async with aclosing(events):
        first = await anext(events)  # fetched before the status is sent, since it may raise
        await response.prepare(request)
        with suppress(ConnectionError):  # the client disconnected, which also ends the sampling
            try:
                await _write(response, first)
                async for event in events:
                    await _write(response, event)
                await response.write(b"data: [DONE]\n\n")
            except ConnectionError:
                raise
            except Exception as error:  # noqa: BLE001 - the status was sent already, so the stream carries the error
                await _write(response, refusal_of(error, f"a stream of {request.path.rpartition('/v1')[2]}").body)
            await response.write_eof()
    return response


async def _write(response: web.StreamResponse, event: Mapping[str, Any]) -> None:
    await response.write(f"data: {json.dumps(event)}\n\n".encode())


Routes = Mapping[str, Callable[[Any], Awaitable[HttpReply]]]
"""`"POST /chat/completions"` -> handler of a JSON body (None for GET)."""


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
        self._mounted: dict[bytes, tuple[Routes, Callable[[APIError], object]]] = {}
        self._address = ""

    async def start(self) -> None:
        """Listen on 127.0.0.1, on a free port."""
        server = HttpServer(self._reply)
        self._address = await server.start()
        self._until = asyncio.get_running_loop().create_task(self._live(server))

    def mount(self, routes: Routes, refused: Callable[[APIError], object] = lambda _: None) -> Mount:
        """Serve routes under a new secret; `refused` is called with each error sent to a client there."""
        secret = secrets.token_urlsafe(24)
        self._mounted[digest(secret)] = routes, refused
        return Mount(f"{self._address}/{secret}/v1", secret)

    def unmount(self, mount: Mount) -> None:
        """Stop serving a mount."""
        self._mounted.pop(digest(mount.secret), None)

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
        mounted = self._mounted.get(digest(secret))
        if mounted is None:
            raise APIError(
                "nothing is served at this URL: it is not from rlsdk, or belonged to a rollout that has ended",
                status=404,
                code="rollout_ended",
            )
        routes, refused = mounted
        answer = routes.get(f"{request.method} /{path.removeprefix('v1/')}") if path.startswith("v1/") else None
        try:
            if answer is None:
                offered = ", ".join(each.replace(" /", " …/v1/") for each in routes)
                unknown = f"there is no {request.method} …/{path}; available: {offered}"
                raise APIError(unknown, status=404, code="not_found")
            return await answer(await read_json(request) if request.method == "POST" else None)
        except APIError as refusal:
            refused(refusal)
            raise


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


def digest(secret: str) -> bytes:
    """Return a hash to compare secrets by, so that the time of a comparison does not reveal them."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
