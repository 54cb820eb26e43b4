"""Extraction of the final answer from a response."""

from __future__ import annotations

import re

from rlsdk.rewards.countdown import last_answer

MAX_RESPONSE = 1_000_000
"""Characters from the end of a response in which an answer is looked for."""

_MAX_PHRASE = 500
_BRACES = {
    name: re.compile(rf"\\{name}\s*\{{|\\.|[{{}}]", re.DOTALL)  # the command with its brace, an escape, a brace
    for name in ("boxed", "fbox")
}
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9_.^])[-−]?\s?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,100})(?:\.[0-9]{1,100})?(?![0-9])"
    r"(?:\s?/\s?[0-9]{1,100}|\s?\\?%)?"
)
_PHRASE = re.compile(r"\banswer\s{0,5}(?:is|=|:)\s{0,5}:?", re.IGNORECASE)
_HASHES = re.compile(r"^[ \t]{0,8}####[ \t]", re.MULTILINE)
_END = re.compile(r"\.(?=\s|$)|;|\n|,\s+(?=[a-z]{2,}\b)")
_MATHEMATICS = re.compile(r"\$([^$\n]{1,400})\$|\\\(([^\n]{1,400}?)\\\)|\\\[([^\n]{1,400}?)\\\]")


def last_boxed(text: str) -> str | None:
    r"""Return the content of the closed `\boxed{…}` that begins last; None if there is none.

    `\fbox{…}` counts where there is no `\boxed{…}`, or within it.
    """
    held = _last_of("boxed", text)
    framed = _last_of("fbox", text if held is None else held)
    return held if framed is None else framed


def _last_of(command: str, text: str) -> str | None:
    if f"\\{command}" not in text:
        return None
    begun: list[int] = []  # positions after open braces; negative for a plain brace
    found = None
    for mark in _BRACES[command].finditer(text):
        kind = mark[0]
        if kind == "{":
            begun.append(-1)
        elif kind == "}":
            start = begun.pop() if begun else -1
            if start > (found[0] if found else -1):
                found = (start, mark.start())
        elif kind.endswith("{") and len(kind) > 2:
            begun.append(mark.end())
    return None if found is None else text[found[0] : found[1]]


def stated_answer(text: str) -> str | None:
    """Find the answer of a response without a box; None if there is none.

    The first match among: the content of the last `<answer>…</answer>`, the text after the last `####` at the
    beginning of a line, the text after the last "answer is", the last number.

    Args:
        text: Text of the response.
    """
    held = last_answer(text)
    if held is not None:
        return _phrase(held) or held
    marks = list(_HASHES.finditer(text))
    if marks:
        return text[marks[-1].end() : marks[-1].end() + _MAX_PHRASE].split("\n", maxsplit=1)[0].strip()
    return _phrase(text) or last_number(text)


def _phrase(text: str) -> str | None:
    """Return the text after the last "answer is", up to the end of its sentence or formula."""
    start = None
    for match in _PHRASE.finditer(text):
        start = match.end()
    if start is None:
        return None
    said = text[start : start + _MAX_PHRASE].lstrip(" *_\t\n")
    formula = _MATHEMATICS.match(said)
    if formula:
        return next(part for part in formula.groups() if part is not None).strip()
    end = _END.search(said)
    return (said[: end.start()] if end else said).strip(" *_\t") or None


def last_number(text: str) -> str | None:
    """The last number, fraction or percentage; None if there is none.

    Args:
        text: The response.
    """
    found = None
    for found in _NUMBER.finditer(text):  # noqa: B007 - the last one counts
        pass
    return None if found is None else found[0].replace("$", "").replace(" ", "")
