"""Routes of the Annotate page: get the queue, add an annotation, undo the last one."""

from __future__ import annotations

import asyncio
import getpass
import json
from typing import TYPE_CHECKING, Any

from rlsdk.errors import ValueFault
from rlsdk.viewer import annotating
from rlsdk.viewer.pages import Page
from rlsdk.viewer.rollouts_page import read_cursor

if TYPE_CHECKING:
    from aiohttp import web

    from rlsdk.viewer.service import ViewerService


async def queue(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return the next questions of a queue."""
    run, asked = service.run(request), annotating.Question.of(request.query)
    cursor = read_cursor(request.query.get("cursor", ""))

    def found() -> dict[str, Any]:
        return annotating.queue(run.browser, run.annotations.read(), asked, cursor)

    return service.reply(await asyncio.to_thread(found))


async def who(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return the name of the viewer's user, and whether the run can be annotated here."""
    annotating.writable(service.run(request))
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container whose user has no name
        name = ""
    return service.reply({"by": name})


async def annotate(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Store an annotation; return its id once it is on disk."""
    run, given = service.run(request), await _content(request)
    made = await asyncio.to_thread(annotating.annotate, run, given)
    return service.reply({"id": made.id})


async def undo(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Undo a person's last annotation; return its question, or null if there is none."""
    file, given = annotating.writable(service.run(request)), await _content(request)
    last = await asyncio.to_thread(file.undo, annotating.name_of(given.get("by")))
    if last is None:
        return service.reply({"item": None})
    places = [[rollout.number, rollout.index] for rollout in last.rollouts]
    return service.reply({"item": places, "ask": last.value if last.kind == "skip" else last.kind, "kind": last.kind})


async def _content(request: web.Request) -> dict[str, Any]:
    """Return the JSON object of a request; reject other content types, which a form on another site could send."""
    if request.content_type != "application/json":
        raise ValueFault(f"the content is {request.content_type!r:.60}; expected application/json")
    try:
        found = json.loads(await request.text())
    except (ValueError, RecursionError) as error:
        raise ValueFault("the content is not JSON") from error
    if not isinstance(found, dict):
        raise ValueFault("the content is JSON, but not an object")
    return found


PAGE = Page(
    name="annotate",
    title="Annotate",
    script="annotate.js",
    routes=[
        ("GET", "annotate/{run}", queue),
        ("GET", "annotate/{run}/who", who),
        ("POST", "annotate/{run}", annotate),
        ("POST", "annotate/{run}/undo", undo),
    ],
)
