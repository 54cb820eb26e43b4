"""Ports of a cluster that a run starts for itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
LISTENING = """
import json, sys
from pathlib import Path
import psutil
from rlsdk.config import check
from rlsdk.cluster.placement import ray_cluster

with ray_cluster(check(Path(sys.argv[1]), (), ())):
    import ray

    @ray.remote(num_cpus=0)
    def ports():
        return None

    ray.get(ports.remote())
    own = psutil.Process()
    found = [
        (process.name(), connection.laddr.ip)
        for process in (own, *own.children(recursive=True))
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
print(json.dumps(found))
"""


@pytest.mark.stack
def test_ray_on_one_machine_listens_on_loopback_alone() -> None:
    command = [sys.executable, "-c", LISTENING, str(CONFIG)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert {"gcs_server", "raylet"} <= {name for name, _ in found}
    assert {address.removeprefix("::ffff:") for _, address in found} == {"127.0.0.1"}
