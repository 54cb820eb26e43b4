"""Pages of the viewer; each consists of a navigation entry, a script, and server routes."""

from __future__ import annotations

import asyncio
import getpass
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from rlsdk.config.tree import spelled_out
from rlsdk.errors import ValueFault
from rlsdk.viewer import annotating
from rlsdk.viewer.conversation import group_json, tokens_json
from rlsdk.viewer.filters import Filter

if TYPE_CHECKING:
    from aiohttp import web

    from rlsdk.viewer.service import ViewerService

Handler = Callable[["ViewerService", "web.Request"], Awaitable["web.StreamResponse"]]
_MOST_NAMES = 400
"""Maximum number of metrics per request for curves."""


@attrs.frozen(kw_only=True)
class Page:
    """A page of the viewer.

    Attributes:
        name: Name in URLs, `#/NAME`.
        title: Title in the navigation.
        script: File below `static/` that exports `mount(element, context)`; static/app.js documents the context.
        routes: (method, path below `/api/`, handler) of its requests. Requests with side effects must be POST; the
            server checks their origin.
        studio: True for a page that writes files or starts processes: it exists only with `rlsdk view --studio`, and
            is shown even if there is no run.
    """

    name: str
    title: str
    script: str
    routes: Sequence[tuple[str, str, Handler]] = ()
    studio: bool = False


def pages() -> tuple[Page, ...]:
    """Return all pages, in the order of the navigation."""
    from rlsdk.viewer import studio_page

    return (
        Page(
            name="curves",
            title="Curves",
            script="curves.js",
            routes=[
                ("GET", "names", names),
                ("GET", "curves", curves),
                ("GET", "findings", findings),
                ("GET", "ledger/{run}", ledger),
            ],
        ),
        Page(name="time", title="Time", script="time.js"),
        Page(
            name="rollouts",
            title="Rollouts",
            script="rollouts.js",
            routes=[
                ("GET", "rollouts/{run}", rollouts),
                ("GET", "rollouts/{run}/facets", facets),
                ("GET", r"rollouts/{run}/groups/{number:-?\d+}", group),
                ("GET", r"rollouts/{run}/groups/{number:-?\d+}/{rollout:\d+}/tokens", tokens),
            ],
        ),
        Page(name="held-out", title="Held-out", script="heldout.js", routes=[("GET", "held-out/{run}", held_out)]),
        Page(
            name="annotate",
            title="Annotate",
            script="annotate.js",
            routes=[
                ("GET", "annotate/{run}", queue),
                ("GET", "annotate/{run}/who", who),
                ("POST", "annotate/{run}", annotate),
                ("POST", "annotate/{run}/undo", undo),
            ],
        ),
        Page(
            name="processes",
            title="Processes",
            script="processes.js",
            routes=[("GET", "processes/{run}", processes), ("GET", "processes/{run}/logs/{log}", log)],
        ),
        Page(name="settings", title="Settings", script="settings.js", routes=[("GET", "settings/{run}", settings)]),
        studio_page.PAGE,
    )


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


async def rollouts(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return a page of rollouts."""
    run, wanted = service.run(request), Filter.of(request.query)
    return service.reply(await asyncio.to_thread(run.browser.page, wanted, _cursor(request.query.get("cursor", ""))))


def _cursor(text: str) -> list[Any] | None:
    """Parse the cursor of a URL; None if it is empty.

    Raises:
        ValueFault: The text is not a cursor.
    """
    if not text:
        return None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not 2 <= len(found) <= 3 or any(type(v) not in (int, float) for v in found):
        raise ValueFault(f"cursor is {text[:60]!r}; expected `next` of the previous page")
    return found


async def facets(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return the values to filter by."""
    return service.reply(await asyncio.to_thread(service.run(request).browser.facets))


async def group(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return a group with all its rollouts."""
    row = await _row(service, request)
    return service.reply(await asyncio.to_thread(group_json, row))


async def tokens(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return the tokens of a rollout."""
    run, row = service.run(request), await _row(service, request)
    index = int(request.match_info["rollout"])
    try:
        found = await asyncio.to_thread(lambda: tokens_json(row, index, run.vocabulary))
    except IndexError as error:
        raise ValueFault(f"the group has no rollout {index}") from error
    return service.reply(found)


async def _row(service: ViewerService, request: web.Request) -> Any:
    number = int(request.match_info["number"])
    row = await asyncio.to_thread(service.run(request).browser.group, number)
    if row is None:
        raise ValueFault(f"there is no group {number}; a resumed run may have dropped it")
    return row


async def held_out(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return the held-out tasks of the last evaluation or, given a task, its answers in each evaluation."""
    browser, task = service.run(request).browser, request.query.get("task", "")
    state = "eval sampled" if request.query.get("sampled") == "1" else "eval greedy"
    return service.reply({"rows": await asyncio.to_thread(browser.held_out, task, state)})


async def queue(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return the next questions of a queue."""
    run, asked = service.run(request), annotating.Question.of(request.query)
    cursor = _cursor(request.query.get("cursor", ""))

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
