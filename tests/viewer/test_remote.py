"""A run at a URL: downloaded when the viewer starts, and again after further uploads."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest

from rlsdk.errors import EnvironmentFault, RlsdkError
from rlsdk.storage import copies
from rlsdk.storage.copies import Copy
from rlsdk.storage.remote import RemoteFolder
from rlsdk.viewer import remote
from rlsdk.viewer.service import ViewerService, serve
from rlsdk.viewer.walks import Filter
from tests.viewer.recorded import make_run


def upload(there: RemoteFolder, run: Path, step: int) -> None:
    names = ("config.yaml", "metrics.jsonl", "rollouts.db", "logs/driver.log")
    files = {f"step-{step}.run/{name}": run / name for name in names}
    for name, file in files.items():
        there.upload(file, f"checkpoints/{name}")
    copies.publish(there, Copy(step, {name: file.stat().st_size for name, file in files.items()}, f"upload-{step}"))


def test_a_remote_run_is_shown_and_follows_its_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "FETCH_SECONDS", 0.0)
    url = f"file://{tmp_path / 'far' / 'run'}"
    (tmp_path / "far").mkdir()
    with pytest.raises(RlsdkError):
        ViewerService([url])
    there = RemoteFolder(url)
    upload(there, make_run(tmp_path / "a", steps=3), 3)
    service = ViewerService([url])
    (run,) = service.runs
    assert (run.state()["step"], run.state()["path"]) == (3, url)
    assert len(run.browser.page(Filter())["rows"]) == 18
    upload(there, make_run(tmp_path / "b", steps=5), 5)
    service.look()
    (again,) = service.runs
    assert (again.state()["step"], again.id) == (5, run.id)
    go_on = threading.Event()
    with monkeypatch.context() as patch:  # a store that answers no more costs a page a moment, and is asked once
        patch.setattr(remote, "WAIT_SECONDS", 0.1)
        patch.setattr(RemoteFolder, "names", lambda *_: go_on.wait(120) and {})
        for _ in range(3):
            service.look()
    assert [each.state()["step"] for each in service.runs] == [5]
    go_on.set()
    with socket.socket() as taken, pytest.raises(EnvironmentFault):  # `rlsdk view` then tries another port
        taken.bind(("127.0.0.1", 0))
        asyncio.run(serve(service, "127.0.0.1", taken.getsockname()[1], print, asyncio.Event()))
    assert len(again.browser.page(Filter())["rows"]) == 30
    service.close()
    assert not again.path.exists()
