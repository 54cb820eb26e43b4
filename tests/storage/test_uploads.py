"""Checkpoints uploaded in the background of a run, and downloaded to resume it."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from rich.console import Console

from rlsdk.checkpoints import mirror as mirror_files
from rlsdk.checkpoints.checkpoint import LEARNER, Checkpoints
from rlsdk.checkpoints.mirror import Mirror, local_copy, mirrored
from rlsdk.checkpoints.serve import CheckpointReader
from rlsdk.config import Plan, check
from rlsdk.errors import CheckpointError, ConfigError, DamagedCheckpointError, RunError
from rlsdk.opening import record as training_run
from rlsdk.runlog.folder import MARKER, mark
from rlsdk.runlog.store import DATABASE
from rlsdk.storage import copies, uploader
from rlsdk.storage import remote as remote_files
from rlsdk.storage.copies import Copy
from rlsdk.storage.lock import LOCK, RemoteLock
from rlsdk.storage.remote import RemoteFolder
from rlsdk.storage.uploader import STAGE, UploadTimes

MODEL = Path(__file__).parents[2] / "examples" / "models" / "countdown-nano"
STATE: dict[str, Any] = {"plugins": {}, "tasks": {}, "production": {}, "components": {}}
QUICK = UploadTimes(first_retry=0.01, longest_retry=0.02, last_attempts=2, stall=60)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry at once."""
    monkeypatch.setattr(uploader, "UploadTimes", lambda: QUICK)


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    """A plan whose folder is a URL, on a machine of a given name."""

    def make(url: str, *settings: str, machine: str = "one") -> Plan:
        tree = {
            "name": "trial",
            "out": url.removesuffix("/trial"),
            "mirror": str(tmp_path / machine),
            "model": str(MODEL),
            "tasks": {"train": "countdown"},
            "reward": "countdown",
            "engine": "transformers",
            "steps": 10,
        }
        return check(tree, settings)

    return make


class Training:
    """A run that writes checkpoints and nothing else."""

    def __init__(self, plan: Plan, mirror: Mirror) -> None:
        self.plan, self.mirror, self.folder = plan, mirror, plan.folder
        mark(self.folder)
        self.checkpoints = Checkpoints(plan.folder, plan.config.checkpoint.keep, saved=mirror.saved)
        (self.folder / "config.yaml").write_text("name: trial\n")
        with closing(sqlite3.connect(self.folder / DATABASE)) as database:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute("CREATE TABLE IF NOT EXISTS steps (step)")

    def save(self, step: int) -> None:
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
        with closing(sqlite3.connect(self.folder / DATABASE)) as database, database:
            database.execute("INSERT INTO steps VALUES (?)", (step,))
        self.checkpoints.save(step, STATE, lambda folder: self._write(folder, step))

    def _write(self, folder: Path, step: int) -> None:
        (folder / LEARNER / "rank").mkdir(parents=True)
        (folder / LEARNER / "rank" / "weights").write_bytes(bytes([step]) * 1000)
        (folder / LEARNER / "empty").touch()


def run(
    plan: Plan, *steps: int, resume: bool = False, overwrite: bool = False, wait: bool = False
) -> tuple[int | None, dict[str, Any], list[str]]:
    """Train some steps; return the first step, the state of uploads, and notices."""
    with mirrored(plan, resume=resume, overwrite=overwrite) as mirror:
        assert mirror is not None
        if overwrite:
            shutil.rmtree(plan.folder, ignore_errors=True)
        begun = Checkpoints(plan.folder, 1).newest_whole()[0] if resume else None
        training = Training(plan, mirror)
        mirror.begin(begun)
        for step in steps:
            training.save(step)
            if wait:
                wait_until_uploaded(mirror, step)
        return begun, mirror.finish(), mirror.notices


def wait_until_uploaded(mirror: Mirror, step: int) -> None:
    own = mirror._uploader
    assert own is not None
    with own._changed:
        assert own._changed.wait_for(lambda: step in own.uploaded and not own._working, timeout=120)


