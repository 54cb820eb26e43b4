"""Pages of rollouts: every filter, every order, across pages; and the index that a database uses for each."""

from __future__ import annotations

import itertools
import resource
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
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
from rlsdk.viewer.rollouts import Browser
from rlsdk.viewer.walks import ORDERS, Filter, walk_of
from tests.runlog.conftest import PASSWORD, PASSWORD_ENV
from tests.turns import medians
from tests.viewer.recorded import make_run

BY_NUMBER = "autoindex_rlsdk_rollouts"
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
    "task": (Filter(task="task 3"), "rlsdk_groups_task"),
    "source": (Filter(source="s1"), "rlsdk_groups_source"),
    "state": (Filter(state="trained"), "rlsdk_groups_state"),
    "steps": (Filter(step_from=2, step_to=30), "rlsdk_groups_step"),
    "finished": (Filter(status="finished"), "rlsdk_rollouts_status"),
    "status": (Filter(status="failed"), "rlsdk_rollouts_status"),
    "no score": (Filter(invalid=True), "rlsdk_rollouts_reward"),
    "lowest": (Filter(order="lowest"), "rlsdk_rollouts_reward"),
    "reward": (Filter(order="highest", reward_from=0.2, reward_to=0.4), "rlsdk_rollouts_reward"),
    "longest": (Filter(order="longest"), "rlsdk_rollouts_tokens"),
    "mixed": (Filter(status="truncated", source="s1", reward_to=0.1, text="e"), "rlsdk_rollouts_status"),
    "common reward": (Filter(reward_from=0.1), "rlsdk_rollouts_scan"),
    "rare reward": (Filter(reward_from=2.0), "rlsdk_rollouts_reward"),
    "rare reward, longest": (Filter(reward_from=2.0, order="longest"), "rlsdk_rollouts_reward"),
    "rare reward of a state": (Filter(state="trained", reward_from=2.0), "rlsdk_rollouts_reward"),
    "rare reward of steps": (Filter(step_from=2, reward_from=2.0), "rlsdk_rollouts_reward"),
    "best of a task": (Filter(task="task 3", order="highest"), "rlsdk_groups_task"),
    "best of steps": (Filter(step_from=2, step_to=3, order="highest"), "rlsdk_groups_step"),
    "text": (Filter(text="nowhere"), "rlsdk_rollouts_scan"),
    "evaluations": (Filter(kind="eval"), "rlsdk_rollouts_scan"),
    "steps of evaluations": (Filter(kind="eval", step_from=2, step_to=3), "rlsdk_rollouts_scan"),
    "best of evaluations": (Filter(kind="eval", order="highest"), "rlsdk_rollouts_evaluated_reward"),
    "longest of evaluations": (Filter(kind="eval", order="longest"), "rlsdk_rollouts_evaluated_tokens"),
}


def plans_of(call: Callable[[], object]) -> list[str]:
    """SQLite's query plan for each statement of a call, as one text with a line for each step."""
    plans: list[str] = []

    def explain(connection: sa.Connection, cursor: object, statement: str, given: Any, *_: object) -> None:
        asked = connection.connection.cursor()
        asked.execute(f"EXPLAIN QUERY PLAN {statement}", given)
        plans.append("\n".join(step for *_, step in asked.fetchall()))

    sa.event.listen(sa.Engine, "before_cursor_execute", explain)
    try:
        call()
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", explain)
    return plans


def check_plans(folder: Path) -> None:
    """Every statement of a first page and of the next searches an index, and none sorts its results."""
    browser = Browser(folder)
    for name, (wanted, index) in WALKS.items():
        first = browser.page(wanted)
        cursors = (None, first["next"] or [1] * len(walk_of(wanted).order))
        plans = [plan for cursor in cursors for plan in plans_of(partial(browser.page, wanted, cursor))]
        assert any(index in plan or (index.endswith("scan") and BY_NUMBER in plan) for plan in plans), (name, plans)
        steps = {step for plan in plans for step in plan.splitlines()}
        # Within each group, its few rollouts are put into order.
        assert not [step for step in steps if "TEMP B-TREE" in step and "RIGHT PART" not in step], (name, plans)
        scans = [step for step in steps if step.startswith("SCAN rlsdk")]
        assert all(scan.endswith("_tokens") for scan in scans), (name, plans)  # an order without a bound to search for


def test_every_statement_of_a_page_walks_an_index_and_sorts_nothing(tmp_path: Path) -> None:
    million(tmp_path / "some", 300, 16)
    check_plans(tmp_path / "some")


