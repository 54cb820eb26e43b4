"""Pages of stored rollouts: each is a few statements that walk an index, so that a million rollouts browse at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import attrs
import sqlalchemy as sa

from rlsdk.errors import RunError, ValueFault
from rlsdk.runlog.query import reader
from rlsdk.runlog.store import Address
from rlsdk.runlog.tables import EVALUATED, GROUPS, ROLLOUTS, create_indices

Order = Literal["newest", "oldest", "lowest", "highest", "longest", "shortest"]
ORDERS: tuple[Order, ...] = ("newest", "oldest", "lowest", "highest", "longest", "shortest")
PAGE = 60
"""Rollouts on a page."""
WINDOW, TEXT_WINDOW = 20_000, 4_000
"""Rows that one statement passes over at most while it looks for those that meet further conditions; fewer where it
must read their texts."""
SECONDS = 0.4
"""Time after which a page is returned as far as it got; its cursor continues."""
EXCERPT = 280
"""Characters of texts in a list."""
_TEXT = 300
"""Maximum length of a text to search for."""


@attrs.frozen(kw_only=True)
class Filter:
    """Conditions on rollouts; those left out always hold.

    Attributes:
        kind: Rollouts of the training, or of evaluations.
        source: Name of the task source.
        task: Id of the task.
        state: State of the group, such as `trained`.
        status: Status of the rollout, such as `truncated`.
        step_from: Least step.
        step_to: Greatest step.
        reward_from: Least reward.
        reward_to: Greatest reward.
        invalid: True for rollouts without a valid score alone.
        text: Text in prompt or response, in any case of letters.
        order: Order of the list.
    """

    kind: Literal["train", "eval"] = "train"
    source: str = ""
    task: str = ""
    state: str = ""
    status: str = ""
    step_from: int | None = None
    step_to: int | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    invalid: bool = False
    text: str = ""
    order: Order = "newest"

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Filter:
        """Read the parameters of an address.

        Raises:
            ValueFault: One of them is wrong.
        """
        read: dict[str, Any] = {name: given[name] for name in ("source", "task", "state", "status") if given.get(name)}
        for names, kind in ((("step_from", "step_to"), int), (("reward_from", "reward_to"), float)):
            for name in names:
                if text := given.get(name, "").strip():
                    read[name] = _number(name, text, kind)
        if given.get("kind") == "eval":
            read["kind"] = "eval"
        order = given.get("order") or "newest"
        if order not in ORDERS:
            raise ValueFault(f"order is {order!r}; expected one of {', '.join(ORDERS)}")
        return cls(**read, order=order, invalid=given.get("invalid") == "1", text=given.get("text", "")[:_TEXT])


def _number(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        expected = "a whole number" if kind is int else "a number"
        raise ValueFault(f"{name} is {text!r}; expected {expected}") from error


@attrs.frozen(kw_only=True)
class _Walk:
    """The index that a list walks: the order of its rows, and the conditions that the index itself decides.

    Attributes:
        order: Columns of the order, the first ones first.
        descending: True for the greatest first.
        decided: Conditions that bound the walk.
        by_group: True if a condition is on the group, whose index is walked.
        names: Fields of the filter that are decided.
    """

    order: tuple[sa.ColumnElement[Any], ...]
    descending: bool
    decided: tuple[sa.ColumnElement[bool], ...] = ()
    by_group: bool = False
    names: frozenset[str] = frozenset()


class Browser:
    """Queries of one run's store, each on a connection of its own: nothing is kept in memory between them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def address(self) -> Address | None:
        """Address of the store; None while the run has stored nothing."""
        return Address.of(self._folder)

    def upgrade(self) -> list[str]:
        """Create the indices that the store of an earlier rlsdk lacks, if it can be written; returns their names."""
        address = self.address
        if address is None:
            return []
        engine = address.engine(poolclass=sa.pool.NullPool)
        try:
            with engine.begin() as connection:
                return create_indices(connection)
        except (sa.exc.DBAPIError, sa.exc.NoSuchTableError):  # read-only, or a run that is just creating its store
            return []
        finally:
            engine.dispose()

    @contextmanager
    def _connected(self, seconds: float) -> Iterator[tuple[sa.Connection, str]]:
        address = self.address
        if address is None:
            raise ValueFault("this run has stored no rollouts yet; save_rollouts sets after how many steps it does")
        engine = reader(address, seconds)
        try:
            with engine.connect() as connection:
                yield connection, address.run
        except sa.exc.DBAPIError as error:
            said = next(iter(str(error.orig).splitlines()), type(error).__name__)
            raise RunError(f"the rollouts in {address.url} cannot be read: {said}") from error
        finally:
            engine.dispose()

    def page(self, wanted: Filter, cursor: Sequence[Any] | None = None, *, limit: int = PAGE) -> dict[str, Any]:
        """Return rollouts that meet a filter: `rows`, `next` (cursor of the next page) and `done`.

        Where conditions are rarely met, a page may hold few rows, or none, and yet not be the last: the walk ended
        after `SECONDS`, and `next` continues it.

        Args:
            wanted: The filter.
            cursor: `next` of the page before; None for the first page.
            limit: Maximum number of rows.
        """
        walk, ends = walk_of(wanted), time.monotonic() + SECONDS
        rest = _further(wanted, walk)
        window = TEXT_WINDOW if wanted.text else WINDOW if rest else limit
        with self._connected(60.0) as (connection, run):
            found: list[tuple[Any, ...]] = []
            done = False
            while len(found) < limit and not done:
                inner = _inner(walk, run, cursor, window)
                keys = connection.execute(_keys(inner, walk, rest, run, limit - len(found))).all()
                found += [tuple(key) for key in keys]
                if len(found) >= limit:
                    cursor = found[-1]
                    break
                last = connection.execute(_inner(walk, run, cursor, 1, offset=window - 1)).first()
                done = last is None
                cursor = None if last is None else tuple(last)[: len(walk.order)]
                if time.monotonic() > ends:
                    break
            rows = _shown(connection, run, [key[-2:] for key in found])
            state = _position(connection, run, cursor)
        return {"rows": rows, "next": None if done else list(cursor or ()), "done": done, "at_step": state}

    def facets(self) -> dict[str, Any]:
        """Return what one can filter by: sources, states, the greatest step, and numbers of rollouts."""
        with self._connected(20.0) as (connection, run):
            own = GROUPS.c.run == run
            steps = connection.execute(sa.select(sa.func.max(GROUPS.c.step)).where(own)).scalar()
            counts = {
                kind: connection.execute(
                    sa.select(sa.func.count()).select_from(ROLLOUTS).where(_of_kind(ROLLOUTS.c.number, kind), _own(run))
                ).scalar()
                for kind in ("train", "eval")
            }
            return {
                "sources": _distinct(connection, GROUPS.c.source),
                "states": [s for s in _distinct(connection, GROUPS.c.state) if s not in EVALUATED],
                "steps": steps,
                "rollouts": counts["train"],
                "evaluated": counts["eval"],
            }

    def group(self, number: int) -> Mapping[str, Any] | None:
        """Return the row of a group with its payload; None if there is none."""
        with self._connected(20.0) as (connection, run):
            same = (GROUPS.c.number == number) & (GROUPS.c.run == run)
            row = connection.execute(sa.select(GROUPS).where(same)).mappings().first()
        return None if row is None else dict(row)

    def held_out(self, task: str = "", state: str = EVALUATED[0], *, most: int = 400) -> list[dict[str, Any]]:
        """Return the answers to a held-out task, one row for each evaluation; without a task, tasks to choose from.

        Args:
            task: Id of the task.
            state: `eval greedy` or `eval sampled`.
            most: Maximum number of rows.
        """
        columns = (GROUPS.c.number, GROUPS.c.step, GROUPS.c.task, GROUPS.c.source)
        with self._connected(20.0) as (connection, run):
            of_state = (GROUPS.c.run == run) & (GROUPS.c.number < 0) & (GROUPS.c.state == state)
            if task:
                chosen = sa.select(*columns).where(of_state & (GROUPS.c.task == task)).order_by(GROUPS.c.step)
            else:
                newest = sa.select(sa.func.min(GROUPS.c.number)).where(of_state).scalar_subquery()
                last = sa.select(GROUPS.c.step).where((GROUPS.c.number == newest) & (GROUPS.c.run == run))
                chosen = sa.select(*columns).where(of_state & (GROUPS.c.step == last.scalar_subquery()))
                chosen = chosen.order_by(GROUPS.c.number)
            groups = [dict(row) for row in connection.execute(chosen.limit(most)).mappings()]
            rows = _shown(connection, run, [(group["number"], 0) for group in groups])
        return rows


