"""Pages of rollouts: every filter, every order, across pages; and which index a database walks for each."""

from __future__ import annotations

import itertools
import json
import resource
import sqlite3
import time
from pathlib import Path
from typing import Any

import attrs
import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.errors import ValueFault
from rlsdk.runlog.query import query, reader
from rlsdk.runlog.store import Address, RolloutStore
from rlsdk.runlog.tables import GROUPS, ROLLOUTS, create_indices
from rlsdk.viewer import rollouts
from rlsdk.viewer.rollouts import ORDERS, Browser, Filter, _inner, walk_of
from tests.viewer.recorded import make_run

COLUMNS = {"newest": ("number", True), "oldest": ("number", False), "lowest": ("reward", False)}
COLUMNS |= {"highest": ("reward", True), "longest": ("tokens", True), "shortest": ("tokens", False)}


def everything(browser: Browser, wanted: Filter, limit: int = 5) -> list[tuple[int, int]]:
    """Keys of all rows, page by page."""
    found: list[tuple[int, int]] = []
    cursor = None
    for _ in range(400):
        page = browser.page(wanted, cursor, limit=limit)
        found += [(row["number"], row["rollout"]) for row in page["rows"]]
        cursor = page["next"]
        if page["done"]:
            return found
    raise AssertionError("the pages do not end")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "one", steps=10)


def meets(row: dict[str, Any], wanted: Filter) -> bool:
    reward, step = row["reward"], row["step"]
    return all(
        (
            wanted.source in ("", row["source"]),
            wanted.task in ("", row["task"]),
            wanted.state in ("", row["state"]),
            wanted.status in ("", row["status"]),
            wanted.step_from is None or step >= wanted.step_from,
            wanted.step_to is None or step <= wanted.step_to,
            wanted.reward_from is None or (reward is not None and reward >= wanted.reward_from),
            wanted.reward_to is None or (reward is not None and reward <= wanted.reward_to),
            not wanted.invalid or reward is None,
            wanted.text.lower() in row["response"].lower() or wanted.text.lower() in row["prompt"].lower(),
            wanted.order not in ("lowest", "highest") or reward is not None,
        )
    )


FILTERS = st.builds(
    Filter,
    kind=st.sampled_from(["train", "train", "eval"]),
    source=st.sampled_from(["", "", "sums", "words", "none"]),
    task=st.sampled_from(["", "", "", "sums/3"]),
    state=st.sampled_from(["", "", "trained"]),
    status=st.sampled_from(["", "", "finished", "truncated"]),
    step_from=st.sampled_from([None, None, 3]),
    step_to=st.sampled_from([None, None, 6]),
    reward_from=st.sampled_from([None, None, 0.0]),
    reward_to=st.sampled_from([None, None, 0.5]),
    invalid=st.sampled_from([False, False, False, True]),
    text=st.sampled_from(["", "", "YES", "_", "<script>"]),
    order=st.sampled_from(ORDERS),
)


@settings(max_examples=25)
@given(wanted=FILTERS, limit=st.sampled_from([5, 60]))
def test_pages_together_hold_exactly_what_meets_the_filter_in_its_order(
    folder: Path, wanted: Filter, limit: int
) -> None:
    rows = [row for row in query(folder, evaluations=wanted.kind == "eval") if meets(row, wanted)]
    found = everything(Browser(folder), wanted, limit)
    assert sorted(found) == sorted((row["number"], row["rollout"]) for row in rows)
    by_key = {(row["number"], row["rollout"]): row for row in rows}
    name, down = COLUMNS[wanted.order]
    if name == "number" and (wanted.kind == "eval" or walk_of(wanted).order[0].name == "step"):
        name = "step"
    values = [by_key[key][name] for key in found]
    assert values == sorted(values, reverse=down)


def test_few_rows_a_statement_give_the_same_pages(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = Filter(source="sums", status="truncated", reward_to=0.0)
    whole = everything(Browser(folder), wanted)
    monkeypatch.setattr(rollouts, "WINDOW", 2)
    monkeypatch.setattr(rollouts, "SECONDS", 0.0)
    assert everything(Browser(folder), wanted) == whole
    assert whole


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reward_from": "much"}, "expected a number"),
        ({"step_to": "1.5"}, "a whole number"),
        ({"order": "x"}, "one of"),
    ],
)
def test_a_wrong_filter_is_answered_with_what_was_expected(given: dict[str, str], message: str) -> None:
    with pytest.raises(ValueFault, match=message):
        Filter.of(given)


def test_a_run_without_rollouts_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueFault, match="has stored no rollouts yet"):
        Browser(tmp_path).page(Filter())


WALKS = {
    "no condition": (Filter(), "rlsdk_rollouts_scan"),
    "oldest": (Filter(order="oldest"), "rlsdk_rollouts_scan"),
    "task": (Filter(task="sums/3"), "rlsdk_groups_task"),
    "source": (Filter(source="sums"), "rlsdk_groups_source"),
    "state": (Filter(state="trained"), "rlsdk_groups_state"),
    "steps": (Filter(step_from=2, step_to=3), "rlsdk_groups_step"),
    "status": (Filter(status="failed"), "rlsdk_rollouts_status"),
    "no score": (Filter(invalid=True), "rlsdk_rollouts_reward"),
    "lowest": (Filter(order="lowest"), "rlsdk_rollouts_reward"),
    "reward": (Filter(order="highest", reward_from=0.2, reward_to=0.4), "rlsdk_rollouts_reward"),
    "longest": (Filter(order="longest"), "rlsdk_rollouts_tokens"),
    "mixed": (Filter(status="truncated", source="sums", reward_to=0.1, text="x"), "rlsdk_rollouts_status"),
    "evaluations": (Filter(kind="eval"), "rlsdk_rollouts_scan"),
}


