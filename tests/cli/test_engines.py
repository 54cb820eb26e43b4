"""`rlsdk engines`: what is asked for, and what the run says."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from rlsdk.cli import root
from rlsdk.runlog.attendance import Attendance, asked, tell


def engines(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(root, ["engines", *arguments])
    return found.exit_code, found.output


def test_it_asks_and_shows_what_the_run_says(tmp_path: Path) -> None:
    code, said = engines(str(tmp_path), "--count", "3")
    assert code == 2 and "no folder of a run" in said and asked(tmp_path) is None
    (tmp_path / "config.yaml").touch()
    assert engines(str(tmp_path)) == (0, "The run has not said yet which engines it has.\n")
    assert engines(str(tmp_path), "--count", "0")[0] == 2
    assert "Asked for: 3." in engines(str(tmp_path), "--count", "3")[1] and asked(tmp_path) == 3
    state = Attendance(wanted=2, alive=(1,), lost=1, refused="3 engines: there is no room", driver=7)
    tell(tmp_path, state)
    code, said = engines(str(tmp_path))
    assert said.splitlines()[:2] == ["2 engines, of which get requests: 1; 1 died so far.", state.refused]
    code, said = engines(str(tmp_path), "--json")
    assert json.loads(said) == {
        "asked": 3,
        "state": {"wanted": 2, "alive": [1], "lost": 1, "refused": state.refused, "driver": 7},
    }
