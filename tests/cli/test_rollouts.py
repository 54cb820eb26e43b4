"""`rlsdk rollouts`: users' conditions, and models' texts shown as data."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlsdk.cli import root
from rlsdk.cli.rollouts import SHOWN
from rlsdk.runlog.actors import mark_ended
from rlsdk.runlog.store import Address, RolloutStore
from rlsdk.runlog.tables import COLUMNS, Entry
from rlsdk.types import Group, Rollout, Score, Task

HOSTILE = "[red]x[/red] \x1b[2J\x1b]0;title\x07 \u202eback\nnext [/]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    store = RolloutStore(Address.make(folder, None, None))
    with store.transaction():
        for n in range(30):
            task = Task(f"t{n}", "p")
            group = Group(task, [Rollout.from_text(task, HOSTILE if n == 3 else f"answer {n}")], [Score(n / 10)])
            store.put([Entry(number=n, source="sums", state="trained", step=n, uses=1, group=group)])
    store.close()
    return folder


def run(folder: Path, *arguments: str, status: int = 0) -> str:
    ran = CliRunner().invoke(root, ["rollouts", str(folder), *arguments])
    assert ran.exit_code == status, ran.output
    return ran.output


def told(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    return json.loads(run(folder, "--json", *arguments))


def test_a_condition_an_order_and_a_limit(folder: Path) -> None:
    rows = told(folder, "--where", "reward < 0.5 and step >= 2")
    assert [row["step"] for row in rows] == [2, 3, 4]
    assert tuple(rows[0]) == COLUMNS
    assert [row["step"] for row in told(folder, "--order-by", "reward desc", "--limit", "2")] == [29, 28]


def test_the_table_says_that_there_is_more(folder: Path) -> None:
    shown = run(folder)
    assert "answer 19" in shown
    assert "answer 20" not in shown
    assert "the first 20; --limit shows more" in shown
    assert "the first" not in run(folder, "--limit", "30")


def test_what_a_model_wrote_is_shown_as_data(folder: Path) -> None:
    shown = run(folder, "--where", "step = 3")
    assert r"[red]x[/red] \x1b[2J\x1b]0;title\x07 \u202eback\nnext [/]" in shown
    assert "\x1b" not in shown
    assert told(folder, "--where", "step = 3")[0]["response"] == HOSTILE


@pytest.mark.parametrize("width", ["40", "120"])
def test_long_responses_leave_room_for_the_other_columns_and_the_reason(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: str
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    store = RolloutStore(Address.make(tmp_path, None, None))
    task = Task("t", "p")
    group = Group(task, [Rollout.from_text(task, "long " * 99)], [Score.invalid("KeyError: 'x' (lab.py, line 12)")])
    with store.transaction():
        store.put([Entry(number=0, source="sums", state="failed", step=1, uses=0, group=group)])
    store.close()
    head, row, *_ = run(tmp_path).splitlines()
    assert head.split() == [*SHOWN, "response", "reason"]
    assert row.startswith("1     sums    t     0        failed  0             finished")
    assert "long long" in row and "KeyError: 'x'" in row
    assert "reason" not in run(folder)


def test_a_wrong_condition_is_a_wrong_command(folder: Path, tmp_path: Path) -> None:
    assert "no such column: rewrd. The columns are step, source" in run(folder, "--where", "rewrd < 1", status=2)
    assert "expected a column" in run(folder, "--order-by", "reward; drop", status=2)
    assert "it has no rollouts.db" in run(tmp_path, status=2)


def empty_run(tmp_path: Path, config: str, steps: int) -> Path:
    """A run that has kept nothing so far."""
    (tmp_path / "config.yaml").write_text(config)
    lines = [json.dumps({"step": step}) for step in range(steps + 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    RolloutStore(Address.make(tmp_path, None, None)).close()
    return tmp_path


@pytest.mark.parametrize("arguments", [[], ["--json"], ["--where", "reward < 0.5"]], ids=str)
def test_before_anything_is_saved_it_says_so(tmp_path: Path, arguments: list[str]) -> None:
    ran = CliRunner().invoke(root, ["rollouts", str(empty_run(tmp_path, "save_rollouts: 10\n", 4)), *arguments])
    assert ran.exit_code == 0, ran.stderr
    assert (
        f"No rollouts are saved yet: {tmp_path} saves them after steps 10, 20, 30, … (save_rollouts: 10)" in ran.stderr
    )
    assert "has done 4 so far" in ran.stderr
    assert ran.stdout == ("[]\n" if arguments == ["--json"] else "")


def test_a_run_that_has_ended_does_not_promise_rollouts(tmp_path: Path) -> None:
    mark_ended(empty_run(tmp_path, "save_rollouts: 10\n", 4), "finished")
    assert "(save_rollouts: 10), and ended after 4." in run(tmp_path)
    (empty_run(tmp_path, "save_rollouts: 2\n", 4) / "rollouts.db").unlink()
    said = run(tmp_path)
    assert f"{tmp_path} has no rollouts.db, where it saved its rollouts (4 steps are done)" in said
    assert "yet" not in said


def test_a_run_that_saves_none_says_so_before_and_after_its_database_is_made(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("save_rollouts: 0\n")
    said = f"No rollouts are saved: {tmp_path} was started with save_rollouts: 0."
    assert said in run(tmp_path)
    assert said in run(empty_run(tmp_path, "save_rollouts: 0\n", 4))


def test_a_folder_whose_name_is_not_utf8_is_read(folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(folder, tmp_path / os.fsdecode(b"M\xfcller"))
    assert told(copied, "--where", "step = 3") == told(folder, "--where", "step = 3")


def test_a_condition_that_nothing_meets_is_not_an_empty_store(folder: Path) -> None:
    ran = CliRunner().invoke(root, ["rollouts", str(folder), "--where", "reward > 100"])
    assert (ran.exit_code, ran.stdout) == (0, "")
    assert "meets the condition 'reward > 100'" in ran.stderr


def test_a_run_without_evaluations_says_so_not_that_it_saves_no_rollouts(folder: Path) -> None:
    for arguments in ((), ("--where", "reward > 0")):
        said = run(folder, "--eval", *arguments)
        assert f"No evaluation answers are saved: {folder} has not evaluated so far." in said


def test_an_endless_query_times_out(folder: Path) -> None:
    endless = "(with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n) > 0"
    assert "took longer than 0.1 s" in run(folder, "--where", endless, "--timeout", "0.1", status=2)