def plan_of(connection: sa.Connection, wanted: Filter, cursor: list[Any] | None) -> list[str]:
    statement = _inner(walk_of(wanted), "", cursor, 60)
    text = str(statement.compile(connection.engine, compile_kwargs={"literal_binds": True}))
    return [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}")]


def check_plans(folder: Path) -> None:
    address = Address.of(folder)
    assert address
    with reader(address).connect() as connection:
        for name, (wanted, index) in WALKS.items():
            columns = len(walk_of(wanted).order)
            for cursor in (None, [1] * columns):
                plan = plan_of(connection, wanted, cursor)
                assert index in plan[0] or (index.endswith("scan") and "autoindex_rlsdk_rollouts" in plan[0]), (
                    name,
                    plan,
                )
                assert not any(step.startswith("SCAN") and "USING" not in step for step in plan), (name, plan)
                sorts = [
                    step for step in plan if "TEMP B-TREE" in step and "RIGHT PART" not in step and "LAST" not in step
                ]
                assert not sorts, (name, plan)


def test_every_filter_walks_an_index_in_its_order(folder: Path) -> None:
    check_plans(folder)


def test_the_store_of_an_earlier_rlsdk_gets_its_indices(folder: Path, tmp_path: Path) -> None:
    old = make_run(tmp_path / "old")
    with sqlite3.connect(old / "rollouts.db") as connection:
        for name in ("task", "source", "state"):
            connection.execute(f"DROP INDEX rlsdk_groups_{name}")
        for name in ("status", "tokens", "scan"):
            connection.execute(f"DROP INDEX rlsdk_rollouts_{name}")
    before = everything(Browser(old), Filter(source="sums"))
    assert len(Browser(old).upgrade()) == 6
    assert Browser(old).upgrade() == []
    check_plans(old)
    assert everything(Browser(old), Filter(source="sums")) == before


def test_a_store_opened_to_write_gets_its_indices(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old")
    with sqlite3.connect(old / "rollouts.db") as connection:
        connection.execute("DROP INDEX rlsdk_rollouts_scan")
    address = Address.of(old)
    assert address
    RolloutStore(address).close()
    with address.engine().begin() as connection:
        assert create_indices(connection) == []


def million(folder: Path, groups: int, size: int) -> None:
    """Write a store of `groups` × `size` rollouts in bulk."""
    made = make_run(folder, steps=1)
    text = "step by step " * 12
    with sqlite3.connect(made / "rollouts.db") as connection:
        connection.execute("PRAGMA synchronous=OFF")
        row = dict(
            zip(GROUPS.c.keys(), connection.execute("SELECT * FROM rlsdk_groups LIMIT 1").fetchone(), strict=True)
        )
        numbers = range(1000, 1000 + groups)
        connection.executemany(
            f"INSERT INTO rlsdk_groups VALUES ({','.join('?' * len(row))})",
            ([n, "", f"s{n % 5}", f"task {n % 997}", "trained", n // 64, 1, None, 0, b""] for n in numbers),
        )
        one = list(ROLLOUTS.c.keys())
        values = (
            [
                n,
                "",
                i,
                ((n * 7 + i) % 101) / 100,
                True,
                "",
                "{}",
                "truncated" if (n + i) % 500 == 0 else "finished",
                10 + (n * i) % 300,
                400,
                0,
                0,
                "",
                "question",
                f"{text} {n} {'needle' if n == 1200 else ''}",
            ]
            for n, i in itertools.product(numbers, range(size))
        )
        connection.executemany(f"INSERT INTO rlsdk_rollouts VALUES ({','.join('?' * len(one))})", values)


@pytest.mark.slow
def test_a_million_rollouts_browse_without_a_wait_and_in_flat_memory(tmp_path: Path) -> None:
    million(tmp_path / "big", 62_500, 16)
    check_plans(tmp_path / "big")
    browser = Browser(tmp_path / "big")
    assert browser.facets()["rollouts"] >= 1_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest: dict[str, float] = {}
    for name, (wanted, _) in WALKS.items():
        began = time.perf_counter()
        page = browser.page(wanted)
        slowest[name] = time.perf_counter() - began
        assert page["rows"] or name in ("no score", "task", "status", "steps", "mixed"), name
    rare = Filter(text="needle")
    began, found, cursor = time.perf_counter(), [], None
    while not found:
        page = browser.page(rare, cursor)
        found, cursor = page["rows"], page["next"]
        assert not page["done"] or found
    slowest["each page of a rare text"] = (time.perf_counter() - began) / 10
    deep = browser.page(Filter(), [2000, 3])
    assert deep["rows"][0]["number"] == 2000
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({name: round(seconds, 3) for name, seconds in slowest.items()}), f"{grown / 1024:.0f} MB more")
    assert grown < 100 * 1024
    assert attrs.asdict(Filter())["order"] == "newest"
