"""The way to the engines: which one is asked, and what becomes of what nobody waits for any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from rlsdk.contracts import Completion, Request, Sampling
from rlsdk.rollout.client import EngineClient

PROMPT = np.array([1, 2, 3])


class Remote:
    """A method that is called as Ray calls it."""

    def __init__(self, method: Any) -> None:
        self.remote = method

    def options(self, **_: Any) -> Remote:
        return self


class Engine:
    """Lives in this process; answers a request as soon as it is told to, or with what there is when it is aborted."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.aborted: list[str] = []
        self.go = asyncio.Event()
        self.generate, self.abort = Remote(self._generate), Remote(self.aborted.extend)

    async def _generate(self, requests: list[Request]) -> AsyncIterator[asyncio.Future[list[Completion]]]:
        self.asked += requests
        await self.go.wait()
        for request in requests:
            done: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
            done.set_result([self._completion(request, i) for i in range(request.n)])
            yield done

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


def test_an_answer_says_which_engine_holds_it_and_affinity_leads_back() -> None:
    async def go() -> None:
        engines = [Engine(), Engine()]
        for engine in engines:
            engine.go.set()
        asked = client(engines)
        answers = await asyncio.gather(*(asked.sample(f"g{i}", PROMPT, Sampling()) for i in range(4)))
        assert sorted(answer.engine for answer in answers) == [0, 0, 1, 1]
        again = [await asked.sample("g", PROMPT, Sampling(), affinity=1) for _ in range(3)]
        assert [answer.engine for answer in again] == [1, 1, 1]

    asyncio.run(go())


def test_a_request_that_nobody_waits_for_is_ended() -> None:
    async def go() -> None:
        engine = Engine()
        asked = client([engine])
        both = [asked.sample("g", PROMPT, Sampling()) for _ in range(2)]
        other = asked.sample("h", PROMPT, Sampling())
        never = asked.sample("i", PROMPT, Sampling())
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

    asyncio.run(go())
