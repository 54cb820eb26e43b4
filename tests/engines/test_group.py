"""Engines that die are replaced while the run continues: real actors, killed as the kernel kills."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlsdk
from rlsdk.cluster.nodes import HAND_BACK_SECONDS, DrainingNode
from rlsdk.contracts import ActorSpec, Completion, Finish, LossSpec, Model, Request, Roles, Sampling, Weights
from rlsdk.engines import starting
from rlsdk.engines.canary import Canary
from rlsdk.engines.client import EngineClient, GenerateRequest
from rlsdk.engines.group import EngineGroup, RestartPolicy
from rlsdk.engines.starting import launch
from rlsdk.errors import CanaryError, EngineError, LearnerError
from rlsdk.learners.group import LearnerGroup
from rlsdk.plugins import Plugins

pytestmark = pytest.mark.stack
PROMPT = np.array([1, 2, 3])


@rlsdk.engine("walker")
class Walker:
    """Writes a token every hundredth of a second; its logprobs are the version of its weights."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[Request, list[int]]] = {}
        self.version, self.wrong, self.deaf, self.frail = 0, 0.0, False, False

    def environment(self, place: ActorSpec) -> dict[str, str]:
        return {}

    def start(self, model: Model, place: ActorSpec) -> None:
        if model.path == "broken":
            raise ValueError("the model is broken")
        if model.path == "slow":
            time.sleep(600)
        self.wrong = float(model.path == "wrong")
        self.deaf = model.path == "deaf"

    def add(self, requests: Sequence[Request]) -> None:
        self.running |= {request.id: (request, []) for request in requests}

    def step(self) -> list[Completion]:
        time.sleep(0.01)
        done = []
        for request, versions in list(self.running.values()):
            versions.append(self.version)
            if len(versions) == request.sampling.max_tokens:
                done += self._ended(request.id, "length")
        return done

    def _ended(self, name: str, finish: Finish) -> list[Completion]:
        request, versions = self.running.pop(name)
        zeros, many = np.zeros(len(versions), np.float32), np.array(versions)
        each: dict[str, Any] = {"token_ids": many, "logprobs": zeros, "versions": many, "finish": finish}
        return [Completion(request=name, index=i, **each) for i in range(request.n)]

    @property
    def unfinished(self) -> int:
        return len(self.running)

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        names = (
            [] if self.deaf else list(self.running) if ids is None else [name for name in ids if name in self.running]
        )
        return [each for name in names for each in self._ended(name, "abort")]

    def reseed(self, seed: int) -> None: ...

    def sleep(self) -> None:
        if self.frail:
            os.kill(os.getpid(), signal.SIGKILL)

    def wake(self) -> None: ...

    def load_weights(self, weights: Weights) -> None:
        self.version = weights.version

    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        return np.full(len(token_ids) - 1, self.version + self.wrong, np.float32)


class Learner:
    """Weights as engines get them."""

    version = 0

    def weights(self, version: int) -> Any:
        import ray

        self.version = version
        return ray.put(Weights(version, {}, {}))

    def canary(self, ids: np.ndarray) -> np.ndarray:
        return np.full(len(ids) - 1, self.version, np.float32)


@rlsdk.learner("unreadable")
class Unreadable:
    """Its rank 0 fails while its weights are read, and rank 1 waits for it, as in a collective call."""

    def environment(self, place: ActorSpec) -> dict[str, str]:
        return {}

    def start(self, roles: Roles, loss: LossSpec, place: ActorSpec, total_updates: int) -> None:
        self.rank = place.rank

    def weights(self, version: int) -> None:
        if self.rank == 0:
            raise RuntimeError("cannot be gathered")
        time.sleep(600)