def walk_of(wanted: Filter) -> _Walk:
    """Choose the index for a filter: that of its order or, by number, that of its most selective condition."""
    number, rollout = ROLLOUTS.c.number, ROLLOUTS.c.rollout
    if wanted.order in ("lowest", "highest"):
        bounds: list[sa.ColumnElement[bool]] = [ROLLOUTS.c.reward.is_not(None)]
        if wanted.reward_from is not None:
            bounds.append(ROLLOUTS.c.reward >= wanted.reward_from)
        if wanted.reward_to is not None:
            bounds.append(ROLLOUTS.c.reward <= wanted.reward_to)
        decided = frozenset({"reward_from", "reward_to"})
        order = (ROLLOUTS.c.reward, number, rollout)
        return _Walk(order=order, descending=wanted.order == "highest", decided=tuple(bounds), names=decided)
    if wanted.order in ("longest", "shortest"):
        return _Walk(order=(ROLLOUTS.c.tokens, number, rollout), descending=wanted.order == "longest")
    # Numbers of evaluations fall with the step, those of trained groups rise.
    down = (wanted.order == "newest") == (wanted.kind == "train")
    kind = _of_kind(number, wanted.kind)
    group_kind = _of_kind(GROUPS.c.number, wanted.kind)
    if wanted.task or not (wanted.invalid or wanted.status not in ("", "finished")):
        for name in ("task", "state", "source"):
            if value := getattr(wanted, name):
                same = (GROUPS.c[name] == value, group_kind)
                names = frozenset({name, "kind"})
                of_group = (GROUPS.c.number, rollout)
                return _Walk(order=of_group, descending=down, decided=same, by_group=True, names=names)
        if wanted.step_from is not None or wanted.step_to is not None:
            return _by_step(wanted)
        return _Walk(order=(number, rollout), descending=down, decided=(kind,), names=frozenset({"kind"}))
    if wanted.invalid:
        none, names = (ROLLOUTS.c.reward.is_(None), kind), frozenset({"invalid", "kind"})
        return _Walk(order=(number, rollout), descending=down, decided=none, names=names)
    bound, names = (ROLLOUTS.c.status == wanted.status, kind), frozenset({"status", "kind"})
    return _Walk(order=(number, rollout), descending=down, decided=bound, names=names)


