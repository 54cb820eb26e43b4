"""The rollout store on both databases: contents, restored groups, queries, and the state after a kill."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import sqlalchemy as sa

import rlsdk
from rlsdk.errors import RunError, ValueFault
from rlsdk.runlog.folder import MARKER
from rlsdk.runlog.query import query, reader
from rlsdk.runlog.store import DATABASE, Address, RolloutStore, RolloutWriter, damage_of, set_aside
from rlsdk.runlog.tables import COLUMNS, Entry, evaluated_entries
from rlsdk.types import Group, Rollout, Score, Task
from tests.runlog.conftest import PASSWORD, PASSWORD_ENV

Make = Callable[..., Entry]


def kept(address: Address, *entries: Entry) -> RolloutStore:
    store = RolloutStore(address)
    with store.transaction():
        store.put(entries)
    return store


def states(folder: Path) -> dict[int, tuple[str, int | None, int]]:
    return {row["number"]: (row["state"], row["step"], row["uses"]) for row in query(folder)}


def test_what_is_kept_can_be_asked_for(address: Address, entry: Make, tmp_path: Path) -> None:
    kept(address, *(entry(n, step=n // 2, version=n) for n in range(6))).close()
    rows = query(tmp_path)
    assert len(rows) == 12
    assert tuple(rows[0]) == COLUMNS
    row = query(tmp_path, "number = 3 and valid")[0]
    assert row["response"] == "3 or 0"
    assert row["prompt"] == "What is 3?"
    assert (row["reward"], row["tokens"], row["length"], row["least_version"]) == (0.3, 3, 5, 3)
    assert row["parts"] == '{"reward/exact": 1.0}'
    assert query(tmp_path, "not valid", limit=1)[0]["reason"] == "timed out"
    assert [r["number"] for r in query(tmp_path, "reward < 0.5 and step >= 1")] == [2, 3, 4]
    assert [r["number"] for r in query(tmp_path, "valid", order_by="reward desc", limit=2)] == [5, 4]
    assert [r["number"] for r in query(tmp_path, "response like '%5 or%' -- a comment")] == [5, 5]
    assert query(tmp_path, "response = '100% :sure'") == []


@pytest.mark.parametrize(
    "where",
    [
        "rewrd < 1",
        "reward <",
        "1=1; drop table rlsdk_groups",
        "1=1); drop table rlsdk_groups --",
        "no_such_function(reward)",
    ],
)
def test_a_wrong_condition_is_answered_with_the_columns(
    address: Address, entry: Make, tmp_path: Path, where: str
) -> None:
    kept(address, entry(1)).close()
    with pytest.raises(ValueFault, match=r"The columns are step, source, task") as caught:
        query(tmp_path, where)
    assert "hush" not in str(caught.value)
    assert len(query(tmp_path)) == 2
    with pytest.raises(ValueFault, match="expected a column"):
        query(tmp_path, order_by="reward; drop table rlsdk_groups")


def test_what_asks_cannot_write(address: Address, entry: Make, tmp_path: Path) -> None:
    kept(address, entry(1)).close()
    with reader(address).connect() as connection, pytest.raises(sa.exc.DBAPIError, match=r"read-?only"):
        connection.exec_driver_sql("delete from rlsdk_groups")
    assert len(query(tmp_path)) == 2


def test_the_source_of_a_rollout_is_that_of_its_task_as_in_metrics_and_evaluations(
    address: Address, tmp_path: Path
) -> None:
    tagged, plain = Task("a", "?", source="lake"), Task("b", "?")
    groups = [Group(task, [Rollout.from_text(task, "x")], [Score(1.0)]) for task in (tagged, plain)]
    entries = [
        Entry(number=i, source="environments", state="trained", step=1, uses=1, group=group)
        for i, group in enumerate(groups)
    ]
    store = kept(address, *entries, *evaluated_entries(1, {"eval greedy": groups[:1]}))
    store.close()
    assert [row["source"] for row in query(tmp_path)] == ["lake", "environments"]
    assert [row["source"] for row in query(tmp_path, evaluations=True)] == ["lake"]


def test_hostile_text_is_kept_exactly_and_shown_harmlessly(address: Address, tmp_path: Path) -> None:
    task = Task("\x00\ud800", "p\x00", source="s\udfff")
    text = "\x00\ud800\udc00'; drop table rlsdk_groups --" + "x" * 10**6
    group = Group(task, [Rollout.from_text(task, text)], [Score(0.0, reason="\x00")])
    store = kept(address, Entry(number=1, source="s\udfff", state="trained", step=1, uses=1, group=group))
    assert store.recall({1: task}, step=9)[1].rollouts[0].text == text
    store.close()
    (row,) = query(tmp_path)
    assert row["response"] == text.replace("\x00", "\ufffd").replace("\ud800", "\ufffd").replace("\udc00", "\ufffd")


def test_a_run_goes_back_to_its_checkpoint(address: Address, entry: Make, tmp_path: Path) -> None:
    waiting, again = entry(4, "completed", None, kept_at=2), entry(2, step=2, uses=1, kept_at=2)
    store = kept(address, entry(1, step=1), again, waiting, entry(5, "completed", None, kept_at=2))
    with store.transaction():  # then the run goes on, and is killed
        store.settle([(4, "trained", 3, 1), (2, "trained", 2, 3), (77, "trained", 3, 1)])
        store.put([entry(5, step=4, version=4), entry(6, step=3), entry(7, "completed", None, kept_at=4)])
    store.rewind(2, {4: ("completed", None, 0), 5: ("completed", None, 0), 2: ("trained", 2, 1)})
    assert states(tmp_path) == {
        1: ("trained", 1, 1),
        2: ("trained", 2, 1),
        4: ("completed", None, 0),
        5: ("completed", None, 0),
    }
    tasks = {n: Task(f"t{n}", "now", source="sums") for n in (4, 5, 9)}
    found = store.recall(tasks, step=2)
    assert set(found) == {4}  # 5 was made again by later weights; 9 was never there
    assert found[4].rollouts[1].task is tasks[4]
    assert found[4].rollouts[1].token_ids.tolist() == [4, 5, 6, 7, 8]
    store.close()


def test_what_only_an_earlier_checkpoint_wanted_is_let_go_of(address: Address, entry: Make, tmp_path: Path) -> None:
    store = kept(address, *(entry(n, "completed", None, kept_at=2) for n in range(4)), entry(9, step=10))
    with store.transaction():
        store.settle([(0, "trained", 3, 1), (1, "trained", 10, 1)])
        store.put([entry(3, "completed", None, kept_at=4)])
        store.forget(4, every=10)
    assert states(tmp_path) == {1: ("trained", 10, 1), 3: ("completed", None, 0), 9: ("trained", 10, 1)}
    store.close()


def test_runs_of_one_database_do_not_see_each_other(server: str, entry: Make, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PGPASSWORD", "hush-hush")  # as every client of PostgreSQL reads it
    for name, number in (("a", 1), ("b", 2)):
        (tmp_path / name).mkdir()
        kept(Address.make(tmp_path / name, server, None), entry(number)).close()
    assert set(states(tmp_path / "a")) == {1}
    address = Address.make(tmp_path / "b", server, None)  # a run that goes on finds its own
    store = RolloutStore(address)
    store.rewind(0, {})
    store.close()
    assert states(tmp_path / "b") == {}
    assert set(states(tmp_path / "a")) == {1}
    assert "hush" not in (tmp_path / "a" / "rollouts.json").read_text()


def test_runs_that_start_at_once_share_a_database_that_has_no_tables_yet(
    server: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv(PASSWORD_ENV, PASSWORD)
    engine = Address(server, password_env=PASSWORD_ENV).engine(isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE shared")
    engine.dispose()
    url, count = str(sa.make_url(server).set(database="shared")), 8
    together = threading.Barrier(count)

    def start(number: int) -> None:
        (tmp_path / str(number)).mkdir()
        address = Address.make(tmp_path / str(number), url, PASSWORD_ENV)
        together.wait()
        RolloutStore(address).close()

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(start, range(count)))


def test_a_database_that_refuses_is_named_without_its_password(server: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("WRONG", "hush-wrong")
    with pytest.raises(
        RunError, match=r"rollouts cannot be stored in postgresql.*password authentication failed"
    ) as caught:
        RolloutStore(Address.make(tmp_path, server, "WRONG"))
    causes, error = [], caught.value
    while error is not None:
        causes.append(str(error))
        error = error.__cause__ or error.__context__
    assert not any("hush" in text for text in causes)


def test_a_file_that_is_not_a_database_is_an_error_with_its_name(tmp_path: Path) -> None:
    (tmp_path / DATABASE).write_text("not a database, but long enough to be taken for one" * 100)
    with pytest.raises(RunError, match=r"rollouts\.db: file is not a database"):
        RolloutStore(Address.make(tmp_path, None, None))
    with pytest.raises(ValueFault, match="there is no such folder"):
        query(tmp_path / "elsewhere")


def test_a_frame(tmp_path: Path, entry: Make) -> None:
    pytest.importorskip("pandas")
    kept(Address.make(tmp_path, None, None), entry(1), entry(2, step=2)).close()
    frame = rlsdk.rollouts(tmp_path, "valid", order_by="reward desc")
    assert frame.reward.tolist() == [0.2, 0.1]
    assert tuple(rlsdk.rollouts(tmp_path, "step > 5").columns) == COLUMNS
    (tmp_path / "config.yaml").write_text("save_rollouts: 1\n")
    with pytest.warns(UserWarning, match=r"No evaluation answers are saved: .* has not evaluated so far") as warned:
        assert rlsdk.rollouts(tmp_path, "valid", evaluations=True).empty
    assert warned[0].filename == __file__


def test_a_frame_with_the_values_of_each_token(address: Address, entry: Make, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    advantages = np.linspace(-1, 1, 5, dtype=np.float32)
    opaque = attrs.evolve(entry(2, "filtered").group, task=Task("t2", "?", answer=object()))
    trained = entry(1, version=4, learned={"advantages": [advantages, None]})
    kept(address, trained, attrs.evolve(entry(2, "filtered"), group=opaque)).close()
    frame = rlsdk.rollouts(tmp_path, order_by="number desc", tokens=True)
    assert tuple(frame.columns[: len(COLUMNS)]) == COLUMNS
    first, last = frame.iloc[0], frame.iloc[2]
    assert (first.task, first.token_ids.tolist()) == ("t2", [2, 3, 4, 5, 6])
    assert first.advantages is None  # it was filtered
    assert (last.response, last.loss_mask.tolist()) == ("1 or 1", [False, False, True, True, True])
    assert last.policy_versions.tolist() == [-1, -1, 4, 4, 4]
    np.testing.assert_array_equal(last.logprobs, np.array([0, 0, -0.1, -0.2, -0.3], np.float32))
    assert last.advantages is None  # its score is invalid
    np.testing.assert_array_equal(frame.iloc[3].advantages, advantages)
    assert frame.learner_logprobs.isna().all()
    empty = rlsdk.rollouts(tmp_path, "step > 5", tokens=True)
    assert tuple(empty.columns) == tuple(frame.columns)


def test_an_empty_frame_of_a_run_that_has_saved_nothing_comes_with_the_reason(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    RolloutStore(Address.make(tmp_path, None, None)).close()
    (tmp_path / "config.yaml").write_text("save_rollouts: 10\n")
    with pytest.warns(UserWarning, match=r"saves them after steps 10, 20, 30, … .*and has done 0 so far"):
        assert rlsdk.rollouts(tmp_path).empty
    (tmp_path / DATABASE).unlink()
    (tmp_path / MARKER).touch()
    (tmp_path / "config.yaml").write_text("save_rollouts: 0\n")
    with pytest.raises(ValueFault, match="was started with save_rollouts: 0"):
        rlsdk.rollouts(tmp_path)


# --- the writer


def test_who_brings_more_than_fits_waits_and_the_event_loop_does_not(tmp_path: Path, entry: Make) -> None:
    gate = threading.Event()

    async def run() -> int:
        store = RolloutStore(Address.make(tmp_path, None, None))
        writer = RolloutWriter(store)
        await writer.submit(lambda store: gate.wait(10) and None)
        bring = asyncio.gather(*(writer.submit(lambda s, n=n: s.put([entry(n)])) for n in range(40)))
        for _ in range(20):
            await asyncio.sleep(0)  # would wait for the gate if `submit` blocked the event loop
        assert not bring.done()
        gate.set()
        await bring
        await writer.flush()
        found = len(query(tmp_path))
        writer.close()
        store.close()
        return found

    assert asyncio.run(run()) == 80


def test_a_failure_surfaces_and_no_caller_waits_for_ever(tmp_path: Path) -> None:
    def broken(store: RolloutStore) -> None:
        raise OSError(errno.ENOSPC, "full")

    async def run() -> None:
        store = RolloutStore(Address.make(tmp_path, None, None))
        writer = RolloutWriter(store)
        await writer.submit(broken)
        with pytest.raises(OSError, match="full"):
            await writer.flush()
        for _ in range(50):
            await writer.submit(lambda store: None)
        writer.close()
        store.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_full_disk_is_reported_as_such(tmp_path: Path, entry: Make) -> None:
    store = RolloutStore(Address.make(tmp_path, None, None))
    pages = store._connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    store._connection.exec_driver_sql(f"PRAGMA max_page_count={pages + 2}")  # sqlite's own "disk is full"
    store._connection.rollback()
    with pytest.raises(OSError, match="No space left") as caught, store.transaction():
        store.put([entry(n) for n in range(60)])
    assert caught.value.errno == errno.ENOSPC
    store.close()


KILLED = """
import asyncio, sys
from pathlib import Path
import numpy as np
from rlsdk.runlog.store import Address, RolloutStore
from rlsdk.runlog.tables import Entry
from rlsdk.runlog.store import RolloutWriter
from rlsdk.types import Group, Rollout, Score, Task

