"""`rlsdk score`: responses of a file, scored without a model."""

from __future__ import annotations

import json
import math
import textwrap

import pytest
from click.testing import CliRunner

from rlsdk.cli import root

ROWS = [
    {"prompt": "2+2?", "answer": "4", "response": "4", "old": 1.0},
    {"prompt": "2+3?", "answer": "5", "response": "4", "old": 1.0},
    {"prompt": "2+4?", "answer": "6", "response": "six", "old": 0.0},
    {"prompt": "2+5?", "answer": "7", "response": " 7 ", "old": 0.75},
]


def run(*arguments, status=0):
    ran = CliRunner().invoke(root, ["score", *map(str, arguments)])
    assert ran.exit_code == status, ran.output
    return ran.stdout if status == 0 else ran.stderr


def lines(tmp_path, rows, name="answers.jsonl"):
    file = tmp_path / name
    file.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return file


def plugin(tmp_path, code):
    file = tmp_path / "lab.py"
    file.write_text("import rlsdk\n" + textwrap.dedent(code))
    return file


def test_the_summary(tmp_path):
    found = json.loads(run(lines(tmp_path, ROWS), "--reward", "exact_match", "--json"))
    assert (found["rows"], found["valid"], found["invalid"], found["reasons"]) == (4, 4, 0, {})
    assert (found["mean"], found["std"], found["min"], found["max"]) == (0.5, 0.5, 0.0, 1.0)
    assert found["histogram"] == [{"from": 0.0, "to": 0.0, "count": 2}, {"from": 1.0, "to": 1.0, "count": 2}]
    assert "disagreement" not in found


def test_equal_scores_have_no_deviation(tmp_path):
    code = "@rlsdk.reward('tenth')\ndef tenth(rollout): return 0.1\n"
    found = json.loads(
        run(lines(tmp_path, ROWS[:3]), "--reward", "lab/tenth", "--plugin", plugin(tmp_path, code), "--json")
    )
    assert (found["std"], found["min"], found["max"]) == (0.0, 0.1, 0.1)


def test_a_fault_of_the_whole_reward_names_the_reward(tmp_path):
    code = """
        @rlsdk.reward("bounded")
        class Bounded:
            def __init__(self, *, low: float = 0.0, high: float = 1.0) -> None:
                if low >= high:
                    raise ValueError(f"low is {low:g}; expected less than high, {high:g}")

            def __call__(self, rollout): return 1.0
    """
    given = ["--reward", "lab/bounded", "--plugin", plugin(tmp_path, code), "--option", "low=2"]
    assert "--reward lab/bounded: low is 2; expected less than high, 1" in run(lines(tmp_path, ROWS), *given, status=2)


def test_for_a_person(tmp_path):
    text = run(lines(tmp_path, ROWS), "--reward", "exact_match", "--score", "old")
    assert "4 rows: 4 valid, 0 invalid\nmean 0.5, std 0.5, min 0, max 1\n" in text
    assert text.count("█" * 40) == 2
    assert "2 differ from the given scores, by 0.3125 on average" in text
    assert "answers.jsonl, line 2" in text


def test_the_worst_disagreements(tmp_path):
    file = lines(tmp_path, ROWS)
    found = json.loads(run(file, "--reward", "exact_match", "--score", "old", "--json"))["disagreement"]
    assert (found["differ"], found["mean"]) == (2, 0.3125)
    assert [(each["row"], each["difference"]) for each in found["worst"]] == [
        (f"{file}, line 2", 1.0),
        (f"{file}, line 4", 0.25),
    ]
    assert found["worst"][0]["response"] == "4"
    one = json.loads(run(file, "--reward", "exact_match", "--score", "old", "--worst", 1, "--json"))["disagreement"]
    assert len(one["worst"]) == 1


def test_scores_of_each_row(tmp_path):
    out = tmp_path / "new" / "scores.jsonl"
    run(lines(tmp_path, ROWS), "--reward", "exact_match", "--out", out, "--score", "old")
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["score"], row["given"], row["task"]) for row in written] == [
        (1.0, 1.0, "answers:0"),
        (0.0, 1.0, "answers:1"),
        (0.0, 0.0, "answers:2"),
        (1.0, 0.75, "answers:3"),
    ]
    assert written[1]["reason"] == "the answer is not the reference"
    assert written[0]["metrics"]["correct"] == 1.0
    assert "exists" in run(lines(tmp_path, ROWS), "--reward", "exact_match", "--out", out, status=2)
    run(lines(tmp_path, ROWS[:1]), "--reward", "exact_match", "--out", out, "--overwrite")
    assert len(out.read_text().splitlines()) == 1
    assert list(out.parent.iterdir()) == [out]


