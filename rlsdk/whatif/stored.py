"""Read the stored groups of a run, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import sqlalchemy as sa

from rlsdk.errors import ValueFault
from rlsdk.runlog.payload import decode, decode_learned
from rlsdk.runlog.query import reader
from rlsdk.runlog.store import Address
from rlsdk.runlog.tables import GROUPS
from rlsdk.types import Group

ENDED = ("trained", "filtered", "failed")
"""States of groups settled by a step."""


@attrs.frozen(eq=False)
class StoredGroup:
    """A stored group.

    Attributes:
        number: Number of its task record.
        state: `trained`, `filtered` or `failed`.
        uses: Number of times it was trained.
        group: The group, with the scores of the run.
        learned: Name -> values per rollout, `[T]`; None for a rollout that was not trained.
    """

    number: int
    state: str
    uses: int
    group: Group
    learned: Mapping[str, Sequence[np.ndarray | None]]


@attrs.frozen(eq=False)
class StoredStep:
    """The groups settled by one step.

    Attributes:
        step: Number of the step, from 1.
        groups: Its groups, in the order in which their tasks were issued.
        unreadable: Messages about groups that cannot be read.
    """

    step: int
    groups: tuple[StoredGroup, ...]
    unreadable: tuple[str, ...] = ()


class Store:
    """Reader of a run's store; only one step is in memory at a time."""

    def __init__(self, run: Path) -> None:
        """Open the store.

        Raises:
            ValueFault: The run keeps no rollouts.
        """
        address = Address.of(run)
        if address is None:
            raise ValueFault(f"{run} has no stored rollouts: saving is off (save_rollouts: 0), or none were saved yet")
        self._address = address

    def steps(self, first: int | None = None, last: int | None = None) -> list[int]:
        """Return the steps with stored groups, within bounds."""
        own = (GROUPS.c.run == self._address.run) & (GROUPS.c.number >= 0) & GROUPS.c.state.in_(ENDED)
        bounds = [] if first is None else [GROUPS.c.step >= first]
        bounds += [] if last is None else [GROUPS.c.step <= last]
        wanted = sa.select(GROUPS.c.step).where(own, GROUPS.c.step.is_not(None), *bounds).distinct()
        return sorted(int(row[0]) for row in self._rows(wanted))

    def read(self, step: int) -> StoredStep:
        """Return the groups of a step."""
        own = (GROUPS.c.run == self._address.run) & (GROUPS.c.step == step) & (GROUPS.c.number >= 0)
        columns = (GROUPS.c.number, GROUPS.c.state, GROUPS.c.uses, GROUPS.c.payload)
        wanted = sa.select(*columns).where(own, GROUPS.c.state.in_(ENDED)).order_by(GROUPS.c.number)
        groups, unreadable = [], []
        for number, state, uses, payload in self._rows(wanted):
            try:
                groups.append(StoredGroup(number, state, uses, decode(payload), decode_learned(payload)))
            except ValueFault as error:
                unreadable.append(f"group {number}: {error}")
        return StoredStep(step, tuple(groups), tuple(unreadable))

    def _rows(self, statement: sa.Select[Any]) -> Iterator[Any]:
        engine = reader(self._address)
        try:
            with engine.connect() as connection:
                yield from connection.execute(statement)
        except sa.exc.DBAPIError as error:
            raise self._address.unreadable(error) from error
        finally:
            engine.dispose()