class Stand:
    """Engines, the way to them, and how they come back: from the model `again`."""

    def __init__(self, count: int, most: int = 3, again: str = "") -> None:
        import ray

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        self.again, self.started = again, 0
        actors = [self.start(rank, 0)[0] for rank in range(count)]
        self.client = EngineClient(actors, lambda ids: ["x" for _ in ids])
        restarts = RestartPolicy(client=self.client, start=self.restart, most=most, missing=self.missing)
        self.engines = EngineGroup(actors, shared=False, restarts=restarts)
        self.learner, self.canary = Learner(), Canary(np.arange(3), 0.5)

    async def restart(self, rank: int, incarnation: int) -> tuple[Any, Any]:
        return self.start(rank, incarnation)

    def start(self, rank: int, incarnation: int) -> tuple[Any, Any]:
        self.started += 1
        actor = launch(Plugins().reference("engine", Walker), ActorSpec(role="engine", rank=rank), cpus=0)
        return actor, actor.start.remote(
            Model(path=self.again if incarnation else ""), ActorSpec(role="engine", rank=rank)
        )

    @staticmethod
    def missing(now: int, wanted: int) -> str:
        return "the test allows three" if wanted > 3 else ""

    async def publish(self, version: int) -> float:
        return await self.engines.publish(self.learner, version, self.canary, updated=version > 0)

    async def kill(self, *ranks: int) -> None:
        pids = [await self.engines._actors[rank].__ray_call__.remote(lambda _: os.getpid()) for rank in ranks]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    async def until(self, alive: int) -> None:
        async with asyncio.timeout(60):
            while self.engines.metrics()["engines/alive"] != alive:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.05)

    def ask(self, count: int, tokens: int) -> list[Any]:
        return [self.client.sample(GenerateRequest(f"g{i}", PROMPT, Sampling(max_tokens=tokens))) for i in range(count)]