async def main():
    writer = RolloutWriter(RolloutStore(Address.make(Path(sys.argv[1]), None, None)))
    for number in range(1_000_000):
        task = Task(str(number), "p" * 2000)
        rollouts = [Rollout(task, (), range(200), [True] * 200, [0.0] * 200, [0] * 200) for _ in range(8)]
        group = Group(task, rollouts, [Score(1.0)] * 8)
        entry = Entry(number=number, source="", state="trained", step=1, uses=1, group=group)
        await writer.submit(lambda store, entry=entry: store.put([entry]))
        if number % 20 == 0:
            print("go", flush=True)

asyncio.run(main())
"""


def test_a_killed_writer_leaves_whole_groups_alone(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process:
        assert [process.stdout.readline() for _ in range(5)] == ["go\n"] * 5
        os.kill(process.pid, signal.SIGKILL)
    rows = query(tmp_path)
    numbers = {row["number"] for row in rows}
    assert len(numbers) > 0
    assert len(rows) == 8 * len(numbers)
    store = RolloutStore(Address.make(tmp_path, None, None))
    back = store.recall({n: Task(str(n), "p") for n in numbers}, step=0)
    assert {n: len(group) for n, group in back.items()} == dict.fromkeys(numbers, 8)
    assert store._connection.exec_driver_sql("PRAGMA integrity_check").scalar_one() == "ok"
    store.close()


def test_a_closed_database_is_one_file_and_reading_it_creates_no_other(entry: Make, tmp_path: Path) -> None:
    store = kept(Address.make(tmp_path, None, None), entry(1))
    assert len(list(tmp_path.iterdir())) == 3  # readers do not wait for the writer
    store.close()
    assert len(query(tmp_path)) == 2
    assert [file.name for file in tmp_path.iterdir()] == [DATABASE]


def test_a_database_that_is_read_is_closed_and_opened_again(
    entry: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    address = Address.make(tmp_path, None, None)
    kept(address, entry(1)).close()
    monkeypatch.setattr("rlsdk.runlog.store.BUSY_SECONDS", 0.01)
    with closing(sqlite3.connect(tmp_path / DATABASE, check_same_thread=False)) as other:
        other.execute("begin")
        other.execute("select count(*) from rlsdk_rollouts").fetchone()
        threading.Timer(0.3, other.rollback).start()
        store = kept(address, entry(2))
        assert "has been locked by" in caplog.text
        other.execute("begin")
        assert other.execute("select count(*) from rlsdk_rollouts").fetchone() == (4,)
        store.close()
        assert len(query(tmp_path)) == 4


def test_a_run_that_is_ended_while_it_creates_its_database_leaves_none_without_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = sa.MetaData.create_all

    def interrupted(self: sa.MetaData, *given: Any, **how: Any) -> None:
        create(self, *given, **how)
        raise KeyboardInterrupt

    monkeypatch.setattr(sa.MetaData, "create_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RolloutStore(Address.make(tmp_path, None, None))
    assert Address.of(tmp_path) is None and list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    RolloutStore(Address.make(tmp_path, None, None)).close()
    assert Address.of(tmp_path) is not None and query(tmp_path) == []


def test_damage_in_the_middle_of_a_database_is_found_and_the_damaged_files_are_kept(
    entry: Make, tmp_path: Path
) -> None:
    file = tmp_path / DATABASE
    assert damage_of(file) == ""
    kept(Address.make(tmp_path, None, None), *(entry(n) for n in range(200))).close()
    assert damage_of(file) == ""
    whole = file.read_bytes()
    for again in ("", "-2"):
        file.write_bytes(whole[:8192] + b"\xff" * 8192 + whole[16384:])
        assert damage_of(file) != ""
        assert set_aside(file) == tmp_path / f"{DATABASE}.damaged{again}"
        assert damage_of(file) == ""


ENDLESS = "(with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n) > 0"


def test_a_query_ends_with_its_time(entry: Make, tmp_path: Path) -> None:
    kept(Address.make(tmp_path, None, None), entry(1)).close()
    with pytest.raises(ValueFault, match=r"took longer than 0\.05 s; narrow it, or allow more time"):
        query(tmp_path, ENDLESS, seconds=0.05)
    assert query(tmp_path, seconds=60)


def test_a_query_heeds_an_interrupt(entry: Make, tmp_path: Path) -> None:
    kept(Address.make(tmp_path, None, None), entry(1)).close()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            query(tmp_path, ENDLESS, seconds=30)
    finally:
        signal.signal(signal.SIGALRM, before)
