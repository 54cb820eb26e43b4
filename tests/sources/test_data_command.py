"""`rlsdk data`."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import rlsdk
from rlsdk.cli.data import data
from rlsdk.errors import RlsdkError


def run(*arguments):
    return CliRunner().invoke(data, [str(a) for a in arguments])


def test_countdown_writes_both_splits(tmp_path):
    ran = run("countdown", "--out", tmp_path / "new", "--train-size", 5000, "--test-size", 30, "--numbers", 3)
    assert ran.exit_code == 0, ran.output
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["test.parquet", "train.parquet"]
    train, test = (pq.read_table(tmp_path / "new" / f"{split}.parquet") for split in ("train", "test"))
    assert (train.num_rows, test.num_rows) == (5000, 30)
    assert train.schema.equals(test.schema)
    verl = ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert train.column_names == [*verl, "nums", "target"]
    assert "5,000 tasks" in ran.output


def test_tinyzeros_columns_hold_what_the_answer_holds(tmp_path):
    run("countdown", "--out", tmp_path, "--train-size", 20, "--test-size", 2)
    table = pq.read_table(tmp_path / "train.parquet")
    assert table.schema.field("target").type == pa.int64()
    assert table.schema.field("nums").type.value_type == pa.int64()
    for row in table.to_pylist():
        assert {"target": row["target"], "numbers": row["nums"]} == row["reward_model"]["ground_truth"]
    read = rlsdk.load("tasks", "parquet", path=str(tmp_path))()
    assert [task.metadata["nums"] for task in read] == [task.answer["numbers"] for task in read]


def test_a_reward_that_reads_tinyzeros_columns_runs_on_the_file(tmp_path):
    run("countdown", "--out", tmp_path, "--train-size", 2, "--test-size", 2, "--numbers", 2, "--operators", "+")
    (tmp_path / "theirs.py").write_text(
        "def equation(completions, target, nums, **kwargs):\n"
        "    return [float(c == ' + '.join(map(str, n)) and sum(n) == t)\n"
        "            for c, t, n in zip(completions, target, nums)]\n"
    )
    task = rlsdk.load("tasks", "parquet", path=str(tmp_path))()[0]
    reward = rlsdk.load("reward", "foreign", path=f"{tmp_path / 'theirs.py'}:equation")
    texts = [" + ".join(map(str, task.answer["numbers"])), "1 + 1"]
    assert [score.value for score in reward([rlsdk.Rollout.from_text(task, text) for text in texts])] == [1.0, 0.0]


def test_options_reach_the_tasks(tmp_path):
    run(
        *("countdown", "--out", tmp_path, "--train-size", 20, "--test-size", 2, "--numbers", "2-3", "--seed", 5),
        *("--number-range", 1, 9, "--target-range", 1, 20, "--operators", "+", "--template", "compact"),
        *("--demonstrations", 1),
    )
    options = {"numbers": [2, 3], "seed": 5, "number_range": [1, 9], "target_range": [1, 20], "operators": "+"}
    made = rlsdk.load("tasks", "countdown", size=20, template="compact", demonstrations=1.0, **options)()
    read = rlsdk.load("tasks", "parquet", path=str(tmp_path))()
    assert [(t.prompt, t.answer) for t in read] == [(t.prompt, t.answer) for t in made]
    assert [t.metadata["demonstration"] for t in read] == [t.metadata["demonstration"] for t in made]


def test_files_are_not_replaced_unasked(tmp_path):
    sizes = ("--train-size", 2, "--test-size", 2)
    assert run("countdown", "--out", tmp_path, *sizes).exit_code == 0
    again = run("countdown", "--out", tmp_path, *sizes)
    assert again.exit_code == 2
    assert "--overwrite" in again.output
    assert run("countdown", "--out", tmp_path, *sizes, "--overwrite").exit_code == 0


@pytest.mark.parametrize("numbers", ["x", "3-", "-3", "3-4-5", "3.5", ""])
def test_wrong_numbers_are_explained(tmp_path, numbers):
    ran = run("countdown", "--out", tmp_path, "--numbers", numbers)
    assert ran.exit_code == 2
    assert "3-4" in ran.output


def test_meaningless_options_leave_nothing_behind(tmp_path):
    ran = run("countdown", "--out", tmp_path / "new", "--operators", "^")
    assert isinstance(ran.exception, RlsdkError)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    ran = run("countdown", "--out", tmp_path / "file" / "new", "--train-size", 2, "--test-size", 2)
    assert isinstance(ran.exception, RlsdkError)
    assert "cannot be written" in str(ran.exception)


def test_a_write_that_fails_leaves_nothing(tmp_path):
    from rlsdk.sources.tables import write

    def tasks():
        yield from rlsdk.load("tasks", "countdown", size=3)()
        raise RuntimeError("broken off")

    with pytest.raises(RuntimeError):
        write(tasks(), tmp_path / "a.parquet")
    assert list(tmp_path.iterdir()) == []


def test_a_column_or_metadata_that_first_appears_in_a_later_task_is_written(tmp_path, monkeypatch):
    from rlsdk.sources import tables

    monkeypatch.setattr(tables, "_BATCH", 2)
    extras = [{}, {"level": 1}, {"level": 2.5, "note": "late"}, {"demonstration": "3"}]
    tasks = [rlsdk.Task(str(i), "1+2", metadata=extra) for i, extra in enumerate(extras)]
    tables.write(tasks, tmp_path / "a.parquet")
    rows = json.loads(run("show", tmp_path / "a.parquet", "--json").output)
    assert [row["extra_info"]["level"] for row in rows] == [None, 1, 2.5, None]
    assert rows[2]["extra_info"]["note"] == "late"
    assert [row["demonstration"] for row in rows] == [None, None, None, "3"]
    with pytest.raises(RlsdkError, match="cannot be the rows of a table"):
        tables.write([*tasks, rlsdk.Task("5", "1+2", metadata={"level": "hard"})], tmp_path / "b.parquet")


def test_show_parquet(tmp_path):
    run("countdown", "--out", tmp_path, "--train-size", 10, "--test-size", 3)
    ran = run("show", tmp_path / "train.parquet", "-n", 2)
    assert ran.exit_code == 0
    assert [line for line in ran.output.splitlines() if line.startswith("row")] == ["row 0", "row 1"]
    assert "user: This is a conversation" in ran.output
    rows = json.loads(run("show", tmp_path / "train.parquet", "-n", 2, "--json").output)
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]
    assert len(json.loads(run("show", tmp_path / "test.parquet", "--json").output)) == 3


def test_show_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": "x\\u001b[2Jy"}\n\n{"a": [1, 2]}\n{')
    ran = run("show", tmp_path / "a.jsonl", "-n", 2)
    assert ran.exit_code == 0
    assert "\x1b[2J" not in ran.output
    assert "x\\x1b[2Jy" in ran.output
    assert json.loads(run("show", tmp_path / "a.jsonl", "-n", 2, "--json").output) == [
        {"a": "x\x1b[2Jy"},
        {"a": [1, 2]},
    ]


def test_show_values_within_lists_and_mappings_as_they_are_written(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": {"émoji": ["🦊", "\\u202ex"]}}\n', encoding="utf-8")
    shown = run("show", tmp_path / "a.jsonl").output
    assert '{"émoji": ["🦊", ' in shown
    assert "\u202e" not in shown


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"{", "line 1 is not JSON"),
        (b"[1]", "not a JSON object"),
        (b"PAR1", "cannot be read"),
        (b"PAR1" + b"\x00" * 50, "cannot be read"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_files_that_cannot_be_shown_are_named(tmp_path, content, said):
    path = tmp_path / "odd.parquet"
    if content is not None:
        path.write_bytes(content)
    ran = run("show", path)
    assert ran.exit_code != 0
    assert isinstance(ran.exception, RlsdkError)
    assert "odd.parquet" in str(ran.exception)
    assert said in str(ran.exception)
