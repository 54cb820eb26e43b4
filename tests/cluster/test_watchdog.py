"""The watchdog, with its own clock and processes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest

from rlsdk.cluster import health
from rlsdk.cluster.actors import last_words
from rlsdk.cluster.address import RayAddress
from rlsdk.cluster.health import GcsAddress, Prober, WatchedLoop, unreachable
from rlsdk.cluster.watchdog import GRACE_SECONDS, SAVE_SECONDS, WRITE_SECONDS, Watchdog
from rlsdk.config.schema import PlacementSection, WatchdogSection
from rlsdk.errors import LearnerError, RunError
from rlsdk.isolation import vitals
from rlsdk.isolation.vitals import Identity, Vitals
from rlsdk.isolation.watching import CURRENT, main_loop, stage
from rlsdk.runlog import store as stores
from rlsdk.runlog.store import Address, RolloutStore, lock_holder

LEARNER = Identity(11, 1.0, "box", "m", "node1234567", stacks=True)
ENGINE = Identity(12, 1.0, "box", "m", "node1234567", stacks=True)


class Processes(Prober):
    """Processes with states set by a test."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Identity, Vitals] = {LEARNER: Vitals("running"), ENGINE: Vitals("running")}
        self.answers = {"learner": LEARNER, "engine": ENGINE}
        self.dumb: set[str] = set()
        self.killed: list[Identity] = []
        self.stacks: list[Identity] = []

    def ask(self, actor: Any) -> Any:
        return actor

    def answer(self, asked: Any) -> tuple[bool, Identity | None]:
        return (False, None) if asked in self.dumb else (True, self.answers[asked])

    def cluster_use(self) -> str:
        return "free are 0 of 2 CPU"

    def look(self, processes: Sequence[Identity], *, measured: bool = True) -> list[Vitals]:
        return [self.found[each] for each in processes]

    def write_stacks(self, process: Identity) -> bool:
        self.stacks.append(process)
        now = self.found[process]
        self.found[process] = attrs.evolve(now, cpu=now.cpu + 0.5, moved=now.moved + 4096)
        return self.found[process].state == "running"

    def kill(self, process: Identity) -> None:
        self.killed.append(process)


@attrs.define(eq=False)
class Bench:
    """A watchdog, its processes and its time."""

    processes: Processes = attrs.field(factory=Processes)
    time: float = 100.0
    abandoned: list[str] = attrs.field(factory=list)
    dog: Watchdog = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        how: dict[str, Any] = {"prober": self.processes, "now": lambda: self.time, "abandon": self.abandoned.append}
        self.dog = Watchdog(WatchdogSection(warn=60, end=600, busy=2000, learner_busy=6000), **how)
        self.dog.add_actor("learner rank 0", "learner", "logs/learner-0.log", replaced=False)
        self.dog.add_actor("engine 0", "engine", "logs/engine-0.log", replaced=True, responsive=True)

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.time += 1
            self.dog.look()


@pytest.fixture
def bench(caplog: pytest.LogCaptureFixture) -> Bench:
    caplog.set_level(logging.WARNING, "rlsdk")
    return Bench()