def _by_step(wanted: Filter) -> _Walk:
    bounds: list[sa.ColumnElement[bool]] = [GROUPS.c.step.is_not(None)]
    if wanted.step_from is not None:
        bounds.append(GROUPS.c.step >= wanted.step_from)
    if wanted.step_to is not None:
        bounds.append(GROUPS.c.step <= wanted.step_to)
    order = (GROUPS.c.step, GROUPS.c.number, ROLLOUTS.c.rollout)
    decided, names = tuple(bounds), frozenset({"step_from", "step_to"})
    return _Walk(order=order, descending=wanted.order == "newest", decided=decided, by_group=True, names=names)


def _of_kind(number: sa.ColumnElement[int], kind: str) -> sa.ColumnElement[bool]:
    return number < 0 if kind == "eval" else number >= 0


def _own(run: str) -> sa.ColumnElement[bool]:
    """Return the condition on the run; a file holds one, and there a condition would mislead SQLite's planner."""
    return ROLLOUTS.c.run == run if run else sa.true()


def _inner(walk: _Walk, run: str, cursor: Sequence[Any] | None, window: int, *, offset: int = 0) -> sa.Select[Any]:
    """Return a statement for the next rows of a walk: keys of the order, ending with group number and rollout."""
    columns = [column.label(f"k{i}") for i, column in enumerate(walk.order)]
    read = sa.select(*columns, *(ROLLOUTS.c[name].label(name) for name in ("reward", "status", "tokens")))
    if walk.by_group:
        same = (ROLLOUTS.c.number == GROUPS.c.number) & (ROLLOUTS.c.run == GROUPS.c.run)
        read = read.select_from(GROUPS.join(ROLLOUTS, same)).where(GROUPS.c.run == run)
    else:
        read = read.select_from(ROLLOUTS).where(_own(run))
    read = read.where(*walk.decided)
    if cursor:
        read = read.where(_beyond(walk, cursor))
    order = [column.desc() if walk.descending else column.asc() for column in walk.order]
    return read.order_by(*order).limit(window).offset(offset or None)


def _beyond(walk: _Walk, cursor: Sequence[Any]) -> sa.ColumnElement[bool]:
    if walk.by_group:  # the group's columns and the rollout's are in two tables: only the former bound an index
        *groups, rollout = walk.order
        *group, i = cursor
        left, right = sa.tuple_(*groups), sa.tuple_(*(sa.literal(value) for value in group))
        same = sa.and_(*(column == value for column, value in zip(groups, group, strict=True)))
        if walk.descending:
            return sa.and_(left <= right, sa.not_(sa.and_(same, rollout >= i)))
        return sa.and_(left >= right, sa.not_(sa.and_(same, rollout <= i)))
    left, right = sa.tuple_(*walk.order), sa.tuple_(*(sa.literal(value) for value in cursor))
    return left < right if walk.descending else left > right


