"""A run's folder belongs to one program, and only what rlsdk created is deleted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from rlsdk.errors import ConfigError
from rlsdk.runlog import folder as folders
from rlsdk.runlog.folder import MARKER, held, mark, process_in, remove_run, replace_text

HOLD = "import sys; from pathlib import Path; from rlsdk.runlog.folder import held\n"
HOLD += "with held(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def holder(tmp_path):
    """Another process, which holds a run's folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_program_is_refused_with_the_holder_of_the_run(tmp_path, holder):
    with pytest.raises(ConfigError) as caught, held(tmp_path / "run"):
        pass
    assert f"is in use by process {holder.pid} on {socket.gethostname()}" in str(caught.value)
    with held(tmp_path / "another"):  # a lock is one run's
        pass
    holder.communicate("")
    with held(tmp_path / "run"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reaped", [True, False])
def test_a_stopped_program_keeps_its_lock_and_a_dead_one_releases_it(tmp_path, holder, reaped):
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(ConfigError), held(tmp_path / "run"):
        pass
    assert process_in(tmp_path / "run") == str(holder.pid)
    holder.kill()
    if reaped:
        holder.wait()
    else:  # its parent has not asked for its status yet: the system still knows the process
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    assert process_in(tmp_path / "run") == process_in(tmp_path / "another") == ""
    with held(tmp_path / "run"):
        pass


@pytest.mark.parametrize("alive", [True, False])
def test_a_program_on_another_machine_holds_the_run_while_it_shows_signs_of_life(tmp_path, monkeypatch, alive):
    monkeypatch.setattr(folders, "LEASE_SECONDS", 0.6)
    lock = tmp_path / ".run.lock"
    lock.write_text("filelock/2\npid=7\nhost=node-7\nmode=lease\ntoken=" + "0" * 32 + "\nduration=0.6\n")
    over = threading.Event()

    def live() -> None:
        while not over.wait(0.1):
            os.utime(lock)

    heart = threading.Thread(target=live)
    if alive:
        heart.start()
    try:
        if alive:
            with pytest.raises(ConfigError, match="process 7 on node-7"), held(tmp_path / "run"):
                pass
        else:
            with held(tmp_path / "run"):
                pass
    finally:
        over.set()
        if alive:
            heart.join()


def test_a_program_notices_that_another_has_taken_over_its_folder(tmp_path):
    run, lock = tmp_path / "run", tmp_path / ".run.lock"
    with held(run) as ours:
        assert not ours.loss()
        lock.unlink()
        assert not ours.loss() and not ours.loss()  # together with the folder: it is missed elsewhere
        run.mkdir()
        assert not ours.loss()  # a program that tries to take over renames the file for a moment
        assert "another program may have trained" in ours.loss()
        lock.write_text("filelock/2\npid=7\nhost=node-7\nmode=lease\ntoken=" + "0" * 32 + "\nduration=30.0\n")
        assert "process 7 on node-7 has taken over" in ours.loss()
    assert lock.exists()  # the other program's


def test_a_lock_that_cannot_be_released_does_not_hide_why_the_run_ended(tmp_path):
    mount = "import os, sys; from pathlib import Path; from rlsdk.runlog.folder import held\n"
    mount += "folder = Path(sys.argv[1])\n"
    mount += "with held(folder / 'run'):\n"
    mount += "    os.system(f'mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}')\n"
    mount += "    (folder / 'metrics.jsonl').touch()\n"
    namespace = ["unshare", "--map-root-user", "--mount"]
    if subprocess.run([*namespace, "true"], check=False).returncode:
        pytest.skip("this kernel lets no user mount a file system")
    command = [*namespace, sys.executable, "-c", mount, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.stderr.splitlines()[-1] == f"OSError: [Errno 30] Read-only file system: '{tmp_path}/metrics.jsonl'"


def test_only_a_folder_that_rlsdk_made_is_deleted(tmp_path):
    run, thesis = tmp_path / "run", tmp_path / "thesis"
    mark(run)
    (run / "checkpoints").mkdir()
    remove_run(run)
    assert not run.exists()
    remove_run(run)  # nothing there
    thesis.mkdir()
    remove_run(thesis)  # nothing in it
    (thesis / "chapter.tex").write_text("Ten years")
    with pytest.raises(ConfigError, match="was not made by rlsdk"):
        remove_run(thesis)
    assert (thesis / "chapter.tex").read_text() == "Ten years"


def test_files_of_somebody_else_are_foreign_and_an_empty_folder_is_not(tmp_path):
    folder = tmp_path / "thesis"
    assert not folders.is_foreign(folder)
    folder.mkdir()
    assert not folders.is_foreign(folder)
    (folder / "chapter.tex").touch()
    assert folders.is_foreign(folder)
    mark(folder)
    assert not folders.is_foreign(folder)


def test_a_link_to_a_run_is_not_followed(tmp_path):
    mark(tmp_path / "kept")
    (tmp_path / "run").symlink_to(tmp_path / "kept")
    with pytest.raises(ConfigError):
        remove_run(tmp_path / "run")
    assert (tmp_path / "kept" / MARKER).is_file()


def test_a_file_that_a_full_disk_does_not_take_stays_as_it_was(tmp_path):
    file = tmp_path / "summary.json"
    replace_text(file, "before")
    (tmp_path / f".summary.json.{os.getpid()}.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        replace_text(file, "after")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("summary.json", "before")]
