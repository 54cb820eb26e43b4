"""Statements that list stored rollouts: each walks an index in the order of the list, and sorts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import sqlalchemy as sa

from rlsdk.runlog.tables import GROUPS, ROLLOUTS, evaluated_numbers
from rlsdk.viewer.filters import Filter

# The plus keeps SQLite from using an index on the number, which it would prefer to that of an order or a range.
# `_EVALUATED` is the condition of the indices of evaluations, word for word. Typed as booleans, SQLAlchemy would
# compare the conditions with 1, and no index would do.
_TRAINED: sa.ColumnElement[bool] = sa.literal_column("(+rlsdk_rollouts.number) >= 0")
_EVALUATED: sa.ColumnElement[bool] = sa.literal_column("(+rlsdk_rollouts.number) < 0")
_BY_NUMBER = {"train": frozenset({"kind"}), "eval": frozenset({"kind", "step_from", "step_to"})}
"""Fields of a filter that a condition on the number decides: numbers of evaluations follow from the step."""


@attrs.frozen(kw_only=True)
class Walk:
    """The index that a list walks: the order of its rows, and the conditions that the statement decides.

    Attributes:
        order: Columns of the order, the first ones first.
        descending: True for the greatest first.
        decided: Conditions that bound the walk, or are decided by what the index holds.
        table: Table whose index is walked.
        names: Fields of the filter that are decided.
    """

    order: tuple[sa.ColumnElement[Any], ...]
    descending: bool
    decided: tuple[sa.ColumnElement[bool], ...] = ()
    table: sa.Table = ROLLOUTS
    names: frozenset[str] = frozenset()


def walk_of(wanted: Filter) -> Walk:
    """Choose the index for a filter: that of its order or, by number, that of its most selective condition."""
    rollout = ROLLOUTS.c.rollout
    if wanted.order in ("lowest", "highest", "longest", "shortest"):
        return _by_value(wanted)
    # Numbers of evaluations fall with the step, those of trained groups rise.
    down = (wanted.order == "newest") == (wanted.kind == "train")
    numbers = _BY_NUMBER[wanted.kind]
    rare = wanted.invalid or wanted.status not in ("", "finished")
    if wanted.task or not rare:
        for name in ("task", "state", "source"):
            if value := getattr(wanted, name):
                decided = (GROUPS.c[name] == value, *_numbered(GROUPS.c.number, wanted))
                order = (GROUPS.c.number, rollout)
                return Walk(order=order, descending=down, decided=decided, table=GROUPS, names=numbers | {name})
        if wanted.kind == "train" and (wanted.step_from is not None or wanted.step_to is not None):
            return _by_step(wanted)
    decided = _numbered(ROLLOUTS.c.number, wanted)
    if wanted.invalid:
        numbers, decided = numbers | {"invalid"}, (ROLLOUTS.c.reward.is_(None), *decided)
    elif wanted.status:
        numbers, decided = numbers | {"status"}, (ROLLOUTS.c.status == wanted.status, *decided)
    return Walk(order=(ROLLOUTS.c.number, rollout), descending=down, decided=decided, names=numbers)


def _by_value(wanted: Filter) -> Walk:
    kind = _EVALUATED if wanted.kind == "eval" else _TRAINED
    column = ROLLOUTS.c.reward if wanted.order in ("lowest", "highest") else ROLLOUTS.c.tokens
    order, down = (column, ROLLOUTS.c.number, ROLLOUTS.c.rollout), wanted.order in ("highest", "longest")
    if column is ROLLOUTS.c.tokens:
        return Walk(order=order, descending=down, decided=(kind,), names=frozenset({"kind"}))
    decided = (column.is_not(None), *_within(column, wanted.reward_from, wanted.reward_to), kind)
    return Walk(order=order, descending=down, decided=decided, names=frozenset({"kind", "reward_from", "reward_to"}))


def _by_step(wanted: Filter) -> Walk:
    order = (GROUPS.c.step, GROUPS.c.number, ROLLOUTS.c.rollout)
    steps = _within(GROUPS.c.step, wanted.step_from, wanted.step_to)
    decided = (GROUPS.c.step.is_not(None), *steps, *_numbered(GROUPS.c.number, wanted))
    names = frozenset({"kind", "step_from", "step_to"})
    return Walk(order=order, descending=wanted.order == "newest", decided=decided, table=GROUPS, names=names)


def _within(column: sa.ColumnElement[Any], least: float | None, greatest: float | None) -> list[sa.ColumnElement[bool]]:
    bounds = ((column.__ge__, least), (column.__le__, greatest))
    return [holds(bound) for holds, bound in bounds if bound is not None]


def _numbered(number: sa.ColumnElement[int], wanted: Filter) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the conditions on a number, which decide the fields `_BY_NUMBER`."""
    if wanted.kind == "train":
        return (number >= 0,)
    numbers = evaluated_numbers(wanted.step_from, wanted.step_to)
    return (number >= numbers.start, number < numbers.stop)


