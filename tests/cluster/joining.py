"""Train on a cluster of raylets started by `ray start`; run by `test_joining.py`.

A program of its own, since Ray connects a process once and its token mode is one of the process. Prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import rlsdk
from rlsdk.cluster.placement import ray_cluster
from rlsdk.config import check
from rlsdk.errors import RlsdkError
from tests.cluster.raylets import raylets
from tests.run.conftest import CONFIG

MODEL = Path(__file__).parents[2] / "examples" / "models" / "countdown-nano"


def refused(config: dict[str, Any]) -> str:
    """Message of the error instead of joining."""
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


def main(folder: Path) -> None:
    """Join with and without token, without a plugin and with it, and train."""
    config = CONFIG | {
        "out": str(folder / "runs"),
        "model": {"path": str(MODEL), "max_length": 32},
        "engine": "transformers",
        "steps": 3,
        "eval": {"before": False, "after": False},
        "rollout": {"max_staleness": 1},
    }
    found: dict[str, Any] = {}
    with raylets(folder) as cluster:
        path = lab(folder)
        cluster.head(resources={"desk": 1}, **path)
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
        summary = rlsdk.train(config)
        found |= {"status": summary["status"], "steps": summary["steps"], "engines": summary["engines"]}
        found["tasks"] = summary["tasks"]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
