"""A folder at a URL, and its lock."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlsdk.errors import ConfigError
from rlsdk.storage import remote as remote_files
from rlsdk.storage.location import is_url, mirror_of, url_fault
from rlsdk.storage.lock import LOCK, RemoteLock
from rlsdk.storage.remote import RemoteFolder


def test_urls_are_distinguished_from_folders() -> None:
    assert all(map(is_url, ["s3://bucket/runs", "file:///data", "memory://x", "simplecache::s3://bucket/x"]))
    assert not any(map(is_url, ["runs", "/data/runs", "C:\\runs", "./s3:/x", "a b://c"]))


def test_each_url_has_its_own_mirror(tmp_path: Path) -> None:
    one, other = (mirror_of(url, str(tmp_path)) for url in ("s3://bucket/a/b", "s3://bucket/a-b"))
    assert one != other and one.parent == other.parent == tmp_path
    assert mirror_of("s3://bucket/a/b/", str(tmp_path)) == one
    assert "bucket-a-b" in one.name


def test_the_mirror_lies_in_the_platforms_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if sys.platform == "linux":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert mirror_of("s3://bucket/runs").parent == tmp_path / "rlsdk" / "runs"


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    # Another test may have loaded it; `fsspec` looks into this dictionary through a view of it.
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "s3", raising=False)
    assert url_fault("s3://bucket/runs").endswith("needs a package that is not installed: pip install 'rlsdk[s3]'")
    assert "has no protocol 'gopher'" in url_fault("gopher://runs")


def test_files_are_written_listed_read_and_removed(url: str, tmp_path: Path) -> None:
    remote = RemoteFolder(url)
    assert remote.names() == {} and remote.read("a") is None
    remote.write("a", b"1")
    remote.write("deep/er/b", b"22")
    assert remote.names() == {"a": 1, "deep/er/b": 2}
    assert remote.names("deep") == {"deep/er/b": 2}
    assert remote.names("de") == {}
    file = tmp_path / "file"
    file.write_bytes(b"333")
    remote.upload(file, "deep/c")
    remote.download("deep/c", tmp_path / "back" / "c")
    assert (tmp_path / "back" / "c").read_bytes() == b"333"
    remote.remove("a", "a")
    remote.remove_below("deep")
    assert remote.names() == {}


def test_a_network_that_swallows_packets_costs_every_call_its_time_limit_and_no_more(
    s3: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import s3fs

    monkeypatch.setattr(remote_files, "CALL_SECONDS", 0.5)
    monkeypatch.setattr(remote_files, "STALL_SECONDS", 0.5)
    file = tmp_path / "file"
    file.write_bytes(b"333")
    with socket.create_server(("127.0.0.1", 0)) as dead:  # it accepts connections, and never answers
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{dead.getsockname()[1]}")
        s3fs.S3FileSystem.clear_instance_cache()
        remote = RemoteFolder("s3://bucket/runs/trial")
        calls: list[Callable[[], Any]] = [
            remote.names,
            lambda: remote.read("a"),
            lambda: remote.write("a", b"1"),
            lambda: remote.create("a", b"1"),
            lambda: remote.upload(file, "a"),
            lambda: remote.download("a", tmp_path / "back"),
            lambda: remote.remove("a"),
            lambda: remote.remove_below("a"),
        ]
        for call in calls:
            with pytest.raises(TimeoutError, match=r"no answer within 0\.5"):
                call()
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_slow_transfer_has_as_long_as_it_needs_while_it_makes_progress(
    memory: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(remote_files, "STALL_SECONDS", 1.5)
    monkeypatch.setattr(remote_files, "CALL_SECONDS", 1.5)
    remote, file = RemoteFolder(memory), tmp_path / "file"

    def put(source: str, target: str, callback: Any) -> None:
        for _ in range(8):
            time.sleep(0.25)
            callback.call()

    def get(source: str, target: str, callback: Any) -> None:  # as over SFTP, which does not call back
        for size in range(1, 9):
            time.sleep(0.25)
            Path(target).write_bytes(bytes(size))

    monkeypatch.setattr(remote._fs, "put_file", put, raising=False)
    monkeypatch.setattr(remote._fs, "get_file", get, raising=False)
    file.write_bytes(b"333")
    remote.upload(file, "a")
    remote.download("a", tmp_path / "back")
    assert (tmp_path / "back").stat().st_size == 8


def test_only_one_of_several_creates_a_file(url: str) -> None:
    remote = RemoteFolder(url)
    assert remote.create("lock", b"mine")
    assert not remote.create("lock", b"another's")
    assert remote.read("lock") == b"mine"


def test_a_locked_folder_is_refused_with_the_holders_name(url: str) -> None:
    remote = RemoteFolder(url)
    first = RemoteLock(remote, beat=0.05)
    first.acquire()
    with pytest.raises(ConfigError, match=rf"in use by process {os.getpid()} on "):
        RemoteLock(remote).acquire()
    first.release()
    second = RemoteLock(remote, beat=0.05)
    second.acquire()
    assert second.is_ours() and not first.is_ours()
    second.release()
    assert remote.read(LOCK) is None


def test_the_lock_of_a_dead_process_of_this_machine_is_taken(url: str) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    remote = RemoteFolder(url)
    first = RemoteLock(remote, beat=0.05)
    held = json.loads(first._content())
    remote.write(LOCK, json.dumps({**held, "pid": ended.pid}).encode())
    second = RemoteLock(remote, beat=0.05)
    second.acquire()
    assert second.is_ours()
    second.release()


def test_a_lock_that_could_not_be_removed_is_taken_by_the_next_run_of_the_same_process(
    memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RemoteFolder(memory)
    first, second = RemoteLock(remote, beat=0.05), RemoteLock(remote, beat=0.05)
    first.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "remove", lambda *_: (_ for _ in ()).throw(OSError("no network")))
        first.release()
    assert remote.read(LOCK) is not None
    second.acquire()
    assert second.is_ours()
    second.release()
    assert remote.read(LOCK) is None


@pytest.mark.parametrize("holder", [{"machine": "another container's"}, {"started": 0.0}])
def test_a_lock_of_another_process_with_the_host_and_process_id_of_a_running_one_is_taken(
    holder: dict[str, Any],
) -> None:
    remote = RemoteFolder("memory://lock-reused/trial")
    lock = RemoteLock(remote, beat=0.05, lease=0.2)
    remote.write(LOCK, json.dumps({**json.loads(lock._content()), "id": "x", **holder}).encode())
    lock.acquire()
    assert lock.is_ours()
    lock.release()


def test_a_holder_elsewhere_lives_as_long_as_its_lock_changes() -> None:
    remote = RemoteFolder("memory://lock-elsewhere/trial")
    told = {"id": "x", "pid": 1, "host": "elsewhere", "time": "0"}
    remote.write(LOCK, json.dumps(told).encode())
    ended = threading.Event()

    def beat() -> None:
        count = 0
        while not ended.wait(0.02) and b'"x"' in (remote.read(LOCK) or b""):
            count += 1
            remote.write(LOCK, b"{")  # most stores show a file while it is written
            time.sleep(0.1)
            remote.write(LOCK, json.dumps({**told, "time": str(count)}).encode())

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="in use by process 1 on elsewhere"):
            RemoteLock(remote, beat=0.05, lease=600).acquire()
    finally:
        ended.set()
        thread.join()
    lock = RemoteLock(remote, beat=0.05, lease=0.2)  # it has stopped
    lock.acquire()
    assert lock.is_ours()
    lock.release()


def test_whoever_was_taken_over_notices() -> None:
    remote = RemoteFolder("memory://lock-lost/trial")
    lock = RemoteLock(remote, beat=0.05)
    lock.acquire()
    remote.write(LOCK, json.dumps({"id": "another's", "pid": 1, "host": "elsewhere"}).encode())
    assert not lock.is_ours()
    lock.release()
    assert b"another's" in (remote.read(LOCK) or b"")  # it is not ours to remove


def test_a_lock_that_a_full_disk_cuts_short_is_rewritten_and_stays_ours(tmp_path: Path) -> None:
    remote = RemoteFolder(f"file://{tmp_path}/runs/trial")
    lock = RemoteLock(remote, beat=0.05)
    lock.acquire()
    remote.write(LOCK, b"")
    assert lock.is_ours()
    deadline = time.monotonic() + 30
    while not remote.read(LOCK) and time.monotonic() < deadline:
        time.sleep(0.01)
    lock.release()
    assert remote.read(LOCK) is None