def test_columns_of_other_names_and_parquet(tmp_path):
    import pyarrow
    from pyarrow import parquet

    rows = [{"question": r["prompt"], "gold": r["answer"], "said": r["response"]} for r in ROWS]
    file = tmp_path / "answers.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    columns = ("--prompt", "question", "--answer", "gold", "--response", "said")
    assert json.loads(run(file, "--reward", "exact_match", *columns, "--json"))["mean"] == 0.5
    assert "row 0: there is no column 'response'; there are: question, gold, said" in run(
        file, "--reward", "exact_match", status=1
    )


def test_verls_rows_and_countdown(tmp_path):
    row = {
        "data_source": "countdown",
        "prompt": [{"role": "user", "content": "24 of 3, 8?"}],
        "reward_model": {"ground_truth": {"target": 24, "numbers": [3, 8]}},
        "response": "<answer>3 * 8</answer>",
    }
    file = lines(tmp_path, [row, {**row, "response": "<answer>3 + 8</answer>"}])
    assert json.loads(run(file, "--reward", "countdown", "--json"))["mean"] == pytest.approx(0.55)
    found = json.loads(run(file, "--reward", "countdown", "--option", "format_score=0.5", "--json"))
    assert found["mean"] == 0.75
    found = json.loads(run(file, "--reward", "countdown", "--option", "format_score=5e-1", "--json"))  # as in a config
    assert found["mean"] == 0.75


def test_metadata_reach_a_reward_of_a_file(tmp_path):
    code = """
        @rlsdk.reward("level", batch=True)
        def level(rollouts):
            '''The level.'''
            return [r.task.metadata["level"] * (1 if "response" not in r.task.metadata else 99) for r in rollouts]
    """
    file = lines(tmp_path, [{**row, "level": i} for i, row in enumerate(ROWS)])
    found = json.loads(run(file, "--reward", "lab/level", "--plugin", plugin(tmp_path, code), "--json"))
    assert (found["mean"], found["std"]) == (1.5, pytest.approx(math.sqrt(1.25)))


def test_a_foreign_reward(tmp_path):
    theirs = tmp_path / "theirs.py"
    theirs.write_text("def f(completions, level, **kw): return [x / 3 if x else None for x in level]\n")
    file = lines(tmp_path, [{**row, "level": i} for i, row in enumerate(ROWS)])
    found = json.loads(run(file, "--reward", "foreign", "--option", f"path={theirs}:f", "--json"))
    assert (found["valid"], found["invalid"]) == (3, 1)
    assert found["reasons"] == {"foreign: it returned None: not applicable here; with `none: zero`, it counts as 0": 1}


def test_invalid_scores_are_counted_by_reason(tmp_path):
    code = """
        @rlsdk.reward("picky")
        def picky(rollout):
            '''Numbers alone.'''
            print('a reward that talks')
            return int(rollout.text) / 10
    """
    text = run(lines(tmp_path, ROWS), "--reward", "lab/picky", "--plugin", plugin(tmp_path, code))
    assert "talks" not in text
    assert "4 rows: 3 valid, 1 invalid" in text
    assert "invalid 1 ×: lab/picky: ValueError: invalid literal for int() with base 10: 'six'" in text
    nothing = lines(tmp_path, ROWS[2:3], "one.jsonl")
    failed = run(nothing, "--reward", "lab/picky", "--plugin", plugin(tmp_path, code), status=1)
    assert failed == "rlsdk: no response could be scored\n"  # what the reward says goes to the real standard error


def test_bad_rows_are_named(tmp_path):
    rows = [ROWS[0], "{broken\n", {"prompt": "?"}, {**ROWS[1], "response": 5}, {**ROWS[1], "old": "high"}]
    file = lines(tmp_path, rows)
    errors = run(file, "--reward", "exact_match", "--score", "old", status=1)
    assert errors.startswith("rlsdk: 4 of 5 rows cannot be scored; --skip-bad leaves them out:\n")
    assert f"\n  {file}, line 2: it is not JSON" in errors
    assert f"\n  {file}, line 3: there is no column 'response'; there are: prompt\n" in errors
    assert f"\n  {file}, line 4: expected text in response, got int\n" in errors
    assert f"\n  {file}, line 5: expected a number in old, got 'high'\n" in errors
    found = json.loads(run(file, "--reward", "exact_match", "--skip-bad", "--json"))
    assert (found["rows"], found["valid"], len(found["unreadable"])) == (5, 2, 3)


def test_a_task_that_cannot_be_scored_is_named(tmp_path):
    file = lines(tmp_path, [ROWS[0], {"prompt": "?", "response": "4"}])
    errors = run(file, "--reward", "exact_match", status=1)
    assert errors.startswith(f"rlsdk: {file}, line 2: task 'answers:1' of 'answers': expected its answer")


