"""The processes of a run in its folder: the watchdog's observations, and processes that have ended since."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from rlsdk.cluster.health import Watched
from rlsdk.isolation.vitals import Vitals, identify
from rlsdk.runlog import actors
from rlsdk.runlog.actors import EVERY_SECONDS, ActorsFile
from rlsdk.runlog.folder import mark


def test_what_was_seen_is_there_with_silence_and_memory(tmp_path: Path) -> None:
    mark(tmp_path)
    engine = Watched("engine 0", "/far/engine-0.log", identity=identify(os.getpid()), silent=(90.0, "is stopped"))
    file = ActorsFile(tmp_path)
    file.report("in take for 3 s", [(engine, Vitals("stopped", memory=5))], 100.0)
    found = actors.read(tmp_path)
    assert found and found.stage == "in take for 3 s"
    driver, seen = found.actors
    assert (driver.name, driver.pid, driver.memory > 0) == ("driver", os.getpid(), True)
    assert (seen.state, seen.memory, seen.silent, seen.silent_for, seen.log) == (
        "stopped",
        5,
        "is stopped",
        10.0,
        "engine-0.log",
    )
    assert found.as_json(found.written + 7)[1]["silent_for"] == 17.0


def test_it_is_written_every_few_seconds_and_keeps_what_was_seen_at_the_end(tmp_path: Path) -> None:
    mark(tmp_path)
    engine = Watched("engine 0", "engine-0.log")
    file = ActorsFile(tmp_path)
    file.report("start", [(engine, Vitals("unknown"))], 100.0)
    file.report("later", [(engine, Vitals("unknown"))], 100.0 + EVERY_SECONDS / 2)
    file.report("end", [], 200.0)
    found = actors.read(tmp_path)
    assert found and [each.state for each in found.actors] == ["running", "starting"]
    assert found.stage == "start"


def test_nothing_is_written_to_a_folder_without_a_run(tmp_path: Path) -> None:
    ActorsFile(tmp_path).report("start", [], 100.0)
    assert list(tmp_path.iterdir()) == []
    assert actors.read(tmp_path) is None


def test_a_process_that_has_ended_is_gone(tmp_path: Path) -> None:
    mark(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watched = Watched("engine 0", "engine-0.log", identity=identify(child.pid))
    ActorsFile(tmp_path).report("start", [(watched, Vitals("running"))], 100.0)
    found = actors.read(tmp_path)
    assert found and found.as_json(time.time())[1]["state"] == "running"
    child.communicate(b"\n")
    assert found.as_json(time.time())[1]["state"] == "gone"
