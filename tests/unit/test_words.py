"""One word for a thing: retired names stay out of the code."""

from __future__ import annotations

import collections
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RETIRED = dict(line.split() for line in Path(__file__).with_name("retired_words.txt").read_text().splitlines())
"""Retired name of a class -> the name that it has now."""
RETIRED_PARTS = {
    "attendance": "scaling",
    "blueprint": "spec",
    "crew": "pool",
    "deaths": "failures",
    "desk": "server",
    "examination": "checks",
    "figures": "metrics",
    "fleet": "pool",
    "guest": "slot",
    "jail": "sandbox",
    "outlet": "exporter",
    "owe": "deficit",
    "owed": "deficit",
    "pace": "limits",
    "production": "rollout",
    "tallies": "counters",
    "tally": "accumulator",
    "ticket": "record",
    "tickets": "records",
    "valve": "pausable",
    "walls": "confinement",
}
"""Retired word within any name of the code -> a word for it."""


def classes() -> dict[str, list[str]]:
    """Names of classes in rlsdk, and the files that define them."""
    found = collections.defaultdict(list)
    for path in sorted((ROOT / "rlsdk").rglob("*.py")):
        for name in re.findall(r"^ *class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            found[name].append(str(path.relative_to(ROOT)))
    return found


def test_no_class_has_a_retired_name():
    again = {name: (files, f"call it {RETIRED[name]}") for name, files in classes().items() if name in RETIRED}
    assert not again


def names() -> Iterator[tuple[str, str]]:
    """Names in the code of rlsdk and its packages, each with its file, where a text has a retired word at all."""
    retired = re.compile(rf"(?<![a-z])({'|'.join(RETIRED_PARTS)})(?![a-z])", re.IGNORECASE)
    for root in ("rlsdk", "plugins"):
        for path in sorted((ROOT / root).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if retired.search(text):
                tokens = tokenize.generate_tokens(io.StringIO(text).readline)
                read = {token.string for token in tokens if token.type == tokenize.NAME}
                yield from ((name, str(path.relative_to(ROOT))) for name in read)


def test_no_name_has_a_retired_word():
    again = {
        (name, file, f"say {RETIRED_PARTS[word]}")
        for name, file in names()
        for word in re.findall("[a-z]+", re.sub("([A-Z])", r"_\1", name).lower())
        if word in RETIRED_PARTS
    }
    assert not again


def test_the_glossary_names_no_retired_class():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert not [name for name in RETIRED if f"`{name}`" in text]


RETIRED_PHRASES = (
    r"\banew\b",
    r"\bgoes on\b",
    r"\bon its way\b",
    r"\bone and the same\b",
    r'"""(What|Whether|Make one)\b',
    r"(?<!here )\b(is|are) no (?!longer|more|faster|slower)(?=[a-z`])",
)
"""Regular expressions of phrases that read as translated."""


def test_neither_code_nor_pages_use_a_retired_phrase():
    retired = re.compile("|".join(RETIRED_PHRASES))
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "zh" not in path.parts]
    files = [ROOT / "README.md", *pages, *(ROOT / "rlsdk").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in sorted(files)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := retired.search(line))
    ]
    assert not found
