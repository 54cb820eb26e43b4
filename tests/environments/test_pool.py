"""Environments in real Ray actors: killed, hanging, raising, full; rollouts of others continue."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from rlsdk.components import Use
from rlsdk.environments.actor import EnvWorkerActor
from rlsdk.errors import FingerprintError
from rlsdk.plugins.fingerprints import Fingerprint
from tests.environments.test_host import on_seed

pytestmark = [pytest.mark.stack]


def noted(folder: Path, what: str) -> list[tuple[int, int]]:
    """(seed, process) of each note."""
    return [tuple(map(int, n.name.split("-")[1:3])) for n in sorted(folder.glob(f"{what}-*"))]  # type: ignore[misc]


async def until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        await asyncio.sleep(0.02)


@pytest.mark.slow
def test_killed_hung_and_raising_fail_alone(in_workers, tmp_path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()

    async def body(stage) -> None:
        tasks = [stage.task(i, folder=str(notes)) for i in (0, 1, 2, 3, 666)]
        killed: list[int] = []

        def script(text: str) -> str:
            """Kill the worker of seed 0 in the middle of its first episode; return what hangs and raises."""
            if text.startswith("0:") and "\n2:" in text and not killed:
                killed.append(next(pid for seed, pid in noted(notes, "reset") if seed == 0))
                os.kill(killed[0], signal.SIGKILL)
            return {"1": "99", "2": "13"}.get(text.split(":")[0], "1")

        groups = await stage.play(tasks, script, group_size=2)
        assert len(killed) == 1
        by_seed = {g.task.metadata["seed"]: g for g in groups}
        assert [r.status for g in groups for r in g.rollouts] == [
            *["finished"] * 2, *["failed"] * 4, *["finished"] * 2, *["failed"] * 2
        ]  # fmt: skip
        assert "(seed 1): step 1: it took longer than 1 s" in by_seed[1].scores[0].reason
        assert "(seed 2): step 1 raised ValueError: unlucky" in by_seed[2].scores[0].reason
        assert "(seed 666): reset raised ValueError: no such level" in by_seed[666].scores[0].reason
        # What ran in the killed worker began anew, in the worker that took its place.
        [reason] = stage.worlds.lost
        assert "environments-0" in reason and "its process died: " in reason
        assert stage.generator.run_again >= 1
        again = [pid for seed, pid in noted(notes, "reset") if seed == 0 and pid != killed[0]]
        assert again and by_seed[0].rollouts[0].metrics["turns"] == 3
        assert {r.metrics["pid"] for r in by_seed[3].rollouts} <= {float(pid) for _, pid in noted(notes, "reset")}

    in_workers(body, step_timeout=1.0)
    pids = {pid for _, pid in noted(notes, "reset")}
    end = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < end, "workers are left behind"
        time.sleep(0.1)
    assert (tmp_path / "environments-1.log").exists()


@pytest.mark.slow
def test_a_rollout_whose_workers_are_always_lost_fails_at_last(in_workers) -> None:
    async def body(stage) -> None:
        bad, good = await stage.play([stage.task(1), stage.task(2)], on_seed({1: "77"}))
        assert bad.rollouts[0].status == "failed"
        assert "WorldLostError: environments-3 is gone: its process died: " in bad.scores[0].reason
        assert len(stage.worlds.lost) == 4
        assert stage.generator.run_again >= 3
        assert good.task.metadata["seed"] == 2  # it may have shared its worker with the bad one each time

    in_workers(body)


@pytest.mark.slow
def test_a_call_that_holds_the_whole_process_costs_its_worker(in_workers) -> None:
    async def body(stage) -> None:
        task = stage.task(1)
        playing = asyncio.ensure_future(stage.play([task], on_seed({1: "88"})))
        await until(lambda: stage.worlds.lost)
        playing.cancel()
        assert "a call blocks its whole process" in stage.worlds.lost[0]
        [group] = await stage.play([stage.task(2)])
        assert group.scores[0].value == 1.0

    in_workers(body, silence=1.0)


@pytest.mark.slow
def test_a_worker_that_takes_longer_than_its_silence_to_start_is_not_lost(in_workers, monkeypatch) -> None:
    class SlowToStart(EnvWorkerActor):
        def __init__(self, threads: int, log_path: str) -> None:
            time.sleep(3)
            super().__init__(threads, log_path)

    monkeypatch.setattr("rlsdk.environments.actor.EnvWorkerActor", SlowToStart)

    async def body(stage) -> None:
        [group] = await stage.play([stage.task(2)])
        assert group.scores[0].value == 1.0
        assert not stage.worlds.lost

    in_workers(body, silence=0.5)


@pytest.mark.slow
def test_places_are_given_in_line_and_workers_share_the_load(in_workers, tmp_path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()

    async def body(stage) -> None:
        live: list[int] = []

        def script(text: str) -> str:
            live.append(sum(w.count for w in stage.worlds._workers))
            return "1"

        tasks = [stage.task(i, folder=str(notes)) for i in range(24)]
        groups = await stage.play(tasks, script)
        assert all(g.scores[0].value == 1.0 for g in groups)
        assert max(live) == 6
        await until(lambda: len(noted(notes, "close")) == 24)
        begun = noted(notes, "reset")
        counts = [sum(pid == each for _, pid in begun) for each in {pid for _, pid in begun}]
        assert len(counts) == 2 and min(counts) >= 3

    in_workers(body, workers=2, per_worker=3)


@pytest.mark.slow
def test_many_hung_calls_replace_a_worker_and_affect_no_other(in_workers, monkeypatch) -> None:
    monkeypatch.setattr("rlsdk.environments.pool.MOST_STUCK", 3)

    async def body(stage) -> None:
        groups = await stage.play([stage.task(i) for i in range(3)], lambda _: "99")
        assert all("took longer than 0.5 s" in g.scores[0].reason for g in groups)
        [given_up] = stage.worlds.lost
        assert "environments-0: 3 calls hang" in given_up
        groups = await stage.play([stage.task(i) for i in range(3)])
        assert all(g.scores[0].valid for g in groups)
        assert [w.name for w in stage.worlds._workers] == ["environments-1"]
        assert not stage.worlds._given_up

    in_workers(body, step_timeout=0.5)


@pytest.mark.slow
def test_processes_of_a_worker_end_with_it(in_workers, tmp_path) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()

    async def body(stage) -> None:
        tasks = [stage.task(i, folder=str(notes)) for i in range(3)]
        playing = asyncio.ensure_future(stage.play(tasks, lambda _: "99"))
        await until(lambda: len(noted(notes, "reset")) == 3)
        pids = {pid for _, pid in noted(notes, "reset")}
        assert len(pids) == 3
        playing.cancel()
        stage.worlds.close()
        await until(lambda: not any(psutil.pid_exists(pid) for pid in pids))

    in_workers(body, isolation="process")


def test_a_worker_with_other_code_refuses(in_workers) -> None:
    async def body(stage) -> None:
        spec = stage.worlds._specs.of(Use("worlds_lab/plain"))
        object.__setattr__(spec.reference, "fingerprint", Fingerprint("", "", "0" * 64))
        with pytest.raises(ExceptionGroup) as caught:
            await stage.play([stage.task(0)])
        assert caught.group_contains(FingerprintError, match="plugin 'worlds_lab' differs between driver and worker")

    in_workers(body)