def test_a_stopped_learner_is_named_after_the_first_limit_and_ends_the_run_after_the_second(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    key = bench.dog.enter("update")
    bench.run(5)
    bench.processes.found[LEARNER] = Vitals("stopped")
    bench.run(59)
    assert caplog.text == ""
    bench.run(5)
    [said] = caplog.messages
    assert said.startswith(
        "learner rank 0 (pid 11 on box, node node1234) is stopped (by SIGSTOP, or a debugger), for 60 s"
    )
    assert "the run is in update for 6" in said and "its log is logs/learner-0.log" in said
    bench.run(540)
    assert bench.processes.killed == [LEARNER]
    found = bench.dog.explain(LearnerError("learner rank 0 failed in update: its process died"), "step 3 is kept")
    assert isinstance(found, RunError)
    assert str(found).startswith("learner rank 0 (pid 11 on box, node node1234) is stopped")
    assert str(found).endswith("watchdog.end=600 s is the limit; step 3 is kept")
    assert not bench.abandoned
    bench.run(WRITE_SECONDS + GRACE_SECONDS + 1)
    assert bench.abandoned == [bench.dog.verdict]
    bench.dog.leave(key)


def test_a_continued_process_is_logged(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.run(5)
    bench.processes.found[LEARNER] = Vitals("stopped")
    bench.run(100)
    bench.processes.found[LEARNER] = Vitals("running")
    bench.run(700)
    assert len(caplog.messages) == 2
    assert caplog.messages[1].endswith("is responding again, after 100 s of silence")
    assert not bench.dog.verdict


def test_an_engine_that_is_stopped_for_too_long_is_killed_and_the_run_continues(
    bench: Bench, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text("a step of 40 s")
    bench.dog.remove_actor("engine")
    bench.dog.add_actor("engine 0", "engine", str(log), replaced=True)
    bench.run(5)
    bench.processes.found[ENGINE] = Vitals("running", stopped=77)
    bench.dog.enter("take")
    bench.run(700)
    assert bench.processes.killed == [ENGINE]
    assert "waits for its child process 77, which is stopped" in caplog.text
    assert "it will be killed and replaced" in caplog.text
    assert not bench.dog.verdict
    why = "it waits for its child process 77, which is stopped (by SIGSTOP, or a debugger)"
    assert last_words(log) == f"killed by the watchdog: {why}, for 600 s; watchdog.end=600 s is the limit"


@pytest.mark.parametrize("sign", ["cpu", "disk", "io", "answer"])
def test_what_works_is_never_ended_however_long_it_takes(
    bench: Bench, caplog: pytest.LogCaptureFixture, sign: str
) -> None:
    bench.dog.enter("update")
    bench.run(5)
    if sign != "answer":
        bench.processes.dumb = {"learner"}
    for second in range(3000):
        if sign == "cpu":
            bench.processes.found[LEARNER] = Vitals("running", cpu=0.05 * second)
        elif sign == "disk":
            bench.processes.found[LEARNER] = Vitals("disk")
        elif sign == "io":
            bench.processes.found[LEARNER] = Vitals("running", moved=second // 20)
        bench.run(1)
    assert caplog.text == "" and not bench.dog.verdict and not bench.processes.killed


def spin(bench: Bench, actor: str, identity: Identity, seconds: int) -> None:
    """Let a process compute without an answer, while the run's stages are short."""
    bench.processes.dumb.add(actor)
    for _ in range(seconds):
        now = bench.processes.found[identity]
        bench.processes.found[identity] = attrs.evolve(now, cpu=now.cpu + 0.9)
        key = bench.dog.enter("take")
        bench.run(1)
        bench.dog.leave(key)


def test_an_engine_that_computes_in_one_call_for_too_long_is_named_then_replaced(
    bench: Bench, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    log = tmp_path / "engine-0.log"
    bench.dog.remove_actor("engine")
    bench.dog.add_actor("engine 0", "engine", str(log), replaced=True, responsive=True)
    bench.run(100)
    spin(bench, "engine", ENGINE, 950)
    assert caplog.text == "" and not bench.processes.stacks
    spin(bench, "engine", ENGINE, 900)
    [said] = caplog.messages
    assert said.startswith("engine 0 (pid 12 on box, node node1234) works, but has not responded, for 1000 s; the run")
    assert said.endswith("with the Python stacks of the process; watchdog.busy=2000 s is the limit")
    assert bench.processes.stacks == [ENGINE] and not bench.processes.killed
    spin(bench, "engine", ENGINE, 200)
    assert bench.processes.killed == [ENGINE] and not bench.dog.verdict
    assert "it will be killed and replaced" in caplog.messages[-1] and len(caplog.messages) == 2
    assert (
        last_words(log)
        == "killed by the watchdog: it works, but has not responded, for 2000 s; watchdog.busy=2000 s is the limit"
    )


def test_an_engine_that_answers_again_before_the_limit_is_not_replaced(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.run(5)
    for _ in range(3):
        spin(bench, "engine", ENGINE, 1900)
        bench.processes.dumb.clear()
        bench.run(100)
        assert caplog.messages[-1].endswith("s of work") and not bench.processes.killed
    assert len(caplog.messages) == 6


def test_a_learner_that_computes_in_one_call_for_too_long_is_named_then_ends_the_run(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.run(5)
    spin(bench, "learner", LEARNER, 2900)
    assert caplog.text == "" and not bench.processes.stacks
    spin(bench, "learner", LEARNER, 200)
    [said] = caplog.messages
    assert said.startswith("learner rank 0 (pid 11 on box, node node1234) works, but has not responded, for 3000 s")
    assert said.endswith("with the Python stacks of the process; watchdog.learner_busy=6000 s is the limit")
    assert bench.processes.stacks == [LEARNER] and not bench.processes.killed
    spin(bench, "learner", LEARNER, 3000)
    assert bench.processes.killed == [LEARNER]
    assert bench.dog.verdict.endswith("its log is logs/learner-0.log; watchdog.learner_busy=6000 s is the limit")


def test_a_rank_that_waits_for_one_that_computes_for_ever_is_reported_with_it(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    other = attrs.evolve(LEARNER, pid=13)
    bench.processes.answers["peer"], bench.processes.found[other] = other, Vitals("running")
    bench.dog.add_actor("learner rank 1", "peer", "logs/learner-1.log", replaced=False)
    bench.run(5)
    bench.dog.enter("update")
    bench.processes.dumb = {"learner"}
    spin(bench, "peer", other, 650)
    assert "learner rank 0 (pid 11 on box, node node1234) uses neither CPU nor a disk" in bench.dog.verdict
    assert "it may be waiting for learner rank 1 (pid 13 on box, node node1234), which works" in bench.dog.verdict
    assert "(its log is logs/learner-1.log)" in bench.dog.verdict and "engine" not in bench.dog.verdict


@pytest.mark.parametrize(("name", "identity"), [("learner", LEARNER), ("engine", ENGINE)])
def test_a_process_that_never_ends_loading_is_known_and_killed(bench: Bench, name: str, identity: Identity) -> None:
    bench.run(1)  # the call that identifies it is the first; the second, which loads a model, never returns
    spin(bench, name, identity, 6100)
    assert bench.processes.killed == [identity]


def test_an_engine_that_is_not_replaced_ends_the_run(bench: Bench) -> None:
    bench.dog.remove_actor("engine")
    bench.dog.add_actor("engine 0", "engine", "engine-0.log", replaced=False, responsive=True)
    bench.run(5)
    spin(bench, "engine", ENGINE, 2100)
    assert bench.dog.verdict.endswith("; its log is engine-0.log; watchdog.busy=2000 s is the limit")
    assert bench.processes.killed == [ENGINE]


def test_an_engine_that_was_stopped_has_the_whole_time_again(bench: Bench) -> None:
    bench.dog = Watchdog(WatchdogSection(warn=60, end=None, busy=2000), prober=bench.processes, now=lambda: bench.time)
    bench.dog.add_actor("engine 0", "engine", "engine-0.log", replaced=True, responsive=True)
    bench.run(100)
    spin(bench, "engine", ENGINE, 40)
    bench.processes.found[ENGINE] = Vitals("stopped")
    bench.run(5000)
    bench.processes.found[ENGINE] = Vitals("running")
    spin(bench, "engine", ENGINE, 1900)
    assert not bench.processes.killed
    spin(bench, "engine", ENGINE, 200)
    assert bench.processes.killed == [ENGINE]


def test_what_hangs_without_cpu_and_answers_nothing_is_silent_and_shows_its_stacks(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.run(5)
    bench.dog.enter("update")
    bench.processes.dumb = {"learner"}
    bench.run(300)
    assert "uses neither CPU nor a disk and does not answer" in caplog.text
    assert "which now ends with the Python stacks of the process" in caplog.text and bench.processes.stacks == [LEARNER]
    bench.run(400)
    assert bench.processes.killed == [LEARNER] and bench.dog.verdict
    assert "responding again" not in caplog.text


def test_what_works_again_after_it_wrote_its_stacks_is_not_ended(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.run(5)
    bench.dog.enter("update")
    bench.processes.dumb = {"learner"}
    bench.run(200)
    assert bench.processes.stacks == [LEARNER] and len(caplog.messages) == 1
    for second in range(1000):
        bench.processes.found[LEARNER] = Vitals("running", cpu=0.5 + 0.05 * second, moved=4096)
        bench.run(1)
    assert len(caplog.messages) == 2 and "is responding again" in caplog.messages[-1]
    assert not bench.dog.verdict


def test_an_actor_that_never_starts_is_reported_and_does_not_end_the_run(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.processes.dumb = {"engine"}
    bench.run(2000)
    [said] = caplog.messages
    assert "engine 0 is not working yet" in said and "Ray may lack resources for it (free are 0 of 2 CPU);" in said
    bench.processes.dumb = set()
    bench.run(2)
    assert "is working now" in caplog.messages[-1] and not bench.dog.verdict


def test_a_dead_raylet_is_the_culprit_and_not_the_rank_that_it_took_along(bench: Bench) -> None:
    raylet = Identity(5, 1.0, "box", "m")
    bench.processes.found[raylet] = Vitals("running")
    bench.dog.add_process("Ray's raylet", raylet, "raylet.out")
    bench.dog.enter("sync")
    bench.run(5)
    bench.processes.found[raylet] = Vitals("zombie")
    bench.dog.release_ray()  # before the watchdog looked: the run failed at once
    found = bench.dog.explain(LearnerError("learner rank 0 failed in canary"), "step 4 is kept")
    what = "Ray's raylet (pid 5 on box) has died, and with it all actors on its node"
    assert str(found) == f"{what}; its log is raylet.out; step 4 is kept"


def test_a_failure_that_the_watchdog_knows_nothing_of_stays_what_it_is(bench: Bench) -> None:
    error = LearnerError("not finite")
    bench.dog.release_ray()
    assert bench.dog.explain(error, "") is error
    bench.dog.check()


def test_a_run_that_loses_the_gcs_finishes_its_step_and_fails(bench: Bench) -> None:
    async def run() -> list[str]:
        gcs, seen = Identity(6, 1.0, "box", "m"), []
        bench.processes.found[gcs] = Vitals("running")
        bench.dog.add_process("Ray's GCS", gcs, "gcs_server.out")
        token = CURRENT.set(bench.dog)
        try:
            with main_loop(lambda: seen.append("finish")):
                with stage("update"):
                    bench.run(5)
                    bench.processes.found[gcs] = Vitals("gone")
                    bench.run(1)
                    await asyncio.sleep(0)
                bench.run(SAVE_SECONDS - 10)
                await asyncio.sleep(0)
        finally:
            CURRENT.reset(token)
        return seen

    assert asyncio.run(run()) == ["finish"] and not bench.abandoned
    with pytest.raises(RunError, match=r"Ray's GCS \(pid 6 on box\) has died; its log .*; the run was in update for"):
        bench.dog.check()


def test_a_run_that_is_asked_to_end_is_cancelled(bench: Bench) -> None:
    async def run() -> None:
        token = CURRENT.set(bench.dog)
        try:
            with main_loop(lambda: None):
                bench.dog.condemn("it hangs")
                bench.run(WRITE_SECONDS + 1)
                await asyncio.sleep(10)
        finally:
            CURRENT.reset(token)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())


def test_a_run_that_must_end_reports_nothing_more_since_its_folder_may_be_anothers() -> None:
    reports: list[Any] = []
    lost = ""
    dog = Watchdog(WatchdogSection(), prober=Processes(), now=lambda: 0.0, report=lambda *seen: reports.append(seen))
    dog.add_check(lambda: lost)
    dog.look()
    lost = "process 7 has taken over the folder"
    dog.look()
    dog.look()
    assert len(reports) == 1
    assert dog.verdict == lost


def test_a_blocked_loop_is_named_with_the_blocking_code() -> None:
    clock, spent, held = [0.0], [0.0], threading.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    health = WatchedLoop(loop, thread, "the run", 60, lambda: clock[0], lambda _: spent[0])
    health.look()
    wait_until(lambda: health.blocked_for == 0 and health._asked is None)
    loop.call_soon_threadsafe(held.wait)
    assert health.look() == ""
    clock[0] = 9.0
    assert health.look() == ""
    clock[0] = 11.0
    said = health.look()
    assert said.startswith("the event loop of the run has been blocked for 11 s in ") and "wait" in said
    assert health.look() == "" and health.idle_for(11.0) == 11.0
    spent[0] = 5.0  # it computes
    assert health.idle_for(12.0) == 0.0
    clock[0] = 25.0
    assert "25 s" in health.look()
    held.set()
    wait_until(lambda: health._asked is None)
    assert health.look() == "the event loop of the run runs again, after 25 s"
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)


def test_a_loop_that_is_blocked_before_its_first_turn_is_named_too() -> None:
    clock, held = [0.0], threading.Event()
    loop = asyncio.new_event_loop()
    loop.call_soon(held.wait)
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    health = WatchedLoop(loop, thread, "the run", 60, lambda: clock[0], lambda _: 0.0)
    health.look()
    wait_until(lambda: "wait" in health.describe())
    clock[0] = 20.0
    assert "20 s" in health.look() and health.idle_for(20.0) == 20.0
    held.set()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)


def test_code_that_computes_on_its_loop_for_ever_ends_the_run(bench: Bench) -> None:
    held, loop = threading.Event(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    loop.call_soon_threadsafe(held.wait)
    computes = WatchedLoop(loop, thread, "users' code", float("inf"), lambda: bench.time, lambda _: bench.time)
    bench.dog._loops.append(computes)
    bench.run(1990)
    assert not bench.dog.verdict
    bench.run(20)
    assert "the event loop of users' code has been blocked for 2000 s in " in bench.dog.verdict
    assert bench.dog.verdict.endswith("; watchdog.busy=2000 s is the limit")
    held.set()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)


def test_a_loop_that_ticks_while_it_is_looked_at_is_not_idle() -> None:
    loop = asyncio.new_event_loop()
    health = WatchedLoop(loop, threading.current_thread(), "the run", 60, lambda: 50.0, lambda _: tick())

    def tick() -> float:
        health._asked = None  # as the loop's own thread does, at any moment
        return 0.0

    health._asked = 10.0
    assert health.idle_for(50.0) >= 0
    loop.close()


def wait_until(condition: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


CHILD = "import time; from rlsdk.isolation.vitals import identity; identity(); print('up', flush=True); time.sleep(600)"


def test_a_real_process_is_seen_stopped_writes_its_stacks_and_is_killed(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, stderr=log)
    try:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        known = attrs.evolve(vitals.identify(child.pid), stacks=True)
        assert vitals.look([known])[0].state in ("running", "disk")
        assert vitals.write_stacks(known)
        wait_until(lambda: "most recent call first" in (tmp_path / "log").read_text())
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: vitals.look([known], measured=False) == [Vitals("stopped")])
        own = vitals.identify(os.getpid())
        assert vitals.look([own])[0].stopped == child.pid
        assert not vitals.write_stacks(known)
        vitals.kill(known)
        wait_until(lambda: vitals.look([known])[0].state == "zombie")
    finally:
        child.kill()
        child.wait()
    assert vitals.look([known]) == [Vitals("gone")]


@pytest.mark.stack
def test_a_node_whose_probe_is_killed_gets_another(cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr("rlsdk.cluster.health.EVERY_SECONDS", 0.05)
    here = vitals.identify(os.getpid(), node=ray.get_runtime_context().get_node_id())
    there, prober = attrs.evolve(here, machine="another"), Prober()

    def heard_after(moment: float) -> bool:
        return prober.look([there])[0].memory > 0 and prober._nodes["another"].heard > moment

    wait_until(lambda: heard_after(0))
    [probe] = [p for p in psutil.Process().children(recursive=True) if "NodeProbe" in " ".join(p.cmdline())]
    probe.kill()
    killed = time.monotonic()
    wait_until(lambda: heard_after(killed + 1))
    ray.kill(prober._nodes["another"].probe)


def test_an_address_without_ray_is_refused_with_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    found = RayAddress.find(PlacementSection())
    assert found is not None
    with pytest.raises(RunError, match=r"'127.0.0.1:1', set by the environment variable RAY_ADDRESS, cannot be "):
        found.join()
    named = RayAddress.find(PlacementSection(ray="nonsense"))
    assert named is not None
    with pytest.raises(RunError, match=r"'nonsense', set by placement.ray, is not an address: expected HOST:PORT"):
        named.join()
    assert RayAddress.find(PlacementSection(ray="local")) is None
    monkeypatch.delenv("RAY_ADDRESS")
    assert RayAddress.find(PlacementSection()) is None


def test_a_gcs_that_takes_no_connections_is_lost_at_the_second_look() -> None:
    gcs = GcsAddress("127.0.0.1:1")
    assert gcs.lost(0.0) == "" and gcs.lost(1.0) == ""
    assert gcs.lost(6.0) == "Ray's GCS at 127.0.0.1:1 is lost: Connection refused"
    assert unreachable("127.0.0.1:1", 1.0)


def test_a_network_that_does_not_reach_the_gcs_may_recover_within_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health, "CONNECT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=1) as server, ExitStack() as stack:
        address = server.getsockname()

        def drop_packets() -> None:
            """Fill the queue of connections: Linux ignores others until they are accepted."""
            for _ in range(4):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(address)

        gcs = GcsAddress(f"127.0.0.1:{address[1]}")
        drop_packets()
        assert [gcs.lost(now) for now in (0.0, 10.0, 59.0)] == ["", "", ""]
        server.settimeout(2.0)
        with suppress(TimeoutError):
            while True:
                stack.enter_context(server.accept()[0])
        assert gcs.lost(64.0) == ""
        drop_packets()
        assert [gcs.lost(now) for now in (70.0, 129.0)] == ["", ""]
        assert gcs.lost(134.0) == f"Ray's GCS at 127.0.0.1:{address[1]} is lost: timed out"
    said = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert said == ["timed out; the run ends if this lasts 60 s", "", "timed out; the run ends if this lasts 60 s"]
    assert "answers again, after 64 s" in caplog.text


LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
connection.execute("BEGIN IMMEDIATE")
print("up", flush=True)
sys.stdin.read()
"""


def test_a_store_locked_by_another_process_is_reported_with_it_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stores, "BUSY_SECONDS", 0.05)
    store = RolloutStore(Address.make(tmp_path, None, None))
    file = tmp_path / "rollouts.db"
    with subprocess.Popen(
        [sys.executable, "-c", LOCK, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdin is not None and other.stdout.readline() == b"up\n"
        assert lock_holder(file).startswith(f"process {other.pid} (")
        writer = threading.Thread(target=transact, args=(store,))
        writer.start()
        wait_until(lambda: "has been locked by process" in caplog.text)
        assert writer.is_alive()
        other.stdin.close()
        writer.join(60)
        assert not writer.is_alive()
    assert f"has been locked by process {other.pid}" in caplog.text and "is free again" in caplog.text
    store.close()
    with sqlite3.connect(file) as connection:
        assert connection.execute("PRAGMA quick_check(1)").fetchone() == ("ok",)
    connection.close()


def transact(store: RolloutStore) -> None:
    with store.transaction():
        store.settle([(1, "trained", 1, 1)])
