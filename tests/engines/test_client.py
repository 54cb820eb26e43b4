"""Clients of engines: routing, and cancellation of requests without a caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from rlsdk.contracts import Completion, Request, Sampled, Sampling
from rlsdk.engines.client import EngineClient, GenerateRequest
from rlsdk.engines.messages import Progress
from rlsdk.errors import EngineError, ValueFault
from rlsdk.simulation.clock import run_virtually

PROMPT = np.array([1, 2, 3])


class Remote:
    """A method that is called as Ray calls it."""

    def __init__(self, method: Any) -> None:
        self.remote = method

    def options(self, **_: Any) -> Remote:
        return self


class Engine:
    """Lives in this process and answers requests when asked to.

    It dies after so many requests, if at all, and answers `parts` continuations of each.
    """

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.aborted: list[str] = []
        self.go = asyncio.Event()
        self.dies_after: int | None = None
        self.fails: Exception | None = None
        self.parts = 100
        self.generate, self.abort = Remote(self._generate), Remote(self.aborted.extend)

    async def _generate(self, requests: list[Request]) -> AsyncIterator[asyncio.Future[list[Completion]]]:
        if any(request.prompt_ids.tolist() == [99] for request in requests):
            raise ValueFault("the model knows no token 99")
        if self.fails is not None:
            raise self.fails
        self.asked += requests
        await self.go.wait()
        for i, request in enumerate(requests):
            if i == self.dies_after:
                raise ActorDiedError
            done: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
            done.set_result([self._completion(request, i) for i in range(min(request.n, self.parts))])
            yield done
        if self.dies_after == len(requests):
            raise ActorDiedError

    @staticmethod
    def _completion(request: Request, index: int) -> Completion:
        one = np.ones(1)
        return Completion(
            request=request.id,
            index=index,
            token_ids=one.astype(int),
            logprobs=-one,
            versions=one.astype(int),
            finish="stop",
        )


def client(engines: list[Engine]) -> EngineClient:
    return EngineClient(engines, lambda ids: ["x" for _ in ids])


async def test_an_answer_says_which_engine_holds_it_and_affinity_leads_back() -> None:
    engines = [Engine(), Engine()]
    for engine in engines:
        engine.go.set()
    asked = client(engines)
    answers = await asyncio.gather(*(asked.sample(GenerateRequest(f"g{i}", PROMPT, Sampling())) for i in range(4)))
    assert sorted(answer.engine for answer in answers) == [0, 0, 1, 1]
    again = [await asked.sample(GenerateRequest("g", PROMPT, Sampling(), affinity=1)) for _ in range(3)]
    assert [answer.engine for answer in again] == [1, 1, 1]


async def test_within_a_turn_continued_requests_are_sent_before_new_ones() -> None:
    engine = Engine()
    asked = client([engine])
    for i, begun in enumerate((0, 2, 0, 1)):
        asked.sample(GenerateRequest(f"g{i}", PROMPT, Sampling(), begun=begun))
    await asyncio.sleep(0.01)
    assert [request.begun for request in engine.asked] == [2, 1, 0, 0]
    engine.go.set()
    await asyncio.sleep(0.01)


async def test_a_request_without_a_waiting_caller_is_ended() -> None:
    engine = Engine()
    asked = client([engine])
    both = [asked.sample(GenerateRequest("g", PROMPT, Sampling())) for _ in range(2)]
    other = asked.sample(GenerateRequest("h", PROMPT, Sampling()))
    never = asked.sample(GenerateRequest("i", PROMPT, Sampling()))
    never.cancel()
    await asyncio.sleep(0.01)
    assert [(r.id, r.n) for r in engine.asked] == [("0", 2), ("1", 1)]  # the third was never sent
    both[0].cancel()
    await asyncio.sleep(0.01)
    assert engine.aborted == []  # its twin goes on
    both[1].cancel()
    await asyncio.sleep(0.01)
    assert engine.aborted == ["0"]
    engine.go.set()
    assert (await other).text == "x"


async def test_what_a_dead_engine_had_not_answered_is_sampled_on_another_and_its_load_is_forgotten() -> None:
    engines = [Engine(), Engine()]
    asked = client(engines)
    lost: list[tuple[int, Any]] = []
    asked.lost = lambda rank, actor, error: lost.append((rank, actor))
    engines[0].dies_after = 1
    first = [asked.sample(GenerateRequest(f"g{i}", PROMPT, Sampling())) for i in range(6)]
    await asyncio.sleep(0.01)
    assert [len(engine.asked) for engine in engines] == [3, 3]
    engines[0].go.set()
    await asyncio.sleep(0.01)
    assert lost == [(0, engines[0])] and asked.sampled_again == 2
    assert [future.done() for future in first] == [True, False, False, False, False, False]
    engines[1].go.set()
    answers = await asyncio.gather(*first)
    assert [answer.engine for answer in answers] == [0, 1, 1, 1, 1, 1]
    # A conversation whose engine is gone goes on elsewhere; one that comes back has no load.
    assert (await asked.sample(GenerateRequest("h", PROMPT, Sampling(), affinity=0))).engine == 1
    engines.append(Engine())
    asked.admit(0, engines[2])
    await asyncio.gather(
        *(asked.sample(GenerateRequest(f"i{i}", PROMPT, Sampling())) for i in range(4)), _later(engines[2].go.set)
    )
    assert len(engines[2].asked) == 2


async def test_a_rejected_request_fails_alone_and_leaves_no_load() -> None:
    engines = [Engine(), Engine()]
    for engine in engines:
        engine.go.set()
    asked = client(engines)
    foreign = np.array([99])
    wrong = [asked.sample(GenerateRequest(f"w{i}", foreign, Sampling(), affinity=0)) for i in range(3)]
    right = [asked.sample(GenerateRequest(f"r{i}", PROMPT, Sampling(), affinity=0)) for i in range(2)]
    found = await asyncio.gather(*wrong, *right, return_exceptions=True)
    assert [isinstance(each, ValueFault) for each in found] == [True] * 3 + [False] * 2
    later = await asyncio.gather(*(asked.sample(GenerateRequest(f"l{i}", PROMPT, Sampling())) for i in range(4)))
    assert sorted(answer.engine for answer in later) == [0, 0, 1, 1]
    await asyncio.wait_for(asked.drain(0), 5)


async def _later(call: Any) -> None:
    await asyncio.sleep(0.01)
    call()


@pytest.mark.parametrize(("seed", "asked_for"), [(None, 1), (7, 3)])
async def test_a_partly_answered_request_gives_the_same_continuations_as_without_a_death(
    seed: int | None, asked_for: int
) -> None:
    engines = [Engine()]
    engines[0].parts, engines[0].dies_after = 2, 1
    engines[0].go.set()
    asked = client(engines)
    asked.lost = lambda rank, actor, error: None
    three = [asked.sample(GenerateRequest("g", PROMPT, Sampling(), seed=seed)) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert [future.done() for future in three] == [True, True, False]
    # No engine is left: what is asked now waits, too, and nobody polls.
    other = asked.sample(GenerateRequest("h", PROMPT, Sampling()))
    await asyncio.sleep(0.01)
    assert not other.done()
    engines.append(Engine())
    engines[1].go.set()
    asked.admit(0, engines[1])
    await other
    indices = [(await future).completion.index for future in three]
    assert indices == ([0, 1, 2] if seed is not None else [0, 1, 0])
    assert [request.n for request in engines[1].asked] == [asked_for, 1]


def test_tokens_are_shown_to_whoever_watches_that_continuation_and_still_waits() -> None:
    class Showing(Engine):
        async def _generate(self, requests: list[Request]) -> AsyncIterator[asyncio.Future[Any]]:
            self.asked += requests
            for index in (0, 1, 1):
                shown: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                one = np.array([index])
                arrays = {"token_ids": one, "logprobs": -one / 2, "versions": one}
                shown.set_result(Progress([Sampled(request=requests[0].id, index=index, start=0, **arrays)]))
                yield shown
            async for message in super()._generate([]):
                yield message

    async def go() -> None:
        engine = Showing()
        asked = client([engine])
        seen: list[tuple[int, Sampled]] = []

        def watch(member: int) -> Callable[[Sampled], None]:
            return lambda sampled: seen.append((member, sampled))

        asked.sample(GenerateRequest("g", PROMPT, Sampling(), watch=watch(0))).cancel()
        asked.sample(GenerateRequest("g", PROMPT, Sampling(), watch=watch(1)))
        asked.sample(GenerateRequest("g", PROMPT, Sampling()))
        await asyncio.sleep(0.01)
        assert [(r.n, r.stream) for r in engine.asked] == [(3, True)]
        assert [(member, s.index) for member, s in seen] == [(1, 1), (1, 1)]
        engine.go.set()
        await asyncio.sleep(0.01)

    run_virtually(go())


async def test_the_failure_of_an_engine_is_named_without_the_traceback_of_its_process() -> None:
    engine = Engine()
    failed = RayTaskError("generate", "a traceback of 90 lines", EngineError("the engine failed: no server"))
    engine.fails = failed.as_instanceof_cause()
    with pytest.raises(EngineError, match=r"^engine 0: the engine failed: no server$") as caught:
        await client([engine]).sample(GenerateRequest("g", PROMPT, Sampling()))
    assert caught.value.__cause__ is engine.fails  # shown by --debug


async def test_nobody_who_waits_for_an_engine_waits_for_ever() -> None:
    engine = Engine()
    engine.dies_after = 0
    engine.go.set()
    asked = client([engine])
    with pytest.raises(EngineError, match=r"^engine 0 failed: its process died: [^\n]+$"):  # nobody brings it back
        await asked.sample(GenerateRequest("g", PROMPT, Sampling()))
    asked.lost = lambda rank, actor, error: None
    waiting = [asked.sample(GenerateRequest("g", PROMPT, Sampling())) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert asked.actors == [] and not waiting[0].done()
    asked.abort()  # there is no engine that could say so
    done = [(await future).completion for future in waiting]
    assert [(each.finish, len(each.token_ids)) for each in done] == [("abort", 0)] * 2
    waiting = [asked.sample(GenerateRequest("g", PROMPT, Sampling())) for _ in range(2)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    asked.fail(ValueError("it will not come back"))
    with pytest.raises(ValueError, match="will not come back"):
        await waiting[1]
    with pytest.raises(ValueError, match="will not come back"):
        await asked.sample(GenerateRequest("g", PROMPT, Sampling()))
