"""Write tasks to parquet files with veRL's columns."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from rlsdk.errors import DataError
from rlsdk.types import Task

_BATCH = 4096
ToColumns = Callable[[Task], Mapping[str, Any]]


def row(task: Task, ability: str = "math") -> dict[str, Any]:
    """Convert a task to veRL's columns.

    veRL knows only messages: a text prompt becomes a single user message, which `extra_info.text_prompt` records.

    Args:
        task: Task; its answer becomes `reward_model.ground_truth`, its metadata `extra_info`.
        ability: Value of veRL's column `ability`.
    """
    text = isinstance(task.prompt, str)
    messages = [("user", task.prompt)] if text else [(m.role, m.as_json()["content"]) for m in task.prompt]  # type: ignore[union-attr]
    extra = {key: value for key, value in task.metadata.items() if key != "demonstration"}
    found = {
        "data_source": task.source,
        "prompt": [{"role": role, "content": content} for role, content in messages],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": task.answer},
        "extra_info": {**extra, "text_prompt": text},
    }
    demonstration = task.metadata.get("demonstration")
    return found if demonstration is None else {**found, "demonstration": demonstration}


def tinyzero_columns(task: Task) -> dict[str, Any]:
    """Return the columns `nums` and `target` of TinyZero's files, which many rewards for Countdown read.

    Args:
        task: A task of the source `countdown`.
    """
    return {"nums": list(task.answer["numbers"]), "target": task.answer["target"]}


def write(
    tasks: Iterable[Task],
    path: Path,
    advance: Callable[[int], None] = lambda _: None,
    more: ToColumns = lambda _: {},
) -> None:
    """Write tasks to a parquet file, which appears only once it is complete.

    Args:
        tasks: At least one task; columns that a task lacks are null.
        path: Target file; an existing one is replaced.
        advance: Callback with the number of rows just converted.
        more: Additional columns of a task.

    Raises:
        DataError: The file cannot be written, or the values of a column have no common type.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(({**row(task), **more(task)} for task in tasks), aside, advance)
        aside.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # it was renamed, or never created
            aside.unlink()


def _write(rows: Iterable[Mapping[str, Any]], path: Path, advance: Callable[[int], None]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows, parts = iter(rows), []
    try:
        while batch := list(islice(rows, _BATCH)):
            names = dict.fromkeys(name for row in batch for name in row)  # a column may first appear in a later row
            parts.append(pa.table({name: [row.get(name) for row in batch] for name in names}))
            advance(len(batch))
        pq.write_table(pa.concat_tables(parts, promote_options="permissive"), path, row_group_size=_BATCH)
    except pa.ArrowException as error:
        raise DataError(f"the tasks cannot be the rows of a table: {error}") from error
