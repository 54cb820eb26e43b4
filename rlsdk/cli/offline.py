"""Implementation of `rlsdk score`: convert rows to rollouts, score them, summarise the scores."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
from rich.console import Console
from rich.markup import escape

from rlsdk.cli.output import borderless
from rlsdk.errors import DataError, visible
from rlsdk.plurals import counted
from rlsdk.scoring.scorer import Scorer
from rlsdk.sources.rows import BadRowError, Columns, RowReader, Wording
from rlsdk.sources.tables import find, is_parquet, read_jsonl, read_parquet
from rlsdk.types import Rollout, Score

_AT_ONCE = 256
"""Number of tasks to score concurrently: a batch for rewards that take lists."""

_BINS = 10
_BAR = 40
_SHOWN = 80


@attrs.frozen
class ScoredRow:
    """A response to score.

    Attributes:
        label: File and row number, for messages.
        rollout: The response with its task.
        group: Key shared by rows of the same task.
        given: Score recorded in the file, or None.
    """

    label: str
    rollout: Rollout
    group: Hashable
    given: float | None = None


def read(
    file: str, response: str, given: str | None = None, **columns: str | None
) -> tuple[list[ScoredRow], list[str]]:
    """Return the usable rows of a file, and why others cannot be used.

    Args:
        file: Parquet or JSON lines.
        response: Column of the responses.
        given: Column of scores to compare with, if any.
        **columns: Columns of the tasks, as in `Columns`.

    Raises:
        DataError: The file cannot be read.
    """
    path = find([file], "train", "parquet")[0]
    try:
        table = read_parquet(path) if is_parquet(path) else read_jsonl(path)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}") from error
    reader = RowReader(columns=Columns(**columns), wording=Wording())
    stem = PurePosixPath(path).name.partition(".")[0]
    rows: list[ScoredRow] = []
    bad: list[str] = []
    for index in range(len(table)):
        try:
            values = dict(table.row(index))
            answer = _taken(values, response)
            if not isinstance(answer, str):
                raise BadRowError(f"expected text in {response}, got {type(answer).__name__}")
            if given == response:
                raise BadRowError(f"column {given!r} is named twice: it already contains the responses")
            score = None if given is None else _number(values, given)
            task = reader.task(values, f"{stem}:{index}", stem)
            group = task.id if columns.get("id") else (task.prompt, repr(task.answer), task.source)
            rows.append(ScoredRow(table.label(index), Rollout.from_text(task, answer), group, score))
        except BadRowError as error:
            bad.append(f"{table.label(index)}: {error}")
    return rows, bad


def _number(values: dict[str, Any], column: str) -> float:
    value = _taken(values, column)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRowError(f"expected a number in {column}, got {value!r}")
    return float(value)


def _taken(values: dict[str, Any], column: str) -> Any:
    if column not in values:
        raise BadRowError(f"there is no column {column!r}; there are: {', '.join(values) or 'none'}")
    return values.pop(column)


async def score(scorer: Scorer, rows: Sequence[ScoredRow]) -> list[tuple[ScoredRow, Score]]:
    """Score rows; rewards that compare rollouts receive the rows of a task together.

    Raises:
        DataError: A task cannot be scored at all; the message names the row.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.group if scorer.comparing else index, []).append(index)
    parts = list(groups.values())
    found: dict[int, Score] = {}
    for start in range(0, len(parts), _AT_ONCE):
        some = parts[start : start + _AT_ONCE]
        scores = await asyncio.gather(*(_score(scorer, [rows[index] for index in part]) for part in some))
        for part, group in zip(some, scores, strict=True):
            found |= zip(part, group, strict=True)
    return [(row, found[index]) for index, row in enumerate(rows)]


async def _score(scorer: Scorer, rows: Sequence[ScoredRow]) -> list[Score]:
    try:
        return await scorer.score_group([row.rollout for row in rows])
    except DataError as error:
        raise DataError(f"{rows[0].label}: {error}") from error


def _plain(row: ScoredRow, score: Score) -> dict[str, Any]:
    """Convert a row's result to plain values for output."""
    found = {
        "row": row.label,
        "task": row.rollout.task.id,
        "valid": score.valid,
        "score": score.value if score.valid else None,
        "reason": score.reason,
        "metrics": dict(score.metrics),
    }
    return found if row.given is None else {**found, "given": row.given}


def write(out: Path, scored: Sequence[tuple[ScoredRow, Score]]) -> None:
    """Write one JSON line per row; the file appears once it is complete.

    Raises:
        DataError: The file cannot be written.
    """
    aside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as opened:
            opened.writelines(json.dumps(_plain(*pair)) + "\n" for pair in scored)
        aside.replace(out)
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # it has been renamed, or was never created
            aside.unlink()


