"""Weights from real learner ranks to real engine actors, by each transfer: equal bits, also if an actor dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlsdk
from rlsdk.contracts import ActorSpec, LossSpec, Model, Roles, TrainBatch, Weights
from rlsdk.engines.canary import Canary
from rlsdk.engines.client import EngineClient
from rlsdk.engines.group import EngineGroup, RestartPolicy
from rlsdk.engines.starting import launch
from rlsdk.errors import CanaryError
from rlsdk.learners.group import LearnerGroup
from rlsdk.plugins import Plugins
from rlsdk.weights import checksums, joined

pytestmark = pytest.mark.stack
LAYERS, VALUES = 24, 2**16
WRONG, LONG = 99, 98
"""Steps whose update leaves the learner with logprobs that are not those of its weights, or waits for a file."""
STREAM = {"bucket_mib": 1, "timeout": 30}
WAYS = {"object_store": {}, "gloo": STREAM, "shared_memory": STREAM}
STREAMED = ["gloo", "shared_memory"]


def layer(index: int, version: int) -> Weights:
    array = np.random.default_rng([index, version]).random(VALUES, np.float32)
    return Weights(version, {f"layers.{index}.weight": array}, {f"layers.{index}.weight": "float32"})


def logprobs_of(tensors: Any, count: int) -> np.ndarray:
    """Depends on each tensor."""
    return np.full(count, np.sum([array[:8].mean() for array in tensors.values()]), np.float32)


@rlsdk.learner("counting")
class Counting:
    """Its weights are random numbers, other ones after each update; two ranks gather each layer together."""

    def environment(self, place: ActorSpec) -> dict[str, str]:
        return {}

    def start(self, roles: Roles, loss: LossSpec, place: ActorSpec, total_updates: int) -> None:
        self.rank, self.updates, self.error = place.rank, 0, 0.0
        self.ends = Path(roles.main.path) / "update ends"

    def weights(self, version: int) -> Weights | None:
        return joined(self.weight_parts(version))

    def weight_parts(self, version: int) -> Iterator[Weights | None]:
        for index in range(LAYERS):
            part = layer(index, self.updates)
            yield None if self.rank else Weights(version, part.tensors, part.dtypes)

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        tensors = {name: a for i in range(LAYERS) for name, a in layer(i, self.updates).tensors.items()}
        return logprobs_of(tensors, len(token_ids) - 1) + self.error

    def update(self, minibatches: Sequence[Any], step: int) -> dict[str, float]:
        time.sleep(0.5)
        while step == LONG and not self.ends.exists():
            time.sleep(0.05)
        self.updates += 1
        self.error = float(step == WRONG)
        return {}


@rlsdk.engine("whole")
class Whole:
    """Keeps the weights that it is given, and is killed in the middle where its model's path says so."""

    def environment(self, place: ActorSpec) -> dict[str, str]:
        return {}

    def start(self, model: Model, place: ActorSpec) -> None:
        self.dies_at, self.dies_sending = (-1, True) if model.path == "sending" else (int(model.path or -1), False)
        self.held: dict[str, np.ndarray] = {}
        self.unfinished, self.version, self.loads = 0, -1, 0

    def load_weights(self, weights: Weights) -> None:
        self.take(weights.version, iter((weights,)))

    def take(self, version: int, parts: Iterator[Weights]) -> None:
        for count, part in enumerate(parts):
            if version == self.dies_at and (count == 3 or len(part.tensors) == LAYERS):
                os.kill(os.getpid(), signal.SIGKILL)
            self.held |= {name: array.copy() for name, array in part.tensors.items()}
        self.version = version
        self.loads += 1

    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        return logprobs_of(self.held, len(token_ids) - 1)


@rlsdk.engine("keeping")
class Keeping(Whole):
    """Takes them part by part."""

    def load_weight_parts(self, version: int, parts: Iterator[Weights]) -> None:
        self.take(version, parts)


@rlsdk.engine("copying")
class Copying(Keeping):
    """Copies those of another one, which may be killed while it sends them."""

    def weight_layout(self) -> str:
        return "layers"

    def held_weights(self) -> Iterator[Weights]:
        import torch

        for count, (name, array) in enumerate(self.held.items()):
            if self.dies_sending and count == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield Weights(self.version, {name: torch.from_numpy(array)}, {name: "float32"})

    def copy_weights(self, version: int, parts: Iterator[Weights]) -> None:
        self.take(version, parts)