def _further(wanted: Filter, walk: _Walk) -> dict[str, Any]:
    """Return the conditions that the walked index does not decide."""
    fields = attrs.asdict(wanted)
    left = {name: value for name, value in fields.items() if name not in (*walk.names, "order")}
    return {name: value for name, value in left.items() if value is not None and value is not False and value != ""}


def _keys(inner: sa.Select[Any], walk: _Walk, rest: Mapping[str, Any], run: str, limit: int) -> sa.Select[Any]:
    """Return a statement for the keys of those rows of a walk that meet the further conditions."""
    k = inner.subquery("k")
    order = [k.c[f"k{i}"] for i in range(len(walk.order))]
    number, rollout = order[-2:]
    found = sa.select(*order)
    if {"task", "source", "state", "step_from", "step_to"} & set(rest):
        found = found.join(GROUPS, (GROUPS.c.number == number) & (GROUPS.c.run == run))
    if "text" in rest:
        same = (ROLLOUTS.c.number == number) & (ROLLOUTS.c.rollout == rollout) & (ROLLOUTS.c.run == run)
        found = found.join(ROLLOUTS, same)
        pattern = "%" + rest["text"].replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        texts = (ROLLOUTS.c.response, ROLLOUTS.c.prompt)
        found = found.where(sa.or_(*(text.ilike(pattern, escape="\\") for text in texts)))
    conditions: dict[str, Callable[[Any], sa.ColumnElement[bool]]] = {
        "kind": lambda value: _of_kind(number, value),
        "task": lambda value: GROUPS.c.task == value,
        "source": lambda value: GROUPS.c.source == value,
        "state": lambda value: GROUPS.c.state == value,
        "step_from": lambda value: GROUPS.c.step >= value,
        "step_to": lambda value: GROUPS.c.step <= value,
        "status": lambda value: k.c.status == value,
        "reward_from": lambda value: k.c.reward >= value,
        "reward_to": lambda value: k.c.reward <= value,
        "invalid": lambda value: k.c.reward.is_(None),
    }
    found = found.where(*(conditions[name](value) for name, value in rest.items() if name in conditions))
    return found.order_by(*(c.desc() if walk.descending else c.asc() for c in order)).limit(limit)


def _shown(connection: sa.Connection, run: str, keys: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """Return what a list shows of rollouts, in the order of their keys."""
    if not keys:
        return []
    same = (GROUPS.c.run == ROLLOUTS.c.run) & (GROUPS.c.number == ROLLOUTS.c.number)
    names = ("number", "rollout", "reward", "valid", "reason", "parts", "status", "tokens", "length")
    columns: list[sa.ColumnElement[Any]] = [ROLLOUTS.c[name] for name in (*names, "least_version", "greatest_version")]
    columns += [GROUPS.c[name] for name in ("step", "source", "task", "state", "uses")]
    columns += [sa.func.substr(ROLLOUTS.c[name], 1, EXCERPT).label(name) for name in ("prompt", "response")]
    numbers = sorted({int(number) for number, _ in keys})
    found = sa.select(*columns).select_from(ROLLOUTS.join(GROUPS, same)).where(ROLLOUTS.c.number.in_(numbers))
    found = found.where(ROLLOUTS.c.run == run)
    if len(keys) > len(numbers):
        found = found.where(ROLLOUTS.c.rollout.in_(sorted({int(rollout) for _, rollout in keys})))
    else:  # one of each group
        pairs = [(ROLLOUTS.c.number == int(n)) & (ROLLOUTS.c.rollout == int(i)) for n, i in keys]
        found = found.where(sa.or_(*pairs))
    rows = {(row["number"], row["rollout"]): dict(row) for row in connection.execute(found).mappings()}
    return [rows[int(n), int(i)] for n, i in keys if (int(n), int(i)) in rows]


def _position(connection: sa.Connection, run: str, cursor: Sequence[Any] | None) -> int | None:
    """Return the step that a walk has come to."""
    if not cursor:
        return None
    same = (GROUPS.c.number == int(cursor[-2])) & (GROUPS.c.run == run)
    step: int | None = connection.execute(sa.select(GROUPS.c.step).where(same)).scalar()
    return step


def _distinct(connection: sa.Connection, column: sa.Column[Any], most: int = 200) -> list[str]:
    """Return the distinct values of an indexed column, with one look-up in the index for each."""
    found: list[str] = []
    while len(found) < most:
        least = sa.select(sa.func.min(column))
        value = connection.execute(least.where(column > found[-1]) if found else least).scalar()
        if value is None:
            break
        found.append(value)
    return found