def steps_of(folder: Path) -> tuple[list[int], list[int]]:
    """Steps in the database of rollouts, and in the metrics."""
    with closing(sqlite3.connect(folder / DATABASE)) as database:
        kept = [row[0] for row in database.execute("SELECT step FROM steps ORDER BY step")]
    return kept, [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_continues_elsewhere_from_its_newest_checkpoint(plan: Callable[..., Plan], url: str) -> None:
    first = plan(url)
    begun, found, _ = run(first, 1, 2, 3, wait=True)
    assert begun is None and found["uploaded"] == [1, 2, 3] and not found["warning"] and found["failures"] == 0
    remote = RemoteFolder(url)
    assert list(copies.copies(remote)) == [2, 3]  # checkpoint.keep
    assert not any("step-1" in name for name in remote.names())
    assert LOCK not in remote.names() and MARKER in remote.names()

    second = plan(url, machine="two")
    begun, found, notices = run(second, 4, resume=True)
    assert begun == 3 and "downloaded the checkpoint of step 3" in notices[0]
    weights = second.folder / "checkpoints" / "step-3" / LEARNER / "rank" / "weights"
    assert weights.read_bytes() == bytes([3]) * 1000
    assert steps_of(second.folder) == ([1, 2, 3, 4], [1, 2, 3, 4])
    assert list(copies.copies(remote)) == [3, 4]

    begun, _, notices = run(first, 5, resume=True)  # the first machine's mirror was overtaken
    assert begun == 4
    assert any("is kept as trial.overtaken-" in text for text in notices)
    assert steps_of(first.folder) == ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])


