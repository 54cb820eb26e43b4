"""Pages of the viewer; each consists of a navigation entry, a script, and server routes.

The studio is available only with `rlsdk view --studio`.
"""

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
from rlsdk.viewer.rollouts import MOST_HELD_OUT
from rlsdk.viewer.walks import Filter

if TYPE_CHECKING:
    from aiohttp import web

    from rlsdk.viewer.service import ViewerService
    from rlsdk.viewer.studio.studio import Studio

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
        PAGE,
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
    """Return the held-out tasks of the last evaluation or, given a task, its answers in each evaluation.

    `sampled` is 1 or 0; a run that lacks the requested kind (`eval.greedy: false`) shows the other one.
    """
    browser, task = service.run(request).browser, request.query.get("task", "")
    asked = {"0": "eval greedy", "1": "eval sampled"}.get(request.query.get("sampled", ""))

    def found() -> dict[str, Any]:
        kinds = browser.evaluated()
        state = asked if asked in kinds else next(iter(kinds), "eval greedy")
        rows = browser.held_out(task, state)
        cut = len(rows) == MOST_HELD_OUT
        return {"rows": rows, "cut": cut, "sampled": state == "eval sampled", "kinds": kinds}

    return service.reply(await asyncio.to_thread(found))


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


def _studio(service: ViewerService) -> Studio:
    assert service.studio is not None, "studio pages exist only with the studio"
    return service.studio


async def _sent(request: web.Request, **kinds: type) -> dict[str, Any]:
    """Return the named values of a JSON request; missing ones are empty.

    Raises:
        ValueFault: The request is not a JSON object, or a value has the wrong type.
    """
    content = await _content(request)
    found = {name: content.get(name, kind()) for name, kind in kinds.items()}
    for name, kind in kinds.items():
        if type(found[name]) is not kind:
            raise ValueFault(f"{name}: expected {kind.__name__}, got {type(found[name]).__name__}")
    return found


async def form(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return the configuration keys and the options of all components, including those of given files."""
    studio, sent = _studio(service), await _sent(request, files=list, file=str)
    file = str(studio.files.path(sent["file"])) if sent["file"] else None
    return service.reply(await studio.checker.form(sent["files"], file))


async def check(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Apply edits to a configuration, check it, and explain it."""
    studio, sent = _studio(service), await _sent(request, text=str, edits=list, file=str)
    file = str(studio.files.path(sent["file"])) if sent["file"] else None
    return service.reply(await studio.checker.check({**sent, "file": file}))


async def files(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return the configuration files below the folder."""
    studio = _studio(service)
    return service.reply({"folder": studio.root.name, "files": await asyncio.to_thread(studio.files.names)})


async def file(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return the text of a file."""
    name = request.query.get("name", "")
    text, version = _studio(service).files.read(name)
    return service.reply({"file": name, "text": text, "version": version})


async def save(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Save a file."""
    sent = await _sent(request, file=str, text=str, version=str)
    return service.reply({"version": _studio(service).files.save(sent["file"], sent["text"], sent["version"])})


async def start(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Check a configuration, and start or resume its run."""
    sent = await _sent(request, text=str, file=str, version=str, resume=bool)
    found = await _studio(service).start(sent["text"], sent["file"], sent["version"], resume=sent["resume"])
    return service.reply(found)


async def resume(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Resume a run that was started here."""
    sent = await _sent(request, name=str)
    return service.reply({"name": _studio(service).resume(sent["name"]).name})


async def stop(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Ask a run to save and stop."""
    sent = await _sent(request, name=str)
    return service.reply({"stops": _studio(service).trainings.stop(sent["name"]).stops})


async def runs(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return the runs that were started here, newest first."""
    return service.reply({"runs": await asyncio.to_thread(_runs, service)})


def _runs(service: ViewerService) -> list[dict[str, Any]]:
    trainings = _studio(service).trainings
    folders = {str(run.path.resolve()): run for run in service.runs}
    found = []
    for each in trainings.listed():
        run, runs = folders.get(each.folder), trainings.runs(each)
        state = run.state() if run is not None else {}
        found.append(
            {
                "name": each.name,
                "file": each.file,
                "pid": each.process.pid,
                "runs": runs,
                "stops": each.stops if runs else 0,
                "code": each.code,
                "output": trainings.output(each.name),
                "run": state.get("id"),
                "status": state.get("status"),
                "step": state.get("step"),
                "steps": state.get("steps"),
                "reward": state.get("last", {}).get("reward/mean"),
            }
        )
    return found


PAGE = Page(
    name="studio",
    title="Studio",
    script="studio.js",
    studio=True,
    routes=[
        ("POST", "studio/form", form),
        ("POST", "studio/check", check),
        ("GET", "studio/files", files),
        ("GET", "studio/file", file),
        ("POST", "studio/save", save),
        ("POST", "studio/start", start),
        ("POST", "studio/resume", resume),
        ("POST", "studio/stop", stop),
        ("GET", "studio/runs", runs),
    ],
)
