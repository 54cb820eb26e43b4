"""Lists of stored rollouts: filters, and SQL statements that walk an index in list order, without sorting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
import sqlalchemy as sa

from rlsdk.errors import ValueFault
from rlsdk.runlog.tables import GROUPS, ROLLOUTS, evaluated_numbers

Order = Literal["newest", "oldest", "lowest", "highest", "longest", "shortest"]
ORDERS: tuple[Order, ...] = ("newest", "oldest", "lowest", "highest", "longest", "shortest")
_TEXT = 300
"""Maximum length of a search text."""


@attrs.frozen(kw_only=True)
class Filter:
    """Conditions on rollouts; omitted ones always hold.

    Attributes:
        kind: Training rollouts or evaluation rollouts.
        source: Name of the task source.
        task: Id of the task.
        state: State of the group, such as `trained`.
        status: Status of the rollout, such as `truncated`.
        step_from: Minimum step.
        step_to: Maximum step.
        reward_from: Minimum reward.
        reward_to: Maximum reward.
        invalid: True to list only rollouts without a valid score.
        text: Text in prompt or response, ignoring case.
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
        """Read the parameters of a URL.

        Raises:
            ValueFault: A parameter is invalid.
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


# The plus keeps SQLite from using the index on the number, which it would prefer to one on an order or a range.
# `_EVALUATED` repeats the condition of the evaluation indices word for word. If these were typed as booleans,
# SQLAlchemy would compare them with 1, and no index would match.
_TRAINED: sa.ColumnElement[bool] = sa.literal_column("(+rlsdk_rollouts.number) >= 0")
_EVALUATED: sa.ColumnElement[bool] = sa.literal_column("(+rlsdk_rollouts.number) < 0")
_BY_NUMBER = {"train": frozenset({"kind"}), "eval": frozenset({"kind", "step_from", "step_to"})}
"""Filter fields decided by a condition on the number: numbers of evaluations follow from the step."""


@attrs.frozen(kw_only=True)
class Walk:
    """The index walked by a list: the order of its rows, and the conditions, fields of the filter, that it decides."""

    order: tuple[sa.ColumnElement[Any], ...]
    descending: bool
    decided: tuple[sa.ColumnElement[bool], ...] = ()
    table: sa.Table = ROLLOUTS
    names: frozenset[str] = frozenset()


def walk_of(wanted: Filter) -> Walk:
    """Choose the index for a filter: that of its order or, by number, of its most selective condition."""
    rollout = ROLLOUTS.c.rollout
    if wanted.order in ("lowest", "highest", "longest", "shortest"):
        return _by_value(wanted)
    # Numbers of evaluations decrease with the step, those of trained groups increase.
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
            steps = _within(GROUPS.c.step, wanted.step_from, wanted.step_to)
            decided = (GROUPS.c.step.is_not(None), *steps, *_numbered(GROUPS.c.number, wanted))
            names, by_step = frozenset({"kind", "step_from", "step_to"}), (GROUPS.c.step, GROUPS.c.number, rollout)
            return Walk(order=by_step, descending=down, decided=decided, table=GROUPS, names=names)
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


def _within(column: sa.ColumnElement[Any], least: float | None, greatest: float | None) -> list[sa.ColumnElement[bool]]:
    bounds = ((column.__ge__, least), (column.__le__, greatest))
    return [holds(bound) for holds, bound in bounds if bound is not None]


def _numbered(number: sa.ColumnElement[int], wanted: Filter) -> tuple[sa.ColumnElement[bool], ...]:
    """Return the conditions on the number, which decide the fields `_BY_NUMBER`."""
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
    """Return a statement for the next rows of a walk: order keys, ending with group number and rollout.

    Args:
        walk: The index.
        run: Id of the run.
        cursor: Key after which to continue; None to start at the beginning.
        window: Maximum number of rows.
        offset: Number of rows to skip.
        also: Names of conditions still to be checked.
    """
    read = _read(walk, run, also, walk.table).where(*walk.decided)
    if cursor:
        read = read.where(_beyond(walk, cursor))
    order = [column.desc() if walk.descending else column.asc() for column in walk.order]
    return read.order_by(*order).limit(window).offset(offset or None)


def _read(walk: Walk, run: str, also: Iterable[str], first: sa.Table) -> sa.Select[Any]:
    """Return a statement for the keys of all rows that reads one table first and joins the other one if needed."""
    columns = [column.label(f"k{i}") for i, column in enumerate(walk.order)]
    # Any unneeded column would make SQLite leave the index to read the row.
    needed = {"status": "status", "reward_from": "reward", "reward_to": "reward", "invalid": "reward"}
    columns += [ROLLOUTS.c[name].label(name) for name in sorted({needed[name] for name in also if name in needed})]
    if GROUPS in (walk.table, first):
        other = ROLLOUTS if first is GROUPS else GROUPS
        # SQLite does not know how many rows meet a condition and may read the whole other table first. The plus hides
        # the index that it would use to look up this table for each of those rows.
        same = (other.c.number == sa.literal_column(f"(+{first.name}.number)")) & (other.c.run == first.c.run)
        return sa.select(*columns).select_from(first.join(other, same)).where(first.c.run == run)
    # An SQLite file holds one run; a condition on the run would mislead the query planner.
    return sa.select(*columns).select_from(ROLLOUTS).where(ROLLOUTS.c.run == run if run else sa.true())


def _beyond(walk: Walk, cursor: Sequence[Any]) -> sa.ColumnElement[bool]:
    if walk.table is GROUPS:  # group and rollout columns are in two tables: only the former bound an index
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
    """Yield unordered statements that find rows by a condition other than the walk's, and what is left to check.

    If such a condition holds for few rows, reading all of them is faster than walking until they are found.
    """
    for names, table, conditions in _conditions(wanted):
        if not names <= walk.names:
            rest = further(wanted, names)
            yield _read(walk, run, rest, table).where(*conditions).limit(limit), rest


def _conditions(wanted: Filter) -> Iterator[tuple[frozenset[str], sa.Table, Sequence[sa.ColumnElement[bool]]]]:
    """Yield sets of conditions that one index decides, kind included: fields, the index's table, and conditions."""
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
    """Return an unordered statement for the keys of rows that meet the further conditions."""
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
    # As conditions instead of joins, which SQLite might start from the other table.
    if groups := [of_group[name](value) for name, value in rest.items() if name in of_group]:
        same = (GROUPS.c.number == number) & (GROUPS.c.run == run)
        found = found.where(sa.select(GROUPS.c.number).where(same, *groups).exists())
    if "text" in rest:
        same = (ROLLOUTS.c.number == number) & (ROLLOUTS.c.rollout == rollout) & (ROLLOUTS.c.run == run)
        pattern = "%" + rest["text"].replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        contains = (column.ilike(pattern, escape="\\") for column in (ROLLOUTS.c.response, ROLLOUTS.c.prompt))
        found = found.where(sa.select(ROLLOUTS.c.number).where(same, sa.or_(*contains)).exists())
    return found
