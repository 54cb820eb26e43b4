"""A dataset of the Hugging Face hub that is not there, before anything starts; the hub is a server on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import datasets
import pytest
from huggingface_hub import constants

from rlsdk import preflight
from rlsdk.config import Plan, check
from rlsdk.readiness.checks import examine


class Hub(BaseHTTPRequestHandler):
    """A hub with one dataset."""

    def do_GET(self) -> None:
        there = self.path.startswith("/api/datasets/org/there") and "/gone" not in self.path
        text = json.dumps({"id": "org/there"} if there else {"error": "not found"}).encode()
        self.send_response(200 if there else 404)
        self.send_header("Content-Length", str(len(text)))
        if not there:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()
        self.wfile.write(text)

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")


@pytest.fixture
def hub(online: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", address)
    yield
    server.shutdown()


@pytest.fixture
def plan(tmp_path: Any) -> Callable[..., Plan]:
    (tmp_path / "config.json").write_text("{}")
    whole = {"name": "t", "model": str(tmp_path), "reward": "math", "steps": 1, "engine": "transformers"}
    return lambda **source: check({**whole, "tasks": {"train": {"use": "hub", **source}}})


def test_the_hub_is_asked_for_a_dataset_and_a_revision(hub: None) -> None:
    assert preflight.hub_has_dataset("org/there") and preflight.hub_has_dataset("org/there", "v1")
    assert not preflight.hub_has_dataset("org/there", "gone") and not preflight.hub_has_dataset("org/gone")
    assert not preflight.hub_has_dataset("/a/folder")
    assert not preflight.hub_is_offline()


def test_a_hub_that_does_not_answer_is_asked_once(
    online: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert not preflight.hub_has_dataset("org/there") and preflight.hub_is_offline()
    assert "datasets are read only from this machine's cache" in caplog.text
    caplog.clear()
    assert not preflight.hub_has_dataset("org/there") and not caplog.text


def test_a_dataset_that_the_hub_lacks_is_a_warning_and_one_that_it_has_is_not_downloaded(
    hub: None, plan: Callable[..., Plan]
) -> None:
    def warnings(name: str) -> list[str]:
        found = examine(plan(name=name), starts=False).warnings
        return [each.message for each in found if each.path == "tasks.train"]

    assert warnings("org/there") == []
    (warning,) = warnings("org/gone")
    assert warning.startswith("dataset 'org/gone', split 'train': ")
