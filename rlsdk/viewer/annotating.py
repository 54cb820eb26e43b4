"""Queue of questions for a person: rollouts of a run that match a filter and that this person has not judged."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

import attrs

from rlsdk.annotations import ASKED, Annotation, AnnotationFile, annotated, task_json
from rlsdk.errors import RunError, ValueFault
from rlsdk.runlog.serialization import decode
from rlsdk.storage.location import is_url
from rlsdk.types import Group
from rlsdk.viewer.rollouts import EXCERPT, Browser
from rlsdk.viewer.runs import RunFolder
from rlsdk.viewer.walks import Filter, walk_of

Asked = Literal["pair", "score", "edit"]
Row = Mapping[str, Any]
MOST = 12
"""Maximum number of questions per reply."""
SECONDS = 0.3
"""Time limit in seconds of a search for more questions; the cursor continues it."""
_MOST_NAME = 80


@attrs.frozen(kw_only=True)
class Question:
    """A kind of question for one person, and the rollouts it is about.

    Attributes:
        kind: `pair`, `score` or `edit`.
        by: Name of the person.
        filter: Conditions on the rollouts.
        disagree: Select only groups whose rewards differ and, within these, only pairs with different rewards.
    """

    kind: Asked
    by: str
    filter: Filter
    disagree: bool = False

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Question:
        """Read the parameters of a URL.

        Raises:
            ValueFault: A parameter is invalid.
        """
        kind = given.get("ask") or "pair"
        if kind not in ASKED:
            raise ValueFault(f"ask is {kind[:60]!r}; expected one of {', '.join(ASKED)}")
        wanted = Filter.of(given)
        if wanted.order not in ("newest", "oldest"):
            raise ValueFault(f"order is {wanted.order!r}; expected newest or oldest")
        return cls(kind=kind, by=name_of(given.get("by")), filter=wanted, disagree=given.get("disagree") == "1")  # type: ignore[arg-type]


def name_of(given: Any) -> str:
    """Return the name of a person.

    Raises:
        ValueFault: The name is empty, too long, or not text.
    """
    if not isinstance(given, str) or not given.strip() or len(given) > _MOST_NAME:
        raise ValueFault(f"by: expected the annotator's name, 1 to {_MOST_NAME} characters; got {given!r:.90}")
    return given.strip()


def queue(
    browser: Browser, made: Sequence[Annotation], asked: Question, cursor: Sequence[Any] | None = None
) -> dict[str, Any]:
    """Return the next questions of a queue.

    Returns:
        `items`, each a list of places (number of the group, position in it); `next`; `done`, true if there are no more;
        `left`, number of questions found after the cursor; `counted`, true if these are all; `made`, number of
        questions that the person has answered.
    """
    seen, ends = _Seen.by(made, asked.by, asked.kind), time.monotonic() + SECONDS
    items: list[list[tuple[int, int]]] = []
    left, after, counted = 0, cursor, False
    for rows, position in _groups(browser, asked.filter, cursor):
        if position is None:
            counted = True
            break
        found = list(_places(rows, asked, seen))
        left += len(found)
        if len(items) < MOST:
            items += found
            after = position
        if time.monotonic() > ends:
            break
    answered = sum(each.kind == asked.kind and each.by == asked.by for each in made)
    done = counted and left == len(items)
    return {"items": items, "next": after, "done": done, "left": left, "counted": counted, "made": answered}


def _groups(
    browser: Browser, wanted: Filter, cursor: Sequence[Any] | None
) -> Iterator[tuple[list[Row], Sequence[Any] | None]]:
    """Yield the rows of each group and the cursor after them; at the end, no rows and None."""
    keys = len(walk_of(wanted).order)
    rows: list[Row] = []
    done = False
    while not done:
        page = browser.page(wanted, cursor)
        cursor, done = page["next"], page["done"]
        for row in page["rows"]:
            if rows and rows[-1]["number"] != row["number"]:
                yield rows, _position(rows[-1], keys)
                rows = []
            rows.append(row)
        if not page["rows"] and not done:  # a condition that few rows meet: the caller may stop here
            yield rows, _position(rows[-1], keys) if rows else cursor
            rows = []
    if rows:
        yield rows, _position(rows[-1], keys)
    yield [], None


def _position(row: Row, keys: int) -> list[Any]:
    place = [row["number"], row["rollout"]]
    return [row["step"], *place] if keys == 3 else place


@attrs.frozen
class _Seen:
    """Rollouts that a person has judged: their places, each with the beginning of the policy's text.

    A resumed run may put another rollout, which has not been seen, in the same place.
    """

    answers: Mapping[tuple[int, int], frozenset[str]]

    @classmethod
    def by(cls, made: Sequence[Annotation], by: str, kind: str) -> _Seen:
        """Collect the rollouts that a person judged or skipped in questions of one kind."""
        found: dict[tuple[int, int], set[str]] = {}
        for each in made:
            if each.by == by and kind in (each.kind, each.value if each.kind == "skip" else ""):
                for i, rollout in enumerate(each.rollouts):
                    found.setdefault((rollout.number, rollout.index), set()).add(_excerpt(each.response(i)))
        return cls({place: frozenset(texts) for place, texts in found.items()})

    def holds(self, row: Row) -> bool:
        """Return True if the row's rollout was judged."""
        return _excerpt(row["response"]) in self.answers.get((row["number"], row["rollout"]), ())


