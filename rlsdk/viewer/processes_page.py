"""Routes of the Processes, Logs and Settings pages."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rlsdk.config.tree import spelled_out
from rlsdk.viewer.pages import Page

if TYPE_CHECKING:
    from aiohttp import web

    from rlsdk.viewer.service import ViewerService


async def processes(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return the processes of a run."""
    return service.reply(await asyncio.to_thread(service.run(request).processes))


async def log(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return the end of a log."""
    after = service.integer(request, "after")
    return service.reply(await asyncio.to_thread(service.run(request).log, request.match_info["log"], after))


async def settings(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return the settings and the summary of a run."""
    run = service.run(request)
    return service.reply({"config": spelled_out(run.config), "summary": run.summary})


PAGE = Page(
    name="processes",
    title="Processes",
    script="processes.js",
    routes=[("GET", "processes/{run}", processes), ("GET", "processes/{run}/logs/{log}", log)],
)
SETTINGS = Page(name="settings", title="Settings", script="settings.js", routes=[("GET", "settings/{run}", settings)])
