"""`rlsdk engines`: requests, and the run's status."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rlsdk.cli import root
from rlsdk.errors import RunError
from rlsdk.runlog.actors import (
    EngineScaling,
    clear_status,
    mark_ended,
    read_status,
    requested_engines,
    write_status,
)


def engines(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(root, ["engines", *arguments])
    return found.exit_code, found.output


def test_it_asks_and_shows_what_the_run_says(tmp_path: Path) -> None:
    code, said = engines(str(tmp_path), "--count", "3")
    assert code == 2 and "not the folder of a run" in said and requested_engines(tmp_path) is None
    (tmp_path / "config.yaml").touch()
    assert engines(str(tmp_path)) == (0, "The run has not reported its engines yet.\n")
    assert engines(str(tmp_path), "--count", "0")[0] == 2
    assert "Requested: 3." in engines(str(tmp_path), "--count", "3")[1] and requested_engines(tmp_path) == 3
    state = EngineScaling(wanted=2, alive=(1,), lost=1, refused="3 engines: there is no room", driver=7)
    write_status(tmp_path, state)
    code, said = engines(str(tmp_path))
    refusal = f"{state.refused}. The run tries again at each step."
    assert said.splitlines() == ["2 engines; running: 1; 1 died so far.", refusal]
    code, said = engines(str(tmp_path), "--json")
    assert json.loads(said) == {
        "asked": 3,
        "state": {"wanted": 2, "alive": [1], "lost": 1, "refused": state.refused, "driver": 7, "host": "", "ended": ""},
    }


def test_a_damaged_request_is_named_and_not_taken_for_none(tmp_path: Path) -> None:
    (tmp_path / "engines.asked.json").write_text('{"cou')
    with pytest.raises(RunError, match=r"engines.asked.json is damaged: .*; delete it"):
        requested_engines(tmp_path)


def finished(folder: Path, **changes: object) -> EngineScaling:
    """Output for a run that has ended."""
    (folder / "config.yaml").touch()
    fields = {"wanted": 2, "alive": (0, 1), "lost": 0, "refused": "", "driver": os.getpid(), "host": platform.node()}
    write_status(folder, EngineScaling(**{**fields, **changes}))
    return read_status(folder)


@pytest.mark.parametrize("status", ["finished", "interrupted", "failed"])
def test_a_run_that_is_over_says_so_and_can_be_asked_for_nothing(tmp_path: Path, status: str) -> None:
    finished(tmp_path)
    mark_ended(tmp_path, status)
    code, said = engines(str(tmp_path))
    assert code == 0 and said.startswith(f"The run has ended ({status}), and so have its engines.")
    code, said = engines(str(tmp_path), "--count", "3")
    assert code == 1 and f"has ended ({status})" in said and "--resume" in said
    assert requested_engines(tmp_path) is None
    assert json.loads(engines(str(tmp_path), "--json")[1])["state"]["ended"] == status
    clear_status(tmp_path)  # it is resumed
    assert engines(str(tmp_path), "--count", "3")[0] == 0 and requested_engines(tmp_path) == 3


def test_a_run_that_failed_before_its_first_step_is_over(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    mark_ended(tmp_path, "failed")
    assert "The run has ended (failed)" in engines(str(tmp_path))[1]


def test_a_run_whose_driver_was_killed_on_this_machine_is_over(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    finished(tmp_path, driver=gone.pid)
    assert "The run has ended (killed)" in engines(str(tmp_path))[1]
    finished(tmp_path, driver=gone.pid, host="elsewhere")  # nothing is known of another machine's processes
    assert "2 engines; running: 0, 1" in engines(str(tmp_path))[1]