@pytest.mark.parametrize(
    ("arguments", "status", "cause"),
    [
        (["--reward", "exact_mach"], 2, "did you mean 'exact_match'"),
        (["--reward", "regex"], 2, "--option pattern: is required"),
        (["--reward", "exact_match", "--option", "ignore_case=5"], 2, "--option ignore_case: expected bool"),
        (["--reward", "exact_match", "--option", "ignore_case"], 2, "is not of the form KEY=VALUE"),
        (["--reward", "exact_match", "--option", "where=[a"], 2, "is not YAML"),
        ([], 2, "--reward"),
    ],
)
def test_a_wrong_command_line(tmp_path, arguments, status, cause):
    assert cause in run(lines(tmp_path, ROWS), *arguments, status=status)


def test_a_file_that_is_not_there(tmp_path):
    lines(tmp_path, ROWS)
    assert "did you mean answers.jsonl?" in run(tmp_path / "answer.jsonl", "--reward", "exact_match", status=1)


def test_many_values_make_ten_bins_and_colours_of_a_model_do_nothing(tmp_path):
    rows = [{"prompt": "?", "answer": "x", "response": "\x1b[31m[bold]" + "x" * i, "old": 0.0} for i in range(100)]
    options = ("--reward", "length_penalty", "--option", "limit=200", "--option", "unit=characters", "--score", "old")
    found = json.loads(run(lines(tmp_path, rows), *options, "--json"))
    assert [each["count"] for each in found["histogram"]] == [10] * 10
    text = run(lines(tmp_path, rows), *options)
    assert "\x1b" not in text
    assert r"characters" in text


RANK = """
    @rlsdk.reward("rank", batch="group")
    def rank(rollouts):
        '''From 0 for the longest answer to 1 for the shortest.'''
        order = sorted(range(len(rollouts)), key=lambda i: -len(rollouts[i].text))
        return [order.index(i) / max(len(rollouts) - 1, 1) for i in range(len(rollouts))]

    @rlsdk.reward("raises")
    def raises(rollout):
        '''Reads what is not there.'''
        return {}["x"]
"""


@pytest.mark.parametrize("by", ["prompt", "column"])
def test_a_reward_that_compares_gets_the_rows_of_each_task_together(tmp_path, by):
    rows = [("a?", "x", 1), ("b?", "xxx", 2), ("a?", "xx", 1), ("b?", "x", 2), ("a?", "xxx", 1)]
    rows = [{"prompt": p if by == "prompt" else f"{p} {i}", "response": r, "n": n} for i, (p, r, n) in enumerate(rows)]
    columns = ("--task", "n") if by == "column" else ()
    lab, out = plugin(tmp_path, RANK), tmp_path / "scores.jsonl"
    run(lines(tmp_path, rows), "--plugin", lab, "--reward", "lab/rank", "--out", out, *columns)
    assert [json.loads(line)["score"] for line in out.read_text().splitlines()] == [1.0, 0.0, 0.5, 1.0, 0.0]


def test_a_raising_reward_is_reported_once_with_its_line(tmp_path):
    lab = plugin(tmp_path, RANK)
    said = run(lines(tmp_path, ROWS), "--plugin", lab, "--reward", "lab/raises", "--json", status=1)
    assert "no response could be scored" in said
    ran = CliRunner().invoke(
        root, ["score", str(lines(tmp_path, ROWS)), "--plugin", str(lab), "--reward", "lab/raises", "--json"]
    )
    (reason,) = json.loads(ran.stdout)["reasons"]
    assert reason == f"lab/raises: KeyError: 'x' ({lab}, line 12)"


def test_the_file_with_the_responses_is_never_replaced(tmp_path):
    file = lines(tmp_path, ROWS)
    before = file.read_text()
    said = run(file, "--reward", "exact_match", "--out", file, "--overwrite", status=2)
    assert "which would be lost" in said
    assert file.read_text() == before


def test_a_file_without_rows_is_a_failure(tmp_path):
    assert "has no rows" in run(lines(tmp_path, []), "--reward", "exact_match", status=1)


def test_a_json_array_is_refused_with_advice_to_write_lines(tmp_path):
    file = lines(tmp_path, [json.dumps(ROWS)])
    assert "write each of its elements on a line of its own" in run(file, "--reward", "exact_match", status=1)


@pytest.mark.parametrize("seconds", ["-1", "0", "nan"])
def test_a_time_limit_is_above_zero(tmp_path, seconds):
    said = run(lines(tmp_path, ROWS), "--reward", "exact_match", "--timeout", seconds, status=2)
    assert "--timeout" in said


def test_scores_cannot_be_in_the_column_of_the_responses(tmp_path):
    said = run(lines(tmp_path, ROWS), "--reward", "exact_match", "--score", "response", status=1)
    assert "column 'response' is named twice" in said
