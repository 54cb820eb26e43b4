"""Routes of the rollout browser and of held-out tasks."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from rlsdk.errors import ValueFault
from rlsdk.viewer.conversation import group_json, tokens_json
from rlsdk.viewer.filters import Filter
from rlsdk.viewer.pages import Page

if TYPE_CHECKING:
    from aiohttp import web

    from rlsdk.viewer.service import ViewerService


async def page(service: ViewerService, request: web.Request) -> web.StreamResponse:
    """Return a page of rollouts."""
    run, wanted = service.run(request), Filter.of(request.query)
    return service.reply(
        await asyncio.to_thread(run.browser.page, wanted, read_cursor(request.query.get("cursor", "")))
    )


def read_cursor(text: str) -> list[Any] | None:
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


PAGE = Page(
    name="rollouts",
    title="Rollouts",
    script="rollouts.js",
    routes=[
        ("GET", "rollouts/{run}", page),
        ("GET", "rollouts/{run}/facets", facets),
        ("GET", r"rollouts/{run}/groups/{number:-?\d+}", group),
        ("GET", r"rollouts/{run}/groups/{number:-?\d+}/{rollout:\d+}/tokens", tokens),
    ],
)
HELD_OUT = Page(name="held-out", title="Held-out", script="heldout.js", routes=[("GET", "held-out/{run}", held_out)])