def further(wanted: Filter, names: frozenset[str]) -> dict[str, Any]:
    """Return the conditions of a filter except those already decided."""
    left = {name: value for name, value in attrs.asdict(wanted).items() if name not in (*names, "order")}
    return {name: value for name, value in left.items() if value is not None and value is not False and value != ""}


def next_rows(
    walk: Walk, run: str, cursor: Sequence[Any] | None, window: int, *, offset: int = 0, also: Iterable[str] = ()
) -> sa.Select[Any]:
    """Return a statement for the next rows of a walk: keys of the order, ending with group number and rollout.

    Args:
        walk: The index.
        run: Id of the run.
        cursor: Key after which the rows begin; None for the first ones.
        window: Maximum number of rows.
        offset: Rows to pass over.
        also: Names of conditions that are still to be checked.
    """
    read = _read(walk, run, also, walk.table).where(*walk.decided)
    if cursor:
        read = read.where(_beyond(walk, cursor))
    order = [column.desc() if walk.descending else column.asc() for column in walk.order]
    return read.order_by(*order).limit(window).offset(offset or None)


def _read(walk: Walk, run: str, also: Iterable[str], first: sa.Table) -> sa.Select[Any]:
    """Return a statement for the keys of all rows: it reads one table first, and looks up the other one if needed."""
    columns = [column.label(f"k{i}") for i, column in enumerate(walk.order)]
    # Columns that are read without need would take SQLite from the index to the row.
    needed = {"status": "status", "reward_from": "reward", "reward_to": "reward", "invalid": "reward"}
    columns += [ROLLOUTS.c[name].label(name) for name in sorted({needed[name] for name in also if name in needed})]
    if GROUPS in (walk.table, first):
        other = ROLLOUTS if first is GROUPS else GROUPS
        # SQLite does not know how many rows meet a condition, and may read the whole of the other table first. The plus
        # takes away the index by which it would look up this one for each of those rows.
        same = (other.c.number == sa.literal_column(f"(+{first.name}.number)")) & (other.c.run == first.c.run)
        return sa.select(*columns).select_from(first.join(other, same)).where(first.c.run == run)
    # A file holds one run, and there a condition on it would mislead SQLite's planner.
    return sa.select(*columns).select_from(ROLLOUTS).where(ROLLOUTS.c.run == run if run else sa.true())


def _beyond(walk: Walk, cursor: Sequence[Any]) -> sa.ColumnElement[bool]:
    if walk.table is GROUPS:  # the group's columns and the rollout's are in two tables: only the former bound an index
        *groups, rollout = walk.order
        *group, i = cursor
        left, right = sa.tuple_(*groups), sa.tuple_(*(sa.literal(value) for value in group))
        same = sa.and_(*(column == value for column, value in zip(groups, group, strict=True)))
        if walk.descending:
            return sa.and_(left <= right, sa.not_(sa.and_(same, rollout >= i)))
        return sa.and_(left >= right, sa.not_(sa.and_(same, rollout <= i)))
    left, right = sa.tuple_(*walk.order), sa.tuple_(*(sa.literal(value) for value in cursor))
    return left < right if walk.descending else left > right


