"""One word for a thing: names that were given up stay out of the code."""

from __future__ import annotations

import ast
import collections
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RETIRED = dict(line.split() for line in Path(__file__).with_name("retired_words.txt").read_text().splitlines())
"""Retired name of a class -> the name that it has now."""


def classes() -> dict[str, list[str]]:
    """Names of classes in rlsdk, and the files that define them."""
    found = collections.defaultdict(list)
    for path in sorted((ROOT / "rlsdk").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(ROOT)))
    return found


def test_no_class_has_a_retired_name():
    again = {name: (files, f"call it {RETIRED[name]}") for name, files in classes().items() if name in RETIRED}
    assert not again


def test_the_glossary_names_no_retired_class():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert not [name for name in RETIRED if f"`{name}`" in text]
