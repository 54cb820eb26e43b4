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
from rlsdk.cluster import setup_worker
from rlsdk.cluster.gpus import GPUSeat
from rlsdk.cluster.placement import Layout, no_room, ray_cluster
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


CONFIG = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
STARTED = """
import json, os, signal, sys
from pathlib import Path
import psutil
from rlsdk.config import check
from rlsdk.cluster.placement import ray_cluster
from rlsdk.isolation.process import sigterm_as_interrupt
from ray._private.state import GlobalState

os.environ["BASE"] = "before"
asked, get_node = [], GlobalState.get_node

def recorded(self, node_id):
    asked.append(node_id in [node["NodeID"] for node in self.node_table()])
    return get_node(self, node_id)

GlobalState.get_node = recorded
handling = sigterm_as_interrupt()
handling.__enter__()
with ray_cluster(check(Path(sys.argv[1]), (), ())):
    import ray

    @ray.remote(num_cpus=0)
    def variables():
        return [os.environ.get(name) for name in ("OWN", "ADDED", "UNSET")]

    environment = {"env_vars": {"OWN": "a b'c", "ADDED": "${BASE}:after", "UNSET": "${NOBODY_SET_IT}."}}
    found = ray.get(variables.options(runtime_env=environment).remote())
    children = psutil.Process().children(recursive=True)
    commands = [" ".join(child.cmdline()) for child in children]
_, left = psutil.wait_procs(children, timeout=20)
print(json.dumps([found, commands, [str(process) for process in left], asked]))
try:
    signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    print("interrupted")
"""
SERVICES = {"dashboard.py", "agent.py", "monitor.py", "log_monitor.py"}


@pytest.mark.stack
def test_ray_starts_without_services_that_no_run_uses() -> None:
    command = [sys.executable, "-c", STARTED, str(CONFIG)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    *_, told, after = ran.stdout.splitlines()
    assert after == "interrupted"  # by SIGTERM, which Ray's end leaves to the program
    found, commands, left, asked = json.loads(told)
    assert found == ["a b'c", "before:after", "."]
    programs = {command.split(" ")[0].rpartition("/")[2] for command in commands}
    assert {"gcs_server", "raylet"} <= programs
    scripts = [next((word for word in command.split(" ") if word.endswith(".py")), "") for command in commands]
    assert not SERVICES & {script.rpartition("/")[2] for script in scripts}
    assert left == []
    assert asked and all(asked)  # before the raylet has registered, Ray would look again after a second


def run_setup(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, setup_worker.__file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_worker_gets_its_variables_its_python_and_its_arguments(tmp_path: Path) -> None:
    shown = tmp_path / "worker.py"
    shown.write_text("import os, sys; print(os.environ['OWN'], sys.flags.isolated, *sys.argv[1:], sep='|')")
    context = {"env_vars": {"OWN": "a ${HOME}"}, "py_executable": f"{sys.executable} -I"}
    given = ("--language=PYTHON", f"--serialized-runtime-env-context={json.dumps(context)}")
    ran = run_setup(str(shown), "--port=1", "two words", *given)
    assert ran.stdout.strip() == f"a {os.environ['HOME']}|1|--port=1|two words", ran.stderr


def test_what_a_run_does_not_use_is_left_to_ray(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside.py", tmp_path / "outside.py"
    inside.write_text("print('inside')")
    outside.write_text("print('outside')")
    context = json.dumps({"override_worker_entrypoint": str(inside)})  # as Ray has it for a container
    ran = run_setup(str(outside), "--language=PYTHON", f"--serialized-runtime-env-context={context}")
    assert ran.stdout.strip() == "inside", ran.stderr
