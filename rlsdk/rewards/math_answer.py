"""Reward for final answers of mathematics problems, compared by value, not by spelling."""

from __future__ import annotations

import math
import re
import reprlib
from typing import Annotated

import rlsdk
from rlsdk.errors import DataError
from rlsdk.limits import at_least, below
from rlsdk.rewards.countdown import LONGEST_ANSWER, last_answer, vote_for
from rlsdk.rewards.math.equality import equal, rational
from rlsdk.rewards.math.latex import MAX_CHARACTERS, UnreadableError
from rlsdk.rewards.math.reading import read
from rlsdk.types import Rollout, Score, Task

_SHAPING = re.compile(r"\\[,;:!]|\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])|[\s$~]")
_BETWEEN = re.compile(r"(?<=[A-Za-z0-9])(?:\s|\\[,;:!]|~)+(?=[A-Za-z0-9])")


Tolerance = Annotated[float, at_least(0), below(1)]


@rlsdk.reward("math", cache=True, imports=("math_verify",))
def math_answer(rollout: Rollout, *, strict: bool = True, tolerance: Tolerance = 0.0) -> Score:
    r"""1 if the final answer equals the task's, as a number, an expression, a set, an interval or a matrix; else 0.

    The last `\boxed{…}` of the response counts or, if there is none, the last `\fbox{…}`. A percentage equals its
    hundredth and also the number before the sign: `50\%` equals 0.5 and 50. Time is bounded by limits on the answer's
    length and nesting and on the size of computed values; nothing is simplified, and no code is run.

    Args:
        rollout: Rollout to score; its task's answer is text or LaTeX, a number, or a list of accepted ones. In a worked
            solution, the boxed part counts, or the part after `####`, as in GSM8K.
        strict: Accept only boxed answers. Otherwise, without a box, the answer is the content of the last
            `<answer>…</answer>`, the text after `####` or "the answer is", or the last number.
        tolerance: Relative difference of two values that is attributed to rounding; without it, 0.33 does not equal
            1/3.

    Returns:
        A score with the metrics `correct` and `format` (0 or 1), and the answer; its reason says why it is 0.

    Raises:
        DataError: The task has no answer.
    """
    references = _references(rollout.task)
    response = rollout.response[-MAX_RESPONSE:]
    answer = last_boxed(response)
    boxed = answer is not None
    if answer is None and not strict:
        answer = stated_answer(response)
    if answer is None:
        return _score(False, boxed, r"there is no \boxed{…}" + ("" if strict else " and no number"))
    faults = []
    for reference in references:
        faults.append(_fault(reference, answer.strip(), tolerance))
        if not faults[-1]:
            return _score(True, boxed, "", _spelled(answer))
    return _score(False, boxed, faults[0], _spelled(answer))


def _score(correct: bool, boxed: bool, reason: str, answer: str = "") -> Score:
    metrics = {"correct": float(correct), "format": float(boxed)}
    return Score(float(correct), metrics=metrics, reason=reason, answer=answer)


def _spelled(answer: str) -> str:
    """Return an answer in the form by which votes are counted: a rational number as a fraction, anything else as text.

    Fractions, decimals and products that are the same number are thus one vote.
    """
    plain = _plain(answer[:LONGEST_ANSWER]).replace("\0", " ")
    if len(answer) > LONGEST_ANSWER:
        return plain
    try:
        value = rational(read(answer.strip()))
    except UnreadableError:
        return plain
    return plain if value is None else vote_for(value) or plain


def _references(task: Task) -> list[str]:
    given = task.answer if isinstance(task.answer, list | tuple) else [task.answer]
    answers = [_reference(answer) for answer in given]
    if not answers or None in answers:
        of = f" of {task.source!r}" if task.source else ""
        raise DataError(
            f"task {task.id!r}{of}: expected its answer as text or LaTeX, a number, or a list of them, got "
            f"{reprlib.repr(task.answer)}"
        )
    return [answer for answer in answers if answer is not None]


def _reference(answer: object) -> str | None:
    if isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer):
        return str(answer)
    if not isinstance(answer, str) or not answer.strip():
        return None
    final = last_boxed(answer)
    if final is None:  # a file that lost its line breaks has #### within a line; formulas never contain it
        final = answer.rpartition("####")[2]
    return final.strip() or None


def _fault(reference: str, answer: str, tolerance: float) -> str:
    """Return why an answer is wrong; empty if it is right."""
    if not answer:
        return "the answer is empty"
    if len(answer) <= len(reference) + MAX_CHARACTERS and _plain(reference) == _plain(answer):
        return ""
    try:
        given, wanted = read(answer), read(reference)
    except UnreadableError as error:
        return f"it cannot be compared with the reference by value: {error}"
    seed = "\n".join(sorted((reference, answer)))
    right = equal(wanted, given, seed=seed, tolerance=tolerance)
    return "" if right else "the answer does not equal the reference"


def _plain(text: str) -> str:
    """Return the text without formatting commands, for a first comparison as text."""
    text = _BETWEEN.sub("\0", text.strip())
    text = _SHAPING.sub("", text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac"))
    return re.sub(r"(?<!\.)\.$", "", text)


MAX_RESPONSE = 1_000_000
"""Characters at the end of a response to search for an answer."""

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
    r"""Return the content of the closed `\boxed{…}` that starts last; None if there is none.

    `\fbox{…}` counts if there is no `\boxed{…}`, or inside it.
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
    """
    held = last_answer(text)
    if held is not None:
        return _phrase(held) or held
    hashed = _after_hashes(text)
    return (_phrase(text) or last_number(text)) if hashed is None else hashed


def _after_hashes(text: str) -> str | None:
    """Return the rest of the last line that begins with `####`; None if there is none."""
    marks = list(_HASHES.finditer(text))
    if not marks:
        return None
    return text[marks[-1].end() : marks[-1].end() + _MAX_PHRASE].split("\n", maxsplit=1)[0].strip()


def _phrase(text: str) -> str | None:
    """Return the text after the last "answer is", up to the end of its sentence or formula."""
    start = None
    for match in _PHRASE.finditer(text):
        start = match.end()
    if start is None:
        return None
    phrase = text[start : start + _MAX_PHRASE].lstrip(" *_\t\n")
    formula = _MATHEMATICS.match(phrase)
    if formula:
        return next(part for part in formula.groups() if part is not None).strip()
    end = _END.search(phrase)
    return (phrase[: end.start()] if end else phrase).strip(" *_\t") or None


def last_number(text: str) -> str | None:
    """Return the last number, fraction or percentage; None if there is none."""
    found = None
    for found in _NUMBER.finditer(text):  # noqa: B007 - the last one counts
        pass
    return None if found is None else found[0].replace("$", "").replace(" ", "")
