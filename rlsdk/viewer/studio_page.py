"""Routes of the studio, available only with `rlsdk view --studio`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from rlsdk.viewer.pages import Page

if TYPE_CHECKING:
    from aiohttp import web

    from rlsdk.viewer.service import ViewerService
    from rlsdk.viewer.studio.studio import Studio


def _studio(service: ViewerService) -> Studio:
    assert service.studio is not None, "studio pages exist only with the studio"
    return service.studio


async def _sent(request: web.Request, **kinds: type) -> dict[str, Any]:
    """Return the named values of a JSON request; missing ones are empty.

    Raises:
        HTTPBadRequest: The request is not JSON, or a value has the wrong type.
    """
    from aiohttp import web

    if request.content_type != "application/json":
        raise web.HTTPBadRequest(text=f"expected JSON, got {request.content_type}")
    content = await request.json()
    if not isinstance(content, dict):
        raise web.HTTPBadRequest(text="expected a mapping")
    found = {name: content.get(name, kind()) for name, kind in kinds.items()}
    for name, kind in kinds.items():
        if type(found[name]) is not kind:
            raise web.HTTPBadRequest(text=f"{name}: expected {kind.__name__}, got {type(found[name]).__name__}")
    return found


async def form(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return the configuration keys and the options of all components, including those of given files."""
    sent = await _sent(request, files=list)
    return service.reply(await _studio(service).checker.form([str(each) for each in sent["files"]]))


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
