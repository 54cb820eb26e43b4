"""The viewer's server: which requests it accepts, which headers it sends, and how its pages find runs."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rlsdk.errors import EnvironmentFault, RlsdkError
from rlsdk.preflight import url_host
from rlsdk.storage.location import is_url
from rlsdk.viewer.pages import pages
from rlsdk.viewer.runs import RunFolder, find_runs, finite

if TYPE_CHECKING:
    from aiohttp import web

    from rlsdk.viewer.remote import RemoteRun
    from rlsdk.viewer.studio.studio import Studio

log = logging.getLogger(__name__)
STATIC = Path(__file__).parent / "static"
COOKIE = "rlsdk_token"
LOOK_SECONDS = 5.0
"""Seconds between searches for new runs in the given folders."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy: scripts and styles come only from this server; text written by a model never runs."""
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}


class ViewerService:
    """Runs, pages and routes of the viewer.

    Attributes:
        token: Secret that requests must carry; empty if only this machine can reach the server.
    """

    def __init__(self, given: Sequence[str], *, token: str = "", studio: Studio | None = None) -> None:
        """Find the runs in folders, at URLs, and in folders of such folders; without a studio, the viewer only reads.

        Raises:
            RunError: A URL cannot be read or, without the studio, a folder does not exist or holds no run.
        """
        self.token = token
        self.studio = studio
        self._pages = tuple(page for page in pages() if studio or not page.studio)
        self._folders = [Path(each) for each in given if not is_url(each)]
        self._ends = ExitStack()
        self._remote: list[RemoteRun] = []
        if urls := [each for each in given if is_url(each)]:
            from rlsdk.viewer.remote import RemoteRun  # takes a second to import

            self._remote += [self._ends.enter_context(RemoteRun(url)) for url in urls]
        self._runs: dict[str, RunFolder] = {}
        self._looked = float("-inf")
        self._order: list[str] = []
        self.look()

    def close(self) -> None:
        """Delete the copies of remote runs; runs started by the studio continue."""
        self._ends.close()
        if self.studio is not None:
            self.studio.checker.close()

    def look(self) -> None:
        """Search for runs, and refresh remote ones."""
        known = {run.path: run for run in self._runs.values()}
        own = [] if self.studio is None else [Path(each.folder) for each in self.studio.trainings.listed()]
        paths = find_runs([*own, *self._folders], required=self.studio is None)
        found = [known.get(path) or RunFolder(path) for path in paths]
        remote = [each.run() for each in self._remote]
        for run in found:
            if run.path not in known and run.browser.address is not None:
                run.browser.upgrade()
        self._runs = {run.id: run for run in (*found, *remote)}
        self._looked = time.monotonic()

    @property
    def runs(self) -> list[RunFolder]:
        """All runs, most recently changed first."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            self._looked = time.monotonic()
            try:
                self.look()
            except RlsdkError as error:
                log.debug("the list of runs is not updated: %s", error)
        return list(self._runs.values())

    # Called by page handlers

    def run(self, request: web.Request) -> RunFolder:
        """Return the run named by a URL."""
        from aiohttp import web

        found = self._runs.get(request.match_info["run"])
        if found is None:
            raise web.HTTPNotFound(text="there is no such run; it was deleted, or the viewer shows other folders")
        return found

    def chosen(self, request: web.Request) -> list[RunFolder]:
        """Return the runs named by a query, `runs=ID,ID`."""
        wanted = request.query.get("runs", "").split(",")
        return [self._runs[each] for each in wanted if each in self._runs]

    def integer(self, request: web.Request, name: str) -> int | None:
        """Return an integer parameter of a query; None if it is missing."""
        from aiohttp import web

        text = request.query.get(name)
        try:
            return int(text) if text else None
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"{name} is {str(text)[:60]!r}; expected a whole number") from error

    def reply(self, content: Any) -> web.Response:
        """Return JSON; non-finite numbers become null, and lone surrogates stay escaped."""
        from aiohttp import web

        return web.Response(text=json.dumps(finite(content), separators=(",", ":")), content_type="application/json")

    # Server

    def application(self) -> web.Application:
        """Build the web application."""
        from aiohttp import web

        app = web.Application(middlewares=[self._guard], client_max_size=2**22)
        app.router.add_get("/", self._index)
        app.router.add_get("/static/{file:[\\w./-]+}", _static)
        app.router.add_get("/api/state", self._state)
        for page in self._pages:
            for method, path, handler in page.routes:
                app.router.add_route(method, f"/api/{path}", partial(handler, self))
        return app

    async def _index(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        if self.token and request.query.get("token"):  # move it from the URL to a cookie, out of history and referrers
            response = web.Response(status=303, headers={"Location": "./"})  # a proxy may serve the page below a path
            response.set_cookie(self._cookie, self.token, httponly=True, samesite="Strict", path="/")
            return response
        return web.Response(text=(STATIC / "index.html").read_text(encoding="utf-8"), content_type="text/html")

    async def _state(self, request: web.Request) -> web.StreamResponse:
        def states() -> list[dict[str, Any]]:
            found = [run.state() for run in self.runs]
            times = Counter(each["name"] for each in found)
            # Runs of one name, such as a copy, or those of two people, are told apart by their folders.
            return [
                {**each, "name": f"{each['name']} ({each['path']})"} if times[each["name"]] > 1 else each
                for each in found
            ]

        shown = [
            {"name": page.name, "title": page.title, "script": page.script, "alone": page.studio}
            for page in self._pages
        ]
        return self.reply({"runs": await asyncio.to_thread(states), "pages": shown})

    @property
    def _guard(self) -> Any:
        from aiohttp import web

        @web.middleware
        async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
            try:
                self._admit(request)
                response: web.StreamResponse = await handler(request)
            except web.HTTPException as error:
                response = self.reply({"error": error.text or error.reason})
                response.set_status(error.status)
            except (RlsdkError, ValueError, OverflowError) as error:  # such as a group number too large for a database
                response = self.reply({"error": str(error)})
                response.set_status(400)
            except Exception as error:
                if isinstance(error, ConnectionError):
                    raise
                log.exception("%s failed", request.path)
                response = self.reply({"error": f"{type(error).__name__} in the viewer; see its terminal"})
                response.set_status(500)
            response.headers.update(HEADERS)
            if response.status == 200:  # the curves of a long run have a megabyte, and an ssh tunnel may be slow
                response.enable_compression()
            return response

        return guard

    def _admit(self, request: web.Request) -> None:
        """Reject requests without the token, for another host name, or from another site's page.

        Raises:
            HTTPForbidden: The request is rejected.
        """
        from aiohttp import web

        host = urlsplit(f"//{request.headers.get('Host', '')}").hostname or ""
        if not self.token and host not in _LOOPBACK:
            raise web.HTTPForbidden(
                text=f"this server is reached as 127.0.0.1 or localhost, not as {host[:100]!r}; a proxy must send "
                "`Host: 127.0.0.1`"
            )
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        given = (request.cookies.get(self._cookie, ""), request.query.get("token", ""), bearer)
        if self.token and not any(hmac.compare_digest(each.encode(), self.token.encode()) for each in given):
            raise web.HTTPForbidden(text="open the address including its token, as printed by `rlsdk view`")
        # Pages of other sites cannot set X-Forwarded-Host: for that their browser would first ask this server.
        own = (request.headers.get("Host"), request.headers.get("X-Forwarded-Host"))
        origin = urlsplit(request.headers.get("Origin", "")).netloc
        if request.method not in ("GET", "HEAD") and (not origin or origin not in own):
            raise web.HTTPForbidden(text="changes are accepted only from the viewer's own page")

    @property
    def _cookie(self) -> str:
        """Name of the cookie, unique to this server, since browsers send cookies to all ports of a host."""
        return f"{COOKIE}_{hashlib.sha256(self.token.encode()).hexdigest()[:8]}"


async def _static(request: web.Request) -> web.StreamResponse:
    from aiohttp import web

    path = (STATIC / request.match_info["file"]).resolve()
    if not path.is_relative_to(STATIC) or not path.is_file() or path.suffix not in _TYPES:
        raise web.HTTPNotFound(text="there is no such file")
    return web.Response(body=path.read_bytes(), content_type=_TYPES[path.suffix], charset="utf-8")


async def serve(
    service: ViewerService, host: str, port: int, ready: Callable[[str], None], ended: asyncio.Event
) -> None:
    """Serve until an event is set, and call `ready` with the URL once requests are accepted; the viewer stays open.

    Raises:
        EnvironmentFault: The port is in use or not permitted, or the address is not this machine's.
    """
    from aiohttp import web

    runner = web.AppRunner(service.application(), access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            remedy = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
            place = f"{host}, port {port}" if port else host
            raise EnvironmentFault(f"cannot listen on {place}: {error.strerror}; choose another {remedy}") from error
        bound = runner.addresses[0]
        ready(f"http://{url_host(bound[0])}:{bound[1]}/" + (f"?token={service.token}" if service.token else ""))
        await ended.wait()
    finally:
        await runner.cleanup()


def secret() -> str:
    """Return a new token."""
    return secrets.token_urlsafe(24)


def new_token(host: str) -> str:
    """Return a new token for a server that other machines can reach; empty for a loopback address."""
    return "" if host in _LOOPBACK else secret()
