"""Pages of stored rollouts: each takes a few index-walking queries, so browsing a million rollouts is instant."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from rlsdk.errors import ValueFault
from rlsdk.runlog.query import reader
from rlsdk.runlog.store import Address
from rlsdk.runlog.tables import EVALUATED, GROUPS, ROLLOUTS, create_indices
from rlsdk.viewer.walks import Filter, Walk, few_rows, further, matching, next_rows, walk_of

Key = tuple[Any, ...]

PAGE = 60
"""Rollouts per page."""
WINDOW, TEXT_WINDOW = 20_000, 4_000
"""Maximum number of rows that one statement scans for those that meet further conditions; fewer if it must read
their texts."""
FIRST_WINDOW, GROWTH = 4, 16
"""Rows that the first of these statements scans per row of a page, and the factor by which the scan grows with each
further statement."""
FEW = 3_000
"""If at most this many rows meet a condition, all are read and sorted instead."""
SECONDS = 0.4
"""Time limit in seconds of a page, which is then returned incomplete; its cursor continues."""
LONGEST = 60.0
"""Time limit in seconds of a statement, enforced by the database."""
MOST_HELD_OUT = 400
"""Maximum number of rows about held-out tasks."""
MOST_VALUES = 200
"""Maximum number of values to filter by."""
EXCERPT = 280
"""Maximum number of characters of a text in a list."""


class Browser:
    """Queries on one run's store, each on its own connection; no rollouts are kept in memory between queries."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader: tuple[Address, sa.Engine] | None = None

    @property
    def address(self) -> Address | None:
        """Address of the store; None until the run has stored something."""
        return Address.of(self._folder)

    def upgrade(self) -> list[str]:
        """Create indices missing from the store of an earlier rlsdk, if it is writable; return their names."""
        address = self.address
        if address is None:
            return []
        engine = address.engine(poolclass=sa.pool.NullPool)
        try:
            with engine.begin() as connection:
                return create_indices(connection)
        except (sa.exc.DBAPIError, sa.exc.NoSuchTableError):  # read-only, or the run is just creating its store
            return []
        finally:
            engine.dispose()

    @contextmanager
    def _connected(self) -> Iterator[tuple[sa.Connection, str]]:
        address = self.address
        if address is None:
            raise ValueFault("this run has stored no rollouts yet; save_rollouts sets how often it stores them")
        kept = self._reader
        if kept is None or kept[0] != address:
            self._reader = kept = (address, reader(address, LONGEST))
        try:
            with kept[1].connect() as connection:
                yield connection, address.run
        except sa.exc.DBAPIError as error:
            raise address.unreadable(error) from error

    def page(self, wanted: Filter, cursor: Sequence[Any] | None = None, *, limit: int = PAGE) -> dict[str, Any]:
        """Return rollouts that match a filter: `rows`, `next` (cursor of the next page), `done` and `at_step`.

        If few rows match, a page may hold few rows or none and yet not be the last: the walk stopped after `SECONDS`
        at step `at_step`, and `next` continues it.

        `cursor` is `next` of the previous page; None for the first one.
        """
        with self._connected() as (connection, run):
            keys, after = _listed(connection, run, wanted, cursor, limit)
            rows = _shown(connection, run, [key[-2:] for key in keys])
            if after is None or (rows and after[-2:] == keys[-1][-2:]):
                step = rows[-1]["step"] if after else None
            else:
                same = (GROUPS.c.number == int(after[-2])) & (GROUPS.c.run == run)
                step = connection.execute(sa.select(GROUPS.c.step).where(same)).scalar()
        return {"rows": rows, "next": None if after is None else list(after), "done": after is None, "at_step": step}

    def facets(self) -> dict[str, Any]:
        """Return values to filter by: sources, states, and the last step."""
        with self._connected() as (connection, run):
            steps = connection.execute(sa.select(sa.func.max(GROUPS.c.step)).where(GROUPS.c.run == run)).scalar()
            return {
                "sources": _distinct(connection, GROUPS.c.source),
                "states": [s for s in _distinct(connection, GROUPS.c.state) if s not in EVALUATED],
                "steps": steps,
            }

    def group(self, number: int) -> Mapping[str, Any] | None:
        """Return the row of a group with its payload; None if it does not exist."""
        with self._connected() as (connection, run):
            same = (GROUPS.c.number == number) & (GROUPS.c.run == run)
            row = connection.execute(sa.select(GROUPS).where(same)).mappings().first()
        return None if row is None else dict(row)

    def evaluated(self) -> list[str]:
        """Return the kinds of stored evaluation groups, `eval greedy` before `eval sampled`."""
        with self._connected() as (connection, run):
            stored = sa.select(sa.literal(1)).where((GROUPS.c.run == run) & (GROUPS.c.number < 0))
            return [
                each for each in EVALUATED if connection.execute(stored.where(GROUPS.c.state == each).limit(1)).first()
            ]

    def held_out(self, task: str = "", state: str = EVALUATED[0]) -> list[dict[str, Any]]:
        """Return the answers to a held-out task, one row per evaluation; without a task, the tasks to choose from."""
        columns = (GROUPS.c.number, GROUPS.c.step, GROUPS.c.task, GROUPS.c.source)
        with self._connected() as (connection, run):
            of_state = (GROUPS.c.run == run) & (GROUPS.c.number < 0) & (GROUPS.c.state == state)
            if task:
                chosen = sa.select(*columns).where(of_state & (GROUPS.c.task == task)).order_by(GROUPS.c.step)
            else:
                newest = sa.select(sa.func.min(GROUPS.c.number)).where(of_state).scalar_subquery()
                last = sa.select(GROUPS.c.step).where((GROUPS.c.number == newest) & (GROUPS.c.run == run))
                chosen = sa.select(*columns).where(of_state & (GROUPS.c.step == last.scalar_subquery()))
                chosen = chosen.order_by(GROUPS.c.number)
            groups = [dict(row) for row in connection.execute(chosen.limit(MOST_HELD_OUT)).mappings()]
            rows = _shown(connection, run, [(group["number"], 0) for group in groups])
        return rows


