"""Read-only queries of a run's rollouts."""

from __future__ import annotations

import math
import os
import sqlite3
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import attrs
import sqlalchemy as sa

from rlsdk.config import Config
from rlsdk.errors import EnvironmentFault, ValueFault, first_line
from rlsdk.runlog.actors import read_status
from rlsdk.runlog.files import read_yaml
from rlsdk.runlog.folder import MARKER, why_no_run
from rlsdk.runlog.metrics import read_metrics
from rlsdk.runlog.serialization import ARRAYS, LEARNED, decode_tokens
from rlsdk.runlog.store import DATABASE, Address, chunks
from rlsdk.runlog.tables import COLUMNS, GROUPS, ROLLOUTS

if TYPE_CHECKING:
    import pandas

TOKEN_COLUMNS = (*ARRAYS, *LEARNED)
"""Columns with the values of each token."""
_INSTRUCTIONS = 10_000
"""SQLite instructions between checks of the clock and signals: about a millisecond."""


def rollouts(
    run: str | Path,
    where: str = "",
    *,
    order_by: str = "",
    limit: int | None = None,
    seconds: float | None = None,
    evaluations: bool = False,
    tokens: bool = False,
) -> pandas.DataFrame:
    """Return a run's rollouts as a pandas data frame, one row each; if none are saved, a warning explains why.

    Args:
        run: The run's folder.
        where: SQL condition, such as `reward < 0.5 and step >= 10`.
        order_by: Column to sort by, followed by ` desc` for descending order; by default, the step.
        limit: Maximum number of rows.
        seconds: Time limit of the query; None for no limit.
        evaluations: True for evaluation rollouts instead of training rollouts.
        tokens: True for further columns with the values of each token, NumPy arrays `[T]` as in `rlsdk.Rollout`:
            `token_ids`, `loss_mask`, `logprobs` and `policy_versions`; and `learner_logprobs` (if they differ from the
            engine's), `advantages` and `entropy` (if the algorithm reads it), None for a rollout that was not trained.

    Raises:
        EnvironmentFault: pandas is not installed.
        ValueFault: The run keeps no rollouts, or the condition is wrong or takes longer than the time limit.
    """
    try:
        import pandas
    except ModuleNotFoundError as error:
        raise EnvironmentFault("rlsdk.rollouts needs pandas, which is not installed: pip install pandas") from error
    how: dict[str, Any] = {"order_by": order_by, "limit": limit, "seconds": seconds, "evaluations": evaluations}
    found = query(run, where, **how, tokens=tokens)
    if not found and not (where and query(run, limit=1, evaluations=evaluations)):
        warnings.warn(why_none(run, evaluations=evaluations), stacklevel=2)
    return pandas.DataFrame(found, columns=[*COLUMNS, *(TOKEN_COLUMNS if tokens else ())])


def query(
    run: str | Path,
    where: str = "",
    *,
    order_by: str = "",
    limit: int | None = None,
    seconds: float | None = None,
    evaluations: bool = False,
    tokens: bool = False,
) -> list[dict[str, Any]]:
    """Return a run's rollouts, each as a mapping of its columns; see `rollouts`.

    Raises:
        ValueFault: The run keeps no rollouts, or the condition is wrong or takes longer than the time limit.
        RunError: The database cannot be read.
        KeyboardInterrupt: The user interrupted the query.
    """
    address = Address.of(Path(run))
    if address is None:
        if not (Path(run) / MARKER).is_file():
            raise ValueFault(why_no_run(Path(run), "rollouts.db"))
        raise ValueFault(why_none(run, evaluations=evaluations))
    most, begun = math.inf if seconds is None else seconds, time.monotonic()
    engine = reader(address, most)
    try:
        with engine.connect() as connection:
            rows = connection.execute(_statement(address.run, where, order_by, limit, evaluations)).mappings()
            found = [dict(row) for row in rows]
            return _with_tokens(connection, address.run, found) if tokens else found
    except sa.exc.DBAPIError as error:
        if getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            if time.monotonic() < begun + most:
                raise KeyboardInterrupt from error  # sqlite3 replaces exceptions raised in its callbacks
            raise ValueFault(
                f"the query {where or order_by!r} took longer than {most:g} s; narrow it, or allow more time "
                "(--timeout, in a script `seconds`)"
            ) from error
        damaged = getattr(error.orig, "sqlite_errorcode", None) in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
        if (where or order_by) and not damaged:
            given, reason = where or order_by, first_line(error.orig)
            raise ValueFault(f"{given!r}: {reason}. The columns are {', '.join(COLUMNS)}") from error
        raise address.unreadable(error) from error
    finally:
        engine.dispose()