def few_rows(wanted: Filter, walk: Walk, run: str, limit: int) -> Iterator[tuple[sa.Select[Any], dict[str, Any]]]:
    """Yield statements that find rows by a condition other than the walk's, in no order, with what is left to check.

    Where such a condition holds for few rows, reading all of them is faster than to walk until they are found.

    Args:
        wanted: The filter.
        walk: Its walk, whose order gives the keys.
        run: Id of the run.
        limit: Maximum number of rows.
    """
    for names, table, conditions in _conditions(wanted):
        if not names <= walk.names:
            rest = further(wanted, names)
            yield _read(walk, run, rest, table).where(*conditions).limit(limit), rest


def _conditions(wanted: Filter) -> Iterator[tuple[frozenset[str], sa.Table, Sequence[sa.ColumnElement[bool]]]]:
    """Yield the conditions that one index decides, the kind included: their fields, the index's table, and they."""
    by_number = _BY_NUMBER[wanted.kind]
    for table, names in ((GROUPS, ("task", "source", "state")), (ROLLOUTS, ("status",))):
        for name in names:
            if value := getattr(wanted, name):
                yield by_number | {name}, table, (table.c[name] == value, *_numbered(table.c.number, wanted))
    if wanted.invalid:
        yield by_number | {"invalid"}, ROLLOUTS, (ROLLOUTS.c.reward.is_(None), *_numbered(ROLLOUTS.c.number, wanted))
    if rewards := _within(ROLLOUTS.c.reward, wanted.reward_from, wanted.reward_to):
        kind = _EVALUATED if wanted.kind == "eval" else _TRAINED
        yield frozenset({"kind", "reward_from", "reward_to"}), ROLLOUTS, (*rewards, kind)
    if steps := _within(GROUPS.c.step, wanted.step_from, wanted.step_to):
        table, bounds = (ROLLOUTS, []) if wanted.kind == "eval" else (GROUPS, steps)
        yield by_number | {"step_from", "step_to"}, table, (*bounds, *_numbered(table.c.number, wanted))


def matching(inner: sa.Select[Any], walk: Walk, rest: Mapping[str, Any], run: str) -> sa.Select[Any]:
    """Return a statement for the keys of those rows that meet the further conditions, in no order."""
    k = inner.subquery("k")
    keys = [k.c[f"k{i}"] for i in range(len(walk.order))]
    number, rollout = keys[-2:]
    of_row: dict[str, Callable[[Any], sa.ColumnElement[bool]]] = {
        "status": lambda value: k.c.status == value,
        "reward_from": lambda value: k.c.reward >= value,
        "reward_to": lambda value: k.c.reward <= value,
        "invalid": lambda value: k.c.reward.is_(None),
    }
    of_group: dict[str, Callable[[Any], sa.ColumnElement[bool]]] = {
        "task": lambda value: GROUPS.c.task == value,
        "source": lambda value: GROUPS.c.source == value,
        "state": lambda value: GROUPS.c.state == value,
        "step_from": lambda value: GROUPS.c.step >= value,
        "step_to": lambda value: GROUPS.c.step <= value,
    }
    found = sa.select(*keys).where(*(of_row[name](value) for name, value in rest.items() if name in of_row))
    # As conditions, not as joins, which SQLite might begin at the other table.
    if groups := [of_group[name](value) for name, value in rest.items() if name in of_group]:
        same = (GROUPS.c.number == number) & (GROUPS.c.run == run)
        found = found.where(sa.select(GROUPS.c.number).where(same, *groups).exists())
    if "text" in rest:
        same = (ROLLOUTS.c.number == number) & (ROLLOUTS.c.rollout == rollout) & (ROLLOUTS.c.run == run)
        found = found.where(sa.select(ROLLOUTS.c.number).where(same, _contains(rest["text"])).exists())
    return found


def _contains(text: str) -> sa.ColumnElement[bool]:
    pattern = "%" + text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
    return sa.or_(*(column.ilike(pattern, escape="\\") for column in (ROLLOUTS.c.response, ROLLOUTS.c.prompt)))