class Stand:
    """Two engines, and a learner of two ranks."""

    def __init__(
        self, python: Mapping[str, str], way: str, folder: Path, dies_at: str = "", engine: type = Keeping
    ) -> None:
        import ray

        self.python = python
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        plugins = Plugins()
        self.way, self.dies_at = plugins.reference("weight_transfer", way, WAYS[way]), dies_at
        self.engine = plugins.reference("engine", engine)
        loss, place = plugins.reference("policy_loss", "reinforce"), ActorSpec(role="learner", world_size=2)
        self.learner = LearnerGroup.launch(
            plugins.reference("learner", Counting),
            Roles(actor=Model(path=str(folder))),
            LossSpec(policy_loss=loss),
            place,
            total_updates=9,
            cpus=0,
            log_dir=folder,
            transfer=self.way,
            python=python.get("learner", ""),
        )
        started = [self.start(rank, 0) for rank in range(2)]
        ray.get([ready for _, ready in started])
        actors = [actor for actor, _ in started]
        client = EngineClient(actors, lambda ids: ["x" for _ in ids])
        restarts = RestartPolicy(client=client, start=self.restart, most=3)
        self.engines, self.canary = EngineGroup(actors, shared=False, restarts=restarts), Canary(np.arange(3), 1e-6)

    async def restart(self, rank: int, incarnation: int) -> tuple[Any, Any]:
        return self.start(rank, incarnation)

    def start(self, rank: int, incarnation: int) -> tuple[Any, Any]:
        place = ActorSpec(role="engine", rank=rank)
        actor = launch(self.engine, place, cpus=0, transfer=self.way, python=self.python.get("engine", ""))
        return actor, actor.start.remote(Model(path="" if incarnation or not rank else self.dies_at), place)

    async def publish(self, version: int, *, updated: bool = True) -> float:
        async with asyncio.timeout(50):
            return await self.engines.publish(self.learner, version, self.canary, updated=updated)

    async def update(self, step: int) -> None:
        one, none = np.ones(1, np.int64), np.zeros(0, np.int64)
        batch = TrainBatch(
            token_ids=np.zeros(2, np.int64), lengths=one * 2, starts=one, responses=one, loss_mask=one > 0
        )
        await asyncio.to_thread(self.learner.update, batch, [none], step)

    async def until(self, alive: int) -> None:
        async with asyncio.timeout(50):
            while self.engines.metrics()["engines/alive"] != alive:
                await self.engines.all("clock")  # notices who died
                await asyncio.sleep(0.05)

    async def kill(self, rank: int) -> None:
        pid = await self.engines._actors[rank].__ray_call__.remote(lambda _: os.getpid())
        os.kill(pid, signal.SIGKILL)

    async def held(self) -> dict[int, tuple[int, int, dict[str, str]]]:
        """Of each engine: version, loads and checksums of its weights."""
        return {
            rank: await actor.__ray_call__.remote(
                lambda owner: (
                    owner._engine.version,
                    owner._engine.loads,
                    checksums(Weights(0, owner._engine.held, {})),
                )
            )
            for rank, actor in self.engines._actors.items()
        }

    def close(self) -> None:
        from rlsdk.cluster.actors import kill

        self.engines.close()
        self.learner.stop()
        for actor in self.engines._actors.values():
            kill(actor)


def expected(updates: int) -> dict[str, str]:
    return {name: s for i in range(LAYERS) for name, s in checksums(layer(i, updates)).items()}


@pytest.fixture
def stand(request: pytest.FixtureRequest, cluster: None, python: Mapping[str, str], tmp_path: Path) -> Iterator[Stand]:
    found = Stand(python, *request.param[:1], tmp_path, *request.param[1:])
    yield found
    found.close()


@pytest.mark.parametrize("stand", [(way,) for way in WAYS], indirect=True, ids=WAYS)
def test_all_engines_get_the_same_bits_and_one_that_was_killed_comes_back_with_them(stand: Stand) -> None:
    async def go() -> None:
        assert await stand.publish(0, updated=False) == 0
        assert await stand.held() == {rank: (0, 1, expected(0)) for rank in range(2)}
        await stand.update(0)
        assert await stand.publish(1) == 0
        assert await stand.held() == {rank: (1, 2, expected(1)) for rank in range(2)}

        await stand.kill(0)  # unnoticed until the next sync
        await stand.update(1)
        assert await stand.publish(2) == 0
        await stand.until(2)
        assert await stand.held() == {1: (2, 3, expected(2)), 0: (2, 1, expected(2))}
        assert len(stand.engines.lost) == 1

    asyncio.run(go())


