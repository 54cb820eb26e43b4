"""The engine model: hand-computed times, versions of tokens, aborts, and a cost independent of token counts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.contracts import Completion, Request, Sampling
from rlsdk.engines.client import EngineClient, GenerateRequest
from rlsdk.errors import ValueFault
from rlsdk.simulation.clock import VirtualLoop, run_virtually
from rlsdk.simulation.engine import SimulatedEngine
from rlsdk.simulation.rates import Lengths, Rates

BARE = Rates(step_seconds=1.0, sequence_seconds=0.5, prompt_tokens=0, slots=4)
"""A decode step of one sequence takes 1.5 s, of two 2 s."""
Script = Callable[[SimulatedEngine], Awaitable[Any]]


def run(script: Script, rates: Rates = BARE, lengths: tuple[int, ...] = (10,), limit: int = 100) -> Any:
    async def go() -> Any:
        return await script(SimulatedEngine(rates, Lengths(seen=lengths, limit=limit), (0,)))

    return run_virtually(go())


def now() -> float:
    return asyncio.get_running_loop().time()


async def ask(engine: SimulatedEngine, name: str = "a", n: int = 1) -> list[tuple[float, Completion]]:
    request = Request(id=name, prompt_ids=np.zeros(3, np.int64), sampling=Sampling(), n=n)
    found = []
    async for ready in engine.generate.options(num_returns="streaming").remote([request]):
        found += [(now(), completion) for completion in await ready]
    return found


def test_one_sequence_takes_its_length_in_decode_steps() -> None:
    ((at, completion),) = run(ask)
    assert at == pytest.approx(15, abs=1e-5)
    assert len(completion.token_ids) == 10
    assert (completion.finish, completion.index) == ("stop", 0)


def test_sequences_share_the_steps_and_a_later_one_slows_the_first() -> None:
    async def script(engine: SimulatedEngine) -> tuple[float, float]:
        first = asyncio.ensure_future(ask(engine, "a"))
        await asyncio.sleep(7.5)  # 5 tokens
        second = await ask(engine, "b")  # both at 2 s a step: the first ends at 17.5, with 5 left of the second
        return (await first)[0][0], second[0][0]

    assert run(script) == pytest.approx((17.5, 25.0), abs=1e-5)


def test_no_more_run_than_there_are_slots() -> None:
    async def script(engine: SimulatedEngine) -> list[float]:
        return [at for at, _ in await ask(engine, n=6)]

    assert run(script) == pytest.approx([30] * 4 + [50] * 2, abs=1e-5)  # 10 steps of 3 s, then 10 of 2 s


def test_a_prompt_is_read_once_for_its_group_and_holds_up_the_others() -> None:
    async def script(engine: SimulatedEngine) -> list[float]:
        first = asyncio.ensure_future(ask(engine, "a"))
        await asyncio.sleep(20)
        return [at for at, _ in await ask(engine, "b", n=2)] + [(await first)[0][0]]

    rates = Rates(step_seconds=1.0, sequence_seconds=0.0, prompt_tokens=10, prompt_rate=1.0)
    assert run(script, rates) == pytest.approx([40, 40, 20], abs=1e-5)


def test_what_was_running_when_weights_came_bears_both_versions() -> None:
    async def script(engine: SimulatedEngine) -> tuple[float, Completion]:
        asked = asyncio.ensure_future(ask(engine))
        await asyncio.sleep(6.0)  # 4 tokens
        engine.load(7, 3.0)
        assert engine.version == 7
        return (await asked)[0]

    rates = Rates(step_seconds=1.0, sequence_seconds=0.5, prompt_tokens=0, prompt_rate=2.0)
    at, completion = run(script, rates)
    assert at == pytest.approx(6 + 3 + 2 + 9, abs=1e-5)  # the 4 tokens are read anew, 2 in a second
    assert completion.versions.tolist() == [0] * 4 + [7] * 6


def test_aborted_requests_return_their_tokens_and_free_their_slots() -> None:
    async def script(engine: SimulatedEngine) -> tuple[list[Any], float, tuple[float, int]]:
        asked = asyncio.ensure_future(ask(engine, "a", n=4))
        waiting = asyncio.ensure_future(ask(engine, "b"))
        await asyncio.sleep(6.0)  # 2 tokens of each
        engine.abort.remote(["a", "unknown"])
        return await asked, (await waiting)[0][0], engine.measure()

    aborted, at, (busy, tokens) = run(script)
    assert [(c.finish, len(c.token_ids)) for _, c in aborted] == [("abort", 2)] * 4
    assert at == pytest.approx(21, abs=1e-5)
    assert busy == pytest.approx(21, abs=1e-5)
    assert tokens == 18


def test_unused_sampled_tokens_are_counted_by_the_client() -> None:
    async def script(engine: SimulatedEngine) -> tuple[int, int]:
        client = EngineClient([engine], lambda ids: [""] * len(ids))
        asked = [client.sample(GenerateRequest("g", np.zeros(3, np.int64), Sampling())) for _ in range(2)]
        kept = client.sample(GenerateRequest("h", np.zeros(3, np.int64), Sampling()))
        await asyncio.sleep(10.0)  # 4 tokens of each
        for future in asked:
            future.cancel()
        return client.unheard, len((await kept).completion.token_ids) + client.unheard

    assert run(script) == (0, 10 + 8)


def test_an_idle_engine_is_not_busy_and_loads_while_idle_cost_nothing_later() -> None:
    async def script(engine: SimulatedEngine) -> float:
        engine.load(1, 5.0)
        await asyncio.sleep(100)
        await ask(engine)
        return engine.measure()[0]

    assert run(script) == pytest.approx(15, abs=1e-5)


def test_lengths_are_cut_off_at_the_limit() -> None:
    ((_, completion),) = run(ask, lengths=(1000,), limit=50)
    assert (len(completion.token_ids), completion.finish) == (50, "length")


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 50), st.integers(1, 6)), min_size=1, max_size=12),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
)
def test_nothing_is_lost_and_an_engine_never_beats_its_rates(
    arrivals: list[tuple[float, int]], lengths: list[int]
) -> None:
    async def script(engine: SimulatedEngine) -> tuple[list[Any], tuple[float, int]]:
        async def later(i: int, at: float, n: int) -> list[Any]:
            await asyncio.sleep(at)
            return await ask(engine, str(i), n)

        asked = await asyncio.gather(*(later(i, at, n) for i, (at, n) in enumerate(arrivals)))
        assert engine.running == 0
        return [completion for one in asked for _, completion in one], engine.measure()

    completions, (busy, tokens) = run(script, lengths=tuple(lengths))
    assert len(completions) == sum(n for _, n in arrivals)
    assert tokens == sum(len(c.token_ids) for c in completions)
    assert busy >= tokens * BARE.decode(4) / 4 - 1e-3  # four at once is the most
    assert busy <= tokens * BARE.decode(1) + 1e-3


def test_work_grows_with_responses_and_not_with_tokens() -> None:
    def turns(length: int) -> int:
        async def script(engine: SimulatedEngine) -> int:
            await ask(engine, n=64)
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            return loop.turns

        found: int = run(script, lengths=(length,), limit=10**6)
        return found

    assert turns(2000) <= turns(10) + 5


def test_log_normal_lengths_have_their_median_and_their_tail() -> None:
    drawn = np.array(Lengths(median=1000, sigma=1.0, limit=10**6).draw(np.random.default_rng(0), 20_000))
    assert np.median(drawn) == pytest.approx(1000, rel=0.03)
    assert np.mean(drawn > 1000 * np.exp(1.645)) == pytest.approx(0.05, abs=0.006)


@pytest.mark.parametrize(("name", "value"), [("bandwidth", 0.0), ("step_seconds", -1.0), ("slots", 0)])
def test_rates_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueFault, match=f"{name} must be"):
        Rates(**{name: value})
