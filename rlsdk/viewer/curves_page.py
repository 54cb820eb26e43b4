"""Routes of the Curves and Times pages."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from rlsdk.viewer.pages import Page

if TYPE_CHECKING:
    from aiohttp import web

    from rlsdk.viewer.service import ViewerService

_MOST_NAMES = 400


async def names(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return the metric names of the chosen runs."""
    runs = service.chosen(request)
    return service.reply({"names": sorted({name for run in runs for name in run.metrics.names})})


async def curves(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return curves: run -> metric -> steps and values."""
    runs, wanted = service.chosen(request), request.query.get("names", "").split(",")[:_MOST_NAMES]
    found = await asyncio.to_thread(lambda: {run.id: run.metrics.points(wanted) for run in runs})
    return service.reply(found)


async def findings(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return the findings of the chosen runs."""
    runs = service.chosen(request)
    return service.reply(await asyncio.to_thread(lambda: {run.id: run.standing() for run in runs}))


async def ledger(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return the outcomes of the tasks of a run."""
    return service.reply(service.run(request).ledger())


PAGE = Page(
    name="curves",
    title="Curves",
    script="curves.js",
    routes=[
        ("GET", "names", names),
        ("GET", "curves", curves),
        ("GET", "findings", findings),
        ("GET", "ledger/{run}", ledger),
    ],
)
TIME = Page(name="time", title="Time", script="time.js")