@pytest.mark.slow
def test_requests_of_the_dead_are_sampled_again_and_who_takes_their_place_has_the_weights(cluster: None) -> None:
    async def go() -> None:
        stand = Stand(2)
        await stand.publish(0)
        await stand.publish(3)
        answers = stand.ask(4, 50)
        await asyncio.sleep(0.2)
        before = await stand.engines.clock()
        await stand.kill(0)
        done = await asyncio.gather(*answers)
        assert [len(answer.completion.token_ids) for answer in done] == [50] * 4
        after = await stand.engines.clock()
        assert after["engine"] >= before["engine"] and after["tokens"] >= before["tokens"]
        assert stand.engines.report()["lost"] == 1 and stand.engines.report()["sampled_again"] == 2
        assert "step 0: engine 0" in stand.engines.lost[0] and "something killed it" in stand.engines.lost[0]
        await stand.until(2)
        fresh = await asyncio.gather(*stand.ask(2, 3))
        assert sorted(answer.engine for answer in fresh) == [0, 1]
        assert all((answer.completion.versions == 3).all() for answer in fresh)
        assert (await stand.engines.clock())["tokens"] >= after["tokens"] + 6

        # Both at once, and weights that are sent meanwhile: what is asked waits until the first is back.
        await stand.kill(0, 1)
        waiting = stand.ask(2, 3)
        assert await stand.publish(4) == 0
        done = await asyncio.gather(*waiting)
        assert all((answer.completion.versions == 4).all() for answer in done)
        await stand.until(2)

        # Fewer: who leaves answers what it has, and is sent weights until then. More: who comes has the weights.
        before = await stand.engines.clock()
        last = stand.ask(4, 50)
        await asyncio.sleep(0.1)
        assert stand.engines.resize(1) == "" and stand.engines.alive == (0,)
        assert stand.engines.metrics()["engines/wanted"] == 1
        assert "other engines are still starting or being drained" in stand.engines.resize(2)
        assert await stand.publish(5) == 0
        done = await asyncio.gather(*last)
        assert sorted(answer.engine for answer in done) == [0, 0, 1, 1]
        assert {version for answer in done for version in answer.completion.versions} == {4, 5}
        while (refused := stand.engines.resize(4)).startswith("4 engines: other engines"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert refused == "4 engines: there is no room for 3 more: the test allows three"
        assert stand.engines.report()["lost"] == 3 and len(stand.engines) == 1
        assert stand.engines.resize(2) == ""
        await stand.until(2)
        [answer] = await asyncio.gather(
            stand.client.sample(GenerateRequest("g", PROMPT, Sampling(max_tokens=3), affinity=1))
        )
        assert answer.engine == 1 and (answer.completion.versions == 5).all()
        after = await stand.engines.clock()
        assert after["engine"] >= before["engine"] and after["tokens"] >= before["tokens"] + 200
        stand.engines.close()

    asyncio.run(go())


@pytest.mark.slow
def test_engines_on_a_draining_node_finish_or_hand_back_and_are_started_again_without_counting_as_dead(
    cluster: None,
) -> None:
    import ray

    async def go() -> None:
        here = ray.get_runtime_context().get_node_id()
        stand = Stand(2, again="deaf")
        await stand.publish(0)
        await stand.publish(1)
        await stand.engines.leave([DrainingNode("another", "a node")])
        assert stand.engines.alive == (0, 1)

        # Until when depends: the short answers are finished, the long ones handed back. New ones wait for an engine.
        short, long = stand.ask(2, 60), stand.ask(2, 6000)
        await asyncio.sleep(0.1)
        for _ in range(2):
            await stand.engines.leave([DrainingNode(here, "a node", time.time() + HAND_BACK_SECONDS + 3)])
        assert stand.engines.alive == ()
        waiting = stand.ask(2, 3)
        assert [len(answer.completion.token_ids) for answer in await asyncio.gather(*short)] == [60] * 2
        back = [answer.completion for answer in await asyncio.gather(*long)]
        assert [each.finish for each in back] == ["abort"] * 2
        assert all(60 < len(each.token_ids) < 1000 for each in back)
        assert all((answer.completion.versions == 1).all() for answer in await asyncio.gather(*waiting))
        await stand.until(2)
        assert stand.client.sampled_again == 0

        # Nobody says until when: all is finished.
        last = stand.ask(2, 60)
        await asyncio.sleep(0.1)
        await stand.engines.leave([DrainingNode(here, "a node")])
        assert [len(answer.completion.token_ids) for answer in await asyncio.gather(*last)] == [60] * 2
        await stand.until(2)
        assert stand.client.sampled_again == 0

        # What these engines, which do not follow when they are told to abort, do not hand back is sampled again.
        long = stand.ask(2, 900)
        await asyncio.sleep(0.1)
        await stand.engines.leave([DrainingNode(here, "a node", time.time() + HAND_BACK_SECONDS)])
        done = await asyncio.gather(*long)
        assert [len(answer.completion.token_ids) for answer in done] == [900] * 2
        assert stand.client.sampled_again == 2
        await stand.until(2)
        assert stand.engines.report()["lost"] == 0
        stand.engines.close()

    asyncio.run(go())


def test_an_engine_that_starts_on_a_draining_node_is_started_elsewhere_without_counting_as_dead(cluster: None) -> None:
    import ray

    async def go() -> None:
        here = ray.get_runtime_context().get_node_id()
        stand = Stand(1, most=1, again="slow")
        await stand.publish(2)
        await stand.kill(0)
        [waiting] = stand.ask(1, 3)
        async with asyncio.timeout(60):
            while stand.started < 2:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.05)
            stand.again = ""
            while stand.started < 3:
                await stand.engines.leave([DrainingNode(here, "a node")])
                await asyncio.sleep(0.05)
        assert ((await waiting).completion.versions == 2).all()
        assert stand.engines.report()["lost"] == 1
        stand.engines.close()

    asyncio.run(go())


@pytest.mark.slow
def test_a_replacement_that_ray_places_on_a_dead_node_is_no_further_death(cluster: None) -> None:
    from ray.core.generated.common_pb2 import ActorDiedErrorContext
    from ray.exceptions import ActorDiedError

    never_ran = ActorDiedError(
        ActorDiedErrorContext(actor_id=bytes(16), error_message="its node has died", never_started=True)
    )

    class Elsewhere(Stand):
        placed = 0

        async def restart(self, rank: int, incarnation: int) -> tuple[Any, Any]:
            self.placed += 1
            if self.placed < 4:
                raise never_ran
            return self.start(rank, incarnation)

    async def go() -> None:
        stand = Elsewhere(1, most=1)
        await stand.publish(2)
        await stand.kill(0)
        [answer] = await asyncio.gather(*stand.ask(1, 3))
        assert (answer.completion.versions == 2).all()
        assert stand.placed == 4 and stand.engines.report()["lost"] == 1
        stand.engines.close()

    asyncio.run(go())


