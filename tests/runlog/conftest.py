"""A real PostgreSQL server in a separate folder, and groups to store."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rlsdk.runlog.store import Address
from rlsdk.runlog.tables import Entry
from rlsdk.types import Group, Message, Rollout, Score, Task

PASSWORD_ENV, PASSWORD = "RLSDK_TEST_PASSWORD", "hush-hush"


@pytest.fixture
def entry() -> Callable[..., Entry]:
    """Makes a group of two rollouts with its number in the answers."""

    def make(number: int, state: str = "trained", step: int | None = 1, **fields: object) -> Entry:
        version = int(fields.pop("version", 0))  # type: ignore[call-overload]
        task = Task(f"t{number}", f"What is {number}?", number, source="sums")
        rollouts = [
            Rollout(
                task,
                (Message("user", str(task.prompt)), Message("assistant", f"{number} or {i}")),
                np.arange(5) + number,
                [False, False, True, True, True],
                [0.0, 0.0, -0.1, -0.2, -0.3],
                [-1, -1, version, version, version],
                metrics={"turns": 1.0},
            )
            for i in range(2)
        ]
        scores = (Score(number / 10, metrics={"reward/exact": 1.0}), Score.invalid("timed out"))
        fields.setdefault("uses", 1 if state == "trained" else 0)
        return Entry(
            number=number, source="sums", state=state, step=step, group=Group(task, rollouts, scores), **fields
        )  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The URL of a server that asks for a password; skipped where there is none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or [Path(p) for p in [shutil.which("initdb")] if p]
    if not found:
        pytest.skip("no PostgreSQL server (initdb) on this machine")
    pytest.importorskip("psycopg", exc_type=ImportError)
    who = _other_user()
    folder = Path(tempfile.mkdtemp(prefix="rlsdk-pg-"))
    tools, data, how = found[-1].parent, folder / "data", {"user": who, "cwd": folder, "capture_output": True}
    (folder / "password").write_text(PASSWORD)
    if who is not None:
        shutil.chown(folder, who)
        shutil.chown(folder / "password", who)
    init = [
        tools / "initdb",
        "-D",
        data,
        "-U",
        "trainer",
        "-A",
        "scram-sha-256",
        "--pwfile",
        "password",
        "-N",
        "-E",
        "UTF8",
    ]
    options = f"-k {folder} -c listen_addresses='' -c fsync=off"
    try:
        subprocess.run(init, check=True, **how)
        subprocess.run(
            [tools / "pg_ctl", "-D", data, "-w", "-l", folder / "log", "-o", options, "start"], check=True, **how
        )
        yield f"postgresql+psycopg://trainer@/postgres?host={folder}"
    finally:
        subprocess.run([tools / "pg_ctl", "-D", data, "-m", "immediate", "stop"], check=False, **how)
        shutil.rmtree(folder, ignore_errors=True)


def _other_user() -> str | None:
    """PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return None
    names = {user.pw_name for user in pwd.getpwall()}
    return next(name for name in ("postgres", "nobody") if name in names)


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Address:
    """Where a run in `tmp_path` keeps its rollouts, on either database."""
    if request.param == "sqlite":
        return Address.make(tmp_path, None, None)
    monkeypatch.setenv(PASSWORD_ENV, PASSWORD)
    return Address.make(tmp_path, request.getfixturevalue("server"), PASSWORD_ENV)
