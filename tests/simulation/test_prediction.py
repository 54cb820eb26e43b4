"""Predictions of large trainings, of which a slice is simulated."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

from rlsdk.cli.simulate import simulate as command
from rlsdk.config.rollout import RolloutSection
from rlsdk.simulation.prediction import predict, sliced
from rlsdk.simulation.rates import Lengths, Rates
from rlsdk.simulation.training import Setup

LARGE = Setup(
    rates=Rates(slots=32, token_seconds=1e-5),
    lengths=Lengths(median=200.0, limit=1600),
    engines=32,
    learners=8,
    batch=96,
    group=4,
    steps=10,
    rollout=RolloutSection(max_staleness=1),
)
CONFIG = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


@pytest.mark.slow
def test_a_slice_represents_the_whole() -> None:
    whole, part = predict(LARGE, most=None), predict(LARGE, most=960)
    assert (whole.share, part.share) == (1.0, 0.25)
    for name in ("configured", "synchronous"):
        exact, near = attrs.asdict(getattr(whole, name)), attrs.asdict(getattr(part, name))
        for figure in ("step", "staleness", "tokens_per_second", "weights_gb_per_second"):
            assert near[figure] == pytest.approx(exact[figure], rel=0.1), (name, figure)
        for figure in ("engines_idle", "learner_idle", "wasted"):
            assert near[figure] == pytest.approx(exact[figure], abs=0.05), (name, figure)
    assert part.engines_alone == pytest.approx(whole.engines_alone, rel=0.1)
    assert part.learner_alone == pytest.approx(whole.learner_alone, rel=0.1)


def test_a_slice_keeps_the_tasks_of_an_engine_and_the_time_of_the_learner() -> None:
    part = sliced(LARGE, 960)
    assert (part.engines, part.batch) == (8, 24)
    tokens = 1000.0
    assert part.rates.learn(tokens / 4, part.learners) == pytest.approx(LARGE.rates.learn(tokens, LARGE.learners))
    assert sliced(LARGE, 10_000) == LARGE
    assert sliced(LARGE, 1).engines == 1


def test_weights_go_to_the_nodes_of_the_whole_training_and_not_to_one_for_each_engine_of_the_slice() -> None:
    setup = attrs.evolve(LARGE, steps=2, group=2)
    part = predict(setup, most=1)  # one of 32 engines, which are four nodes
    assert part.share == 1 / 32
    sent = 4 * setup.rates.weights_bytes / 1e9
    assert part.synchronous.weights_gb_per_second * part.synchronous.step == pytest.approx(sent, rel=1e-3)


def test_a_thousand_gpus_are_a_slice_unless_the_whole_is_asked_for() -> None:
    apart = [str(CONFIG), "placement.colocate=false"]
    found = CliRunner().invoke(command, [*apart, "--gpus", "1024", "--per-gpu", "1", "--steps", "4", "--json"])
    assert found.exit_code == 0, found.output
    prediction = json.loads(found.stdout)["predictions"][0]
    assert prediction["share"] < 0.2 and prediction["engines"] == 768 and prediction["batch_size"] == 1024
    small = CliRunner().invoke(command, [str(CONFIG), "--gpus", "8", "--steps", "4", "--whole", "--json"])
    assert json.loads(small.stdout)["predictions"][0]["share"] == 1.0
