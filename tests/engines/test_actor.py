"""The actor around an engine: streaming, concurrency, and failures that reach every waiting caller."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import psutil
import pytest
import torch
from ray.exceptions import ActorDiedError

import rlsdk
from rlsdk.cluster.actors import streamed
from rlsdk.contracts import ActorSpec, Completion, Model, Request, Sampled, Sampling, TopTokens, Weights
from rlsdk.engines.actor import Bundle, EngineActor, Progress
from rlsdk.engines.starting import engine_clocks, launch
from rlsdk.errors import EngineError, TransferError, ValueFault
from rlsdk.plugins import Plugins

PLACE = ActorSpec(role="engine", threads=1)
MODEL = Model(path="none")


@rlsdk.engine("scripted")
@attrs.define(kw_only=True, slots=False)
class Scripted:
    """Writes 1, 2, 3, … one token a step, and records its calls.

    Attributes:
        fail_at: Step that raises.
        limits: Seconds that a step takes.
    """

    fail_at: int = -1
    limits: float = 0.0

    steps: int = attrs.field(init=False, default=0)
    version: int = attrs.field(init=False, default=0)
    notes: list[Any] = attrs.field(init=False, factory=list)
    running: dict[str, Any] = attrs.field(init=False, factory=dict)

    def environment(self, place: ActorSpec) -> dict[str, str]:
        return {"SCRIPTED_THREADS": str(place.threads)}

    def start(self, model: Model, place: ActorSpec) -> None:
        self.notes.append("start")

    def add(self, requests: Sequence[Request]) -> None:
        if any(r.n < 1 for r in requests):
            raise ValueFault("n must be at least 1")
        self.running.update((r.id, [r, []]) for r in requests)

    def step(self) -> list[Completion]:
        time.sleep(self.limits)
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("the script says so")
        done = []
        for name, (request, versions) in list(self.running.items()):
            versions.append(self.version)
            if len(versions) >= request.sampling.max_tokens:
                del self.running[name]
                done += [self._completion(request, i, versions, "length") for i in range(request.n)]
        return done

    @staticmethod
    def _completion(request: Request, index: int, versions: list[int], finish: Any) -> Completion:
        tokens = np.arange(1, len(versions) + 1)
        logprobs = np.zeros(len(versions), dtype=np.float32)
        return Completion(
            request=request.id,
            index=index,
            token_ids=tokens,
            logprobs=logprobs,
            versions=np.array(versions, dtype=np.int64),
            finish=finish,
        )

    def sampled(self, since: Mapping[tuple[str, int], int]) -> list[Sampled]:
        self.notes.append("sampled")
        found = []
        for (name, index), start in since.items():
            versions = self.running.get(name, (None, []))[1]
            if len(versions) > start:
                made = self._completion(self.running[name][0], index, versions, "abort")
                arrays = {n: getattr(made, n)[start:] for n in ("token_ids", "logprobs", "versions")}
                found.append(Sampled(request=name, index=index, start=start, **arrays))
        return found

    @property
    def unfinished(self) -> int:
        return sum(r.n for r, _ in self.running.values())

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        names = list(self.running) if ids is None else [i for i in ids if i in self.running]
        self.notes.append(("abort", tuple(names)))
        taken = [self.running.pop(n) for n in names]
        return [self._completion(r, i, v, "abort") for r, v in taken for i in range(r.n)]

    def load_weights(self, weights: Weights) -> None:
        self.version = weights.version

    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        return np.zeros(len(token_ids) - 1, dtype=np.float32)

    def reseed(self, seed: int) -> None:
        self.notes.append(("reseed", seed))

    def sleep(self) -> None:
        self.notes.append("sleep")

    def wake(self) -> None:
        self.notes.append("wake")

    def stop(self) -> None:
        self.notes.append("stop")


def ask(name: str, length: int = 3, n: int = 1) -> Request:
    return Request(id=name, prompt_ids=np.array([1, 2]), sampling=Sampling(max_tokens=length), n=n)


def play(
    body: Callable[[EngineActor, Scripted], Awaitable[Any]], *, kind: type[Scripted] = Scripted, **options: Any
) -> Any:
    """Run `body` on an actor of the scripted engine, without Ray."""

    async def main() -> Any:
        actor = EngineActor(Plugins().reference("engine", kind, options))
        await actor.start(MODEL, PLACE)
        found = await asyncio.wait_for(body(actor, actor._engine), 20)
        await actor.stop()
        return found

    return asyncio.run(main())


async def collect(actor: EngineActor, *requests: Request) -> list[list[Completion]]:
    return [list(pickle.loads(part)) async for part in actor.generate(requests)]


async def reach(engine: Scripted, steps: int) -> None:
    while engine.steps < steps:  # noqa: ASYNC110 - the engine knows no events
        await asyncio.sleep(0)


def test_completions_come_in_few_messages() -> None:
    async def body(actor: EngineActor, engine: Scripted) -> None:
        parts = await collect(actor, *(ask(f"r{i}", length=1 + i, n=4) for i in range(50)))
        assert sum(map(len, parts)) == 200
        assert len(parts) <= 8
        clock = await actor.clock()
        assert clock["steps"] == 50
        assert clock["tokens"] == 4 * sum(range(1, 51))
        assert clock["prompt_tokens"] == 100
        assert 0.05 < clock["step_seconds"] < 10

    play(body, limits=0.001)


def test_an_early_completion_does_not_wait_for_a_late_one() -> None:
    async def body(actor: EngineActor, engine: Scripted) -> None:
        parts = await collect(actor, ask("short", 1), ask("long", 30))
        assert [[c.request for c in part] for part in parts] == [["short"], ["long"]]

    play(body, limits=0.005)


def test_a_request_that_streams_shows_its_tokens_before_its_completion() -> None:
    async def body(actor: EngineActor, engine: Scripted) -> None:
        shown: list[Sampled] = []
        done: list[Completion] = []
        watched = attrs.evolve(ask("a", 40, n=2), stream=True)
        async for part in actor.generate([watched, ask("b", 60)]):
            message = pickle.loads(part)
            (shown if isinstance(message, Progress) else done).extend(getattr(message, "sampled", message))
            assert not done or len(shown) > 2
        assert [c.request for c in done] == ["a", "a", "b"] and {s.request for s in shown} == {"a"}
        for index in (0, 1):
            ids = np.concatenate([s.token_ids for s in shown if s.index == index])
            assert ids.tolist() == list(range(1, len(ids) + 1))
        engine.notes.clear()
        await collect(actor, ask("c", 20))
        assert engine.notes == []  # nobody watches, nobody looks

    play(body, limits=0.002)


def test_likeliest_tokens_travel_with_their_completion() -> None:
    top = TopTokens(np.array([[1, 2], [3, 4]]), np.array([[-0.1, -2.0], [-0.2, -3.0]], np.float32))
    with_top, without = (
        attrs.evolve(Scripted._completion(ask("a"), i, [0, 0], "stop"), top=(top, None)[i]) for i in (0, 1)
    )
    found = pickle.loads(pickle.dumps(Bundle([with_top, without])))
    assert found[0].top.ids.tolist() == top.ids.tolist() and found[0].top.logprobs.tolist() == top.logprobs.tolist()
    assert found[1].top is None


def test_an_idle_actor_does_not_step() -> None:
    async def body(actor: EngineActor, engine: Scripted) -> None:
        await collect(actor, ask("a"))
        steps = engine.steps
        await asyncio.sleep(0.05)
        assert engine.steps == steps
        await collect(actor, ask("b"))
        assert engine.steps == steps + 3

    play(body)


def _loses_requests(engine: Scripted) -> list[Completion]:
    engine.running.clear()
    return []


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda engine: None, "Scripted returned NoneType from step or abort; expected a list of Completion"),
        (_loses_requests, "Scripted has no unfinished requests, but never returned the completions of 2 requests"),
    ],
)
def test_an_engine_whose_steps_return_no_completions_fails_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, step: Callable[[Scripted], Any], said: str
) -> None:
    monkeypatch.setattr(Scripted, "step", step)
    with pytest.raises(EngineError, match=f"the engine failed: {said}"):
        play(lambda actor, engine: collect(actor, ask("a"), ask("b")))


def test_a_server_hears_of_an_engine_that_answers_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def remote(call: Callable[[], Awaitable[Any]]) -> Any:
        return SimpleNamespace(health=SimpleNamespace(remote=call))

    async def dead() -> None:
        raise ActorDiedError

    async def body(actor: EngineActor, engine: Scripted) -> None:
        (clock,) = await engine_clocks([remote(actor.health)])
        assert clock == await actor.clock()
        with pytest.raises(EngineError, match=r"^engine 1 failed while serving: its process died: .*$"):
            await engine_clocks([remote(actor.health), remote(dead)])
        monkeypatch.setattr(Scripted, "step", lambda engine: None)
        with pytest.raises(EngineError):
            await collect(actor, ask("a"))
        with pytest.raises(
            EngineError, match=r"^engine 0 failed while serving: .*Scripted returned NoneType from step"
        ):
            await engine_clocks([remote(actor.health)])

    play(body)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logprobs": np.zeros(2, np.float32)}, r"logprobs of dtype float32 and shape \[2\] for 3 tokens; expected"),
        ({"versions": np.zeros(4, np.int64)}, r"versions of dtype int64 and shape \[4\] for 3 tokens; expected an arr"),
        ({"versions": np.zeros(3)}, "versions of dtype float64 .* expected an array of 3 integers"),
        ({"logprobs": [0.0] * 3}, "logprobs of type list for 3 tokens; expected an array of 3 floats"),
        ({"logprobs": None}, "logprobs of type NoneType for 3 tokens"),
        ({"token_ids": np.zeros(3)}, "token_ids of dtype float64 .*; expected an array of integers with one axis"),
        ({"token_ids": np.array([[1, 2, 3]])}, "token_ids of dtype int64 and shape"),
        ({"token_ids": np.array([1, -1, 1])}, "token id -1; expected ids from 0"),
        ({"logprobs": np.array([0, np.nan, 0], np.float32)}, "logprob nan for token 1; expected a finite logprob"),
        ({"logprobs": np.array([0, 0, -np.inf], np.float32)}, "logprob -inf for token 2; expected a finite logprob"),
        ({"versions": np.array([0, 1, 1])}, "version 1 for a token; expected the version .*, 0 to 0"),
        ({"versions": np.full(3, -1)}, "version -1 for a token"),
        ({"finish": "eos"}, "finish 'eos'; expected one of stop, length, abort"),
        ({"index": 2}, "index 2; expected 0 to 1, since n is 2"),
        ({"index": None}, "index None; expected 0 to 1, since n is 2"),
        ({"index": 0}, "index 0, which it had returned before; expected each continuation once"),
    ],
)
def test_a_faulty_completion_is_refused_with_what_was_expected(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    right = Scripted._completion
    wrong = staticmethod(lambda request, i, *rest: attrs.evolve(right(request, i, *rest), **(changes if i else {})))
    monkeypatch.setattr(Scripted, "_completion", wrong)
    said = f"the engine failed: Scripted returned a completion of request 'a' with {said}"
    with pytest.raises(EngineError, match=said) as caught:
        play(lambda actor, engine: collect(actor, ask("a", n=2)))
    assert str(caught.value).endswith(" (engine 'test_actor/scripted')")


def test_token_ids_that_the_model_does_not_have_are_refused_in_prompts_and_completions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 120}')

    async def run(actor: EngineActor, engine: Scripted) -> None:
        await actor.start(Model(path=str(tmp_path)), PLACE)
        for ids in ([5, 120], [-1, 5]):
            request = attrs.evolve(ask("a"), prompt_ids=np.array(ids))
            with pytest.raises(ValueFault, match=f"token ids from {min(ids)} to {max(ids)}; the model has 0 to 119"):
                await collect(actor, request)
        assert not engine.running
        await collect(actor, attrs.evolve(ask("a"), prompt_ids=np.array([5, 119])))
        right = Scripted._completion
        beyond = staticmethod(lambda *given: attrs.evolve(right(*given), token_ids=np.array([1, 120, 1])))
        monkeypatch.setattr(Scripted, "_completion", beyond)
        with pytest.raises(EngineError, match="completion of request 'a' with token id 120; the model has 0 to 119"):
            await collect(actor, ask("a"))

    play(run)


def test_an_engine_that_steps_on_without_a_completion_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsdk.engines.actor.SILENT_SECONDS", 0.05)
    monkeypatch.setattr(Scripted, "step", lambda engine: [])
    said = r"Scripted has returned no completion for 0 s, in \d+ steps; expected those of 3 requests"
    with pytest.raises(EngineError, match=said):
        play(lambda actor, engine: collect(actor, ask("a", 3, n=2), ask("b", 3)))


def test_an_engine_whose_requests_need_many_steps_has_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlsdk.engines.actor.SILENT_SECONDS", 0.0)

    async def body(actor: EngineActor, engine: Scripted) -> None:
        assert [len(part) for part in await collect(actor, ask("a", 2_000), ask("b", 2_000))] == [2]
        await collect(actor, ask("c", 1))  # steps of earlier requests do not count

    play(body)


def test_more_tokens_than_asked_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Scripted._completion
    monkeypatch.setattr(Scripted, "_completion", staticmethod(lambda r, i, v, f: right(r, i, [*v, 0], f)))
    with pytest.raises(EngineError, match="with 4 tokens; its request allows 3"):
        play(lambda actor, engine: collect(actor, ask("a")))


def test_something_else_among_completions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "step", lambda engine: [{"request": "a"}])
    with pytest.raises(EngineError, match="Scripted returned dict among its completions; expected Completion"):
        play(lambda actor, engine: collect(actor, ask("a")))


def test_a_fault_of_an_aborted_completion_reaches_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(actor: EngineActor, engine: Scripted) -> None:
        running = asyncio.create_task(collect(actor, ask("a", 10**9)))
        await reach(engine, 2)
        monkeypatch.setattr(Scripted, "abort", lambda engine, ids: None)
        with pytest.raises(EngineError, match="returned NoneType from step or abort"):
            await actor.abort(["a"])
        with pytest.raises(EngineError, match=r"the engine failed: .* from step or abort"):
            await running

    play(body)


def test_logprobs_of_another_length_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "logprobs", lambda engine, ids: np.zeros(len(ids), np.float32))
    said = r"Scripted.logprobs returned ndarray \[3\] for 3 tokens; expected an array \[2\]"
    with pytest.raises(EngineError, match=said):
        play(lambda actor, engine: actor.logprobs(np.arange(3)))


def test_an_offer_that_is_neither_weights_nor_streamed_is_refused() -> None:
    with pytest.raises(EngineError, match="offer returned None; expected Weights, or methods send and receive"):
        play(lambda actor, engine: actor.load_weights(None))


def test_weights_land_between_two_steps_of_requests_in_flight() -> None:
    async def body(actor: EngineActor, engine: Scripted) -> None:
        running = asyncio.create_task(collect(actor, ask("a", 20)))
        await reach(engine, 5)
        await actor.load_weights(Weights(3, {}, {}))
        (part,) = await running
        assert part[0].versions.tolist() == [0] * 5 + [3] * 15
        assert (await actor.clock())["load_seconds"] > 0

    play(body)


def test_pause_freezes_requests_and_resume_continues_them() -> None:
    async def body(actor: EngineActor, engine: Scripted) -> None:
        running = asyncio.create_task(collect(actor, ask("a", 10)))
        await reach(engine, 4)
        await actor.pause()
        later = asyncio.create_task(collect(actor, ask("b", 2)))
        await asyncio.sleep(0.05)
        assert engine.steps == 4
        assert engine.unfinished == 2
        await actor.resume()
        await asyncio.gather(running, later)
        assert engine.steps == 10

    play(body)


def test_a_sleeping_engine_is_not_stepped() -> None:
    async def body(actor: EngineActor, engine: Scripted) -> None:
        running = asyncio.create_task(collect(actor, ask("a", 10)))
        await reach(engine, 4)
        await actor.sleep()
        await asyncio.sleep(0.05)
        assert engine.steps == 4
        await actor.wake()
        await running
        assert engine.notes == ["start", "sleep", "wake"]

    play(body)


@rlsdk.engine("in_parts")
@attrs.define(kw_only=True, slots=False)
class InParts(Scripted):
    """Wakes in parts; its canary tells how many steps it had taken."""

    def wake_weights(self) -> None:
        self.notes.append("wake weights")

    def load_weights(self, weights: Weights) -> None:
        super().load_weights(weights)
        self.notes.append("load")

    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        return np.full(len(token_ids) - 1, self.steps, np.float32)


@pytest.mark.parametrize("kind", [InParts, Scripted])
def test_an_engine_wakes_in_parts_if_it_can_and_computes_the_canary_before_requests_continue(kind: type) -> None:
    async def body(actor: EngineActor, engine: Scripted) -> None:
        running = asyncio.create_task(collect(actor, ask("a", 10)))
        await reach(engine, 4)
        for _ in range(2):
            await actor.sleep()
            await actor.wake_weights()
            await asyncio.sleep(0.02)
            assert await actor.load_weights(Weights(1, {}, {})) is None
            await asyncio.sleep(0.02)
            seen = await actor.wake(np.arange(3))
            assert seen is not None and seen.tolist() == ([4, 4] if kind is InParts else [0, 0])
            assert engine.steps == 4
        await running
        parts = ["sleep", "wake weights", "load", "wake"] if kind is InParts else ["sleep", "wake"]
        assert engine.notes == ["start", *parts * 2]
        engine.notes.clear()
        await actor.wake_weights()  # of an engine that is awake
        await actor.wake()
        assert engine.notes == (["wake weights", "wake"] if kind is InParts else ["wake"])

    play(body, kind=kind)


@rlsdk.engine("copies")
@attrs.define(kw_only=True, slots=False)
class Copies(Scripted):
    """Sends three parts, and takes a step between any two."""

    got: dict[str, Any] = attrs.field(init=False, factory=dict)

    def weight_layout(self) -> str:
        return "one layer"

    def held_weights(self) -> Iterator[Weights]:
        for index in range(3):
            started, deadline = self.steps, time.monotonic() + 10
            while self.unfinished and self.steps == started:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            tensor = torch.full((2**18,), float(index))
            yield Weights(self.version, {f"{index}": tensor}, {f"{index}": "float32"})

    def copy_weights(self, version: int, parts: Iterator[Weights]) -> None:
        for part in parts:
            self.got |= {name: np.array(values) for name, values in part.tensors.items()}
        self.version = version


@pytest.mark.parametrize("way", ["shared_memory", "gloo"])
def test_an_engine_samples_while_another_copies_its_weights(way: str) -> None:
    async def go() -> None:
        plugins = Plugins()
        transfer = plugins.reference("weight_transfer", way, {"bucket_mib": 1, "timeout": 20})
        actors = [EngineActor(plugins.reference("engine", Copies), transfer=transfer) for _ in range(2)]
        for actor in actors:
            await actor.start(MODEL, PLACE)
        sender, receiver = actors
        await sender.load_weights(Weights(5, {}, {}))
        assert await sender.weight_layout() == (5, "one layer") and await receiver.weight_layout() == (0, "one layer")
        for steps in (3, 6):  # the same two may meet again
            running = asyncio.create_task(collect(sender, ask("a", 1000)))
            await reach(sender._engine, 1)
            offer = await sender.offer_copy()
            load = receiver.load_weights(offer, version=5, seat=1, copied=True)  # in a loop of its own, as in an actor
            loading = asyncio.create_task(asyncio.to_thread(asyncio.run, load))
            await sender.send_copy()
            await loading
            assert sender._engine.steps >= steps and not running.done()
            await sender.abort()
            await running
        assert receiver._engine.version == 5
        assert {name: (len(v), v.min(), v.max()) for name, v in receiver._engine.got.items()} == {
            str(i): (2**18, i, i) for i in range(3)
        }
        for actor in actors:
            await actor.stop()

    asyncio.run(asyncio.wait_for(go(), 40))


@rlsdk.engine("receives")
@attrs.define(kw_only=True, slots=False)
class Receives(Scripted):
    """Calls the weight transfer itself, for which it breaks off once."""

    def receive_weights(self, version: int, transfer: Any, offer: Any, seat: int) -> None:
        self.notes.append((version, type(transfer).__name__, offer, seat))
        if version == 3:
            raise TransferError("the learner left")
        self.version = version


def test_an_engine_that_receives_weights_itself_gets_the_transfer_and_its_offer() -> None:
    async def go() -> None:
        plugins = Plugins()
        actor = EngineActor(
            plugins.reference("engine", Receives), transfer=plugins.reference("weight_transfer", "gloo")
        )
        await actor.start(MODEL, PLACE)
        with pytest.raises(TransferError):
            await actor.load_weights("first", version=3, seat=2)
        assert await actor.weight_layout() == (3, "")
        assert await actor.load_weights("second", version=4, seat=1) is None
        assert actor._engine.version == 4
        assert actor._engine.notes[1:] == [(3, "Gloo", "first", 2), (4, "Gloo", "second", 1)]
        await actor.stop()

    asyncio.run(go())


def test_weights_are_not_copied_without_a_stream_or_from_an_engine_that_cannot(tmp_path: Path) -> None:
    async def layout(engine: type, way: str | None) -> str:
        plugins = Plugins()
        transfer = None if way is None else plugins.reference("weight_transfer", way)
        actor = EngineActor(plugins.reference("engine", engine), transfer=transfer)
        await actor.start(MODEL, PLACE)
        return (await actor.weight_layout())[1]

    async def go() -> list[str]:
        return [
            await layout(*each)
            for each in ((Scripted, "gloo"), (Copies, None), (Copies, "object_store"), (Copies, "cuda_ipc"))
        ]

    assert asyncio.run(go()) == [""] * 4


def test_abort_hands_out_what_was_sampled() -> None:
    async def body(actor: EngineActor, engine: Scripted) -> None:
        running = asyncio.create_task(collect(actor, ask("a", 10**9, n=2), ask("b", 8)))
        await reach(engine, 4)
        assert await actor.abort(["a"]) == 2
        done = [c for part in await running for c in part]
        assert {(c.request, c.finish) for c in done} == {("a", "abort"), ("b", "length")}
        assert len(done[0].token_ids) == 4

    play(body)


def test_a_caller_that_goes_away_takes_its_requests_along() -> None:
    async def body(actor: EngineActor, engine: Scripted) -> None:
        stream = actor.generate([ask("a", 1), ask("b", 10**9)])
        await anext(stream)
        await stream.aclose()
        assert engine.unfinished == 0
        assert ("abort", ("b",)) in engine.notes

    play(body, limits=0.001)


def test_a_step_that_fails_fails_everyone_with_its_traceback() -> None:
    async def body(actor: EngineActor, engine: Scripted) -> None:
        found = await asyncio.gather(collect(actor, ask("a", 9)), collect(actor, ask("b", 9)), return_exceptions=True)
        for error in found:
            assert isinstance(error, EngineError)
            assert "the script says so" in str(error)
            assert isinstance(error.__cause__, RuntimeError)
            assert error.__cause__.__traceback__ is not None
        for later in (
            collect(actor, ask("c")),
            actor.logprobs(np.array([1, 2])),
            actor.load_weights(Weights(1, {}, {})),
        ):
            with pytest.raises(EngineError, match="the script says so"):
                await later
        assert await actor.abort(["a"]) == 0

    play(body, fail_at=4)


def test_a_bad_request_fails_its_caller_alone() -> None:
    async def body(actor: EngineActor, engine: Scripted) -> None:
        running = asyncio.create_task(collect(actor, ask("a", 5)))
        with pytest.raises(ValueFault, match="n must be"):
            await collect(actor, ask("bad", n=0))
        assert len(await running) == 1

    play(body)


def test_stop_fails_who_waits() -> None:
    async def body(actor: EngineActor, engine: Scripted) -> None:
        running = asyncio.create_task(collect(actor, ask("a", 10**9)))
        await asyncio.sleep(0.02)
        await actor.stop()
        with pytest.raises(EngineError, match="stopped"):
            await running
        await actor.stop()

    play(body)


def test_calls_reach_the_engine() -> None:
    async def body(actor: EngineActor, engine: Scripted) -> None:
        await actor.reseed(4)
        await actor.sleep()
        await actor.wake()
        assert (await actor.logprobs(np.arange(5))).shape == (4,)
        assert engine.notes == ["start", ("reseed", 4), "sleep", "wake"]

    play(body)


def test_a_bundle_is_pickled_as_a_few_arrays() -> None:
    made = [Scripted._completion(ask(f"r{i}"), i, list(range(i)), "stop") for i in range(100)]
    buffers: list[Any] = []
    data = pickle.dumps(Bundle(made), protocol=5, buffer_callback=buffers.append)
    assert len(buffers) <= 4
    back = pickle.loads(data, buffers=buffers)
    assert len(back) == 100
    for a, b in zip(made, back, strict=True):
        assert (a.request, a.index, a.finish) == (b.request, b.index, b.finish)
        for field in ("token_ids", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
            assert getattr(a, field).dtype == getattr(b, field).dtype
    assert pickle.loads(pickle.dumps(Bundle())) == []


@pytest.fixture
def by_value() -> Iterator[None]:
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


async def _stream(actor: Any, requests: Sequence[Request]) -> list[Completion]:
    found: list[Completion] = []
    async for part in streamed(actor.generate, requests):
        found += part
    return found


@pytest.mark.stack
def test_through_ray(cluster: None, by_value: None, tmp_path: Path) -> None:
    import ray

    log = tmp_path / "logs" / "engine.log"
    reference = Plugins().reference("engine", Scripted, {"fail_at": 10})
    actor = launch(reference, PLACE, name="scripted", log_path=log)
    ray.get(actor.start.remote(MODEL, PLACE))

    def speak(owner: Any) -> tuple[int, str]:
        print("from python")
        os.write(2, b"from C\n")
        return os.getpid(), os.environ["SCRIPTED_THREADS"]

    pid, threads = ray.get(actor.__ray_call__.remote(speak))
    assert pid != os.getpid()
    assert threads == "1"
    done = asyncio.run(_stream(actor, [ask(f"r{i}", 4, n=3) for i in range(5)]))
    assert len(done) == 15
    assert ray.get(actor.clock.remote())["steps"] == 4
    with pytest.raises(EngineError, match="the script says so") as caught:
        asyncio.run(_stream(actor, [ask("last", 100)]))
    assert "in step" in str(caught.value)  # the engine's own frames
    text = log.read_text()
    assert "from python" in text and "from C" in text and "RuntimeError: the script says so" in text
    ray.kill(actor)


@pytest.mark.stack
def test_vllm_through_its_actor(vllm_engine: Any, model: Model) -> None:
    import ray
    import tiny

    weights = tiny.original(model)
    ray.get(vllm_engine.actor.load_weights.remote(weights))
    prompt = np.array([20, 7, 30])
    asked = [
        Request(id=f"s{i}", prompt_ids=prompt, sampling=Sampling(max_tokens=9, ignore_eos=True), n=4, seed=i)
        for i in range(10)
    ]
    before = ray.get(vllm_engine.actor.clock.remote())
    done = asyncio.run(_stream(vllm_engine.actor, asked))
    after = ray.get(vllm_engine.actor.clock.remote())
    assert len(done) == 40
    assert after["tokens"] - before["tokens"] == 360
    assert after["prompt_tokens"] - before["prompt_tokens"] == 30
    for completion in done[::9]:
        found = tiny.reference_logprobs(model, np.concatenate([prompt, completion.token_ids]))[2:]
        np.testing.assert_allclose(completion.logprobs, found, atol=1e-4)
    sent = ray.get(vllm_engine.actor.checksums.remote(weights))
    assert sent == rlsdk.weights.checksums(weights)


def shared_files(pid: int) -> set[Path]:
    """Files in memory, and sockets of vLLM, through which a process works with others, deleted ones included."""
    memory = re.findall(r"/dev/shm/(?:psm|vllm_dist)_\S+", Path(f"/proc/{pid}/maps").read_text())
    paths = [each.laddr for each in psutil.Process(pid).net_connections("unix")]
    sockets = [path for path in paths if re.search(r"/[0-9a-f]{8}-[0-9a-f-]{27}$", path)]
    return {Path(path) for path in memory + sockets}


@pytest.mark.slow
@pytest.mark.stack
def test_an_engine_dies_with_one_of_the_processes_that_divide_its_model(launched: Any, tmp_path: Path) -> None:
    import ray

    from rlsdk.cluster.actors import cause_of, died

    def workers(engine: Any) -> list[int]:
        return [each.proc.pid for each in engine._llm.model_executor.workers]

    gone = suppress(ray.exceptions.RayActorError)  # as `launched` stops the engine
    with gone, launched(tmp_path, {"max_num_seqs": 4, "tensor_parallel_size": 2}) as engine:
        first, second = engine.run(workers)
        shared = {path for pid in (engine.run(lambda _: os.getpid()), first, second) for path in shared_files(pid)}
        assert {path.name.partition("_")[0] for path in shared if "_" in path.name} == {"psm", "vllm"}
        assert {path for path in shared if path.parent.name.startswith("rlsdk-vllm-")}  # sockets
        assert not [path for path in shared if path.exists()]  # nothing stays when they are killed
        long = Request(id="a", prompt_ids=np.array([5, 6]), sampling=Sampling(max_tokens=250, ignore_eos=True))
        stream = engine.actor.generate.options(num_returns="streaming").remote([long])
        os.kill(second, signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayError) as failed:
            ray.get(next(stream))
        assert died(cause_of(failed.value))
        assert (
            "this engine ends, since one of its tensor-parallel processes has died"
            in (tmp_path / "engine.log").read_text()
        )
        for _ in range(100):
            if not Path(f"/proc/{first}").exists():
                break
            time.sleep(0.1)
        assert not Path(f"/proc/{first}").exists()
