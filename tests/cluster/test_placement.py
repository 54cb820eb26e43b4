"""How Ray is started for a run."""

from __future__ import annotations

import logging
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rlsdk.cluster.placement import ray_cluster
from rlsdk.config.schema import PlacementSection
from rlsdk.errors import RunError

KEPT = "RAY_task_events_max_num_task_in_gcs"


def of_placement() -> Any:
    return SimpleNamespace(config=SimpleNamespace(placement=PlacementSection()), apart={})


def test_the_gcs_of_a_run_keeps_few_calls_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    kept: list[str] = []
    monkeypatch.setattr(ray, "init", lambda **_: kept.append(os.environ[KEPT]))
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv(KEPT, raising=False)
    with ray_cluster(of_placement()):
        pass
    monkeypatch.setenv(KEPT, "100000")
    with ray_cluster(of_placement()):
        pass
    assert kept == ["2000", "100000"]


def test_ray_that_does_not_start_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    attempts = []

    def refuse(**_: Any) -> None:
        attempts.append(1)
        raise RuntimeError("The current node timed out\nduring startup.")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    said = r"in 3 attempts \(load .*\); .*: The current node timed out during startup"
    with pytest.raises(RunError, match=said), ray_cluster(of_placement()):
        pass
    assert len(attempts) == 3


def stop_the_first_raylet(before: set[int], stopped: list[psutil.Process]) -> None:
    """As on a machine so busy that the raylet is not scheduled."""
    until = time.monotonic() + 60
    while not stopped and time.monotonic() < until:
        for process in psutil.Process().children(recursive=True):
            if process.pid not in before and process.name() == "raylet":
                process.suspend()
                stopped.append(process)
                return
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.stack
def test_ray_whose_raylet_hangs_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    stopped: list[psutil.Process] = []
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    thread = threading.Thread(target=stop_the_first_raylet, args=(before, stopped))
    thread.start()
    with caplog.at_level(logging.WARNING, "rlsdk"), ray_cluster(of_placement()):
        thread.join()
        assert stopped and not (stopped[0].is_running() and stopped[0].status() != psutil.STATUS_ZOMBIE)
    assert "Trying again, 2 of 3" in caplog.text
