"""Causes of a failed actor call: a death, or an exception in the actor's code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from ray import exceptions
from ray.core.generated.common_pb2 import ActorDiedErrorContext

from rlsdk.cluster.actors import (
    LONGEST,
    ActorFailures,
    RunActor,
    cause_of,
    described,
    died,
    last_words,
    never_ran,
    reason,
    spawn,
)
from rlsdk.errors import PluginError

RAY_SAYS = """The actor died unexpectedly before finishing this task.
\tclass_name: EngineActor
\tpid: 12
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. Some common causes include: (1) the process was killed by the OOM
killer"""


class LongDeath(exceptions.RayActorError):
    def __str__(self) -> str:
        return RAY_SAYS


def raised(error: Exception) -> exceptions.RayTaskError:
    """Raise an exception of an actor's code as Ray does."""
    return exceptions.RayTaskError("call", "Traceback", error).as_instanceof_cause()


def test_an_exception_of_the_code_is_not_a_death_and_is_named() -> None:
    error = raised(ValueError("no such number"))
    assert not died(error)
    assert isinstance(cause_of(error), ValueError)
    assert described(error) == "ValueError: no such number"


def test_what_the_code_raised_for_the_death_of_another_is_not_its_own_death() -> None:
    assert not died(raised(exceptions.ActorDiedError()))


@pytest.mark.parametrize("error", [exceptions.ActorDiedError(), exceptions.NodeDiedError("gone"), LongDeath()])
def test_a_death_is_reported_in_one_line(error: exceptions.RayError) -> None:
    assert died(error)
    assert cause_of(error) is error
    assert described(error) == f"its process died: {reason(error)}"
    assert "\n" not in described(error) and len(reason(error)) <= LONGEST


def test_the_reason_is_in_plain_words_or_the_line_that_says_because() -> None:
    assert reason(LongDeath()) == "it crashed, or something killed it"
    orphan = exceptions.RayActorError(
        error_msg="The actor is dead because its owner has died. Owner Id: 0200000fff Owner worker exit type: "
        "SYSTEM_ERROR Worker exit detail: Owner's worker process has crashed."
    )
    assert reason(orphan) == "the program that started it crashed, or something killed it"
    other = exceptions.RayActorError(
        error_msg="The actor died.\nThe actor is dead because its node has died.\nGood bye."
    )
    assert reason(other) == "The actor is dead because its node has died."


def death(words: str, never_started: bool) -> exceptions.ActorDiedError:
    """Return a death as Ray reports it to whoever calls the actor."""
    return exceptions.ActorDiedError(
        ActorDiedErrorContext(actor_id=bytes(16), error_message=words, never_started=never_started)
    )


NODE_DEATH = "The actor died because its node has died. Node Id: 2c67ca61"
NEVER_RAN = death(NODE_DEATH, never_started=True)


def test_an_actor_that_ray_placed_on_a_dead_node_never_ran() -> None:
    assert died(NEVER_RAN) and never_ran(NEVER_RAN)
    assert reason(NEVER_RAN) == NODE_DEATH


class Incomplete(RunActor):
    def __init__(self) -> None:
        raise PluginError("plugin 'lab' is not installed")


@pytest.mark.stack
def test_an_actor_that_cannot_be_created_is_described_in_one_line_with_its_machine(cluster: None) -> None:
    import ray

    with pytest.raises(exceptions.RayActorError) as failed:
        ray.get(spawn(Incomplete).identity.remote())
    where = ray.util.get_node_ip_address()
    assert described(failed.value) == (
        f"it could not be created on {where}: rlsdk.errors.PluginError: plugin 'lab' is not installed"
    )