def test_an_engine_that_waits_for_room_says_what_it_needs_and_what_ray_has(
    cluster: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(starting, "PATIENCE", 0.05)
    needs = {"CPU": 1.0, "sampling": 2.0}
    assert asyncio.run(starting.until_ready(3, asyncio.sleep(0.2, "ready"), needs)) == "ready"
    said = caplog.messages[0]
    assert said.startswith("engine 3 has not started yet; it needs CPU 1, sampling 2; free in Ray: CPU ")
    assert said.endswith(", sampling 0")


@pytest.mark.slow
def test_an_engine_that_dies_too_often_or_comes_back_otherwise_fails_the_run(cluster: None) -> None:
    async def go() -> None:
        wrong, broken, mortal = Stand(1, again="wrong"), Stand(1, again="broken"), Stand(2, most=0)
        await asyncio.gather(*(stand.publish(0) for stand in (wrong, broken, mortal)))
        await asyncio.gather(wrong.kill(0), broken.kill(0), mortal.kill(1))
        with pytest.raises(
            EngineError, match=r"(?s)engine 1 died 1 times; .*\n  step 0: engine 1: it crashed, or something killed it"
        ):
            await _calls(mortal)
        with pytest.raises(EngineError, match="engine 1 died 1 times"):  # the other lives, but the run has failed
            await mortal.ask(1, 3)[0]
        with pytest.raises(CanaryError, match="engine 0 and the learner disagree on 2 of 2 fixed tokens"):
            await _calls(wrong)
        with pytest.raises(EngineError, match="engine 0 failed in start: ValueError: the model is broken"):
            await _calls(broken)

    asyncio.run(go())


def test_a_learner_that_fails_while_its_weights_are_read_is_named_and_no_engine_is(
    cluster: None, tmp_path: Path
) -> None:
    async def go() -> None:
        plugins, place = Plugins(), ActorSpec(role="learner", world_size=2)
        reference, loss = plugins.reference("learner", Unreadable), plugins.reference("policy_loss", "reinforce")
        roles, spec = Roles(actor=Model(path="")), LossSpec(policy_loss=loss)
        learner = LearnerGroup.launch(reference, roles, spec, place, total_updates=1, cpus=0, log_dir=tmp_path)
        stand = Stand(1)
        with pytest.raises(LearnerError, match="learner rank 0 failed in weights of version 0: RuntimeError"):
            await stand.engines.publish(learner, 0, stand.canary, updated=False)
        stand.engines.close()

    asyncio.run(go())


async def _calls(stand: Stand) -> None:
    async with asyncio.timeout(60):
        while True:
            await stand.engines.all("clock")
            await asyncio.sleep(0.05)


@pytest.mark.slow
def test_an_engine_that_dies_while_the_learner_has_its_gpu_is_replaced_after_the_next_sync(cluster: None) -> None:
    def make_frail(owner: Any) -> None:
        owner._engine.frail = True

    async def go() -> None:
        stand = Stand(2)
        stand.engines.shared = True
        await stand.publish(0)
        await stand.engines._actors[1].__ray_call__.remote(make_frail)
        async with asyncio.timeout(60):
            for _ in range(2):  # a second sleep does not wait for an engine that waits for the sync
                await stand.engines.sleep()
        await asyncio.sleep(0.2)
        assert stand.engines.alive == (0,) and stand.started == 2
        assert await stand.publish(1) == 0
        await stand.until(2)
        fresh = await asyncio.gather(*stand.ask(2, 3))
        assert sorted(answer.engine for answer in fresh) == [0, 1]
        assert all((answer.completion.versions == 1).all() for answer in fresh)

    asyncio.run(go())
