"""The page of failures names existing tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`((?:tests|plugins)/[\w/.-]+\.py)::(\w+)`", PAGE)))


def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_that_the_page_names_exists():
    missing = [
        f"{file}::{test}"
        for file, test in NAMED
        if not (ROOT / file).is_file() or test not in functions_of(ROOT / file)
    ]
    assert not missing


def test_every_row_names_a_test():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| failure ")]
    assert len(rows) > 15
    assert not [row for row in rows if "::test_" not in row]