@pytest.mark.stack
def test_an_actor_whose_class_cannot_be_imported_on_its_machine_is_described_by_the_exception_there(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setitem(sys.modules, "only_here", ModuleType("only_here"))
    monkeypatch.setattr(Incomplete, "__module__", "only_here")
    monkeypatch.setattr(sys.modules["only_here"], "Incomplete", Incomplete, raising=False)
    with pytest.raises(exceptions.RayActorError) as failed:
        ray.get(spawn(Incomplete).identity.remote())
    where = ray.util.get_node_ip_address()
    assert described(failed.value) == (
        f"it could not be created on {where}: ModuleNotFoundError: No module named 'only_here'"
    )


@pytest.mark.stack
def test_an_actor_whose_log_cannot_be_opened_works(cluster: None, tmp_path: Path) -> None:
    import ray

    (tmp_path / "logs").write_text("a file where a folder was")
    actor = spawn(RunActor, str(tmp_path / "logs" / "engine-0.log"))
    assert ray.get(actor.identity.remote()).pid
    ray.kill(actor)


@pytest.mark.stack
def test_an_actor_for_a_node_that_ray_no_longer_has_never_ran(cluster: None) -> None:
    import ray

    with pytest.raises(exceptions.RayError) as refused:
        ray.get(spawn(RunActor, node="5b3c61aa" * 7).identity.remote())
    assert never_ran(refused.value)


@pytest.mark.parametrize(
    "error",
    [
        death(NODE_DEATH, never_started=False),
        death("The actor is dead because its worker process has died.", never_started=True),
        raised(NEVER_RAN),
    ],
)
def test_an_actor_that_ran_or_failed_on_a_living_node_died(error: Exception) -> None:
    assert not never_ran(error)


def test_an_actor_that_ray_calls_unavailable_is_described_in_plain_words() -> None:
    error = exceptions.ActorUnavailableError(
        "The actor is temporarily unavailable: RpcError: RPC error: Socket closed rpc_code: 14", None
    )
    assert died(error)
    assert reason(error) == "it crashed, something killed it, or its machine cannot be reached any more"


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (b"first\nlast one\n\n", "last one"),
        (b"12%\rloading 100%\r", "loading 100%"),
        (b"x" * 5000, "x" * (LONGEST - 1) + "…"),
        (
            b"[c10d] recvValue failed\nException raised from recvBytes at U.hpp:784 (most recent call first):\n"
            b"frame #0: c10::Error(int) + 0x80 (0x7f in lib.so)\n<omitting python frames>\nframe #9: <unknown> + 1\n",
            "[c10d] recvValue failed",
        ),
        (b"\xff\xfe no text", "\ufffd\ufffd no text"),
        (b"", ""),
    ],
)
def test_the_last_words_of_an_actor_are_the_last_line_of_its_log(tmp_path: Path, written: bytes, words: str) -> None:
    (tmp_path / "engine-0.log").write_bytes(written)
    assert last_words(tmp_path / "engine-0.log") == words
    assert last_words(tmp_path / "engine-1.log") == ""


ENDED = """
import ray

from rlsdk.cluster.actors import kill, spawn

class Idle:
    pass

def start():
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)

start()
actor = spawn(Idle)
ray.shutdown()
kill(actor)
print("started by kill:", ray.is_initialized())
start()
kill(actor)
"""


@pytest.mark.slow
@pytest.mark.stack
def test_an_actor_that_ended_with_its_ray_is_killed_without_an_error() -> None:
    command = [sys.executable, "-c", ENDED]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (ran.returncode, ran.stdout) == (0, "started by kill: False\n"), ran.stderr


def test_deaths_are_reported_alike_for_every_role_and_counted_by_rank(tmp_path: Path) -> None:
    (tmp_path / "rollout-worker-1.log").write_text("starting\nout of paper\n")
    failures = ActorFailures("rollout worker", 1, tmp_path)
    first = failures.add(1, 3, LongDeath())
    assert first == "step 3: rollout worker 1: it crashed, or something killed it; its log ends with 'out of paper'"
    other = failures.add(0, 4, LongDeath())
    assert failures.too_many(1) == failures.too_many(0) == ""
    second = failures.add(1, 5, LongDeath())
    assert failures.too_many(1) == (
        "rollout worker 1 died 2 times; a run survives placement.engine_restarts=1. Its log is "
        f"logs/rollout-worker-1.log:\n  {first}\n  {second}"
    )
    failures.forget(1)
    assert failures.too_many(1) == "" and failures.sentences == [first, other, second]