def summary(scored: Sequence[tuple[ScoredRow, Score]], bad: Sequence[str], worst: int) -> dict[str, Any]:
    """Summarise the scores of a file.

    Args:
        scored: Rows with their scores.
        bad: Reasons why other rows were skipped.
        worst: Number of disagreements with the given scores to list; 0 skips the comparison.
    """
    valid = [(row, score) for row, score in scored if score.valid]
    values = [score.value for _, score in valid]
    mean = math.fsum(values) / len(values) if values else None
    # Rounding of the mean must not give equal scores a deviation.
    deviations = [value - mean for value in values] if mean is not None and min(values) < max(values) else [0.0]
    spread = None if mean is None else math.hypot(*deviations) / math.sqrt(len(values))
    reasons = Counter(score.reason for _, score in scored if not score.valid)
    found = {
        "rows": len(scored) + len(bad),
        "unreadable": list(bad),
        "valid": len(valid),
        "invalid": len(scored) - len(valid),
        "reasons": dict(reasons.most_common()),
        "mean": mean,
        "std": spread,
        "min": min(values, default=None),
        "max": max(values, default=None),
        "histogram": _histogram(values),
    }
    return {**found, "disagreement": _disagreement(valid, worst)} if worst else found


def _histogram(values: Sequence[float]) -> list[dict[str, float]]:
    """Return equal-width bins between minimum and maximum, or one bin per value for up to ten distinct values."""
    count = Counter(values)
    if len(count) <= _BINS:
        return [{"from": value, "to": value, "count": count[value]} for value in sorted(count)]
    low, high = min(values), max(values)
    width = (high - low) / _BINS
    bins = Counter(min(int((value - low) / (high - low) * _BINS), _BINS - 1) for value in values)
    return [{"from": low + i * width, "to": low + (i + 1) * width, "count": bins[i]} for i in range(_BINS)]


def _disagreement(valid: Sequence[tuple[ScoredRow, Score]], worst: int) -> dict[str, Any]:
    apart = [(abs(score.value - row.given), row, score) for row, score in valid if row.given is not None]
    apart.sort(key=lambda each: -each[0])
    listed = [
        {**_plain(row, score), "difference": gap, "response": row.rollout.response}
        for gap, row, score in apart[:worst]
        if gap > 0
    ]
    mean = math.fsum(gap for gap, _, _ in apart) / len(apart) if apart else None
    return {"mean": mean, "differ": sum(gap > 0 for gap, _, _ in apart), "worst": listed}


def show(found: Mapping[str, Any], out: Console) -> None:
    """Print a readable summary."""
    numbers = ((name, found[name]) for name in ("mean", "std", "min", "max"))
    text = ", ".join(f"{name} {value:.4g}" for name, value in numbers if value is not None)
    left_out = f", {len(found['unreadable'])} unreadable" if found["unreadable"] else ""
    out.print(
        f"{counted(found['rows'], 'row')}: {found['valid']} valid, {found['invalid']} invalid{left_out}", markup=False
    )
    if text:
        out.print(text, markup=False)
    for reason, count in found["reasons"].items():
        out.print(f"  invalid {count} ×: {_brief(reason)}", markup=False, soft_wrap=True)
    if found["histogram"]:
        table = borderless(show_header=False)
        most = max(each["count"] for each in found["histogram"])
        for each in found["histogram"]:
            single = each["from"] == each["to"]
            name = f"{each['from']:.4g}" if single else f"{each['from']:.4g} to {each['to']:.4g}"
            bar = "█" * math.ceil(_BAR * each["count"] / most)
            table.add_row(name, f"{each['count']:,.0f}", f"[cyan]{bar}[/cyan]")
        out.print(table)
    apart = found.get("disagreement", {"mean": None})
    if apart["mean"] is None:
        return
    out.print(f"{apart['differ']} differ from the given scores, by {apart['mean']:.4g} on average", markup=False)
    table = borderless("row", "given", "score", "reason", "end of the response")
    for each in apart["worst"]:
        cells = (each["row"], f"{each['given']:.4g}", f"{each['score']:.4g}", _brief(each["reason"]))
        table.add_row(*map(escape, cells), escape(_brief(each["response"][-_SHOWN:])))
    if apart["worst"]:
        out.print(table)


def _brief(text: str) -> str:
    """Return text on one line, without terminal control sequences."""
    plain = visible(text[: 3 * _SHOWN])
    return plain if len(text) <= 3 * _SHOWN else f"{plain} …"