def test_a_mirror_that_is_up_to_date_is_not_downloaded(
    plan: Callable[..., Plan], memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(plan(memory), 1, 2, wait=True)
    monkeypatch.setattr(RemoteFolder, "download", lambda *_: pytest.fail("downloaded"))
    begun, _, notices = run(plan(memory), resume=True)
    assert begun == 2 and notices == []


def test_an_upload_that_breaks_off_anywhere_is_never_found(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    run(plan(memory), 1)
    upload, write = RemoteFolder.upload, RemoteFolder.write
    for cut in range(1, 50):
        calls = 0

        def counted(original: Callable[..., None], name: str, cut: int = cut) -> Callable[..., None]:
            def call(self: RemoteFolder, *arguments: Any) -> None:
                nonlocal calls
                if any(str(each).startswith("checkpoints/") for each in arguments):
                    calls += 1
                    if calls >= cut:
                        raise ConnectionError(f"{name} {calls} broke off")
                original(self, *arguments)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(RemoteFolder, "upload", counted(upload, "upload"))
            patch.setattr(RemoteFolder, "write", counted(write, "write"))
            patch.setattr(uploader, "UploadTimes", lambda: UploadTimes(first_retry=0.001, last_attempts=1))
            _, found, _ = run(plan(memory), 2, resume=True)
        there = copies.copies(RemoteFolder(memory))
        if not found["warning"]:
            assert list(there) == [1, 2] and cut > 5
            return
        assert list(there) == [1] and found["failures"] >= 1 and "broke off" in found["last_error"]
        shutil.rmtree(plan(memory).folder)  # the machine is gone
    pytest.fail("no upload was finished")


def test_failed_uploads_are_retried_while_the_run_continues(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, memory: str
) -> None:
    upload, failures = RemoteFolder.upload, iter([OSError(errno.ENOSPC, "No space left on device"), ConnectionError()])

    def flaky(self: RemoteFolder, file: Path, name: str, moved: Any = None) -> None:
        if name.endswith("weights") and (failure := next(failures, None)):
            raise failure
        upload(self, file, name, moved)

    monkeypatch.setattr(RemoteFolder, "upload", flaky)
    _, found, _ = run(plan(memory), 1, wait=True)
    assert found["uploaded"] == [1] and found["failures"] == 2 and not found["warning"]
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 1 and "step 1 cannot be uploaded: OSError" in warned[0] and "the run continues" in warned[0]


def test_a_failure_behind_the_manifest_uploads_nothing_twice(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    upload, failures, sent = RemoteFolder.upload, iter([ConnectionError()]), []

    def flaky(self: RemoteFolder, file: Path, name: str, moved: Any = None) -> None:
        sent.append(name)
        if name == "metrics.jsonl" and (failure := next(failures, None)):
            raise failure
        upload(self, file, name, moved)

    left = plan(memory).folder / ".upload" / "step-9"
    left.mkdir(parents=True)
    monkeypatch.setattr(RemoteFolder, "upload", flaky)
    _, found, _ = run(plan(memory), 1, wait=True)
    assert found["uploaded"] == [1] and found["failures"] == 1 and not found["warning"]
    assert sum(name.endswith("weights") for name in sent) == 1
    assert not left.exists()


def test_a_store_that_refuses_deletes_gets_every_checkpoint_and_one_warning(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, memory: str
) -> None:
    def refuse(_: RemoteFolder, *names: str) -> None:
        if names:
            raise PermissionError(f"AccessDenied: {names[0]}")

    upload, failures = RemoteFolder.upload, iter([ConnectionError("reset")])

    def flaky(self: RemoteFolder, file: Path, name: str, moved: Any = None) -> None:
        upload(self, file, name, moved)
        if name.startswith("checkpoints/step-1/") and (failure := next(failures, None)):
            raise failure

    monkeypatch.setattr(RemoteFolder, "remove", refuse)
    monkeypatch.setattr(RemoteFolder, "upload", flaky)
    with mirrored(plan(memory), resume=False, overwrite=False) as mirror:
        assert mirror is not None
        training = Training(mirror._plan, mirror)
        mirror.begin(None)
        for step in range(1, 6):
            training.save(step)
            wait_until_uploaded(mirror, step)
        found = mirror.finish()
    assert found["uploaded"] == [1, 2, 3, 4, 5] and found["left_out"] == [] and not found["warning"]
    assert list(copies.copies(RemoteFolder(memory))) == [1, 2, 3, 4, 5]  # more than checkpoint.keep
    assert RemoteFolder(memory).read("metrics.jsonl") == (plan(memory).folder / "metrics.jsonl").read_bytes()
    assert caplog.text.count("which refuses to delete files: AccessDenied") == 1


def test_a_lost_network_is_reported_and_the_next_resume_uploads(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    with monkeypatch.context() as patch:

        def fail(_: RemoteFolder, file: Path, name: str, moved: Any = None) -> None:
            if name.startswith("checkpoints/"):
                raise ConnectionError("no route")

        patch.setattr(RemoteFolder, "upload", fail)
        _, found, _ = run(plan(memory), 1, 2)
    assert found["uploaded"] == [] and 2 in found["left_out"]
    assert "the checkpoint of step 2 is not in memory://" in found["warning"] and "no route" in found["warning"]
    begun, found, _ = run(plan(memory), resume=True)
    assert begun == 2 and found["uploaded"] == [2] and not found["warning"]
    assert list(copies.copies(RemoteFolder(memory))) == [2]


def test_who_interrupts_the_wait_for_the_last_upload_waits_no_more_and_the_next_resume_uploads(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    go_on = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "upload", lambda *_: go_on.wait(120))
        with pytest.raises(KeyboardInterrupt), mirrored(plan(memory), resume=False, overwrite=False) as mirror:
            assert mirror is not None
            training = Training(mirror._plan, mirror)
            go_on.set()
            mirror.begin(None)
            go_on.clear()
            training.save(1)
            threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
            mirror.finish()
        found = mirror.finish()
        assert not (training.folder / STAGE).exists()
        go_on.set()
    assert "the checkpoint of step 1 is not in memory://" in found["warning"] and "(interrupted)" in found["warning"]
    begun, found, _ = run(plan(memory), resume=True)
    assert begun == 1 and found["uploaded"] == [1]


def test_checkpoints_of_a_second_training_in_one_program_are_uploaded_too(
    plan: Callable[..., Plan], memory: str
) -> None:
    with mirrored(plan(memory), resume=False, overwrite=False) as mirror:
        assert mirror is not None
        training = Training(mirror._plan, mirror)
        mirror.begin(None)
        found = []
        for step in (1, 2):
            training.save(step)
            found.append(mirror.finish())
    assert [each["uploaded"] for each in found] == [[1], [1, 2]] and not any(each["warning"] for each in found)
    assert list(copies.copies(RemoteFolder(memory))) == [1, 2]


def test_a_run_ends_although_its_store_does_not_answer_any_more(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, memory: str
) -> None:
    """As a store does behind a connection that is open and dead: no call fails, and none returns."""
    go_on = threading.Event()
    monkeypatch.setattr(remote_files.answered, "__defaults__", (0.1,))
    monkeypatch.setattr(RemoteLock.__init__, "__kwdefaults__", {"beat": 0.2, "lease": 60.0})
    monkeypatch.setattr(uploader, "UploadTimes", lambda: UploadTimes(stall=0.5))
    with monkeypatch.context() as patch, mirrored(plan(memory), resume=False, overwrite=False) as mirror:
        assert mirror is not None
        training = Training(mirror._plan, mirror)
        mirror.begin(None)
        for name in ("names", "read", "write", "create", "upload", "remove"):
            patch.setattr(RemoteFolder, name, lambda *_: go_on.wait(120))
        training.save(1)
        found = mirror.finish()
        left = (training.folder / STAGE).exists()
        ended = threading.Thread(target=mirror.close)
        ended.start()
        ended.join(20)
        hangs = ended.is_alive()
        go_on.set()
    assert not hangs and not left
    assert "the checkpoint of step 1 is not in memory://" in found["warning"]
    assert "could not be removed, and expires by itself: no answer within 0.1 s" in caplog.text
    begun, found, _ = run(plan(memory), resume=True)
    assert begun == 1 and found["uploaded"] == [1]


def test_an_upload_that_stalls_during_a_run_is_told_and_the_next_ones_are_made(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, memory: str
) -> None:
    """As behind a router that has forgotten one connection: other calls to the store succeed."""
    go_on, put, hung = threading.Event(), MemoryFileSystem.put_file, []

    def hang_once(self: Any, source: str, target: str, **options: Any) -> None:
        if "/step-2/" in target and not hung:
            hung.append(target)
            go_on.wait(120)
        put(self, source, target, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", hang_once)
    monkeypatch.setattr(remote_files, "STALL_SECONDS", 0.2)
    with mirrored(plan(memory), resume=False, overwrite=False) as mirror:
        assert mirror is not None
        training = Training(mirror._plan, mirror)
        mirror.begin(None)
        for step in (1, 2, 3):
            training.save(step)
            wait_until_uploaded(mirror, step)
        found = mirror.finish()
    go_on.set()
    assert hung and found["uploaded"] == [1, 2, 3] and found["failures"] == 1 and not found["warning"]
    said = "the checkpoint of step 2 cannot be uploaded: TimeoutError: no answer within 0.2"
    assert said in caplog.text and "the run continues, and the upload is retried" in caplog.text


def test_a_failed_upload_that_is_skipped_leaves_no_files(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    upload, failed = RemoteFolder.upload, threading.Event()

    def fail(self: RemoteFolder, file: Path, name: str, moved: Any = None) -> None:
        upload(self, file, name, moved)
        if name.startswith("checkpoints/step-1/"):
            failed.set()
            raise ConnectionError("reset")

    monkeypatch.setattr(RemoteFolder, "upload", fail)
    with mirrored(plan(memory), resume=False, overwrite=False) as mirror:
        assert mirror is not None
        training = Training(mirror._plan, mirror)
        mirror.begin(None)
        training.save(1)
        assert failed.wait(60)
        training.save(2)
        found = mirror.finish()
    assert found["uploaded"] == [2] and found["left_out"] == [1]
    assert not [name for name in RemoteFolder(memory).names("checkpoints") if "step-1" in name]


def test_a_full_disk_under_the_copy_of_the_database_ends_no_run(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    staged, full = uploader.stage, iter([True])

    def stage(*arguments: Any) -> Any:
        if next(full, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        return staged(*arguments)

    monkeypatch.setattr(uploader, "stage", stage)
    _, found, _ = run(plan(memory), 1, 2)
    assert found["failures"] == 1 and "No space left" in found["last_error"]
    assert found["uploaded"] == [2] and not found["warning"]


def held_uploads(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Make uploads of the first checkpoint wait; return an event that tells of them, and one that lets them go on."""
    upload, began, go_on = RemoteFolder.upload, threading.Event(), threading.Event()

    def held(self: RemoteFolder, file: Path, name: str, moved: Any = None) -> None:
        if name.startswith("checkpoints/step-1/"):
            began.set()
            assert go_on.wait(120)
        upload(self, file, name, moved)

    monkeypatch.setattr(RemoteFolder, "upload", held)
    return began, go_on


def test_checkpoints_that_come_faster_than_uploads_are_left_out_and_are_not_deleted_under_an_upload(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    began, go_on = held_uploads(monkeypatch)
    checked = plan(memory, "checkpoint.keep=1")
    with mirrored(checked, resume=False, overwrite=False) as mirror:
        assert mirror is not None
        training = Training(checked, mirror)
        mirror.begin(None)
        training.save(1)
        assert began.wait(120)
        for step in (2, 3, 4):
            training.save(step)
        assert training.checkpoints.steps() == [4]
        go_on.set()
        found = mirror.finish()
    assert found["uploaded"] == [1, 4] and found["left_out"] == [2, 3]
    with local_copy(memory) as folder:  # as it was at that step, not as it became
        assert steps_of(folder) == ([1, 2, 3, 4], [1, 2, 3, 4])


def test_an_upload_holds_files_as_they_were_at_its_step(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    upload, go_on = RemoteFolder.upload, threading.Event()

    def slow(self: RemoteFolder, file: Path, name: str, moved: Any = None) -> None:
        if name.startswith("checkpoints/"):
            assert go_on.wait(120)
        upload(self, file, name, moved)

    monkeypatch.setattr(RemoteFolder, "upload", slow)
    checked = plan(memory)
    with mirrored(checked, resume=False, overwrite=False) as mirror:
        assert mirror is not None
        training = Training(checked, mirror)
        mirror.begin(None)
        training.save(1)
        with closing(sqlite3.connect(training.folder / DATABASE)) as database, database:
            database.execute("INSERT INTO steps VALUES (99)")
        with (training.folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 99}\n')
        go_on.set()
        mirror.finish()
    with local_copy(memory) as folder:
        assert steps_of(folder) == ([1], [1])


def test_an_upload_holds_no_files_of_servers_and_no_compiled_programs(plan: Callable[..., Plan], memory: str) -> None:
    checked = plan(memory)
    for name in (
        "serve/logs/engine-0.log",
        "serve/cache/a.so",
        "eval/step-1/cache/a.so",
        "eval/step-1/evaluation.json",
    ):
        file = checked.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    run(checked, 1, wait=True)
    names = {name for name in RemoteFolder(memory).names() if "serve" in name or "eval" in name}
    assert names == {"eval/step-1/evaluation.json", "checkpoints/step-1.run/eval/step-1/evaluation.json"}


def test_a_damaged_newest_upload_is_left_out(plan: Callable[..., Plan], memory: str) -> None:
    run(plan(memory), 1, 2, wait=True)
    remote = RemoteFolder(memory)
    remote.write("checkpoints/step-2/learner/rank/weights", b"short")
    begun, _, notices = run(plan(memory, machine="two"), resume=True)
    assert begun == 1 and "step 2" in notices[0] and "has 5 bytes; its manifest says 1000" in notices[0]
    remote.remove("checkpoints/step-1/learner/rank/weights")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact"):
        run(plan(memory, machine="three"), resume=True)


def test_a_checkpoint_that_is_damaged_in_the_mirror_is_downloaded_again(plan: Callable[..., Plan], memory: str) -> None:
    run(plan(memory), 1, 2, wait=True)
    local = plan(memory).folder / "checkpoints" / "step-2" / LEARNER / "rank" / "weights"
    local.unlink()
    begun, _, notices = run(plan(memory), resume=True)
    assert begun == 2 and list(copies.copies(RemoteFolder(memory))) == [1, 2]
    assert "step-2 is damaged" in notices[0] and "downloaded the checkpoint of step 2" in notices[-1]
    # One that is damaged in both places costs no more than itself.
    run(plan(memory), 3, resume=True, wait=True)
    (local.parents[3] / "step-3" / LEARNER / "rank" / "weights").unlink()
    RemoteFolder(memory).remove("checkpoints/step-3/learner/rank/weights")
    begun, _, notices = run(plan(memory), resume=True)
    assert begun == 2 and "step 3 in memory://" in notices[-1]


def test_an_upload_of_another_version_is_named_and_a_damaged_manifest_is_removed(
    plan: Callable[..., Plan], memory: str
) -> None:
    run(plan(memory), 1, 2, wait=True)
    remote = RemoteFolder(memory)
    whole = remote.read("checkpoints/step-2.json")
    remote.write("checkpoints/step-2.json", b'{"format": 9, "files": []}')
    with pytest.raises(CheckpointError, match=r"step-2.json has format 9; this rlsdk reads 1: use the newer rlsdk"):
        run(plan(memory, machine="two"), resume=True)
    assert list(remote.names("checkpoints/step-2")), "nothing of it is deleted"
    assert whole is not None
    remote.write("checkpoints/step-2.json", whole[:20])  # a disk was full, or the machine was lost
    begun, _, _ = run(plan(memory, machine="three"), resume=True)
    assert begun == 1 and not [name for name in remote.names("checkpoints") if "step-2" in name]


def test_a_remote_run_is_not_overwritten_unasked(plan: Callable[..., Plan], memory: str) -> None:
    run(plan(memory), 1)
    with pytest.raises(ConfigError, match=r"already holds a run; continue it with --resume"):
        run(plan(memory, machine="two"), 1)
    assert LOCK not in RemoteFolder(memory).names()
    run(plan(memory, machine="two"), overwrite=True)
    assert not copies.copies(RemoteFolder(memory))


def test_overwrite_deletes_nothing_that_rlsdk_did_not_make(plan: Callable[..., Plan], memory: str) -> None:
    remote = RemoteFolder(memory)
    remote.write("thesis.tex", b"years")
    for how in ({"overwrite": True}, {"resume": True}, {}):
        with pytest.raises(ConfigError, match=r"has files, such as thesis\.tex, but is not a run"):
            run(plan(memory), **how)
    assert list(remote.names()) == ["thesis.tex"]


def test_a_remote_run_in_use_is_refused(plan: Callable[..., Plan], memory: str) -> None:
    with mirrored(plan(memory), resume=False, overwrite=False):
        for how in ({}, {"overwrite": True}, {"resume": True}):
            with pytest.raises(ConfigError, match="is in use by process"):
                run(plan(memory, machine="two"), **how)


def test_whoever_lost_the_remote_folder_uploads_nothing_more(plan: Callable[..., Plan], memory: str) -> None:
    checked = plan(memory)
    with mirrored(checked, resume=False, overwrite=False) as mirror:
        assert mirror is not None
        training = Training(checked, mirror)
        mirror.begin(None)
        RemoteFolder(memory).write(LOCK, json.dumps({"id": "another's", "pid": 1, "host": "elsewhere"}).encode())
        training.save(1)
        found = mirror.finish()
    assert found["uploaded"] == [] and "another program has taken over" in found["warning"]
    assert not copies.copies(RemoteFolder(memory))


def test_a_snapshot_that_waits_when_the_remote_folder_is_lost_is_deleted(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    began, go_on = held_uploads(monkeypatch)
    checked = plan(memory)
    with mirrored(checked, resume=False, overwrite=False) as mirror:
        assert mirror is not None
        training = Training(checked, mirror)
        mirror.begin(None)
        own = mirror._uploader
        assert own is not None
        training.save(1)
        assert began.wait(120)
        training.save(2)
        RemoteFolder(memory).write(LOCK, json.dumps({"id": "another's", "pid": 1, "host": "elsewhere"}).encode())
        go_on.set()
        with own._changed:  # the training continues; it has not ended yet
            assert own._changed.wait_for(lambda: own._given_up, timeout=120)
        training.save(3)
        wait_until(lambda: not list((training.folder / STAGE).iterdir()))
        found = mirror.finish()
    assert found["uploaded"] == [] and found["left_out"] == [2]
    assert not (training.folder / STAGE).exists()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_unreachable_store_is_reported_before_the_run(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(RemoteFolder, "names", fail)
    with pytest.raises(RunError, match=r"memory://nowhere/trial cannot be used: PermissionError: Access Denied"):
        run(plan("memory://nowhere/trial"))


def test_a_store_that_does_not_answer_is_reported_before_the_run(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(mirror_files, "FIRST_ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(RemoteFolder, "names", lambda *_: go_on.wait(20) and {})
    said = "memory://.* cannot be used: TimeoutError: no answer within 0.1 s"
    with pytest.raises(RunError, match=said), mirrored(plan(memory), resume=False, overwrite=False):
        pytest.fail("it runs")
    with pytest.raises(RunError, match=said), local_copy(memory):
        pytest.fail("it is read")
    go_on.set()


def test_a_missing_bucket_is_reported_and_not_created(plan: Callable[..., Plan], s3: str) -> None:
    import s3fs

    with pytest.raises(RunError, match="s3://misspelt/runs/trial cannot be used"):
        run(plan("s3://misspelt/runs/trial"))
    assert not s3fs.S3FileSystem().exists("misspelt")


def test_a_training_uploads_its_checkpoints_and_is_resumed_from_them(
    plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    monkeypatch.setattr(training_run, "ray_cluster", lambda _, **__: contextlib.nullcontext(0))
    monkeypatch.setattr(training_run, "reaped", contextlib.nullcontext)
    monkeypatch.setattr(training_run, "log_to", lambda *_: None)
    how: dict[str, Any] = {"overwrite": False, "allow_changes": False, "console": Console(file=io.StringIO())}
    for machine, begun, step in (("one", None, 1), ("two", 1, 2)):
        checked = plan(memory, machine=machine)
        with training_run.open_run(checked, resume=begun is not None, **how) as record:
            assert record.resume_from == begun

            def write(folder: Path) -> None:
                (folder / LEARNER).mkdir()

            record.checkpoints.save(step, {**STATE, "plugins": checked.code}, write)
    remote = RemoteFolder(memory)
    assert list(copies.copies(remote)) == [1, 2]
    assert {"config.yaml", MARKER} < set(remote.names())
    assert LOCK not in remote.names()


def test_a_run_goes_back_to_a_step_that_only_the_remote_folder_has(plan: Callable[..., Plan], memory: str) -> None:
    run(plan(memory), 1, 2, wait=True)
    elsewhere = plan(memory, machine="two")
    with mirrored(elsewhere, resume=1, overwrite=False) as mirror:
        assert mirror is not None
        assert Checkpoints(elsewhere.folder, 1).steps() == [1] and steps_of(elsewhere.folder) == ([1], [1])
        mirror.begin(1)
        assert list(copies.copies(RemoteFolder(memory))) == [1]  # what came later belongs to another course
    third = mirrored(plan(memory, machine="three"), resume=7, overwrite=False)
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 7; there are: 1"), third:
        pass


def test_a_run_is_read_from_its_url(plan: Callable[..., Plan], url: str) -> None:
    run(plan(url), 1, 2, wait=True)
    with local_copy(url, step=1) as folder:
        assert (folder / "checkpoints" / "step-1" / "state.json").is_file()
        assert steps_of(folder) == ([1], [1])
    assert not folder.exists()
    with local_copy(url, checkpoint=False) as folder:
        assert not (folder / "checkpoints").exists() and (folder / "config.yaml").is_file()
    with (
        pytest.raises(CheckpointError, match=r"has no complete checkpoint of step 7; there are: 1, 2"),
        local_copy(url, step=7),
    ):
        pass


def test_a_run_is_read_from_its_newest_intact_upload(
    plan: Callable[..., Plan], memory: str, caplog: pytest.LogCaptureFixture
) -> None:
    run(plan(memory), 1, 2, wait=True)
    remote = RemoteFolder(memory)
    state = remote.read("checkpoints/step-2/state.json") or b""
    for damaged in (state[:-9], state.replace(b'"step": 2', b'"step": 3')):
        remote.write("checkpoints/step-2/state.json", damaged)
        with local_copy(memory) as folder:
            assert Checkpoints(folder, 1).steps() == [1] and steps_of(folder) == ([1], [1])
        assert "the checkpoint of step 2 in memory://" in caplog.text
        caplog.clear()
    remote.remove("checkpoints/step-2/learner/rank/weights")
    with pytest.raises(DamagedCheckpointError, match="learner/rank/weights is missing"), local_copy(memory, step=2):
        pass


def test_the_server_of_a_url_skips_damaged_checkpoints_and_retries_what_it_could_not_download(
    plan: Callable[..., Plan], memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(training: Training, *steps: int) -> None:
        for step in steps:
            training.checkpoints.save(step, STATE, lambda folder: shutil.copytree(MODEL, folder / "export"))
            wait_until_uploaded(training.mirror, step)

    checked, reader = plan(memory, "checkpoint.keep=3"), CheckpointReader(plan(memory), (), tmp_path)
    remote = RemoteFolder(memory)
    with mirrored(checked, resume=False, overwrite=False) as mirror:
        assert mirror is not None
        training = Training(checked, mirror)
        mirror.begin(None)
        save(training, 1, 2)
        remote.write("checkpoints/step-2/export/model.safetensors", b"cut short")
        assert served(reader) == 1
        assert served(reader) is None
        save(training, 3)
        with monkeypatch.context() as patch:
            patch.setattr(RemoteFolder, "download", unreachable)
            assert served(reader) is None
        assert served(reader) == 3
        copies.publish(remote, Copy(3, copies.copies(remote)[3].files))  # a resumed run has trained this step again
        assert served(reader) == 3
        assert served(reader) is None


def served(reader: CheckpointReader) -> int | None:
    weights = reader.read_newest()
    return None if weights is None else weights.version


def unreachable(*_: Any) -> None:
    raise ConnectionError("no route to the store")


def test_a_full_local_disk_is_not_blamed_on_the_url(
    plan: Callable[..., Plan], memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(plan(memory), 1, wait=True)

    def fail(_: RemoteFolder, name: str, file: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RemoteFolder, "download", fail)
    with (
        pytest.raises(RunError, match=r"the disk of .*reading.* is full: memory://.* at step 1 has "),
        local_copy(memory),
    ):
        pass


def test_commands_read_a_run_from_its_url(plan: Callable[..., Plan], url: str, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from rlsdk.cli import root
    from rlsdk.evaluation.models import model_of
    from rlsdk.runlog.store import Address, RolloutStore

    checked = plan(url)
    with mirrored(checked, resume=False, overwrite=False) as mirror:
        assert mirror is not None
        training = Training(checked, mirror)
        (training.folder / DATABASE).unlink()
        RolloutStore(Address.make(training.folder, None, None)).close()
        mirror.begin(None)
        for step in (1, 2):

            def write(folder: Path, step: int = step) -> None:
                training._write(folder, step)
                shutil.copytree(MODEL, folder / "export")

            training.checkpoints.save(step, STATE, write)
            wait_until_uploaded(mirror, step)
    shutil.rmtree(training.folder)

    ran = CliRunner().invoke(root, ["export", url, str(tmp_path / "model"), "--step", "1"])
    assert ran.exit_code == 0 and f"the model of {url} after step 1" in ran.stdout, ran.output
    assert (tmp_path / "model" / "config.json").is_file()
    ran = CliRunner().invoke(root, ["rollouts", url])
    assert ran.exit_code == 0 and f"{url} saves them after each step" in ran.stderr, ran.output
    for checkpoint in (url, f"{url}/checkpoints/step-1"):
        with model_of(checkpoint) as model:
            assert (model / "config.json").is_file()
    ran = CliRunner().invoke(root, ["export", url, str(tmp_path / "other"), "--step", "7"])
    assert ran.exit_code != 0 and "no complete checkpoint of step 7; there are: 1, 2" in ran.stderr


def test_a_mirror_is_only_for_a_url(plan: Callable[..., Plan], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mirror: given, but out='runs' is a local folder"):
        plan("memory://x/trial", "out=runs")
    with pytest.raises(ConfigError, match="out: gopher://x: fsspec has no protocol 'gopher'"):
        plan("gopher://x/trial")
    checked = plan("memory://x/trial")
    assert checked.location == "memory://x/trial" and checked.folder.is_relative_to(tmp_path / "one")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Downloads lie in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield


def test_a_checkpoint_that_is_deleted_while_copies_are_listed_is_left_out_without_a_warning(memory, caplog):
    class Listed(RemoteFolder):
        def names(self, below: str = "") -> dict[str, int]:  # as they were before the run deleted the first one
            return {f"checkpoints/step-{step}.json": 1 for step in (1, 2)}

    remote = Listed(memory)
    copies.publish(remote, Copy(2, {"step-2/x": 1}))
    assert list(copies.copies(remote)) == [2]
    assert not caplog.records
