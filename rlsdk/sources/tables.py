"""Data files and hub datasets as tables of rows, whose paths may be fsspec URLs; and files with veRL's columns."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import attrs

from rlsdk import preflight
from rlsdk.errors import DataError, UnreachableDataError
from rlsdk.options import did_you_mean
from rlsdk.sources.rows import BadRowError
from rlsdk.types import Task

Row = Mapping[str, Any]
_BATCH = 4096
_PARQUET = b"PAR1"
"""First bytes of a parquet file."""
ToColumns = Callable[[Task], Mapping[str, Any]]


class Table(Protocol):
    """Rows of a data file or dataset."""

    @property
    def name(self) -> str:
        """Name of the file or dataset, as the user gave it."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """Return a row with all columns; raises BadRowError if it cannot be read."""

    def scan(self, needed: Any) -> Iterator[Row | BadRowError]:
        """Yield each row, or why it cannot be read; `needed` selects the columns to read, others may be None."""

    def label(self, index: int) -> str:
        """Return file and row, for messages."""


@attrs.frozen(eq=False)
class Columnar:
    """A table in columns, whose rows are numbered from 0."""

    name: str
    data: Any
    """A `datasets.Dataset`."""

    def __len__(self) -> int:
        return len(self.data)

    def row(self, index: int) -> Row:
        """Return a row with all columns."""
        found: Row = self.data[index]
        return found

    def scan(self, needed: Any) -> Iterator[Row | BadRowError]:
        """Yield all rows; columns that are not needed are None, so that images, for example, are not decoded."""
        columns = needed(self.data.column_names)
        blank = dict.fromkeys(self.data.column_names)
        if not columns:
            yield from (blank for _ in range(len(self)))
            return
        for batch in self.data.select_columns(columns).iter(batch_size=1000):
            for values in zip(*batch.values(), strict=True):
                yield {**blank, **dict(zip(batch, values, strict=True))}

    def label(self, index: int) -> str:
        """Return file and row, for messages."""
        return f"{self.name}, row {index}"


@attrs.frozen(eq=False)
class JsonLines:
    """A file with one JSON object per line; lines are numbered from 1, and blank ones are skipped.

    It is read here instead of by `datasets`, which rejects a whole file for a single broken line.
    """

    name: str
    lines: Sequence[tuple[int, bytes]]

    def __len__(self) -> int:
        return len(self.lines)

    def row(self, index: int) -> Row:
        """Return a row with all columns."""
        try:
            value = json.loads(self.lines[index][1])
        except (ValueError, RecursionError) as error:
            raise BadRowError(f"it is not JSON: {error}") from error
        if not isinstance(value, dict):
            hint = "; write each of its elements on a line of its own" if isinstance(value, list) else ""
            raise BadRowError(f"expected a JSON object, got {type(value).__name__}{hint}")
        return value

    def scan(self, needed: Any) -> Iterator[Row | BadRowError]:
        """Yield each row, or why it cannot be read."""
        for index in range(len(self)):
            try:
                yield self.row(index)
            except BadRowError as error:
                yield error

    def label(self, index: int) -> str:
        """Return file and line, for messages."""
        return f"{self.name}, line {self.lines[index][0]}"


def find(paths: Sequence[str], split: str, suffix: str) -> list[str]:
    """List the data files that paths refer to.

    Args:
        paths: Files, patterns with `*`, or folders with files `SPLIT.SUFFIX` or `SPLIT-….SUFFIX`; on any fsspec file
            system.
        split: Split to select in folders.
        suffix: File suffix to select in folders.
    """
    from fsspec.core import url_to_fs

    found: list[str] = []
    for path in paths:
        try:
            system, bare = url_to_fs(path)
            if system.isfile(bare):  # its name may have the marks of a pattern
                matches = [bare]
            elif any(mark in bare for mark in "*?["):
                matches = sorted(system.glob(bare))
            else:
                matches = sorted({*system.glob(f"{bare}/{split}.{suffix}"), *system.glob(f"{bare}/{split}-*.{suffix}")})
        except (OSError, ValueError, ImportError) as error:
            raise DataError(f"{path}: {error}") from error
        if not matches:
            raise DataError(f"{path}: {_missing(system, bare, split, suffix)}")
        local = "://" not in path
        found += [match if local else system.unstrip_protocol(match) for match in map(str, matches)]
    return found


def _missing(system: Any, bare: str, split: str, suffix: str) -> str:
    if system.isdir(bare):
        held = sorted(PurePosixPath(p).name for p in system.ls(bare, detail=False))
        saved = any(name.endswith(".arrow") or name == "dataset_dict.json" for name in held)
        return (
            f"the folder holds neither {split}.{suffix} nor {split}-*.{suffix}; "
            f"it holds: {', '.join(held[:10]) or 'nothing'}"
            + (f"; `save_to_disk` of datasets wrote it: read it as {{use: hub, name: {bare}}}" if saved else "")
        )
    folder = str(PurePosixPath(bare).parent)
    siblings = [PurePosixPath(p).name for p in system.ls(folder, detail=False)] if system.isdir(folder) else []
    if system.exists(bare):
        return "it is neither a file nor a folder; a pipe cannot be read here: save its output to a file"
    return f"there is no such file{did_you_mean(PurePosixPath(PurePosixPath(bare).name), siblings)}"


def read_parquet(path: str) -> Columnar:
    """Read a parquet file."""
    import fsspec
    import pyarrow.parquet as pq
    from datasets import Dataset

    try:
        with fsspec.open(path, "rb") as file:
            return Columnar(path, Dataset(pq.read_table(file)))
    except Exception as error:  # a hostile file may make pyarrow raise anything
        hint = "; read JSON lines with the source `jsonl`" if ".jsonl" in path else _csv_hint(path)
        raise DataError(f"{path}: it cannot be read as parquet: {error}{hint}") from error


def is_parquet(path: str) -> bool:
    """Return whether a file is parquet, by its first bytes."""
    import fsspec

    with fsspec.open(path, "rb") as file:
        return bool(file.read(len(_PARQUET)) == _PARQUET)


def read_jsonl(path: str) -> JsonLines:
    """Read a file of JSON lines, compressed or not."""
    import fsspec

    try:
        with fsspec.open(path, "rb", compression="infer") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
            parquet = bool(lines) and lines[0][1].startswith(_PARQUET)
    except Exception as error:  # each compression has its own errors
        raise DataError(f"{path}: it cannot be read: {error}") from error
    if parquet:
        raise DataError(f"{path} is a parquet file; read it with the source `parquet`")
    if (hint := _csv_hint(path)) and lines and not _is_json(lines[0][1]):
        raise DataError(f"{path}: line 1 is not JSON{hint}")
    if len(lines) > 1 and not _is_json(lines[0][1]) and _is_json(b"".join(line for _, line in lines)):
        remedy = f"jq -c '.[]' {PurePosixPath(path).name} > train.jsonl"
        raise DataError(
            f"{path} holds one JSON value on {len(lines)} lines; write one object per line, such as: {remedy}"
        )
    return JsonLines(path, lines)


def _csv_hint(path: str) -> str:
    """Return how to convert a CSV file, if the name is that of one."""
    name = PurePosixPath(path)
    if name.suffix != ".csv":
        return ""
    code = f"import pandas; pandas.read_csv({name.name!r}).to_parquet({name.stem + '.parquet'!r})"
    return f'; convert CSV to parquet, and read it with the source `parquet`: python -c "{code}"'


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def read_hub(name: str, config: str | None, split: str, revision: str | None) -> Columnar:
    """Read a dataset from the Hugging Face hub, a folder with the same layout, or one written by `save_to_disk`.

    Raises:
        DataError: A folder written by `save_to_disk` has a single split without a name.
        UnreachableDataError: The dataset cannot be read.
    """
    import datasets

    saved = (Path(name) / "state.json").is_file()
    if saved and split != "train":
        raise DataError(f"dataset {name!r} was saved by save_to_disk and holds one split without a name, not {split!r}")
    if not Path(name).exists():
        preflight.hub_has_dataset(name, revision)  # if the hub does not answer, `datasets` must not ask it for minutes
    try:
        if saved:
            return Columnar(f"{name}/{split}", datasets.load_from_disk(name))
        data = datasets.load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # network, permissions, layout
        if preflight.hub_is_offline():
            advice = "Only this machine's cache was read: load it once with a connection to the hub"
        else:
            advice = "Without a connection to the hub, set HF_HUB_OFFLINE=1 to read what is in this machine's cache"
        raise UnreachableDataError(
            f"dataset {name!r}, split {split!r}: {type(error).__name__}: {error}. {advice}, give `name` a folder with "
            "the dataset, or use a source of local files, such as parquet or jsonl"
        ) from error
    return Columnar(f"{name}/{split}", data)


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
    """Return the columns `nums` and `target` of TinyZero's files, which many rewards for Countdown read."""
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
