"""Settings of the section `rollout` in virtual time, computed by hand: interrupted answers, replay, rules, buffers.

One engine with one slot, so that responses follow each other, and one token a second: what is counted in tokens takes
as many seconds. Filters let everything through, prompts and scores take no time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.config.rollout import ReplaySection, RolloutSection
from rlsdk.contracts import Completion, Request, Sampling
from rlsdk.engines.client import EngineClient, GenerateRequest
from rlsdk.engines.pausable import PausableClient
from rlsdk.errors import RunError, ValueFault
from rlsdk.simulation.clock import run_virtually
from rlsdk.simulation.engine import SimulatedEngine
from rlsdk.simulation.rates import Lengths, Rates
from rlsdk.simulation.training import Setup, engines_alone, learner_alone, simulate, synchronous
from rlsdk.types import Group

PROMPT = np.zeros(1, np.int64)
TWENTY = Lengths(seen=(20,), limit=100)
SLOW = Rates(step_seconds=1.0, sequence_seconds=0.0, prompt_tokens=10, prompt_rate=10.0, slots=4)
"""A token a second for each, a second for a prompt."""
BARE = Rates(
    slots=1, step_seconds=1.0, sequence_seconds=0.0, prompt_tokens=0, prompt_rate=1e12, score_seconds=0.0,
    token_seconds=0.0, learner_seconds=5.0, sync_seconds=2.0, weights_bytes=0.0,
)  # fmt: skip
SETUP = Setup(
    rates=BARE, lengths=Lengths(seen=(12,), limit=100), engines=1, learners=1, batch=1, group=1, steps=12,
    rollout=RolloutSection(max_staleness=1),
)  # fmt: skip


def now() -> float:
    return asyncio.get_running_loop().time()


def through(
    body: Callable[[SimulatedEngine, PausableClient], Awaitable[Any]],
    *,
    partial: bool = True,
    rates: Rates = SLOW,
    lengths: Lengths = TWENTY,
) -> Any:
    """Result of a body with the real pausable and the real client of one engine."""

    async def go() -> Any:
        engine = SimulatedEngine(rates, lengths, (0,))
        client = EngineClient([engine], lambda ids: [""] * len(ids))
        return await body(engine, PausableClient(client, lambda ids: [""] * len(ids), partial=partial))

    return run_virtually(go())


@pytest.mark.parametrize(
    ("partial", "end", "versions", "sampled", "dropped"),
    [(True, 24.5, [0] * 5 + [1] * 15, 20, 0), (False, 29.0, [1] * 20, 25, 5)],
)
def test_an_answer_interrupted_by_a_sync_costs_its_rest_and_prefill_or_starts_again(
    partial: bool, end: float, versions: list[int], sampled: int, dropped: int
) -> None:
    """5 tokens at 6 s; 2 s later prompt and tokens are read (1.5 s) and 15 more follow, or the prompt and 20."""

    async def body(engine: SimulatedEngine, pausable: PausableClient) -> tuple[Completion, float, int, int]:
        asked = asyncio.ensure_future(pausable.sample(GenerateRequest("g", PROMPT, Sampling(max_tokens=100))))
        await asyncio.sleep(6.0)
        async with pausable.held():
            assert now() == pytest.approx(6.0)  # the engine hands over at once
            engine.load(1, 0.0)
            await asyncio.sleep(2.0)
        answer = await asked
        return answer.completion, now(), engine.measure()[1], pausable.dropped

    done, at, *counted = through(body, partial=partial)
    assert at == pytest.approx(end, abs=1e-5)
    assert done.versions.tolist() == versions
    assert done.finish == "stop"
    assert counted == [sampled, dropped]


def test_all_that_runs_or_waits_is_ended_and_unread_prompts_are_forgotten() -> None:
    async def body(engine: SimulatedEngine, pausable: PausableClient) -> tuple[Any, ...]:
        client = EngineClient([engine], lambda ids: [""] * len(ids))
        asked = [
            client.sample(GenerateRequest(str(i), PROMPT, Sampling())) for i in range(6)
        ]  # 4 run, whose prompts take 4 s
        await asyncio.sleep(1.5)
        count = engine.abort.remote(None)
        ended = [(a.completion.finish, len(a.completion.token_ids)) for a in await asyncio.gather(*asked)]
        await client.sample(GenerateRequest("later", PROMPT, Sampling()))
        return count, ended, now()

    assert through(body) == (6, [("abort", 0)] * 6, pytest.approx(1.5 + 1 + 20, abs=1e-5))


@pytest.mark.parametrize("loading", [0.0, 3.0])
def test_what_is_whole_when_all_is_ended_is_no_half_answer(loading: float) -> None:
    async def body(engine: SimulatedEngine, pausable: PausableClient) -> Completion:
        client = EngineClient([engine], lambda ids: [""] * len(ids))
        asked = client.sample(GenerateRequest("g", PROMPT, Sampling()))
        await asyncio.sleep(21.0)
        engine.load(1, loading)
        engine.abort.remote(None)
        return (await asked).completion

    done = through(body)
    assert (done.finish, len(done.token_ids)) == ("stop", 20)


def test_answers_of_one_group_go_on_each_by_itself() -> None:
    """Their tokens differ, as those of a run do: were they one request, the engine would read one prompt for all."""

    async def body(engine: SimulatedEngine, pausable: PausableClient) -> tuple[float, int]:
        asked = [
            asyncio.ensure_future(pausable.sample(GenerateRequest("g", PROMPT, Sampling(max_tokens=100))))
            for _ in range(4)
        ]
        await asyncio.sleep(6.0)
        async with pausable.held():
            pass
        await asyncio.gather(*asked)
        return now(), pausable.resumed

    assert through(body) == (pytest.approx(6 + 4 * 1.5 + 15, abs=1e-5), 4)


def test_what_was_begun_goes_before_what_waited_for_a_place() -> None:
    """Of four answers two run, of 20 s each; ended after 6 s, they are whole at 20 s, and the others at 40 s."""

    async def go() -> list[float]:
        rates = attrs.evolve(SLOW, slots=1, prompt_tokens=0, prompt_rate=1e12)
        client = EngineClient([SimulatedEngine(rates, TWENTY, (i,)) for i in range(2)], lambda ids: [""] * len(ids))
        pausable = PausableClient(client, lambda ids: [""] * len(ids))

        async def ask(name: str) -> float:
            await pausable.sample(GenerateRequest(name, PROMPT, Sampling(max_tokens=100)))
            return now()

        asked = [asyncio.ensure_future(ask(name)) for name in "abcd"]
        await asyncio.sleep(6.0)
        async with pausable.held():
            pass
        return await asyncio.gather(*asked)

    assert run_virtually(go()) == pytest.approx([20, 20, 40, 40], abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(2, 60), min_size=1, max_size=8),
    st.lists(st.floats(1.0, 20.0), min_size=1, max_size=5),
    st.integers(1, 6),
)
def test_however_often_answers_are_ended_they_get_as_long_as_without(
    lengths: list[int], cuts: list[float], count: int
) -> None:
    free = attrs.evolve(SLOW, slots=16, prompt_tokens=0)

    def lengths_with(cuts: list[float]) -> list[int]:
        async def body(engine: SimulatedEngine, pausable: PausableClient) -> list[int]:
            sampling = Sampling(max_tokens=50)
            asked = [
                asyncio.ensure_future(pausable.sample(GenerateRequest(str(i), PROMPT, sampling))) for i in range(count)
            ]
            for version, cut in enumerate(cuts, 1):
                await asyncio.sleep(cut)
                async with pausable.held():
                    engine.load(version, 1.0)
                    await asyncio.sleep(1.0)
            found = [answer.completion for answer in await asyncio.gather(*asked)]
            assert all((np.diff(one.versions) >= 0).all() for one in found)
            assert all((one.finish == "length") == (len(one.token_ids) == 50) for one in found)
            assert engine.running == 0
            assert engine.measure()[1] == sum(len(one.token_ids) for one in found)
            return [len(one.token_ids) for one in found]

        drawn: list[int] = through(body, rates=free, lengths=Lengths(seen=tuple(lengths), limit=50))
        return drawn

    assert lengths_with(cuts) == lengths_with([])


def test_in_flight_weights_reach_what_runs() -> None:
    """12 s per response, 5 + 2 s of learner and sync in parallel: 7 tokens of a response have the older weights."""
    found = simulate(SETUP)
    assert found.step == pytest.approx(12, abs=1e-4)
    assert found.staleness == pytest.approx(7 / 12)
    assert (found.staleness_max, found.wasted) == (1, 0.0)
    assert found.engines_idle == pytest.approx(0, abs=1e-4)


def test_partial_rollouts_continue_after_a_sync() -> None:
    """5 tokens while the learner learns, 2 s of sync without an engine, then the 7 that are missing: 14 s."""
    section = RolloutSection(max_staleness=1, in_flight=False)
    found = simulate(attrs.evolve(SETUP, rollout=section))
    assert found.step == pytest.approx(14, abs=1e-4)
    assert found.staleness == pytest.approx(5 / 12)
    assert (found.staleness_max, found.wasted) == (1, 0.0)
    assert found.engines_idle == pytest.approx(2 / 14, abs=1e-4)
    assert found.tokens_per_second == pytest.approx(12 / 14, abs=1e-4)


def test_without_partial_rollouts_what_a_sync_ends_is_wasted() -> None:
    """5 tokens while the learner learns are thrown away, and all 12 follow the sync: 19 s, of one version."""
    section = RolloutSection(max_staleness=1, in_flight=False, partial_rollouts=False)
    found = simulate(attrs.evolve(SETUP, rollout=section))
    assert found.step == pytest.approx(19, abs=1e-4)
    assert (found.staleness, found.staleness_max) == (0.0, 0)
    assert found.wasted == pytest.approx(5 / 17)
    assert found.tokens_per_second == pytest.approx(12 / 19, abs=1e-4)


def test_beginnings_are_read_again_at_every_sync() -> None:
    section = RolloutSection(max_staleness=1, in_flight=False)
    rates = attrs.evolve(BARE, prompt_rate=5.0)
    found = simulate(attrs.evolve(SETUP, rollout=section, rates=rates))
    assert found.step == pytest.approx(15, abs=1e-4)  # 5 tokens are read in a second


def test_old_tokens_do_not_count_as_trained() -> None:
    section = RolloutSection(max_staleness=1, in_flight=False, max_token_staleness=0, oversample=1.0)
    found = simulate(attrs.evolve(SETUP, rollout=section))
    assert found.step == pytest.approx(14, abs=1e-4)
    assert (found.staleness, found.staleness_max) == (0.0, 0)
    assert found.tokens_per_second == pytest.approx(7 / 14, abs=1e-4)


def test_answers_are_not_sampled_further_ahead_than_their_tokens_may_be_trained() -> None:
    """Ahead, the five tokens sampled during the update would be of no use: 12 tokens in 12 + 5 + 2 s, not 7 in 14 s."""
    section = RolloutSection(max_staleness=1, in_flight=False, max_token_staleness=0)
    found = simulate(attrs.evolve(SETUP, rollout=section))
    assert found.step == pytest.approx(19, abs=1e-4)
    assert found.tokens_per_second == pytest.approx(12 / 19, abs=1e-4)


REPLAY = attrs.evolve(
    SETUP,
    batch=2,
    lengths=Lengths(seen=(40,), limit=100),
    rates=attrs.evolve(BARE, token_seconds=0.125, learner_seconds=0.0, sync_seconds=0.0),
    rollout=RolloutSection(max_staleness=2, replay=ReplaySection(share=0.5)),
)


def test_a_share_of_the_batch_is_trained_again() -> None:
    """A response takes 40 s; the batch is this one and that of the step before, on which the learner is for 10 s.

    The sync is 10 s after a response begins: 10 of its tokens are a step old when it is trained, 30 are new; when it is
    trained again, they are two steps and one step old.
    """
    found = simulate(REPLAY)
    assert found.step == pytest.approx(40, abs=1e-4)
    assert found.tokens_per_second == pytest.approx(80 / 40, abs=1e-4)
    assert found.staleness == pytest.approx((10 * 1 + 30 * 0 + 10 * 2 + 30 * 1) / 80)
    assert (found.staleness_max, found.wasted) == (2, 0.0)
    assert simulate(learner_alone(REPLAY)).step == pytest.approx(5, abs=1e-3)  # those that waited are too old for more


def test_groups_that_are_too_old_are_not_replayed() -> None:
    short = attrs.evolve(REPLAY.rollout, max_staleness=1)
    found = simulate(attrs.evolve(REPLAY, rollout=short))
    assert found.staleness_max == 1
    assert found.tokens_per_second == pytest.approx(40 / 40, abs=1e-4)


def test_a_batch_without_new_groups_is_refused() -> None:
    with pytest.raises(ValueFault, match=r"replay\.share: 0\.75 of a batch of 2 leaves no new group"):
        attrs.evolve(REPLAY, rollout=RolloutSection(max_staleness=2, replay=ReplaySection(share=0.75)))


def test_a_stop_rule_ends_the_wait_for_the_rest_of_a_batch() -> None:
    asked = []

    def one_is_enough(*, available: int, target: int) -> bool:
        asked.append((available, target))
        return True

    whole = attrs.evolve(SETUP, batch=2)
    early = attrs.evolve(whole, stop=lambda: one_is_enough)
    assert simulate(whole).step == pytest.approx(24, abs=1e-4)
    assert simulate(early).step == pytest.approx(12, abs=1e-4)
    assert set(asked) == {(1, 2)}
    assert synchronous(early).stop is None


def test_a_policy_orders_and_drops() -> None:
    def even(group: Group, *, step: int, uses: int) -> float | None:
        return None if int(group.task.id) % 2 else 0.0

    found = simulate(attrs.evolve(SETUP, policy=lambda: even, steps=20))
    assert found.step == pytest.approx(24, abs=1e-4)
    assert found.wasted == pytest.approx(0.5, abs=0.05)
    assert simulate(synchronous(attrs.evolve(SETUP, policy=lambda: even))).step == pytest.approx(24 + 5 + 2, abs=1e-4)
    again = simulate(attrs.evolve(REPLAY, policy=lambda: even, steps=20))
    assert again.tokens_per_second == pytest.approx(80 / 80, abs=1e-4)
    assert again.wasted == pytest.approx(0.5, abs=0.05)  # what is trained twice was sampled once


def test_each_simulation_has_its_own_policy_and_rule() -> None:
    made = []

    class Policy:
        def __init__(self) -> None:
            self.calls = 0
            made.append(self)

        def __call__(self, group: Group, /, *, step: int, uses: int) -> float:
            self.calls += 1
            return -float(self.calls)

    setup = attrs.evolve(SETUP, policy=Policy)
    assert simulate(setup) == simulate(setup)
    assert len({id(policy) for policy in made}) == 2
    assert made[0].calls == made[1].calls > 0


def test_policies_see_groups_with_rewards_of_one_and_zero() -> None:
    seen: dict[str, list[list[float]]] = {}

    def look(group: Group, *, step: int, uses: int) -> float:
        seen.setdefault(group.rollouts[0].status, []).append([score.value for score in group.scores])
        return 0.0

    rates = attrs.evolve(BARE, filtered=0.5)
    lengths = Lengths(seen=(12, 100), limit=100)
    simulate(attrs.evolve(SETUP, rates=rates, group=4, steps=20, lengths=lengths, policy=lambda: look))
    assert seen.keys() == {"finished", "truncated"}
    assert all(scores in ([1, 0, 1, 0], [0, 0, 0, 0]) for found in seen.values() for scores in found)
    assert len({tuple(scores) for scores in seen["finished"]}) == 2


def test_a_policy_that_drops_everything_is_an_error_and_no_hang() -> None:
    def none(group: Group, *, step: int, uses: int) -> None:
        return None

    with pytest.raises(RunError, match=r"policy dropped 1,001 groups in a row.*rollout\.buffer=fifo"):
        simulate(attrs.evolve(SETUP, policy=lambda: none))


TAIL = Setup(
    rates=Rates(slots=32, weights_bytes=1e9),
    lengths=Lengths(median=200, sigma=1.0, limit=2000),
    engines=2, learners=1, batch=16, group=4, steps=8,
    rollout=RolloutSection(max_staleness=3, oversample=0.25, in_flight=False),
)  # fmt: skip


def test_interrupted_answers_cost_time_and_restarted_ones_more() -> None:
    keep = simulate(TAIL)
    anew = simulate(attrs.evolve(TAIL, rollout=attrs.evolve(TAIL.rollout, partial_rollouts=False)))
    assert simulate(TAIL) == keep
    assert simulate(attrs.evolve(TAIL, rollout=attrs.evolve(TAIL.rollout, in_flight=True))).step < keep.step
    assert keep.tokens_per_second > anew.tokens_per_second
    assert anew.wasted > keep.wasted + 0.1
    assert keep.step >= 0.95 * max(simulate(engines_alone(TAIL)).step, simulate(learner_alone(TAIL)).step)


@pytest.mark.parametrize("partial", [True, False])
def test_in_step_no_sync_meets_an_answer(partial: bool) -> None:
    ended = attrs.evolve(TAIL, rollout=attrs.evolve(TAIL.rollout, partial_rollouts=partial))
    section = RolloutSection(in_flight=False, partial_rollouts=partial)
    in_step = simulate(attrs.evolve(TAIL, rollout=section))
    assert in_step == simulate(synchronous(ended))
    assert (in_step.wasted, in_step.staleness_max) == (0.0, 0)


def test_work_grows_with_ended_responses_and_not_with_tokens() -> None:
    def turns(factor: int) -> int:
        rates = attrs.evolve(BARE, slots=8, learner_seconds=5.0 * factor, prompt_rate=1e12)
        lengths = Lengths(seen=(12 * factor,), limit=10**6)
        section = RolloutSection(max_staleness=1, in_flight=False)
        return simulate(attrs.evolve(SETUP, batch=8, rates=rates, lengths=lengths, rollout=section)).turns

    assert turns(1000) <= turns(1) * 1.1


def test_an_engine_continues_with_what_the_tokens_say_and_marks_no_two_alike() -> None:
    async def body(engine: SimulatedEngine, pausable: PausableClient) -> list[Completion]:
        async def ask(name: str, prompt: np.ndarray, begun: int = 0) -> list[Completion]:
            request = Request(id=name, prompt_ids=prompt, sampling=Sampling(), n=2, begun=begun)
            return [c async for ready in engine.generate.remote([request]) for c in await ready]

        first = await ask("a", PROMPT)
        cut = np.concatenate([PROMPT, first[0].token_ids[:7]])
        return [*first, *await ask("b", cut, begun=7)]

    one, other, *rest = through(body)
    assert one.token_ids[0] != other.token_ids[0]
    assert [c.token_ids.tolist() for c in rest] == [one.token_ids[7:].tolist()] * 2


@pytest.mark.parametrize("learner_seconds", [1.0, 3.0])
def test_a_slow_learner_whose_syncs_waste_fewer_answers_is_not_faster_than_the_engines_alone(
    learner_seconds: float,
) -> None:
    rates = Rates(
        prompt_tokens=0, score_seconds=0.0, token_seconds=0.0, learner_seconds=learner_seconds, sync_seconds=0.1
    )
    setup = Setup(
        rates=attrs.evolve(rates, weights_bytes=0.0), lengths=Lengths(median=100, limit=256),
        engines=1, learners=1, batch=16, group=16, steps=16,
        rollout=RolloutSection(max_staleness=3, in_flight=False, partial_rollouts=False),
    )  # fmt: skip
    alone, learner = simulate(engines_alone(setup)).step, simulate(learner_alone(setup)).step
    assert simulate(setup).step >= max(alone, learner)
