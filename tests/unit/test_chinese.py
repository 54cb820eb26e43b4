"""The Chinese pages have the same code blocks and links as the English ones, in the same order."""

from __future__ import annotations

import re

import pytest

from tests.unit.documented import ROOT, blocks

PAGES = {
    "README.zh.md": "README.md",
    "docs/zh/index.md": "docs/index.md",
    "docs/zh/tutorial.md": "docs/tutorial.md",
    "docs/zh/train.md": "docs/howto/train.md",
    "docs/zh/runs.md": "docs/howto/runs.md",
    "docs/zh/quickstart.md": "docs/quickstart.md",
}


def test_each_page_in_chinese_is_compared() -> None:
    assert {f"docs/zh/{page.name}" for page in (ROOT / "docs" / "zh").iterdir()} | {"README.zh.md"} == set(PAGES)


@pytest.mark.parametrize(("page", "english"), PAGES.items())
def test_the_code_blocks_are_those_of_the_english_page(page: str, english: str) -> None:
    ours, theirs = ([(b.language, b.text) for b in blocks(ROOT / each)] for each in (page, english))
    assert ours == theirs


@pytest.mark.parametrize(("page", "english"), [pair for pair in PAGES.items() if pair[0] != "README.zh.md"])
def test_the_sections_and_the_rows_of_tables_are_as_many(page: str, english: str) -> None:
    ours, theirs = ((ROOT / each).read_text(encoding="utf-8") for each in (page, english))
    assert re.findall(r"^#+(?= )", ours, re.M) == re.findall(r"^#+(?= )", theirs, re.M)
    if page != "docs/zh/index.md":  # which lists the pages in Chinese as well
        assert len(re.findall(r"^\|", ours, re.M)) == len(re.findall(r"^\|", theirs, re.M))


@pytest.mark.parametrize("page", PAGES)
def test_figures_are_those_of_the_english_page(page: str) -> None:
    """Percentages and counts that are measured in one language only would be a drift."""
    ours, theirs = ((ROOT / each).read_text(encoding="utf-8") for each in (page, PAGES[page]))
    assert set(re.findall(r"\d+\.\d+ %", ours)) == set(re.findall(r"\d+\.\d+ %", theirs))
