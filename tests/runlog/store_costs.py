"""Measure a store with a given number of rollouts; print one JSON object of milliseconds and MB."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import sqlalchemy as sa

from rlsdk.runlog.query import query
from rlsdk.runlog.store import Address, RolloutStore
from rlsdk.runlog.tables import GROUPS, ROLLOUTS, Entry
from rlsdk.types import Group, Message, Rollout, Score, Task

SIZE, BATCH, TOKENS = 8, 32, 32
"""Rollouts of a group, groups of a batch, tokens of a rollout."""


def task(number: int) -> Task:
    return Task("t", "What is the answer?", number, source="sums")


def entry(number: int) -> Entry:
    own, random = task(number), np.random.default_rng(number)
    messages = (Message("user", str(own.prompt)), Message("assistant", f"The answer may be {number}."))
    sampled = np.arange(TOKENS) >= 8
    rollouts = [
        Rollout(own, messages, random.integers(0, 50_000, TOKENS), sampled, -random.random(TOKENS), sampled - 1)
        for _ in range(SIZE)
    ]
    group = Group(own, rollouts, [Score(float(value)) for value in random.choice([0.0, 0.1, 1.0], SIZE)])
    return Entry(number=number, source="sums", state="completed", step=None, uses=0, group=group)


def median(rounds: int, call: Callable[[int], object]) -> float:
    """Milliseconds of a call."""
    seconds = []
    for i in range(rounds):
        start = time.perf_counter()
        call(i)
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def _doubled(store: RolloutStore, own: int, more: int) -> int:
    """Append copies of the first groups; return their number."""
    with store.transaction():
        for table in (GROUPS, ROLLOUTS):
            columns = [(c + own).label(c.name) if c.name == "number" else c for c in table.columns]
            copied = sa.select(*columns).where(table.c.number < more)
            store._connection.execute(table.insert().from_select([c.name for c in table.columns], copied))
    return more


def costs(folder: Path, count: int, rounds: int, distinct: int = 10**9) -> dict[str, float]:
    """Fill a store with so many rollouts, then time batches of groups, and questions that find few.

    Args:
        folder: Made for it.
        count: Rollouts.
        rounds: Of each measurement.
        distinct: Rollouts that are made one by one; further ones are copies of these.
    """
    folder.mkdir()
    store = RolloutStore(Address.make(folder, None, None))
    groups, memory = count // SIZE, psutil.Process().memory_info().rss

    def put(first: int, how_many: int) -> None:
        entries = [entry(n) for n in range(first, first + how_many)]
        with store.transaction():
            store.put(entries)

    def take(i: int) -> None:
        numbers = np.random.default_rng(i).choice(groups, BATCH, replace=False).tolist()
        assert len(store.recall({n: task(n) for n in numbers}, step=0)) == BATCH
        with store.transaction():
            store.settle([(n, "trained", i + 1, 1) for n in numbers])

    own = min(groups, distinct // SIZE)
    for first in range(0, own, 64):
        put(first, min(64, own - first))
    while own < groups:
        own += _doubled(store, own, min(own, groups - own))
    found = {
        "put": median(rounds, lambda i: put(groups + i * BATCH, BATCH)) / BATCH,
        "take": median(rounds, take) / BATCH,
        "by_step": median(rounds, lambda i: query(folder, f"step = {i + 1}")),
        "by_reward": median(rounds, lambda i: query(folder, "reward > 0.5", order_by="reward desc", limit=20)),
        "by_number": median(rounds, lambda i: query(folder, f"number = {i}")),
        "memory": (psutil.Process().memory_info().rss - memory) / 1e6,
        "database": (folder / "rollouts.db").stat().st_size / 1e6,
    }
    store.close()
    return found


if __name__ == "__main__":
    print(json.dumps(costs(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
