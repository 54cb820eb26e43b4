"""Final answers of mathematics problems: equal in value, not in spelling."""

from __future__ import annotations

import re
import reprlib
from functools import lru_cache
from typing import Any

import rlsdk
from rlsdk.errors import DataError
from rlsdk.rewards.bounds import MAX_CHARACTERS, over_limits
from rlsdk.rewards.equality import equal
from rlsdk.types import Rollout, Score, Task

MAX_RESPONSE = 1_000_000
"""Characters from the end of a response in which an answer is looked for."""

_MAX_SIMPLIFIED = 60
"""Characters of equations, inequalities and other things that have no value, and have to be simplified."""

_DECIMALS = re.compile(r"\.[0-9]{3}")
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:\s?/\s?[0-9]+|\s?\\?%)?")
_SPACING = re.compile(r"\\[,;:!]|\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])|[\s$~]")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname|mbox)\s*\{([^{}]*)\}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_FUNCTIONS = frozenset({"sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "arcsin", "arccos", "arctan"})


@rlsdk.reward("math")
def math_answer(rollout: Rollout, *, strict: bool = True) -> Score:
    r"""1 if the final answer equals the task's, as a number, an expression, a set, an interval or a matrix; else 0.

    The last `\boxed{…}` of the response counts. Its time is bounded by what it may hold (see `rlsdk.rewards.bounds`).

    Args:
        rollout: What to score; its task's answer is text or LaTeX.
        strict: Only a `\boxed{}` is an answer; otherwise the last number of the response serves where there is none.

    Returns:
        A score with the metrics `correct` and `format` (0 or 1); its reason says why it is 0.

    Raises:
        DataError: The task has no answer.
    """
    reference = _reference(rollout.task)
    response = rollout.response[-MAX_RESPONSE:]
    answer = last_boxed(response)
    boxed = answer is not None
    if answer is None and not strict:
        answer = _last_number(response)
    if answer is None:
        return _score(False, boxed, r"there is no \boxed{…}" + ("" if strict else " and no number"))
    fault = _fault(reference, answer.strip())
    return _score(not fault, boxed, fault)


def last_boxed(text: str) -> str | None:
    r"""What the `\boxed{…}` holds that begins last among those that are closed; None if there is none."""
    if r"\boxed" not in text:
        return None
    begun: list[int] = []  # positions behind the braces that are open; negative: of a plain brace
    found = None
    for mark in _BRACES.finditer(text):
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


def _score(correct: bool, boxed: bool, reason: str) -> Score:
    return Score(float(correct), metrics={"correct": float(correct), "format": float(boxed)}, reason=reason)


def _reference(task: Task) -> str:
    answer = task.answer
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str) or not answer.strip():
        of = f" of {task.source!r}" if task.source else ""
        raise DataError(f"task {task.id!r}{of}: expected its answer as text or LaTeX, got {reprlib.repr(task.answer)}")
    boxed = last_boxed(answer)
    return (answer if boxed is None else boxed).strip()


def _last_number(response: str) -> str | None:
    found = None
    for found in _NUMBER.finditer(response):  # noqa: B007 - the last one counts
        pass
    return None if found is None else found[0]


def _fault(reference: str, answer: str) -> str:
    """Why an answer is wrong; empty if it is right."""
    if not answer:
        return "the answer is empty"
    if len(answer) <= len(reference) + MAX_CHARACTERS and _plain(reference) == _plain(answer):
        return ""
    if _is_words(reference):
        return "the answer is other words than the reference"
    too_much = over_limits(answer)
    if too_much:
        return too_much
    if over_limits(reference):
        return "the answer is not the reference, which is too large to be compared in any way but as text"
    return "" if _equal(reference, answer) else "the answer does not equal the reference"


def _plain(text: str) -> str:
    """The text without what only shapes its look; two that are the same after this are equal."""
    text = _TEXT.sub(r"\1", text)
    text = _SPACING.sub("", text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")).rstrip(".")
    if len(text) == 3 and text[0] + text[2] == "()":  # the letter of a choice
        text = text[1]
    return text.casefold() if text.isalpha() else text


def _is_words(text: str) -> bool:
    """Whether text is words, which algebra would take for products of letters: `stop` would equal `pots`."""
    words = [word for word in _WORD.findall(_TEXT.sub(r" \1 ", text)) if word.lower() not in _FUNCTIONS]
    return bool(words) and not any(character.isdigit() for character in text)


def _equal(reference: str, answer: str) -> bool:
    first, second = _parse(reference), _parse(answer)
    if not first or not second:
        return False
    rounded = _DECIMALS.search(reference) or _DECIMALS.search(answer)
    found = equal(first[0], second[0], 1e-6 if rounded else 0.0)
    if found is not None:
        return found
    if max(len(reference), len(answer)) > _MAX_SIMPLIFIED:
        return False
    from math_verify import verify

    # The package limits its time with SIGALRM, which only a main thread can set: the limits on the text replace it.
    return bool(verify(first, second, timeout_seconds=None))


@lru_cache(maxsize=4096)
def _parse(text: str) -> Any:
    """The expressions that a text holds; the rollouts of a group share one reference, and often answers."""
    _quieten()
    from math_verify import LatexExtractionConfig, parse

    # LaTeX alone: the package reads other text with sympy's parser, which evaluates it as Python.
    latex = (LatexExtractionConfig(),)
    return parse(rf"\boxed{{{text}}}", latex, fallback_mode="no_fallback", parsing_timeout=None)


@lru_cache(maxsize=1)
def _quieten() -> None:
    """Keep the package from warning that its time limit is off: that is intended."""
    from math_verify import grader, parser

    parser.TIMEOUT_WARNING_SHOWN = grader.TIMEOUT_WARNING_SHOWN = True
