"""A GRPO step of rlsdk and of TRL's `GRPOTrainer`, one after the other, with the same model, samples and lengths.

Ratios of medians, never times. Both train every group by one optimiser step for each generation, without a KL term.
TRL generates by itself: its vLLM mode needs a GPU. The machine must have nothing else to do.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.benchmarks.conftest import Steps, Work

BENCHMARK = "A GRPO step against TRL"
FIGURE = "times as fast as TRL"
ROUNDS = 3
"""Runs of each, in turn: a machine that grows slower meanwhile does so for all."""
TRIAL_STEPS = 8
SHORT = {"tasks": 64, "group": 16, "max_tokens": 14, "steps": 20}
LONG = {"tasks": 16, "group": 16, "max_tokens": 256, "steps": 8}
FAST = {"learner.attention": "eager", "learner.compile": "true"}
"""For rows of a few dozen tokens: of an update on a CPU, eager attention saves a twentieth and compilation a fifth."""
TUNINGS: tuple[dict[str, Any], ...] = (
    {"attention": "eager"},
    {"compiled": True},
    {"attention": "eager", "compiled": True},
    {"paged": True},
)
"""What TRL is tried with beyond its best threads and batch."""


@pytest.fixture(scope="module")
def best_of_trl(trl: Callable[..., Any]) -> Callable[..., tuple[dict[str, Any], dict[str, Any]]]:
    """Finds TRL's fastest threads, batch and other settings for a kind of work, once."""
    found: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}

    def best(work: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        if work.max_tokens not in found:
            found[work.max_tokens] = _fastest(trl, attrs.evolve(work, steps=TRIAL_STEPS))
        return found[work.max_tokens]

    return best


def _fastest(trl: Callable[..., Any], work: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    def fastest(tried: Iterable[dict[str, Any]]) -> dict[str, Any]:
        return min(tried, key=lambda settings: trl(work, **settings).median)

    batches = (work.completions, work.completions // 4)
    plain = fastest({"threads": t, "micro_batch": b} for t, b in itertools.product((1, 2), batches))
    return plain, fastest({**plain, **more} for more in TUNINGS)


@pytest.fixture
def compare(
    model: Path,
    prompts: Path,
    train: Callable[..., Any],
    trl: Callable[..., Any],
    best_of_trl: Callable[..., tuple[dict[str, Any], dict[str, Any]]],
    show: Callable[..., None],
) -> Callable[..., float]:
    """How many times as fast as TRL with its best threads and batch: `compare(shape, engine)`.

    Further settings of rlsdk's by path. Beside it stands the ratio to TRL tuned beyond that.
    """

    def run(shape: dict[str, int], engine: str, **own: str) -> float:
        work = Work(model=model, prompts=prompts, **shape)
        plain, tuned = best_of_trl(work)
        rounds = [(train(work, engine=engine, **own), trl(work, **plain), trl(work, **tuned)) for _ in range(ROUNDS)]
        ours, theirs, theirs_tuned = (Steps.join(runs) for runs in zip(*rounds, strict=True))
        ratio = theirs.median / ours.median
        show(
            ours.seconds,
            engine=engine,
            ratio=round(ratio, 2),
            ratio_tuned=round(theirs_tuned.median / ours.median, 2),
            rounds=[[round(each.median, 3) for each in runs] for runs in rounds],
            rlsdk={**_figures(ours), **own},
            trl={**_figures(theirs), **plain},
            trl_tuned={**_figures(theirs_tuned), **tuned},
        )
        # Equal work: otherwise the ratio says nothing.
        for other in (theirs, theirs_tuned):
            assert ours.length == pytest.approx(other.length, rel=0.1)
            assert ours.truncated == pytest.approx(other.truncated, abs=0.04)
        return ratio

    return run


def _figures(steps: Any) -> dict[str, Any]:
    return {
        "median": round(steps.median, 4),
        "steps": len(steps.seconds),
        "mean_length": round(steps.length, 2),
        "truncated": round(steps.truncated, 3),
        "length_quartiles": statistics.quantiles(steps.lengths, n=4),
    }


def test_vllm_on_many_short_completions_is_as_fast_as_trl(
    compare: Callable[..., float], check: Callable[..., None]
) -> None:
    # Prompts of eight tokens fill no block of the cache that equal prompts could share.
    engine = "{use: vllm, max_num_seqs: 512, args: {enable_prefix_caching: false}}"
    check(FIGURE, compare(SHORT, engine, **FAST), case="1,024 × at most 14, `vllm`", at_least=1.0)


def test_vllm_on_a_long_tail_is_twice_as_fast_as_trl(compare: Callable[..., float], check: Callable[..., None]) -> None:
    check(FIGURE, compare(LONG, "vllm"), case="256 × at most 256, `vllm`", at_least=2.0)


def test_transformers_on_many_short_completions_is_half_as_fast_again_as_trl(
    compare: Callable[..., float], check: Callable[..., None]
) -> None:
    engine = "{use: transformers, compile: true}"
    check(FIGURE, compare(SHORT, engine, **FAST), case="1,024 × at most 14, `transformers`", at_least=1.5)
