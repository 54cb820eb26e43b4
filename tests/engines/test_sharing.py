"""Engines and learner take turns on a GPU: who gives memory back before whom."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
from test_adapter import ADAPTER, random_adapter

from rlsdk.contracts import Model, WakesInParts, WeightStream
from rlsdk.engines.canary import Canary
from rlsdk.engines.transformers import Transformers
from rlsdk.engines.vllm import Vllm
from rlsdk.engines.weight_sync import LoadedWeights, deliver, deliver_late

IDS = np.arange(3)
LOGPROBS = np.zeros(2, np.float32)


class Engines:
    """Two engines, which sleep at first; engine 1 dies in the call `dies_in`, and is not replaced."""

    def __init__(self, calls: list[str], dies_in: str = "") -> None:
        self.calls, self.dies_in, self.ranks = calls, dies_in, (0, 1)

    async def all(self, method: str, *arguments: Any) -> dict[int, Any]:
        return {rank: each[0] for rank in self.ranks if (each := await self.call(rank, method, *arguments))}

    async def call(self, rank: int, method: str, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        if self.calls[-1:] != [f"engines {method}"]:
            self.calls.append(f"engines {method}")
        if rank == 1 and method == self.dies_in:
            self.ranks = (0,)
            return ()
        return (LOGPROBS if any(each is IDS for each in arguments) else None,)


class Learner:
    """Sends one object, as over Ray's store."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def weights(self, version: int) -> Any:
        self.calls.append("learner weights")

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        return LOGPROBS

    def checksums(self) -> dict[str, str]:
        return {}


class Sleeps(Learner):
    def sleep(self) -> None:
        self.calls.append("learner sleep")


class Streams(Sleeps):
    streams = True
    fault = ""

    def stream(self, engines: int, token_ids: np.ndarray, version: int | None = None) -> Any:
        self.calls.append("learner stream")
        return WeightStream(1, None, lambda: (self.fault, LOGPROBS))


class Breaks(Streams):
    """Its streams break off."""

    fault = "an engine has not connected"


BY_STORE = ["learner weights", "learner sleep", "engines wake_weights", "engines load_weights"]
BY_STREAM = ["learner sleep", "engines wake_weights", "engines clock", "learner stream", "engines load_weights"]
CACHE = ["learner sleep", "engines wake"]
ORDERS = {
    Learner: ["learner weights", "engines wake_weights", "engines load_weights", "engines wake"],
    Sleeps: [*BY_STORE, *CACHE],
    Streams: [*BY_STREAM, *CACHE],
    Breaks: [*BY_STREAM, "learner weights", "engines load_weights", *CACHE],
}


@pytest.mark.parametrize("kind", ORDERS)
def test_engines_take_back_their_cache_once_they_have_the_weights_and_the_learner_is_done(kind: type[Learner]) -> None:
    calls: list[str] = []
    found = asyncio.run(deliver(Engines(calls), kind(calls), 1, IDS, wake=True))
    assert calls == ORDERS[kind]
    assert all(found.seen[rank] is LOGPROBS for rank in (0, 1))  # only computed with the cache


@pytest.mark.parametrize("kind", [Sleeps, Streams, Breaks])
@pytest.mark.parametrize("dies_in", ["wake_weights", "load_weights", "wake"])
def test_an_engine_that_dies_between_the_two_parts_does_not_stop_the_others(kind: type[Learner], dies_in: str) -> None:
    calls: list[str] = []
    found = asyncio.run(deliver(Engines(calls, dies_in), kind(calls), 1, IDS, wake=True))
    assert calls == ORDERS[kind]
    assert list(found.seen) == [0] and found.seen[0] is LOGPROBS


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        (Sleeps, ["learner weights", "engines load_weights"]),
        (Streams, ["engines clock", "learner stream", "engines load_weights"]),
        (
            Breaks,
            ["engines clock", "learner stream", *["engines load_weights", "learner weights"], "engines load_weights"],
        ),
    ],
)
def test_engines_on_other_devices_leave_the_learner_its_memory(kind: type[Learner], order: list[str]) -> None:
    calls: list[str] = []
    found = asyncio.run(deliver(Engines(calls), kind(calls), 1, IDS, wake=False))
    assert calls == order
    assert all(found.seen[rank] is LOGPROBS for rank in (0, 1))  # computed as part of loading


def test_both_engines_wake_in_parts() -> None:
    assert isinstance(Vllm(), WakesInParts) and isinstance(Transformers(), WakesInParts)


CALLS = ("sleep", "wake_up", "rlsdk_load", "add_lora")


def turns(engine: Any, weights: Any) -> list[Any]:
    """Sleep, wake in parts and load; return the calls that vLLM's workers got, and what was still asleep after each."""
    executor = engine._llm.engine_core.engine_core.model_executor
    called, calls = executor.collective_rpc, []

    def record(method: Any, *arguments: Any, **options: Any) -> Any:
        found = called(method, *arguments, **options)
        if method in CALLS:
            calls.append((method, *(options["kwargs"].values() if method in ("sleep", "wake_up") else ())))
        return found

    executor.collective_rpc = record
    try:
        for turn in (engine.sleep, engine.wake_weights, lambda: engine.load_weights(weights), engine.wake):
            turn()
            calls.append(sorted(executor.sleeping_tags))
    finally:
        del executor.collective_rpc
    return calls


@pytest.fixture(scope="module", autouse=True)
def _bodies_travel_by_value() -> None:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.mark.stack
@pytest.mark.parametrize("which", ["vllm", pytest.param("parallel_vllm", marks=pytest.mark.slow)])
def test_vllm_loads_a_whole_model_before_it_has_its_cache(
    which: str, request: pytest.FixtureRequest, model: Model
) -> None:
    subject = request.getfixturevalue(f"{which}_engine")
    assert subject.run(turns, tiny.original(model)) == [
        ("sleep", 2),
        ["kv_cache", "weights"],
        ("wake_up", ["weights"]),
        ["kv_cache"],
        ("rlsdk_load",),
        ["kv_cache"],
        ("wake_up", ["kv_cache"]),
        [],
    ]


@pytest.mark.slow
@pytest.mark.stack
def test_vllm_keeps_a_base_model_and_loads_its_adapter_before_it_has_its_cache(
    launched: Callable[..., Any], tmp_path: Any, model: Model
) -> None:
    with launched(tmp_path, {"max_num_seqs": 8}, ADAPTER) as subject:
        calls = subject.run(turns, random_adapter(model, 1))
    assert calls == [
        ("sleep", 1),
        ["kv_cache", "weights"],
        ("wake_up", ["weights"]),
        ["kv_cache"],
        ("add_lora",),
        ["kv_cache"],
        ("wake_up", ["kv_cache"]),
        [],
    ]


def test_an_engine_that_starts_later_loads_the_object_of_the_others_such_as_an_adapter() -> None:
    calls: list[str] = []

    class Late:
        """A new engine's handle; its methods return coroutines, as an actor's return references."""

        def __getattr__(self, method: str) -> Any:
            async def remote(*arguments: Any, **options: Any) -> np.ndarray:
                calls.append(f"late {method} {arguments[0]}")
                return LOGPROBS

            return SimpleNamespace(remote=remote)

    canary = Canary(IDS, 1e-3)
    canary.check(3, LOGPROBS, {0: LOGPROBS}, updated=False)
    loaded = LoadedWeights(Streams(calls), canary, 3, "an adapter")
    asyncio.run(deliver_late(loaded, 1, Late(), Engines(calls)))
    assert calls == ["late load_weights an adapter"]
