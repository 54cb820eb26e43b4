"""Training on a cluster of several nodes on this machine, one of which dies."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from rlsdk.cli import root
from tests.cluster.draining_lab import drain
from tests.run.conftest import wait_for

pytestmark = [pytest.mark.stack, pytest.mark.slow]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A cluster, and its nodes: the driver's, two with room for an engine, one for the learner."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_worker_niceness", "0")  # or any other program of the machine starves the actors
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # A program that finds a token in the home folder would refuse the calls of a cluster that was started without.
    monkeypatch.setenv("RAY_AUTH_MODE", os.environ.get("RAY_AUTH_MODE", "disabled"))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        rooms = {"first": {"room": 1}, "second": {"room": 1}, "learners": {"desk": 2}}
        yield cluster, {name: cluster.add_node(num_cpus=2, resources=each) for name, each in rooms.items()}
    finally:
        cluster.shutdown()


def test_engine_and_learner_on_separate_nodes_and_the_engines_node_dies(nodes: Any, runner: Any) -> None:
    cluster, named = nodes
    places = ("placement.engine_resources={room: 1}", "placement.learner_resources={desk: 1}", "placement.learners=2")
    evals = ("eval.before=false", "eval.after=false")
    how = ("steps=8", "engine=transformers", "rollout.max_staleness=1", *evals, *places)
    process = runner.start(*how, env=os.environ | {"RAY_ADDRESS": cluster.address})
    try:
        path = runner.path() / "metrics.jsonl"
        wait_for(lambda: path.is_file() and path.read_text().count("\n") >= 2, 180, process)
        before = actors(cluster)
        [engine] = before["EngineActor"]
        assert before["LearnerActor"] == [named["learners"].node_id] * 2
        assert engine in (named["first"].node_id, named["second"].node_id)
        # There is room for one engine more, and not for three: the run says so, and goes on.
        assert rlsdk_engines(runner, "--count", "4")["asked"] == 4
        wait_for(lambda: (rlsdk_engines(runner)["state"] or {}).get("refused"), 60, process)
        said = rlsdk_engines(runner, "--count", "1")["state"]
        assert said["refused"] == "4 engines: there is no room for 3 more: Ray has free 1 of 3 room"
        assert said["wanted"] == 1 and said["alive"] == [0]
        [dies, lives] = sorted((named["first"], named["second"]), key=lambda node: node.node_id != engine)
        cluster.remove_node(dies, allow_graceful=False)
        wait_for(lambda: actors(cluster).get("EngineActor") == [lives.node_id], 120, process)
        assert process.wait(120) == 0, runner.console()
    finally:
        process.kill()
    metrics, summary = runner.metrics(), runner.summary()
    assert [line["step"] for line in metrics] == list(range(1, 9))
    assert all(line["canary/gap"] < 1e-3 for line in metrics)  # the weights came over
    assert summary["engines"]["lost"] == 1 and summary["tasks"]["issued"] == 8 * 4 + summary["tasks"]["returned"]
    assert any(line["actor/grad_norm"] > 0 for line in metrics if "actor/grad_norm" in line)
    end = time.monotonic() + 20
    while actors(cluster) and time.monotonic() < end:
        time.sleep(0.2)
    assert actors(cluster) == {}


def rlsdk_engines(runner: Any, *arguments: str) -> Any:
    found = CliRunner().invoke(root, ["engines", str(runner.path()), "--json", *arguments])
    assert found.exit_code == 0, found.output
    return json.loads(found.output)


def actors(cluster: Any) -> dict[str, list[str]]:
    """Class -> nodes of its actors that live, as Ray's state has it."""
    found: dict[str, list[str]] = {}
    for actor in cluster.global_state.actor_table(None).values():
        if actor["State"] == "ALIVE":
            found.setdefault(actor["ActorClassName"], []).append(actor["Address"]["NodeID"])
    return found


def test_nodes_are_drained_first_an_engines_then_the_learners(nodes: Any, runner: Any) -> None:
    cluster, named = nodes
    places = ("placement.engine_resources={room: 1}", "placement.learner_resources={desk: 1}", "rollout.workers=1")
    evals = ("eval.before=false", "eval.after=false")
    how = ("steps=300", "engine=transformers", "rollout.max_staleness=1", *evals, *places)
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    process = runner.start(*how, env=environment)
    try:
        path = runner.path() / "metrics.jsonl"
        wait_for(lambda: path.is_file() and path.read_text().count("\n") >= 2, 180, process)
        before = actors(cluster)
        [engine] = before["EngineActor"]
        assert before["RolloutWorkerActor"] == [engine]
        [stays] = {named["first"].node_id, named["second"].node_id} - {engine}
        drain(cluster, engine, time.time() + 60)
        wait_for(lambda: actors(cluster).get("EngineActor") == [stays], 120, process)
        driver = cluster.head_node.node_id  # the worker goes there, as no other engine has a node
        wait_for(lambda: actors(cluster).get("RolloutWorkerActor") == [driver], 120, process)
        steps = path.read_text().count("\n")
        wait_for(lambda: path.read_text().count("\n") >= steps + 2, 120, process)
        drain(cluster, named["learners"].node_id, time.time() + 120)
        assert process.wait(120) == 130, runner.console()
    finally:
        process.kill()
    summary, log = runner.summary(), (runner.path() / "logs" / "driver.log").read_text()
    for name in ("engine 0", "rollout worker 0"):
        assert re.search(rf"{name} is on [^\n]*{engine[:8]}", log)
    assert summary["status"] == "interrupted" and summary["steps"] < 300
    assert summary["engines"]["lost"] == summary["rollout_workers"]["lost"] == 0
    [warning] = [each for each in summary["warnings"] if "--resume" in each]
    assert warning.startswith("learner rank 0 is on ") and named["learners"].node_id[:8] in warning
    assert (runner.path() / "checkpoints" / f"step-{summary['steps']}").is_dir()
    cluster.add_node(num_cpus=2, resources={"desk": 2})  # both drained nodes are still there, and are not used
    last = summary["steps"] + 2
    process = runner.start(*how[1:], f"steps={last}", "--resume", env=environment)
    assert process.wait(180) == 0, runner.console()
    metrics, summary = runner.metrics(), runner.summary()
    assert [line["step"] for line in metrics] == list(range(1, last + 1))  # each step once
    assert summary["tasks"]["issued"] == last * 4 + summary["tasks"]["returned"] and not summary["tasks"]["failed"]
