"""Text comparison of answers: equal to the reference, or matched by a regular expression."""

from __future__ import annotations

import re
import reprlib
import time
import unicodedata
from typing import Annotated, Any, Literal

import attrs

import rlsdk
from rlsdk.errors import DataError, ValueFault
from rlsdk.limits import above
from rlsdk.rewards.countdown import LONGEST_ANSWER, last_answer
from rlsdk.types import Rollout, Score, Task

Where = Literal["message", "response", "answer"]

_SPARE = 1_000
"""Extra characters, beyond four times the reference's length, above which an answer counts as different."""

_MAX_NORMALISED = 10_000
"""Maximum characters to normalise to a Unicode normal form, which takes quadratic time for hostile text."""

_PUNCTUATION = re.compile(
    r"(?!(?<=[0-9])[^,](?=[0-9])|(?<!\w)-\.?[0-9]|(?<![\w.])\.[0-9])"  # not in 1.5 and 1/2, or before -1 and .5
    r"[^\w\s]|_"
)


@rlsdk.reward("exact_match", runs="driver", cache=True)
def exact_match(
    rollout: Rollout, *, where: Where = "message", ignore_case: bool = False, ignore_punctuation: bool = False
) -> Score:
    """1 if the text equals the task's answer, else 0; white space is collapsed, and stripped at the ends.

    Texts are compared in Unicode normal form NFC, so that it does not matter how an accent is encoded.

    Args:
        rollout: Rollout to score; its task's answer is text, a number, or a list of accepted ones.
        where: Text to compare: the last message, the whole response (all turns), or the last `<answer>…</answer>`.
        ignore_case: Treat `Paris` and `PARIS` as equal.
        ignore_punctuation: Treat `Paris.` and `Paris` as equal: punctuation matters only within a number, such as
            `-1.5` or `1/2` (but `1,000` equals `1000`), or in text that has nothing else.

    Returns:
        A score with the metric `correct` (0 or 1), and the text; its reason says why it is 0.

    Raises:
        DataError: The task has no answer.
    """
    wanted = references(rollout.task)
    given = _taken(rollout, where)
    if given is None:
        return _judged("there is no <answer> … </answer>")
    plain = _folded(given, max(map(len, wanted)), ignore_case, ignore_punctuation)
    if plain is None:
        return _judged(f"the answer has {len(given)} characters, far more than the reference")
    right = any(plain == _folded(each, len(each), ignore_case, ignore_punctuation) for each in wanted)
    return _judged("" if right else "the answer is not the reference", answer=plain)


@rlsdk.reward("regex", cache=True)
@attrs.frozen(kw_only=True)
class Regex:
    """1 if a regular expression matches in the text or, with `group`, if that group is the task's answer; else 0.

    Attributes:
        pattern: Regular expression of the package `regex`; begin it with `(?i)` to ignore case, with `(?s)` to let the
            dot match line breaks.
        where: Text to search: the last message, the whole response (all turns), or the last `<answer>…</answer>`.
        whole: Require a match of the whole text.
        group: Number or name of the group that must equal the task's answer, in the last match (the last nonempty one,
            if any); by default, a match is enough.
        timeout: Time limit in seconds for a search; if exceeded, the score is invalid.
    """

    pattern: str
    where: Where = "response"
    whole: bool = False
    group: int | str | None = None
    timeout: Annotated[float, above(0)] = 1.0
    _compiled: Any = attrs.field(default=None, init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "_compiled", compiled(self.pattern))
        groups = [*range(self._compiled.groups + 1), *self._compiled.groupindex]
        if self.group is not None and self.group not in groups:
            raise ValueFault(f"group {self.group!r} is not in the pattern; it has: {', '.join(map(str, groups))}")

    def __call__(self, rollout: Rollout) -> Score:
        """Score one rollout.

        Returns:
            Score 1 or 0, also as the metric `match`, or `correct` if a group is compared; invalid if the search ran
            out of time.

        Raises:
            DataError: A regex group is compared, and the task has no answer.
        """
        metric = "match" if self.group is None else "correct"
        wanted = None if self.group is None else references(rollout.task)
        text = _taken(rollout, self.where)
        if text is None:
            return _judged("there is no <answer> … </answer>", metric)
        try:
            found = self._last(text)
        except TimeoutError:
            return Score.invalid(f"the pattern took longer than {self.timeout:g} s")
        if found is None:
            return _judged("the pattern is not found", metric)
        if wanted is None:
            return _judged("", metric)
        held = (found[self.group] or "").strip()
        right = held in {each.strip() for each in wanted}
        return _judged("" if right else "the text of the group is not the reference", metric, held)

    def _last(self, text: str) -> Any:
        """Return the match that counts, or None."""
        if self.whole:
            return self._compiled.fullmatch(text, timeout=self.timeout)
        if self.group is None:
            return self._compiled.search(text, timeout=self.timeout)
        until = time.monotonic() + self.timeout  # many fast matches also take time
        found: Any = None
        for match in self._compiled.finditer(text, timeout=self.timeout):
            if time.monotonic() > until:
                raise TimeoutError
            if found is None or match[0] or not found[0]:  # after its last number, \d* matches the empty end of a text
                found = match
        return found


def compiled(pattern: str) -> Any:
    """Compile a pattern of the package `regex`.

    Raises:
        ValueFault: The pattern is invalid; the message says where.
    """
    import regex

    try:
        return regex.compile(pattern)
    except regex.error as error:
        raise ValueFault(f"pattern {pattern!r} is not a regular expression: {error}") from error


def references(task: Task) -> list[str]:
    """Return the task's accepted answers as texts, any of which may match.

    Raises:
        DataError: There is no answer, or one that is neither text nor a number.
    """
    answers = task.answer if isinstance(task.answer, list | tuple) else [task.answer]
    if not answers or not all(isinstance(a, str | int | float) and not isinstance(a, bool) for a in answers):
        of = f" of {task.source!r}" if task.source else ""
        raise DataError(
            f"task {task.id!r}{of}: expected its answer as text, a number or a list of them, got "
            f"{reprlib.repr(task.answer)}"
        )
    # An integer column with missing values is read as float, so 42.0 also means 42.
    whole = [str(int(a)) for a in answers if isinstance(a, float) and a.is_integer()]
    return [*map(str, answers), *whole]


def _taken(rollout: Rollout, where: Where) -> str | None:
    if where == "answer":
        return last_answer(rollout.response)
    return rollout.text if where == "message" else rollout.response


def _folded(text: str, expected: int, ignore_case: bool, ignore_punctuation: bool) -> str | None:
    """The normalised text for comparison; None if it is far longer than the expected one."""
    text = re.sub(r"\s+", " ", text)
    if len(text) > 4 * expected + _SPARE:
        return None
    if len(text) <= _MAX_NORMALISED:
        text = unicodedata.normalize("NFC", text)
    if ignore_case:
        text = text.casefold()
    if ignore_punctuation:
        text = _PUNCTUATION.sub("", text.replace("−", "-")).strip() or text
    return " ".join(text.split())


def _judged(fault: str, metric: str = "correct", answer: str = "") -> Score:
    score = float(not fault)
    return Score(score, metrics={metric: score}, reason=fault, answer=answer[:LONGEST_ANSWER])
