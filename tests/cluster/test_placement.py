"""How Ray is started for a run."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from rlsdk.cluster.placement import ray_cluster
from rlsdk.config.schema import PlacementSection

KEPT = "RAY_task_events_max_num_task_in_gcs"


def test_the_gcs_of_a_run_keeps_few_calls_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    kept: list[str] = []
    monkeypatch.setattr(ray, "init", lambda **_: kept.append(os.environ[KEPT]))
    monkeypatch.setattr(ray, "cluster_resources", dict)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv(KEPT, raising=False)
    plan: Any = SimpleNamespace(config=SimpleNamespace(placement=PlacementSection()))
    with ray_cluster(plan):
        pass
    monkeypatch.setenv(KEPT, "100000")
    with ray_cluster(plan):
        pass
    assert kept == ["2000", "100000"]
