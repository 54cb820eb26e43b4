"""Pages of the viewer; each consists of a navigation entry, a script, and server routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from aiohttp import web

    from rlsdk.viewer.service import ViewerService

Handler = Callable[["ViewerService", "web.Request"], Awaitable["web.StreamResponse"]]


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
    """Return all pages, in the order of the navigation. To add one, write its module and name its `PAGE` here."""
    from rlsdk.viewer import annotate_page, curves_page, processes_page, rollouts_page, studio_page

    return (
        curves_page.PAGE,
        curves_page.TIME,
        rollouts_page.PAGE,
        rollouts_page.HELD_OUT,
        annotate_page.PAGE,
        processes_page.PAGE,
        processes_page.SETTINGS,
        studio_page.PAGE,
    )