def _with_tokens(connection: sa.Connection, run: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    stored: dict[int, dict[str, list[Any]]] = {}
    for part in chunks(sorted({row["number"] for row in rows})):
        of_run = (GROUPS.c.run == run) & GROUPS.c.number.in_(part)
        for number, payload in connection.execute(sa.select(GROUPS.c.number, GROUPS.c.payload).where(of_run)):
            stored[number] = decode_tokens(payload)
    found = []
    for row in rows:
        group = stored.get(row["number"], {})  # empty if the run has just deleted it
        found.append(row | {name: group[name][row["rollout"]] if name in group else None for name in TOKEN_COLUMNS})
    return found


def why_none(run: str | Path, where: str = "", *, evaluations: bool = False, name: str = "") -> str:
    """Explain why a query finds nothing.

    Args:
        run: The run's folder.
        where: Condition of the query.
        evaluations: True if the query was for evaluation rollouts.
        name: Name of the run in the message; by default, its folder.
    """
    folder, name = Path(run), name or str(run)
    stored = Address.of(folder) is not None
    if stored and where and query(folder, limit=1, evaluations=evaluations):
        return f"No rollout of {name} meets the condition {where!r}."
    default: Any = attrs.fields(Config).save_rollouts.default
    every = int(read_yaml(folder / "config.yaml").get("save_rollouts", default))
    done = max((line["step"] for line in read_metrics(folder)), default=0)
    if not every:
        return f"No rollouts are saved: {name} was started with save_rollouts: 0."
    if done >= every and not stored:
        return (
            f"{name} has no {DATABASE}, where it saved its rollouts ({done} steps are done): it was deleted or moved."
        )
    state = read_status(folder)
    over = state is not None and state.over
    if stored and evaluations and query(folder, limit=1):
        return (
            f"No evaluation answers are saved: {name} has {'made no evaluation' if over else 'not evaluated so far'}."
        )
    when = "after each step" if every == 1 else f"after steps {every}, {2 * every}, {3 * every}, …"
    if over:
        return f"No rollouts are saved: {name} saves them {when} (save_rollouts: {every}), and ended after {done}."
    return f"No rollouts are saved yet: {name} saves them {when} (save_rollouts: {every}), and has done {done} so far."


def _statement(run: str, where: str, order_by: str, limit: int | None, evaluations: bool) -> sa.Select[Any]:
    same = (GROUPS.c.run == ROLLOUTS.c.run) & (GROUPS.c.number == ROLLOUTS.c.number)
    columns = [ROLLOUTS.c[name] if name in ROLLOUTS.c else GROUPS.c[name] for name in COLUMNS]
    whole = sa.select(*columns).select_from(GROUPS.join(ROLLOUTS, same))
    # A file holds one run. A condition on it would mislead SQLite, which takes any equality for a selective one.
    # The plus keeps SQLite from preferring the primary key to the index of a condition or an order.
    kind: sa.ColumnElement[bool] = sa.literal_column(f"(+rlsdk_groups.number) {'<' if evaluations else '>='} 0")
    whole = whole.where(kind)
    rows = (whole.where(GROUPS.c.run == run) if run else whole).subquery("rollouts")
    found = sa.select(rows).order_by(*_order(rows, order_by)).limit(limit)
    # The line break ends a comment at the end of the condition. Typed as a boolean, SQLAlchemy would compare the
    # condition with 1, and SQLite would then use no index.
    return found.where(sa.literal_column(f"({where}\n)")) if where else found


def _order(rows: sa.Subquery, order_by: str) -> list[sa.ColumnElement[Any]]:
    if not order_by:
        return [rows.c.step, rows.c.number, rows.c.rollout]
    name, _, way = order_by.strip().partition(" ")
    if name not in COLUMNS or way.strip().lower() not in ("", "asc", "desc"):
        raise ValueFault(f"{order_by!r}: expected a column, or `COLUMN desc`; the columns are {', '.join(COLUMNS)}")
    # Ties follow an index: rewards have few distinct values, and sorting all rows with one value would take long.
    columns = [rows.c[each] for each in dict.fromkeys((name, "number", "rollout"))]
    first, *rest = [c.desc() if way.strip().lower() == "desc" else c.asc() for c in columns]
    return [sa.nulls_last(first), *rest]


def reader(address: Address, seconds: float = math.inf) -> sa.Engine:
    """Create an engine with read-only connections, whose statements end after `seconds` at the latest.

    For a file, the time starts with the connection; for PostgreSQL, with each statement. Reuse the engine for frequent
    queries: creating it takes longer than a query.
    """
    how: dict[str, Any] = {"poolclass": sa.pool.NullPool}
    if address.is_file:

        def connect() -> sqlite3.Connection:
            # SQLAlchemy would create a missing file; sqlite3 opens an existing one read-only.
            name = f"file:{quote(os.fsencode(address.file))}?mode=ro"
            if not os.access(Path(address.file).parent, os.W_OK) and not Path(f"{address.file}-wal").exists():
                name += "&immutable=1"  # otherwise SQLite creates a file next to the database
            ends = time.monotonic() + seconds
            connection = sqlite3.connect(name, uri=True, timeout=60)
            # Calling Python also lets it handle signals; an exception raised by a handler ends the statement.
            connection.set_progress_handler(lambda: time.monotonic() > ends, _INSTRUCTIONS)
            return connection

        return address.engine(creator=connect, **how)
    limit = "" if seconds == math.inf else f" -c statement_timeout={max(1, round(1000 * seconds))}"
    return address.engine(connect_args={"options": f"-c default_transaction_read_only=on{limit}"}, **how)
