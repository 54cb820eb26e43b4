"""Engines and learner take turns on a GPU: who gives memory back before whom."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from rlsdk.engines.weight_sync import deliver

IDS = np.arange(3)


class Engines:
    """One engine, which sleeps at first."""

    ranks = (0,)

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    async def all(self, method: str, *arguments: Any) -> dict[int, Any]:
        self.calls.append(f"engines {method}")
        return {0: np.zeros(2, np.float32)}

    async def call(self, rank: int, method: str, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        return ((await self.all(method))[rank],)


class Learner:
    """Sends one object, as over Ray's store."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def weights(self, version: int) -> Any:
        self.calls.append("learner weights")

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        return np.zeros(2, np.float32)

    def checksums(self) -> dict[str, str]:
        return {}


class Sleeps(Learner):
    def sleep(self) -> None:
        self.calls.append("learner sleep")


class Streams(Sleeps):
    streams = True

    def stream(self, engines: int, token_ids: np.ndarray, version: int | None = None) -> Any:
        from rlsdk.contracts import WeightStream

        self.calls.append("learner stream")
        return WeightStream(1, None, lambda: ("", np.zeros(2, np.float32)))


@pytest.mark.parametrize(
    ("kind", "order"),
    [
        (Learner, ["learner weights", "engines wake", "engines load_weights"]),
        (Sleeps, ["learner weights", "learner sleep", "engines wake", "engines load_weights"]),
        (Streams, ["learner sleep", "engines wake", "engines clock", "learner stream", "engines load_weights"]),
    ],
)
def test_the_learner_frees_memory_before_engines_take_theirs(kind: type[Learner], order: list[str]) -> None:
    calls: list[str] = []
    asyncio.run(deliver(Engines(calls), kind(calls), 1, IDS, wake=True))
    assert calls == order


def test_engines_on_other_devices_leave_the_learner_its_memory() -> None:
    calls: list[str] = []
    asyncio.run(deliver(Engines(calls), Sleeps(calls), 1, IDS, wake=False))
    assert calls == ["learner weights", "engines load_weights"]