@pytest.mark.slow
def test_pages_are_the_same_from_postgresql(
    folder: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PASSWORD_ENV, PASSWORD)
    address, here = Address.make(tmp_path, server, PASSWORD_ENV), Address.of(folder)
    RolloutStore(address).close()
    assert here is not None
    with address.engine().begin() as there, reader(here).connect() as connection:
        for table in (GROUPS, ROLLOUTS):
            rows = [dict(row) for row in connection.execute(sa.select(table)).mappings()]
            there.execute(table.insert(), [row | {"run": run} for row in rows for run in (address.run, "other")])
    monkeypatch.setattr(rollouts, "FIRST_WINDOW", 1)
    for name, (wanted, _) in WALKS.items():
        wanted = attrs.evolve(wanted, source=wanted.source and "sums", task=wanted.task and "sums/3")
        assert everything(Browser(tmp_path), wanted) == everything(Browser(folder), wanted), name
    assert Browser(tmp_path).upgrade() == []


def test_the_values_by_which_one_filters_are_read_from_indices_and_not_counted(tmp_path: Path) -> None:
    million(tmp_path / "some", 300, 16)
    browser = Browser(tmp_path / "some")
    plans = plans_of(browser.facets)
    assert all(plan.startswith("SEARCH") and "INDEX rlsdk_groups_" in plan for plan in plans), plans
    assert browser.facets() == {
        "sources": [*(f"s{n}" for n in range(5)), "sums", "words"],
        "states": ["filtered", "trained"],
        "steps": 20,
    }


def test_a_page_reads_neither_payloads_nor_more_rows_than_it_shows(folder: Path) -> None:
    statements: list[str] = []
    seen = lambda connection, cursor, statement, *_: statements.append(statement)  # noqa: E731
    sa.event.listen(sa.Engine, "before_cursor_execute", seen)
    try:
        Browser(folder).page(Filter(), limit=5)
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", seen)
    assert len(statements) == 2
    assert not any(word in statement for statement in statements for word in ("payload", "count("))


@pytest.mark.parametrize("few", [0, 3000])
@settings(max_examples=15)
@given(wanted=FILTERS)
def test_rows_of_a_rare_condition_are_the_same_by_either_way(folder: Path, few: int, wanted: Filter) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts, "FIRST_WINDOW", 1)
        patch.setattr(rollouts, "FEW", few)
        found = everything(Browser(folder), wanted, 2)
    assert found == everything(Browser(folder), wanted, 60)


def test_the_store_of_an_earlier_rlsdk_gets_its_indices(tmp_path: Path) -> None:
    old = tmp_path / "old"
    million(old, 300, 16)
    with sqlite3.connect(old / "rollouts.db") as connection:
        for name in ("task", "source", "state"):
            connection.execute(f"DROP INDEX rlsdk_groups_{name}")
        for name in ("status", "tokens", "scan", "evaluated_reward", "evaluated_tokens"):
            connection.execute(f"DROP INDEX rlsdk_rollouts_{name}")
    before = everything(Browser(old), Filter(source="s1"))
    assert len(Browser(old).upgrade()) == 8
    assert Browser(old).upgrade() == []
    check_plans(old)
    assert everything(Browser(old), Filter(source="s1")) == before


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
    # Closing it moves what was written into the file; otherwise, each reader would have to go through the log of it.
    with closing(sqlite3.connect(made / "rollouts.db")) as connection, connection:
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


EMPTY = {"no score", "status", "rare reward", "rare reward, longest", "rare reward of a state", "rare reward of steps"}
EMPTY |= {"text", "best of steps"}
"""Filters that no rollout of the store above meets."""
TIMES, TIMES_OF_TEXT = 15.0, 3000.0
"""Greatest time until a filter's first rows are found, or that there are none, in indexed queries; and of a text that
is searched for in all rollouts."""


def first_rows(browser: Browser, wanted: Filter) -> list[dict[str, Any]]:
    """Ask for pages by their cursors, as the list in the browser does, until one has rows or is the last."""
    page = browser.page(wanted)
    while not page["rows"] and not page["done"]:
        page = browser.page(wanted, page["next"])
    return page["rows"]


@pytest.mark.slow
def test_a_million_rollouts_browse_at_the_cost_of_indexed_queries_and_in_flat_memory(tmp_path: Path) -> None:
    big = tmp_path / "big"
    million(big, 62_500, 16)
    check_plans(big)
    browser = Browser(big)
    assert browser.facets()["steps"] >= 900
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    filters = {name: wanted for name, (wanted, _) in WALKS.items()} | {"rare text": Filter(text="needle")}
    for name, wanted in filters.items():
        assert bool(first_rows(browser, wanted)) is (name not in EMPTY), name
    calls = {name: partial(first_rows, browser, wanted) for name, wanted in filters.items()}
    times = medians({"indexed query": partial(query, big, "number = 2000"), **calls}, 5)
    deep = browser.page(Filter(), [2000, 3])
    assert deep["rows"][0]["number"] == 2000
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    ratios = {name: round(value / times["indexed query"], 1) for name, value in times.items()}
    print(ratios, f"{times['indexed query']:.1f} ms an indexed query, {grown / 1024:.0f} MB more")
    assert max(ratios.pop("text"), ratios.pop("rare text")) <= TIMES_OF_TEXT
    assert max(ratios.values()) <= TIMES, ratios
    assert grown < 100 * 1024
