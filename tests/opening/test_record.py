"""An open run: its folder and status, and the reports of runs that fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlsdk.config import Plan
from rlsdk.errors import RunError
from rlsdk.opening import record
from rlsdk.runlog.actors import read_status
from rlsdk.trainer import trainer as trainer_module
from rlsdk.trainer.callbacks import Callback, standard_callbacks
from rlsdk.trainer.trainer import Trainer
from tests.ports import free_port
from tests.trainer.fakes import FakeLearner, ScriptedRollouts, make_plan


def test_a_run_that_cannot_write_down_its_end_still_says_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "ray_cluster", lambda _, **__: contextlib.nullcontext(0))
    plan, console = make_plan(tmp_path), Console(quiet=True)
    how: dict[str, Any] = {"resume": False, "overwrite": False, "allow_changes": False, "console": console}
    with pytest.raises(RunError, match="the learner is gone"), record.open_run(plan, **how):
        (plan.folder / "engines.json").mkdir()  # as little can be written there as on a read-only disk
        raise RunError("the learner is gone")


def opened(plan: Plan) -> Any:
    return record.open_run(plan, resume=False, overwrite=False, allow_changes=False, console=Console(quiet=True))


def test_a_second_run_in_one_program_is_refused_until_the_first_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "ray_cluster", lambda _, **__: contextlib.nullcontext(0))
    first, second = (make_plan(tmp_path, name=name) for name in ("first", "second"))
    with opened(first):
        for plan in (second, first):
            with pytest.raises(RunError, match=r"another trainer open, in .*/first: close it first"), opened(plan):
                pass
    assert not second.folder.exists()
    with opened(second):
        pass


def test_a_trainer_whose_variable_is_gone_can_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(tmp_path)

    @contextlib.contextmanager
    def started(*_: Any, **__: Any) -> Iterator[Any]:
        yield ScriptedRollouts(plan), FakeLearner(), 1
        closed.append("parts")

    closed: list[str] = []
    monkeypatch.setattr(record, "ray_cluster", lambda _, **__: contextlib.nullcontext(0))
    for name, found in (("template", contextlib.nullcontext("")), ("examined", ({}, None)), ("check", plan)):
        monkeypatch.setattr(trainer_module, name, lambda *_, found=found: found)
    monkeypatch.setattr(trainer_module, "started", started)
    Trainer.from_config({}, console=Console(quiet=True))  # no variable, or `del trainer`
    with pytest.raises(RunError, match=r"close it first .* rlsdk\.Trainer\.close_open\(\)"):
        Trainer.from_config({}, console=Console(quiet=True))
    Trainer.close_open()
    assert closed == ["parts"]
    Trainer.close_open()
    with Trainer.from_config({}, overwrite=True, console=Console(quiet=True)):
        pass
    assert closed == ["parts"] * 2


class EndsEarly(Callback):
    """Interrupts the training after its first step, and fails it after its second; notes how the run is marked."""

    def __init__(self) -> None:
        self.marks: list[str] = []

    async def after_step(self, trainer: Trainer, metrics: Any) -> None:
        state = read_status(trainer.plan.folder)
        assert state is not None
        self.marks.append(state.ended)
        if trainer.version == 2:
            raise RunError("the learner is gone")
        trainer.interrupt()


def test_a_second_training_by_hand_is_marked_running_and_reports_its_own_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "ray_cluster", lambda _, **__: contextlib.nullcontext(0))
    plan, own = make_plan(tmp_path), EndsEarly()
    with pytest.raises(RunError, match="the learner is gone"), opened(plan) as run:
        run.by_hand = True
        callbacks = standard_callbacks(run.console, run.observers, run.store, [own])
        trainer = Trainer(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner(), callbacks=callbacks)
        trainer.record = run
        assert trainer.train()["status"] == "interrupted"
        trainer.train()
    assert own.marks == ["", ""]
    summary, state = json.loads((plan.folder / "summary.json").read_text()), read_status(plan.folder)
    assert (summary["status"], state and state.ended) == ("failed", "failed")


@pytest.mark.parametrize("train", [Trainer.train, lambda trainer: asyncio.run(trainer.train_async())])
@pytest.mark.parametrize("caught", [KeyboardInterrupt, asyncio.CancelledError, RunError])
def test_a_run_whose_training_failed_has_failed_even_if_its_script_catches_the_error(
    caught: type[BaseException], train: Callable[[Trainer], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Trainer):
        async def update(self, *_: Any) -> dict[str, float]:
            raise caught("the learner is gone")

    monkeypatch.setattr(record, "ray_cluster", lambda _, **__: contextlib.nullcontext(0))
    plan = make_plan(tmp_path)
    with opened(plan) as run:
        run.by_hand = True
        trainer = Failing(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner())
        trainer.record = run
        for _ in range(2):  # the second call only says that the trainer cannot go on
            with pytest.raises((caught, RunError)):
                train(trainer)
    summary, state = json.loads((plan.folder / "summary.json").read_text()), read_status(plan.folder)
    assert summary["error"].startswith("the learner is gone" if caught is RunError else "interrupted")
    status = "failed" if caught is RunError else "interrupted"
    assert (summary["status"], state and state.ended) == (status, status)


def test_a_training_in_a_running_event_loop_leaves_its_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "ray_cluster", lambda _, **__: contextlib.nullcontext(0))
    plan = make_plan(tmp_path, steps=1)
    with opened(plan) as run:
        run.by_hand = True
        trainer = Trainer(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner())
        trainer.record = run
        asyncio.run(trainer.train_async())
        assert json.loads((plan.folder / "summary.json").read_text())["status"] == "finished"


def test_a_run_whose_training_failed_and_then_succeeded_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Recovers(Trainer):
        async def update(self, *arguments: Any) -> dict[str, float]:
            if failures:
                raise failures.pop()
            return await super().update(*arguments)

    monkeypatch.setattr(record, "ray_cluster", lambda _, **__: contextlib.nullcontext(0))
    plan, failures = make_plan(tmp_path, steps=1), [RunError("the learner is busy")]
    with opened(plan) as run:
        run.by_hand = True
        trainer = Recovers(plan, rollouts=ScriptedRollouts(plan), learner=FakeLearner())
        trainer.record = run
        with pytest.raises(RunError, match="busy"):
            trainer.train()
        trainer.train()
    assert json.loads((plan.folder / "summary.json").read_text())["status"] == "finished"


def test_a_run_that_an_error_ends_leaves_a_report_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "ray_cluster", lambda _, **__: contextlib.nullcontext(0))
    plan = make_plan(tmp_path)
    with pytest.raises(RunError, match="the learner is gone"), opened(plan):
        raise RunError("the learner is gone <b>")
    summary = json.loads((plan.folder / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", "the learner is gone <b>")
    page = (plan.folder / "report.html").read_text()
    assert "<td>failed</td>" in page
    assert "the learner is gone &lt;b&gt;" in page


def test_an_interrupted_run_says_what_is_kept_and_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "ray_cluster", lambda _, **__: contextlib.nullcontext(0))
    plan = make_plan(tmp_path)
    with pytest.raises(KeyboardInterrupt), opened(plan):
        raise KeyboardInterrupt
    summary = json.loads((plan.folder / "summary.json").read_text())
    assert summary["error"] == "interrupted; there is no checkpoint yet. Continue with --resume"
    assert summary["status"] == "interrupted"
    ended = read_status(plan.folder)
    assert ended is not None and ended.ended == "interrupted"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), MemoryError()])
def test_a_report_that_fails_does_not_hide_why_the_run_failed(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(record, "ray_cluster", lambda _, **__: contextlib.nullcontext(0))
    for writer in ("write_summary", "try_report"):
        with monkeypatch.context() as patched, pytest.raises(RunError, match="the learner is gone"):
            patched.setattr(record, writer, fail)
            plan = make_plan(tmp_path / writer)
            with opened(plan):
                raise RunError("the learner is gone")
        assert "the report of the failed run cannot be written" in (plan.folder / "logs" / "driver.log").read_text()


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_run_whose_summary_finds_no_space_says_so_and_what_is_kept(
    by_hand: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    ends: list[str] = []
    monkeypatch.setattr(record, "ray_cluster", lambda _, **__: contextlib.nullcontext(0))
    monkeypatch.setattr(record, "write_summary", fail)
    monkeypatch.setattr(record.RunRecord, "end", lambda _, status, __: ends.append(status))
    with (
        pytest.raises(RunError, match=r"the disk is full \(.* free\); there is no checkpoint yet\. .*--resume"),
        opened(make_plan(tmp_path)) as run,
    ):
        run.by_hand = by_hand
        run.finish({"status": "finished", "steps": 1, "seconds": {}, "warnings": []}, {})
    assert ends == ["failed"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_run_whose_configuration_finds_no_space_names_the_file_and_starts_once_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        with open("/dev/full", "w") as file:
            file.write("x")

    plan = make_plan(tmp_path)
    monkeypatch.setattr(record, "ray_cluster", lambda _, **__: contextlib.nullcontext(0))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        where = re.escape(str(plan.folder / "config.yaml"))
        said = rf"the disk is full \({where}; .* free\); there is no checkpoint yet\. Free space, .*--resume"
        with pytest.raises(RunError, match=said), opened(plan):
            pass
    assert not (plan.folder / "config.yaml").exists()
    with opened(plan):
        pass
    assert (plan.folder / "config.yaml").is_file()


def test_a_run_whose_folder_another_program_takes_over_ends_and_writes_nothing_more_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "ray_cluster", lambda _, **__: contextlib.nullcontext(0))
    plan = make_plan(tmp_path, watchdog={"warn": 0.1}, save_rollouts=0)
    with (
        pytest.raises(RunError, match=r"process 7 on node-7 has taken over .*; there is no checkpoint yet"),
        opened(plan),
    ):
        lock = plan.folder.with_name(f".{plan.folder.name}.lock")
        lock.unlink()
        lock.write_text("filelock/2\npid=7\nhost=node-7\nmode=lease\ntoken=" + "0" * 32 + "\nduration=30.0\n")
        log, end = plan.folder / "logs" / "driver.log", time.monotonic() + 10
        while "the run ends" not in log.read_text() and time.monotonic() < end:
            time.sleep(0.02)
        before = {path.name for path in plan.folder.iterdir()}
    assert {path.name for path in plan.folder.iterdir()} == before


def test_a_wrong_address_of_a_cluster_leaves_no_run_behind(tmp_path: Path) -> None:
    port = free_port()
    plan = make_plan(tmp_path, placement={"ray": f"127.0.0.1:{port}"})
    for _ in range(2):
        with pytest.raises(RunError, match=f"cluster '127.0.0.1:{port}', set by placement.ray, cannot be reached"):
            opened(plan).__enter__()
    assert not plan.folder.exists()


def test_a_run_on_a_cluster_joins_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {}
    for joins, name in ((True, "joining"), (False, "starting")):
        monkeypatch.setattr(record, "ray_cluster", lambda _, **__: contextlib.nullcontext(0))
        monkeypatch.setattr(record, "joins_ray", lambda _, joins=joins: joins)
        plan = make_plan(tmp_path, name=name)
        with pytest.raises(RunError), opened(plan):
            raise RunError("enough")
        said[name] = (plan.folder / "logs" / "driver.log").read_text()
    assert "joining Ray; the full log is" in said["joining"] and "starting Ray" not in said["joining"]
    assert "starting Ray; the full log is" in said["starting"]
