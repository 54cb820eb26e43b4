"""How Ray is started for a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlsdk import preflight
from rlsdk.cluster.placement import Layout, no_room, ray_cluster
from rlsdk.cluster.reservation import GPUSeat
from rlsdk.config.schema import PlacementSection
from rlsdk.errors import RunError

KEPT = "RAY_task_events_max_num_task_in_gcs"


def of_placement() -> Any:
    return SimpleNamespace(config=SimpleNamespace(placement=PlacementSection()), apart={})


def test_engines_beyond_the_reserved_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    seats = tuple(GPUSeat(group=None, bundles=(i,), devices=(str(i),), node="a") for i in range(2))
    found = Layout("cuda", 1, 1, engines=seats)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "a", "Alive": True}])
    assert no_room(of_placement(), found, 1, 2) == ""
    assert no_room(of_placement(), found, 1, 3) == (
        "this run reserved GPUs for 2 engines when it started; for more, end it and resume it with placement.engines=3"
    )
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": "a", "Alive": False}])
    assert "is gone" in no_room(of_placement(), found, 1, 2)


def test_the_gcs_of_a_run_keeps_few_calls_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    kept: list[str] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # another test may have connected
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


@pytest.mark.parametrize("usable", [0, 1])
def test_gpus_that_torch_cannot_use_do_not_count(usable: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # another test may have connected
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 1.0})
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(preflight, "gpu_count", lambda: usable)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with ray_cluster(of_placement()) as gpus:
        assert gpus == usable


def test_a_failed_start_of_ray_is_reported_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    attempts = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # another test may have connected

    def refuse(**_: Any) -> None:
        attempts.append(1)
        raise RuntimeError("The current node timed out\nduring startup.")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    said = r"in 3 attempts \(load .*\); .*: The current node timed out during startup"
    with pytest.raises(RunError, match=said), ray_cluster(of_placement()):
        pass
    assert len(attempts) == 3


@pytest.mark.slow
@pytest.mark.stack
@pytest.mark.parametrize("fate", ["hang", "kill-gcs"])
def test_ray_with_a_hanging_raylet_or_a_killed_gcs_is_restarted(fate: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "tests.cluster.hanging_raylet", fate]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == "ended"
    assert "Trying again, 2 of 3" in ran.stderr


CONNECTED = """
import json, sys
from pathlib import Path
import ray
from rlsdk.cluster.placement import ray_cluster
from rlsdk.config import check
from rlsdk.errors import ConfigError

ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
ours = ray.get_runtime_context().gcs_address
with ray_cluster(check(Path(sys.argv[1]), (), ())):
    used = ray.get_runtime_context().gcs_address
try:
    with ray_cluster(check(Path(sys.argv[1]), ("placement.runtime_env={env_vars: {A: b}}",), ())):
        refused = ""
except ConfigError as error:
    refused = str(error)
kept = ray.is_initialized() and ray.get_runtime_context().gcs_address == ours
ray.shutdown()
given = {"env_vars": {"A": "b"}}
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=given)
with ray_cluster(check(Path(sys.argv[1]), ("placement.runtime_env={env_vars: {A: b}}",), ())):
    print(json.dumps([used == ours, kept, refused]))
"""


@pytest.mark.slow
@pytest.mark.stack
def test_a_connection_of_the_program_is_used_and_kept() -> None:
    command = [sys.executable, "-c", CONNECTED, str(Path(__file__).parents[2] / "examples" / "quickstart.yaml")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    used, kept, refused = json.loads(ran.stdout.splitlines()[-1])
    assert used and kept
    assert "connected to Ray before rlsdk did, without env_vars; remove `ray.init`" in refused
