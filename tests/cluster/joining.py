"""Train on a cluster of raylets that `ray start` started, one of which is drained; run by `test_joining.py`.

A program of its own, since Ray connects a process once and its token mode is one of the process. Prints JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import rlsdk
from rlsdk.cluster.placement import ray_cluster
from rlsdk.config import check
from rlsdk.errors import RlsdkError
from tests.cluster.raylets import RAY, Raylets, raylets
from tests.run.conftest import CONFIG

MODEL = Path(__file__).parents[2] / "examples" / "models" / "countdown-nano"


def refused(config: dict[str, Any]) -> str:
    """What is said instead of joining."""
    try:
        with ray_cluster(check(config, (), ())):
            return ""
    except RlsdkError as error:
        return str(error)


def lab(folder: Path) -> dict[str, str]:
    """Install a plugin in a folder, which only the driver and the first node have on their path."""
    (folder / "site" / "rlsdk_lab-0.3.dist-info").mkdir(parents=True)
    (folder / "site" / "rlsdk_lab.py").write_text("import rlsdk\n")
    info = folder / "site" / "rlsdk_lab-0.3.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlsdk-lab\nVersion: 0.3\n")
    (info / "entry_points.txt").write_text("[rlsdk.v1]\nlab = rlsdk_lab\n")
    sys.path.insert(0, str(folder / "site"))
    return {"PYTHONPATH": os.pathsep.join([str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])}


def drain_after_two_steps(cluster: Raylets, run: Path, found: dict[str, Any]) -> None:
    """Drain the node of the only engine, and note where it was and is."""
    while not ((run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").read_text().count("\n") >= 2):
        time.sleep(0.1)
    import ray

    engine = ray.get_actor("engine-0")
    found["before"] = ray.get(engine.identity.remote()).node
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    command = [RAY, "drain-node", "--address", cluster.address, "--node-id", found["before"], *why]
    tokens = {"RAY_AUTH_MODE": "token"}
    subprocess.run([*command, "--deadline-remaining-seconds", "600"], env=cluster.environment | tokens, check=True)
    end = time.monotonic() + 120
    while time.monotonic() < end and "after" not in found and ray.is_initialized():
        try:
            found["after"] = ray.get(ray.get_actor("engine-0-life-2").identity.remote()).node
        except (ValueError, ray.exceptions.RayError):
            time.sleep(0.2)
    seen = (run / "metrics.jsonl").read_text().count("\n")
    while (run / "metrics.jsonl").read_text().count("\n") < seen + 2:  # the run goes on with the other engine
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)


def main(folder: Path) -> None:
    """Join with and without token, without a plugin and with it, and train while a node is drained."""
    config = CONFIG | {
        "out": str(folder / "runs"),
        "model": {"path": str(MODEL), "max_length": 32},
        "engine": "transformers",
        "steps": 5000,
        "learner": {"use": "deepspeed", "lr": 1.0e-6},
        "max_empty_steps": None,
        "eval": {"before": False, "after": False},
        "rollout": {"max_staleness": 1},
    }
    found: dict[str, Any] = {}
    with raylets(folder) as cluster:
        path = lab(folder)
        cluster.head(resources={"desk": 1, "room": 1}, **path)
        os.environ |= {"HOME": str(folder / "nobody"), "RAY_TMPDIR": str(folder)}
        os.environ.pop("RAY_AUTH_MODE", None)
        place = {
            "engine_threads": 1,
            "learner_threads": 1,
            "ray": cluster.address,
            "engine_resources": {"room": 1},
            "learner_resources": {"desk": 1},
            "runtime_env": {"env_vars": {"LAB_COLOUR": "red"}},
        }
        config["placement"] = place
        found["no_token"] = refused(config)
        os.environ["HOME"] = cluster.environment["HOME"]
        cluster.join({"room": 1})
        found["no_plugin"] = refused(config | {"plugins": ["lab"]})
        watch = threading.Thread(
            target=drain_after_two_steps, args=(cluster, folder / "runs" / "run", found), daemon=True
        )
        watch.start()
        summary = rlsdk.train(config)
        found |= {"status": summary["status"], "steps": summary["steps"], "engines": summary["engines"]}
        found["tasks"] = summary["tasks"]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
