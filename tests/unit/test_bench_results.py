"""Results of `make bench`: their files, and the page that shows them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.bench import results

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
COMMITTED = results.read()


def result(**changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = dict.fromkeys(results.REQUIRED)
    return {
        **plain,
        "test": "test_a.py::test_a",
        "benchmark": "A",
        "case": "short",
        "figure": "ratio",
        "value": 1.5,
        "at_least": 1.0,
        "passed": True,
        "figures": {},
        **changes,
    }


def test_the_page_shows_the_committed_results() -> None:
    assert results.replace_block(PAGE, "results", results.table(COMMITTED)) == PAGE


def test_every_committed_result_is_whole_and_within_what_it_says() -> None:
    assert COMMITTED
    for each in COMMITTED:
        assert set(each) == set(results.REQUIRED), each["test"]
        assert each["at_least"] is not None or each["at_most"] is not None, each["test"]
        assert each["passed"] == (results.margin(each) >= 1), each["test"]
        assert each["commit"] and each["date"], each["test"]


def test_every_benchmark_has_a_line_of_method_and_a_name() -> None:
    files = sorted((ROOT / "tests" / "benchmarks").glob("test_*.py"))
    assert sorted(re.findall(r"`(test_\w+\.py)`", PAGE)) == [path.name for path in files]
    names = {path.name: re.search(r'^BENCHMARK = "(.*)"$', path.read_text(), re.MULTILINE) for path in files}
    for name, found in names.items():
        assert found is not None and f"| {found[1]}, `{name}` |" in PAGE
    measured = {each["test"].partition("::")[0] for each in COMMITTED}
    assert measured <= set(names)


def test_a_new_result_replaces_that_of_the_same_test_and_figure_alone(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "a.json"
    results.write(file, [result(), result(figure="memory")])
    results.write(file, [result(value=2.5)])
    assert [(each["figure"], each["value"]) for each in results.read(file.parent)] == [("ratio", 2.5), ("memory", 1.5)]


def test_a_row_says_limit_commit_and_load() -> None:
    row = results.table([
        result(commit="abc1234", dirty=True, date="2026-11-25", load_average={"before": 0.21, "after": 1.94})
    ]).splitlines()[2]  # fmt: skip
    assert row == "| A | short | ratio | **1.5** | ≥ 1 | `abc1234` with changes | 2026-11-25 | 0.2 → 1.9 |"


def test_a_figure_beyond_its_limit_is_marked() -> None:
    assert "| 0.5 (fails) | ≤ 0.1 |" in results.table([result(value=0.5, at_least=None, at_most=0.1, passed=False)])


def test_of_many_cases_the_one_nearest_to_its_limit_is_shown() -> None:
    many = [result(test=f"t{n}", case=f"case {n}", value=float(n), at_least=None, at_most=30.0) for n in range(1, 21)]
    rows = results.table(many).splitlines()[2:]
    assert len(rows) == 1 and rows[0].startswith("| A | case 20: worst of 20 | ratio | **20** |")


@pytest.mark.parametrize("page", ["", "<!-- results -->", "<!-- results --><!-- results --><!-- /results -->"])
def test_a_page_without_its_markers_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="expected the markers <!-- results -->"):
        results.replace_block(page, "results", "x")


@pytest.mark.slow
def test_a_benchmark_records_its_figure_whether_it_passes_or_not(tmp_path: Path) -> None:
    case = "8 rollouts, prompt 256, response 256"
    test = f"tests/benchmarks/test_tree.py::test_trees_are_faster_than_rows_of_their_own[{case}]"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "bench", test]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"RLSDK_BENCH_RESULTS": str(tmp_path)}, check=False)
    (found,) = results.read(tmp_path)
    assert set(found) == set(results.REQUIRED)
    assert found["case"] == case and found["at_least"] == 0.75 and found["passed"] == (found["value"] >= 0.75)
    assert found["figures"]["tokens"] == 4096 and found["machine"]["cores"] == os.cpu_count()
    assert {"torch", "transformers"} <= set(found["versions"]) and found["load_average"]["after"] >= 0
