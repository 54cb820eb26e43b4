"""A run folder with a small real store, and a client of the viewer's server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.runlog.conftest import server  # noqa: F401 - PostgreSQL
from tests.viewer.recorded import make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "first")


@pytest.fixture
def ask() -> Callable[..., Any]:
    """Sends requests to the server of a service: `ask(service, path, …)` gives status, headers and content."""

    def send(
        service: Any, path: str, *, method: str = "GET", headers: dict[str, str] | None = None, content: Any = None
    ) -> Any:
        async def talk() -> Any:
            from aiohttp.test_utils import TestClient, TestServer

            async with TestClient(TestServer(service.application())) as client:
                given = {
                    **({"Origin": str(client.make_url("")).rstrip("/")} if method == "POST" else {}),
                    **(headers or {}),
                }
                response = await client.request(method, path, headers=given, json=content, allow_redirects=False)
                text = await response.text()
                answer = json.loads(text) if response.content_type == "application/json" else text
                return response.status, response.headers, answer

        return asyncio.run(talk())

    return send