def _listed(
    connection: sa.Connection, run: str, wanted: Filter, cursor: Sequence[Any] | None, limit: int
) -> tuple[list[Key], Key | None]:
    """Return the keys of a page, and the key after which the next page begins; None for the last page."""
    walk, ends = walk_of(wanted), time.monotonic() + SECONDS
    rest = further(wanted, walk.names)
    widest = TEXT_WINDOW if wanted.text else WINDOW
    window = min(FIRST_WINDOW * limit, widest) if rest else limit
    after = None if cursor is None else tuple(cursor)
    found: list[Key] = []
    probed = False
    while True:
        inner = next_rows(walk, run, after, window, also=rest)
        found += _sorted(connection.execute(matching(inner, walk, rest, run) if rest else inner), walk)
        if len(found) >= limit:
            return found[:limit], found[limit - 1]
        last = connection.execute(next_rows(walk, run, after, 1, offset=window - 1)).first() if rest else None
        if last is None:
            return found, None
        after = tuple(last)
        few = None if probed else _few(connection, run, wanted, walk, after)
        if few is not None:
            found += few
            return found[:limit], found[limit - 1] if len(found) > limit else None
        if time.monotonic() > ends:
            return found, after
        probed, window = True, min(GROWTH * window, widest)


def _few(connection: sa.Connection, run: str, wanted: Filter, walk: Walk, after: Key) -> list[Key] | None:
    """Return the keys of all rows after a key, if one of the conditions holds for only a few rows of the store."""
    for rows, rest in few_rows(wanted, walk, run, FEW + 1):
        count = connection.execute(sa.select(sa.func.count()).select_from(rows.subquery())).scalar()
        if count is not None and count <= FEW:
            keys = _sorted(connection.execute(matching(rows, walk, rest, run)), walk)
            return [key for key in keys if (key < after if walk.descending else key > after)]
    return None


def _sorted(rows: sa.CursorResult[Any], walk: Walk) -> list[Key]:
    """Return keys in the order of a walk; databases do not guarantee that an outer statement keeps it."""
    keys = [tuple(row) for row in rows]
    return sorted((key for key in keys if None not in key), reverse=walk.descending)


def _shown(connection: sa.Connection, run: str, keys: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Return list entries for rollouts, in the order of their keys."""
    if not keys:
        return []
    same = (GROUPS.c.run == ROLLOUTS.c.run) & (GROUPS.c.number == ROLLOUTS.c.number)
    names = ("number", "rollout", "reward", "valid", "reason", "parts", "status", "tokens", "length")
    columns: list[sa.ColumnElement[Any]] = [ROLLOUTS.c[name] for name in (*names, "least_version", "greatest_version")]
    columns += [GROUPS.c[name] for name in ("step", "source", "task", "state", "uses")]
    columns += [sa.func.substr(ROLLOUTS.c[name], 1, EXCERPT).label(name) for name in ("prompt", "response")]
    found = sa.select(*columns).select_from(ROLLOUTS.join(GROUPS, same)).where(ROLLOUTS.c.run == run)
    pairs = [(int(number), int(rollout)) for number, rollout in keys]
    # SQLite uses no index for pairs alone.
    for column, values in zip((ROLLOUTS.c.number, ROLLOUTS.c.rollout), zip(*pairs, strict=True), strict=True):
        found = found.where(column.in_(sorted(set(values))))
    found = found.where(sa.tuple_(ROLLOUTS.c.number, ROLLOUTS.c.rollout).in_(pairs))
    rows = {(row["number"], row["rollout"]): dict(row) for row in connection.execute(found).mappings()}
    return [rows[pair] for pair in pairs if pair in rows]


def _distinct(connection: sa.Connection, column: sa.Column[Any]) -> list[str]:
    """Return the distinct values of an indexed column, with one index look-up per value."""
    found: list[str] = []
    while len(found) < MOST_VALUES:
        least = sa.select(sa.func.min(column))
        value = connection.execute(least.where(column > found[-1]) if found else least).scalar()
        if value is None:
            break
        found.append(value)
    return found
