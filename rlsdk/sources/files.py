"""Tasks from parquet files, JSON lines and the Hugging Face hub."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import numpy as np

import rlsdk
from rlsdk import preflight
from rlsdk.contracts import TaskList
from rlsdk.errors import DataError, OptionError
from rlsdk.sources.rows import BadRowError, Columns, NoColumnError, RowReader, TaskOrder, Wording
from rlsdk.sources.tables import Table, find, read_hub, read_jsonl, read_parquet
from rlsdk.types import Task

LARGE = 2**28
"""Total size of files above which reading them is costly."""
_SHOWN = 5
"""Maximum bad rows quoted in a message."""
_COLUMNS = "\n  name the columns to create tasks from, such as `columns: {prompt: question, answer: solution}`"
_SHARD = re.compile(r"-\d+-of-\d+(?=\.[^/]*$)")
_log = logging.getLogger(__name__)


def _is_large(suffix: str, options: Mapping[str, Any]) -> bool:
    files = find(_listed(options["path"]), str(options.get("split", "train")), suffix)
    return any("://" in file for file in files) or sum(Path(file).stat().st_size for file in files) > LARGE


@rlsdk.tasks("parquet", costly=partial(_is_large, "parquet"))
def parquet(
    *,
    path: str | tuple[str, ...],
    split: str = "train",
    columns: Columns = Columns(),  # noqa: B008 - frozen
    chat: bool = False,
    system: str | None = None,
    prefill: str | None = None,
    shuffle: bool = True,
    sort_by: str | None = None,
    skip_bad: float = 0.0,
) -> TaskList:
    """Tasks from parquet files; the columns of veRL's files are recognised.

    Args:
        path: A file, a pattern such as `data/*.parquet`, a folder that holds `SPLIT.parquet`, or a list; on any
            file system that fsspec knows.
        split: Split whose files are read from a folder.
        columns: Names of the columns, such as `{prompt: question, answer: solution}`; other columns become metadata.
        chat: Convert text prompts to user messages.
        system: System message prepended to every prompt; prompts must not have one already.
        prefill: Beginning of every answer; not trained on.
        shuffle: Train on the tasks in a new random order in every epoch; if false, in the order of the rows.
        sort_by: Column of numbers that orders the tasks, smallest first, or largest first with a minus before its name,
            such as `-pass_rate` for a curriculum from easy to hard; training then keeps this order.
        skip_bad: Maximum share of rows to skip because they cannot be converted to tasks.

    Returns:
        Tasks named by file and row, unless a column names them.

    Raises:
        DataError: A file cannot be read, or more rows are bad than allowed; the message names file and row.
    """
    files = find(_listed(path), split, "parquet")
    wording, order = Wording(chat=chat, system=system, prefill=prefill), TaskOrder(shuffle=shuffle, sort_by=sort_by)
    return _tasks([read_parquet(file) for file in files], columns, wording, order, skip_bad)


@rlsdk.tasks("jsonl", costly=partial(_is_large, "jsonl"))
def jsonl(
    *,
    path: str | tuple[str, ...],
    split: str = "train",
    columns: Columns = Columns(),  # noqa: B008 - frozen
    chat: bool = False,
    system: str | None = None,
    prefill: str | None = None,
    shuffle: bool = True,
    sort_by: str | None = None,
    skip_bad: float = 0.0,
) -> TaskList:
    """Tasks from JSON lines files, compressed or not; the columns of veRL's files are recognised.

    Args:
        path: A file, a pattern such as `data/*.jsonl.gz`, a folder that holds `SPLIT.jsonl`, or a list of these; on any
            file system that fsspec knows.
        split: Split whose files are read from a folder.
        columns: Names of the columns, such as `{prompt: question, answer: solution}`; other columns become metadata.
        chat: Convert text prompts to user messages.
        system: System message prepended to every prompt; prompts must not have one already.
        prefill: Beginning of every answer; not trained on.
        shuffle: Train on the tasks in a new random order in every epoch; if false, in the order of the rows.
        sort_by: Column of numbers that orders the tasks, smallest first, or largest first with a minus before its name,
            such as `-pass_rate` for a curriculum from easy to hard; training then keeps this order.
        skip_bad: Maximum share of rows to skip because they cannot be converted to tasks.

    Returns:
        Tasks named by file and row, unless a column names them.

    Raises:
        DataError: A file cannot be read, or more rows are bad than allowed; the message names file and line.
    """
    files = find(_listed(path), split, "jsonl")
    wording, order = Wording(chat=chat, system=system, prefill=prefill), TaskOrder(shuffle=shuffle, sort_by=sort_by)
    return _tasks([read_jsonl(file) for file in files], columns, wording, order, skip_bad)


def _is_downloaded(options: Mapping[str, Any]) -> bool:
    """Return whether reading a dataset downloads it; what the hub does not have is read, which says what is wrong."""
    return not Path(name := str(options["name"])).is_dir() and preflight.hub_has_dataset(name, options.get("revision"))


@rlsdk.tasks("hub", costly=_is_downloaded)
def hub(
    *,
    name: str,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    columns: Columns = Columns(),  # noqa: B008 - frozen
    chat: bool = False,
    system: str | None = None,
    prefill: str | None = None,
    shuffle: bool = True,
    sort_by: str | None = None,
    skip_bad: float = 0.0,
) -> TaskList:
    """Tasks from a dataset of the Hugging Face hub.

    Args:
        name: Name such as `openai/gsm8k`, or a folder with the layout of a dataset or written by `save_to_disk`.
        config: Configuration of the dataset, if it has several.
        split: Split such as `train`, or `train[:1000]`.
        revision: Commit or tag; without one, the data may change between runs.
        columns: Names of the columns, such as `{prompt: question, answer: solution}`; other columns become metadata.
        chat: Convert text prompts to user messages.
        system: System message prepended to every prompt; prompts must not have one already.
        prefill: Beginning of every answer; not trained on.
        shuffle: Train on the tasks in a new random order in every epoch; if false, in the order of the rows.
        sort_by: Column of numbers that orders the tasks, smallest first, or largest first with a minus before its name,
            such as `-pass_rate` for a curriculum from easy to hard; training then keeps this order.
        skip_bad: Maximum share of rows to skip because they cannot be converted to tasks.

    Returns:
        Tasks named by dataset and row, unless a column names them.

    Raises:
        DataError: The dataset cannot be read, or more rows are bad than allowed; the message names the row.
    """
    wording, order = Wording(chat=chat, system=system, prefill=prefill), TaskOrder(shuffle=shuffle, sort_by=sort_by)
    return _tasks([read_hub(name, config, split, revision)], columns, wording, order, skip_bad)


def _listed(path: str | tuple[str, ...]) -> tuple[str, ...]:
    return (path,) if isinstance(path, str) else path


@attrs.frozen(eq=False)
class _Rows:
    """Creates the task of a valid row."""

    tables: tuple[Table, ...]
    names: tuple[str, ...]
    sources: tuple[str, ...]
    good: np.ndarray
    """Table and row of each task, int64 `[tasks, 2]`."""
    reader: RowReader

    def __call__(self, index: int) -> Task:
        table, row = self.good[index].tolist()
        return self.reader.task(self.tables[table].row(row), f"{self.names[table]}:{row}", self.sources[table])


def _tasks(tables: Sequence[Table], columns: Columns, wording: Wording, order: TaskOrder, skip_bad: float) -> TaskList:
    """Read every row once, so that bad rows are found now and not in the middle of a run."""
    if not 0 <= skip_bad <= 1:
        raise OptionError("tasks", [("skip_bad", f"expected a share from 0 to 1, got {skip_bad}")])
    reader = RowReader(columns=columns, wording=wording, order=order)
    names, sources = _names([table.name for table in tables]), _sources([table.name for table in tables])
    good: dict[tuple[int, int], float] = {}
    bad: list[str] = []
    seen: dict[str, str] = {}
    answered: set[str] = set()
    unanswered: dict[tuple[int, int], str] = {}
    unmapped = False
    for number, table in enumerate(tables):
        for index, row in enumerate(table.scan(reader.needed)):
            try:
                if isinstance(row, BadRowError):
                    raise row
                task, key = reader.task(row, f"{names[number]}:{index}", sources[number]), order.key(row)
                if columns.id:  # ids derived from file and row cannot collide
                    if task.id in seen:
                        raise BadRowError(f"its id {task.id!r} is taken by {seen[task.id]}")
                    seen[task.id] = table.label(index)
            except BadRowError as error:
                bad.append(f"{table.label(index)}: {error}")
                unmapped = unmapped or isinstance(error, NoColumnError)
            else:
                good[number, index] = key
                if task.answer is None:
                    unanswered[number, index] = task.source
                else:
                    answered.add(task.source)
    # A source without any answers may have a reward that reads none; one with only some answers is a mistake.
    lacking = {place: source for place, source in unanswered.items() if source in answered}
    bad += [
        f"{tables[number].label(index)}: it has no answer, unlike other rows of {source!r}"
        for (number, index), source in lacking.items()
    ]
    places = [place for place in good if place not in lacking]
    places.sort(key=good.__getitem__)  # a stable sort: without a column to sort by, all keys are equal
    _judge(len(places), bad, skip_bad, [table.name for table in tables], _COLUMNS if unmapped else "")
    rows = _Rows(tuple(tables), names, sources, np.array(places, dtype=np.int64), reader)
    return TaskList(rows, len(places), tuple(bad), ordered=order.kept)


def _names(files: Sequence[str]) -> tuple[str, ...]:
    """Return a unique short name for each file, independent of the data's folder."""
    stems = [PurePosixPath(file).name.partition(".")[0] for file in files]
    count = Counter(stems)
    return tuple(stem if count[stem] == 1 else f"{stem}-{number}" for number, stem in enumerate(stems))