def _excerpt(text: str) -> str:
    return "".join("\ufffd" if c == "\x00" or "\ud800" <= c <= "\udfff" else c for c in text[:EXCERPT])


def _places(rows: Sequence[Row], asked: Question, seen: _Seen) -> Iterator[list[tuple[int, int]]]:
    """Yield the questions about a group: its rollouts one by one, or one pair of them."""
    if asked.disagree and len({row["reward"] for row in rows}) < 2:
        return
    if asked.kind != "pair":
        yield from ([(row["number"], row["rollout"])] for row in rows if not seen.holds(row))
        return
    if any(seen.holds(row) for row in rows):
        return
    different = [
        pair
        for pair in combinations(rows, 2)
        if (pair[0]["response"], pair[0]["tokens"]) != (pair[1]["response"], pair[1]["tokens"])
        and not (asked.disagree and pair[0]["reward"] == pair[1]["reward"])
    ]
    if different:  # any pair, but always the same one; the side a rollout is shown on does not depend on its reward
        first, second = min(different, key=_shuffled)
        places = [(row["number"], row["rollout"]) for row in (first, second)]
        yield places if _shuffled((second, first)) % 2 else places[::-1]


def _shuffled(pair: Sequence[Row]) -> int:
    text = "/".join(f"{row['number']}.{row['rollout']}" for row in pair)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def annotate(run: RunFolder, given: Any) -> Annotation:
    """Store a person's annotation of rollouts of a run.

    Args:
        run: The run.
        given: `kind`, `value`, `by`, and `places`, each with the number of a group and a position in it.

    Raises:
        ValueFault: A value is invalid, or there is no such rollout.
        RunError: The file cannot be written.
    """
    file = writable(run)
    if not isinstance(given, dict) or not isinstance(given.get("places"), list):
        raise ValueFault("expected an object with kind, value, by and places")
    places = [_place(each) for each in given["places"]]
    if len({number for number, _ in places}) != 1:
        raise ValueFault("places: expected one rollout, or two of one group")
    row = run.browser.group(places[0][0])
    if row is None:
        raise ValueFault(f"there is no group {places[0][0]}; a resumed run may have dropped it")
    group: Group = decode(row["payload"])
    try:
        rollouts = [group.rollouts[index] for _, index in places]
    except IndexError as error:
        raise ValueFault(f"group {places[0][0]} has {len(group)} rollouts; got places {places}") from error
    annotation = Annotation(
        kind=given.get("kind"),  # type: ignore[arg-type]
        value=given.get("value"),
        by=name_of(given.get("by")),
        rollouts=tuple(annotated(rollout, *place) for rollout, place in zip(rollouts, places, strict=True)),
        task=task_json(rollouts[0]),
    )
    if annotation.kind == "undo":
        raise ValueFault("kind: undo has its own address")
    file.append(annotation)
    return annotation


def writable(run: RunFolder) -> AnnotationFile:
    """Return the annotation file of a run that can be annotated here.

    Raises:
        RunError: The page shows a copy of the run.
    """
    if is_url(run.shown):
        raise RunError(f"{run.shown} is shown from a copy; annotate it on the machine that has the run's folder")
    return run.annotations


def _place(given: Any) -> tuple[int, int]:
    if not isinstance(given, list) or len(given) != 2 or any(type(each) is not int for each in given) or given[1] < 0:
        raise ValueFault(f"places: expected the number of a group and a position in it, got {given!r:.60}")
    return given[0], given[1]
