"""Rows of data files and hub datasets, found by paths that fsspec understands."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Protocol

import attrs

from rlsdk.errors import DataError, UnreachableDataError
from rlsdk.options import nearest
from rlsdk.sources.rows import BadRowError

Row = Mapping[str, Any]


class Table(Protocol):
    """Rows, and what they are called."""

    @property
    def name(self) -> str:
        """The file or dataset as it was named."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """A row with all columns; `BadRowError` if it cannot be read."""

    def scan(self, needed: Any) -> Iterator[Row | BadRowError]:
        """All rows in order, or why one cannot be read; `needed` says which columns must be there."""

    def label(self, index: int) -> str:
        """File and row, for messages."""


@attrs.frozen(eq=False)
class Columnar:
    """A table in columns: rows count from 0."""

    name: str
    data: Any
    """A `datasets.Dataset`."""

    def __len__(self) -> int:
        return len(self.data)

    def row(self, index: int) -> Row:
        """A row with all columns."""
        found: Row = self.data[index]
        return found

    def scan(self, needed: Any) -> Iterator[Row | BadRowError]:
        """All rows in order; columns that are not needed are None, which spares their decoding (of images, say)."""
        columns = needed(self.data.column_names)
        blank = dict.fromkeys(self.data.column_names)
        if not columns:
            yield from (blank for _ in range(len(self)))
            return
        for batch in self.data.select_columns(columns).iter(batch_size=1000):
            for values in zip(*batch.values(), strict=True):
                yield {**blank, **dict(zip(batch, values, strict=True))}

    def label(self, index: int) -> str:
        """File and row."""
        return f"{self.name}, row {index}"


@attrs.frozen(eq=False)
class Lines:
    """A file of JSON objects, one a line: lines count from 1, and blank ones do not matter.

    `datasets` gives up a file for a single broken line, so that they are read here.
    """

    name: str
    lines: Sequence[tuple[int, bytes]]

    def __len__(self) -> int:
        return len(self.lines)

    def row(self, index: int) -> Row:
        """A row with all columns."""
        try:
            value = json.loads(self.lines[index][1])
        except (ValueError, RecursionError) as error:
            raise BadRowError(f"it is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise BadRowError(f"expected a JSON object, got {type(value).__name__}")
        return value

    def scan(self, needed: Any) -> Iterator[Row | BadRowError]:
        """All rows in order."""
        for index in range(len(self)):
            try:
                yield self.row(index)
            except BadRowError as error:
                yield error

    def label(self, index: int) -> str:
        """File and line."""
        return f"{self.name}, line {self.lines[index][0]}"


def find(paths: Sequence[str], split: str, suffix: str) -> list[str]:
    """List the data files that paths stand for.

    Args:
        paths: Files, patterns with `*`, or folders, which stand for their files `SPLIT.SUFFIX` and `SPLIT-….SUFFIX`;
            on any file system that fsspec knows.
        split: Split to select in folders.
        suffix: File suffix to select in folders.

    Raises:
        DataError: There is no such file.
    """
    from fsspec.core import url_to_fs

    found: list[str] = []
    for path in paths:
        try:
            system, bare = url_to_fs(path)
            if any(mark in bare for mark in "*?["):
                matches = sorted(system.glob(bare))
            elif system.isdir(bare):
                matches = sorted({*system.glob(f"{bare}/{split}.{suffix}"), *system.glob(f"{bare}/{split}-*.{suffix}")})
            else:
                matches = [bare] if system.isfile(bare) else []
        except (OSError, ValueError, ImportError) as error:
            raise DataError(f"{path}: {error}") from error
        if not matches:
            raise DataError(f"{path}: {_missing(system, bare, split, suffix)}")
        local = "://" not in path
        found += [match if local else system.unstrip_protocol(match) for match in map(str, matches)]
    return found


def _missing(system: Any, bare: str, split: str, suffix: str) -> str:
    if system.isdir(bare):
        held = ", ".join(sorted(PurePosixPath(p).name for p in system.ls(bare, detail=False))[:10])
        return f"the folder holds neither {split}.{suffix} nor {split}-*.{suffix}; it holds: {held or 'nothing'}"
    folder = str(PurePosixPath(bare).parent)
    beside = [PurePosixPath(p).name for p in system.ls(folder, detail=False)] if system.isdir(folder) else []
    near = nearest(PurePosixPath(bare).name, beside)
    return f"there is no such file{f'; did you mean {near}?' if near else ''}"


def read_parquet(path: str) -> Columnar:
    """Read a parquet file.

    Raises:
        DataError: It cannot be read.
    """
    import fsspec
    import pyarrow.parquet as pq
    from datasets import Dataset

    try:
        with fsspec.open(path, "rb") as file:
            return Columnar(path, Dataset(pq.read_table(file)))
    except Exception as error:  # whatever a hostile file makes pyarrow raise: it is named, with its cause
        raise DataError(f"{path}: it cannot be read as parquet: {error}") from error


def read_jsonl(path: str) -> Lines:
    """Read a file of JSON lines, compressed or not.

    Raises:
        DataError: It cannot be read.
    """
    import fsspec

    try:
        with fsspec.open(path, "rb", compression="infer") as file:
            lines = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except Exception as error:  # as above; compression adds errors of its own
        raise DataError(f"{path}: it cannot be read: {error}") from error
    return Lines(path, lines)


def read_hub(name: str, config: str | None, split: str, revision: str | None) -> Columnar:
    """Read a dataset of the Hugging Face hub, or of a folder laid out like one.

    Raises:
        UnreachableDataError: It cannot be read.
    """
    import datasets

    try:
        data = datasets.load_dataset(name, config, split=split, revision=revision)
    except Exception as error:  # network, permissions, layout: named, with its cause
        raise UnreachableDataError(f"dataset {name!r}, split {split!r}: {type(error).__name__}: {error}") from error
    return Columnar(f"{name}/{split}", data)
