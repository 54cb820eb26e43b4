"""The manifests for KubeRay: valid fields (ray.io/v1), and valid commands of rlsdk."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from rlsdk.cli import root
from rlsdk.cluster.placement import VARIABLES
from rlsdk.config import check

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "cluster"
CLUSTER = {"rayVersion", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling", "autoscalerOptions"}
HEAD = {"rayStartParams", "template", "serviceType"}
WORKERS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template", "numOfHosts"}
JOB = {
    *("entrypoint", "rayClusterSpec", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit"),
    *("submissionMode", "runtimeEnvYAML", "activeDeadlineSeconds", "jobId", "metadata", "suspend"),
}
POD = {"containers", "volumes", "terminationGracePeriodSeconds", "nodeSelector", "tolerations"}
CONTAINER = {"name", "image", "env", "ports", "resources", "volumeMounts", "lifecycle"}


def manifest(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    assert found["apiVersion"] == "ray.io/v1" and found["metadata"]["name"]
    return found


def cluster_spec(name: str) -> dict[str, Any]:
    spec: dict[str, Any] = manifest(name)["spec"]
    return spec["rayClusterSpec"] if name == "rayjob.yaml" else spec


def groups(name: str) -> list[dict[str, Any]]:
    spec = cluster_spec(name)
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


@pytest.mark.parametrize("name", ["rayjob.yaml", "raycluster.yaml"])
def test_a_manifest_has_only_fields_of_the_definition(name: str) -> None:
    spec = cluster_spec(name)
    assert set(spec) <= CLUSTER and {"headGroupSpec", "workerGroupSpecs"} <= set(spec)
    assert set(spec["headGroupSpec"]) <= HEAD
    assert all(set(group) <= WORKERS for group in spec["workerGroupSpecs"])
    for group in groups(name):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())  # a map of texts
        pod = group["template"]["spec"]
        assert set(pod) <= POD
        [container] = pod["containers"]
        assert set(container) <= CONTAINER
        assert all(isinstance(variable["value"], str) for variable in container["env"])
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert container["resources"]["limits"] == container["resources"]["requests"]  # Ray counts the limits


@pytest.mark.parametrize("name", ["rayjob.yaml", "raycluster.yaml"])
def test_ray_has_the_version_that_rlsdk_requires(name: str) -> None:
    from importlib.metadata import version

    assert cluster_spec(name)["rayVersion"].rpartition(".")[0] == version("ray").rpartition(".")[0]


def test_the_job_trains_on_all_gpus_of_its_cluster_and_both_manifests_start_the_same_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = manifest("rayjob.yaml")["spec"]
    assert manifest("rayjob.yaml")["kind"] == "RayJob" and manifest("raycluster.yaml")["kind"] == "RayCluster"
    assert set(spec) <= JOB
    program, command, config, *rest = shlex.split(spec["entrypoint"])
    assert program == "rlsdk" and config == "/config/config.yaml"
    found = root.get_command(click.Context(root), command)
    assert found is not None
    monkeypatch.chdir(ROOT)
    given = found.make_context(command, [str(ROOT / "examples" / "quickstart.yaml"), *rest]).params
    plan = check(given["config"], given["settings"], ())
    assert given["resume"] is True and plan.config.out == "/runs"
    [workers] = spec["rayClusterSpec"]["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    gpus = workers["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert plan.config.placement.engines == plan.config.placement.learners == gpus
    assert any(mount["mountPath"] == "/runs" for mount in container["volumeMounts"])
    alone = cluster_spec("raycluster.yaml")["workerGroupSpecs"][0]
    assert {key: alone[key] for key in WORKERS - {"template"} if key in alone} == {
        key: workers[key] for key in WORKERS - {"template"} if key in workers
    }


@pytest.mark.parametrize(
    "page", ["examples/cluster/slurm.sh", "examples/cluster/raycluster.yaml", "docs/howto/cluster.md"]
)
def test_clusters_get_the_variables_of_a_ray_that_rlsdk_starts(page: str) -> None:
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    for name in (
        "RAY_worker_niceness",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
        "RAY_grpc_keepalive_timeout_ms",
        "RAY_grpc_client_keepalive_time_ms",
    ):
        assert f"{name}={VARIABLES[name]}" in text or f'{name}, value: "{VARIABLES[name]}"' in text, name
