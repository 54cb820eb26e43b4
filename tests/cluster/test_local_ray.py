"""The Ray that a run starts for itself: its processes, and how these start workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlsdk.cluster import setup_worker

CONFIG = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
STARTED = """
import json, os, sys
from pathlib import Path
import psutil
from rlsdk.config import check
from rlsdk.cluster.placement import ray_cluster
from ray._private.state import GlobalState

os.environ["BASE"] = "before"
asked, get_node = [], GlobalState.get_node

def recorded(self, node_id):
    asked.append(node_id in [node["NodeID"] for node in self.node_table()])
    return get_node(self, node_id)

GlobalState.get_node = recorded
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
"""
SERVICES = {"dashboard.py", "agent.py", "monitor.py", "log_monitor.py"}


@pytest.mark.stack
def test_ray_starts_without_services_that_no_run_uses() -> None:
    command = [sys.executable, "-c", STARTED, str(CONFIG)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    found, commands, left, asked = json.loads(ran.stdout.splitlines()[-1])
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
