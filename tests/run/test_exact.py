"""Whole runs with `model.exact`: the gap between engine and learner stays exactly zero while the weights change."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]
EXACT = ["engine=transformers", "model.exact=true", "steps=4", "algorithm.kl_coef=0.01"]


@pytest.mark.parametrize(
    "settings",
    [
        ["group_size=4", "minibatches=2"],
        pytest.param(
            ["group_size=3", "batch_size=3", "learner.micro_batch_tokens=40", "sampling.temperature=0.8"],
            marks=pytest.mark.long,
        ),
        ["workflow={use: dialogue, turns: 2}", "model.max_length=64", "placement.learners=2", "group_size=2"],
    ],
    ids=["minibatches", "temperature", "turns on two ranks"],
)
def test_the_gap_is_zero_at_every_step(runner: Any, settings: list[str]) -> None:
    runner.train(*EXACT, *settings)
    lines = runner.metrics()[1:]
    assert len(lines) == 4
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    assert [line["actor/gap"] for line in lines] == [0.0] * 4
    assert [line["canary/gap"] for line in lines] == [0.0] * 4


def test_without_it_the_gap_is_rounding(runner: Any) -> None:
    runner.train("engine=transformers", "steps=2", "eval={before: false, after: false}")
    gaps = [line["actor/gap"] for line in runner.metrics()]
    assert all(0 < gap < 1e-3 for gap in gaps)
