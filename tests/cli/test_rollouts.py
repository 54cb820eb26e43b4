"""`rlsdk rollouts`: a person's condition, and what a model wrote shown as data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlsdk.cli import root
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


def test_a_wrong_condition_is_a_wrong_command(folder: Path, tmp_path: Path) -> None:
    assert "no such column: rewrd. There are the columns step, source" in run(folder, "--where", "rewrd < 1", status=2)
    assert "expected a column" in run(folder, "--order-by", "reward; drop", status=2)
    assert "holds no rollouts" in run(tmp_path, status=2)