@pytest.mark.parametrize(
    "stand",
    [pytest.param((way, "1"), id=way, marks=[] if way == "gloo" else pytest.mark.slow) for way in WAYS],
    indirect=True,
)
def test_one_that_dies_while_it_loads_keeps_neither_the_learner_nor_the_others(stand: Stand) -> None:
    async def go() -> None:
        await stand.publish(0, updated=False)
        await stand.update(0)
        assert await stand.publish(1) == 0  # of a stream that broke off: from the object store
        await stand.until(2)
        found = await stand.held()
        assert {rank: (version, sums) for rank, (version, _, sums) in found.items()} == {
            rank: (1, expected(1)) for rank in range(2)
        }
        await stand.update(1)
        assert await stand.publish(2) == 0  # and the next sync goes its way as before
        assert {(version, loads) for version, loads, _ in (await stand.held()).values()} == {(2, 3), (2, 2)}
        assert not stand.learner.ended

    asyncio.run(go())


@pytest.mark.parametrize("stand", [("gloo",)], indirect=True)
def test_a_replaced_engine_gets_the_learners_current_weights(stand: Stand) -> None:
    async def go() -> None:
        await stand.publish(0, updated=False)
        await stand.kill(1)
        updating = asyncio.create_task(stand.update(0))
        await stand.until(1)
        await updating
        await stand.until(2)
        assert await stand.held() == {0: (0, 1, expected(0)), 1: (1, 1, expected(1))}
        assert await stand.publish(1) == 0  # nothing new for it, which is no sync without effect
        assert await stand.held() == {0: (1, 2, expected(1)), 1: (1, 2, expected(1))}

    asyncio.run(go())


@pytest.mark.parametrize("stand", [(way, "", Copying) for way in STREAMED], indirect=True, ids=STREAMED)
def test_a_replaced_engine_gets_the_others_weights_while_the_learner_trains(stand: Stand, tmp_path: Path) -> None:
    async def go() -> None:
        await stand.publish(0, updated=False)
        await stand.update(0)
        await stand.publish(1)
        updating = asyncio.create_task(stand.update(LONG))
        await stand.kill(0)
        await stand.until(1)
        await stand.until(2)
        assert not updating.done()
        assert await stand.held() == {0: (1, 1, expected(1)), 1: (1, 2, expected(1))}
        (tmp_path / "update ends").touch()
        await updating
        assert await stand.publish(2) == 0
        assert await stand.held() == {0: (2, 2, expected(2)), 1: (2, 3, expected(2))}
        assert len(stand.engines.lost) == 1

    asyncio.run(go())


@pytest.mark.slow
@pytest.mark.parametrize("stand", [("gloo", "sending", Copying)], indirect=True)
def test_an_engine_whose_peer_is_killed_while_it_sends_gets_the_learners_weights(
    stand: Stand, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        await stand.publish(0, updated=False)
        await stand.kill(0)
        async with asyncio.timeout(50):
            while len(stand.engines.lost) < 2:
                await stand.engines.all("clock")
                await asyncio.sleep(0.05)
        await stand.until(2)  # engine 0 from the learner, then engine 1 from engine 0
        held = await stand.held()
        assert {rank: (version, sums) for rank, (version, _, sums) in held.items()} == {
            rank: (0, expected(0)) for rank in range(2)
        }
        assert len(stand.engines.lost) == 2
        assert "engine 0 gets the weights of the learner instead of engine 1's: " in caplog.text
        await stand.update(0)
        assert await stand.publish(1) == 0

    caplog.set_level("INFO")
    asyncio.run(go())
    assert "engine 1 has the weights of engine 0" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("stand", [("gloo", "", Whole)], indirect=True)
def test_an_engine_without_parts_gets_them_joined_and_a_disagreement_names_tensors(stand: Stand) -> None:
    async def go() -> None:
        await stand.publish(0, updated=False)
        assert await stand.held() == {rank: (0, 1, expected(0)) for rank in range(2)}
        await stand.update(WRONG)
        with pytest.raises(CanaryError, match=f"checksums of {LAYERS} tensors as sent and received: {LAYERS} equal"):
            await stand.publish(1)

    asyncio.run(go())
