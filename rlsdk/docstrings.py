"""Parse component docstrings: explanations of options, paper and formula."""

from __future__ import annotations

import inspect
import re
import textwrap

LABELS = ("Paper", "Source", "Formula", "When to use")
"""Labels at the beginning of docstring lines; `Source` is an origin without a paper."""


def documented(doc: str) -> dict[str, str]:
    """Return names in the `Args:`, `Options:` or `Attributes:` section -> their explanation as one line."""
    found: dict[str, str] = {}
    doc = inspect.cleandoc(doc)
    for section in re.finditer(r"^(?:Args|Options|Attributes):\n((?:[ \t]+.*\n?|\n)*)", doc, re.MULTILINE):
        body = textwrap.dedent(section.group(1))
        for entry in re.finditer(r"^\*{0,2}(\w+)(?: \([^)]*\))?:\s*((?:.*\n?)(?:[ \t]+.*\n?)*)", body, re.MULTILINE):
            found[entry.group(1)] = " ".join(entry.group(2).split())
    return found


def labelled(doc: str) -> dict[str, str]:
    """Split a docstring: the text after each of `LABELS`, and under "" the text between summary and labels."""
    head = re.split(r"^(?:Args|Options|Attributes|Returns|Raises):\n", inspect.cleandoc(doc), maxsplit=1, flags=re.M)[0]
    found: dict[str, list[str]] = {}
    label = ""
    for line in head.partition("\n\n")[2].splitlines():
        start = re.match(rf"({'|'.join(LABELS)}): (.*)", line)
        label = start[1] if start else label if line else ""
        found.setdefault(label, []).append(start[2] if start else line)
    joined = {name: " ".join(" ".join(lines).split()) for name, lines in found.items()}
    return {name: text for name, text in joined.items() if text}
