"""Trainings in virtual time: the bound of overlapping, staleness, waste, and the cost for a thousand GPUs.

Lengths are log-normal with a median of 400 tokens and a sigma of 1, cut off at 4,096: one response in twenty is more
than five times the median.
"""

from __future__ import annotations

import asyncio

import attrs
import numpy as np
import pytest

from rlsdk.config.rollout import RolloutSection
from rlsdk.simulation.rates import Lengths, Rates
from rlsdk.simulation.training import (
    Setup,
    SimulatedTraining,
    SimulationResult,
    engines_alone,
    learner_alone,
    simulate,
    synchronous,
)

TAIL = Lengths(median=400, sigma=1.0, limit=4096)
RATES = Rates(
    slots=64,
    token_seconds=1.1e-4,
    learner_seconds=1.0,
    sync_seconds=0.5,
    weights_bytes=1e9,
    engines_per_node=1,
    relayed=True,
)
AHEAD = RolloutSection(max_staleness=4, oversample=0.25)
"""The longest response lasts about three steps."""
SETUP = Setup(rates=RATES, lengths=TAIL, engines=2, learners=1, batch=64, group=4, steps=12, rollout=AHEAD)
SMALL = attrs.evolve(SETUP, batch=16, steps=8)


@pytest.fixture(scope="module")
def found() -> dict[str, SimulationResult]:
    setups = {
        "async": SETUP,
        "sync": synchronous(SETUP),
        "G": engines_alone(SETUP),
        "sync G": engines_alone(synchronous(SETUP)),
        "sync T": learner_alone(synchronous(SETUP)),
    }
    return {name: simulate(setup) for name, setup in setups.items()}


@pytest.mark.parametrize(
    "token_seconds", [pytest.param(4e-5, marks=pytest.mark.slow), 1.1e-4, pytest.param(2e-4, marks=pytest.mark.slow)]
)
def test_running_ahead_keeps_nine_tenths_of_what_the_slower_half_can_do_alone(
    token_seconds: float, found: dict[str, SimulationResult]
) -> None:
    """The learner is the faster half, as fast as the engines, the slower half."""
    setup = attrs.evolve(SETUP, rates=attrs.evolve(RATES, token_seconds=token_seconds))
    both, learner, engines = simulate(setup), simulate(learner_alone(setup)), found["G"]
    assert both.step <= max(engines.step, learner.step) / 0.9
    assert both.tokens_per_second >= 0.9 * min(engines.tokens_per_second, learner.tokens_per_second)
    assert engines.wasted < 0.02  # its step is all that engines can do


def test_in_step_both_halves_wait_for_each_other(found: dict[str, SimulationResult]) -> None:
    assert found["sync"].step == pytest.approx(found["sync G"].step + found["sync T"].step, rel=0.05)
    assert found["async"].step < 0.6 * found["sync"].step


def test_what_is_reported_fits_together(found: dict[str, SimulationResult]) -> None:
    ahead, sync = found["async"], found["sync"]
    assert (sync.staleness, sync.staleness_max, sync.wasted) == (0.0, 0, 0.0)
    assert 0 < ahead.staleness <= ahead.staleness_max <= AHEAD.max_staleness
    assert 0 < ahead.wasted < 0.1
    assert ahead.engines_idle < 0.02 < 0.2 < sync.engines_idle
    assert sync.learner_idle == pytest.approx(found["sync G"].step / sync.step, rel=0.05)
    sent = RATES.weights_bytes * SETUP.engines / 1e9
    assert ahead.weights_gb_per_second == pytest.approx(sent / ahead.step, rel=1e-3)
    assert ahead.step <= ahead.step_p95


def test_a_run_is_the_same_each_time(found: dict[str, SimulationResult]) -> None:
    assert simulate(SETUP) == found["async"] != simulate(attrs.evolve(SETUP, seed=1))


def test_weights_that_travel_seldom_are_sent_seldom_and_age() -> None:
    section = RolloutSection(max_staleness=1, sync_interval=4)
    seldom = simulate(attrs.evolve(SMALL, rollout=section, steps=16))
    often = simulate(attrs.evolve(SMALL, rollout=RolloutSection(max_staleness=1)))
    a_sync = RATES.weights_bytes * SMALL.engines / 1e9
    assert often.weights_gb_per_second * often.step == pytest.approx(a_sync, rel=1e-3)
    assert seldom.weights_gb_per_second * seldom.step == pytest.approx(a_sync / 4, rel=0.4)
    assert often.staleness_max <= 1 < seldom.staleness_max < 8


def test_groups_that_filters_leave_out_are_waste_or_are_replaced() -> None:
    rates = attrs.evolve(RATES, filtered=0.5)
    left_out = simulate(attrs.evolve(synchronous(SETUP), rates=rates))
    section = RolloutSection(dynamic_sampling=True)
    replaced = simulate(attrs.evolve(SETUP, rates=rates, rollout=section))
    assert left_out.wasted == pytest.approx(0.5, abs=0.1)
    assert replaced.wasted == pytest.approx(0.5, abs=0.1)
    assert replaced.tokens_per_second * replaced.step > 1.6 * left_out.tokens_per_second * left_out.step


def test_sources_with_weights_and_uneven_batches_run_through() -> None:
    assert simulate(attrs.evolve(SMALL, sources={"a": 0.05, "b": 0.95}, batch=7)).step > 0


def test_a_thousand_gpus_cost_work_for_each_response_and_no_more() -> None:
    setup = attrs.evolve(SETUP, engines=768, learners=256, batch=256, steps=2, rollout=RolloutSection())
    assert simulate(setup).turns < 8 * setup.steps * setup.batch * setup.group


@pytest.mark.slow
@pytest.mark.long
def test_on_a_real_clock_too() -> None:
    """The same on the usual event loop, with engines and a learner that sleep: some four seconds each.

    The fastest of three rounds: whatever else the machine does only makes a run longer.
    """
    rates = Rates(
        slots=32, step_seconds=4e-3, sequence_seconds=2e-5, prompt_tokens=0, score_seconds=0.0,
        token_seconds=5e-5, learner_seconds=0.02, sync_seconds=2e-3, weights_bytes=0.0,
    )  # fmt: skip
    lengths = Lengths(median=40, sigma=1.0, limit=300)
    ahead = attrs.evolve(AHEAD, oversample=0.0)
    setup = attrs.evolve(SETUP, rates=rates, lengths=lengths, batch=24, steps=9, rollout=ahead)
    in_step = attrs.evolve(synchronous(setup), steps=4)

    def seconds(one: Setup) -> float:
        async def run() -> float:
            return (await SimulatedTraining(one).run()).step

        return asyncio.run(run())

    setups = engines_alone(setup), learner_alone(setup), setup, in_step
    generation, training, both, each = np.min([[seconds(one) for one in setups] for _ in range(3)], axis=0)
    assert both <= max(generation, training) / 0.9
    assert each > 1.3 * both
