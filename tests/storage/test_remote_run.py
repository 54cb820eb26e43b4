"""A whole training into an S3 bucket, whose machine is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import uuid
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlsdk.cli import root
from rlsdk.runlog.query import query
from rlsdk.storage import copies
from rlsdk.storage.location import mirror_of
from rlsdk.storage.remote import RemoteFolder
from tests.run.conftest import Runner, alive, descendants, wait_for

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.usefixtures("s3")]
LONGER = ("steps=8", "checkpoint.every=2", "eval.every=4", "engine=transformers")


def test_a_run_whose_machine_is_lost_continues_exactly_from_the_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runner = Runner(tmp_path, Path(__file__).parents[2] / "examples" / "models" / "countdown-nano")
    runner.train(*LONGER, "name=alone")

    runs = f"s3://bucket/{uuid.uuid4().hex}"
    mirrors = tmp_path / "mirrors"
    away = (*LONGER, f"out={runs}", f"mirror={mirrors}")
    remote = RemoteFolder(f"{runs}/run")
    process = runner.start(*away)
    wait_for(lambda: copies.copies(remote), 240, process)
    family = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    wait_for(lambda: not alive(family), 120)
    saved = max(copies.copies(remote))
    shutil.rmtree(mirrors)

    runner.train(*away, "--resume")
    folder = mirror_of(runs, str(mirrors)) / "run"
    console = " ".join(runner.console().split())
    assert f"downloaded the checkpoint of step {saved} from {runs}/run" in console
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [
        {k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines
    ] == runner.metrics("alone")
    told = ("step", "task", "state", "reward", "response")
    rows = [
        [{k: row[k] for k in told} for row in query(each, "", limit=1000)] for each in (folder, runner.path("alone"))
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 8 * 16

    summary = json.loads((folder / "summary.json").read_text())
    assert summary["upload"]["url"] == f"{runs}/run" and not summary["upload"]["warning"]
    assert max(copies.copies(remote)) == 8
    assert json.loads(remote.read("summary.json") or b"")["steps"] == 8
    ran = CliRunner().invoke(root, ["export", f"{runs}/run", str(tmp_path / "model")])
    assert ran.exit_code == 0 and (tmp_path / "model" / "config.json").is_file(), ran.output
    ran = CliRunner().invoke(root, ["rollouts", f"{runs}/run", "--json", "--where", "step = 1", "--limit", "100"])
    assert ran.exit_code == 0 and len(json.loads(ran.stdout)) == 16, ran.output