def _sources(files: Sequence[str]) -> tuple[str, ...]:
    """Return the default source of each file's tasks; files such as `train-00001-of-00004.parquet` are one source."""
    whole = [_SHARD.sub("", file) for file in files]
    unique = tuple(dict.fromkeys(whole))
    names = dict(zip(unique, _names(unique), strict=True))
    return tuple(names[file] for file in whole)


def _judge(good: int, bad: Sequence[str], skip_bad: float, names: Sequence[str], remedy: str) -> None:
    """Raise if too many rows are bad, or none is valid; otherwise log how many are skipped."""
    if len(bad) > skip_bad * (good + len(bad)):
        more = f"\n  … and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise DataError(
            f"{len(bad)} of {good + len(bad)} rows are not valid tasks, more than skip_bad={skip_bad:g} allows:"
            + "".join(f"\n  {line}" for line in bad[:_SHOWN])
            + more
            + remedy
        )
    if not good and not bad:
        raise DataError(f"{', '.join(names)}: there are no rows")
    if not good:
        raise DataError(f"{', '.join(names)}: no row is a valid task" + "".join(f"\n  {line}" for line in bad[:_SHOWN]))
    if bad:
        _log.warning(
            "%d of %d rows are not valid tasks and are left out; the first: %s", len(bad), good + len(bad), bad[0]
        )
