"""Trainings whose reward fails, or is a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.stack, pytest.mark.slow]

LAB = str(Path(__file__).with_name("flaky_lab.py"))
FLAKY = ("--plugin", LAB, "engine=transformers", "scoring.timeout=2", "batch_size=16", "group_size=8", "eval.limit=4")


def test_a_few_failures_are_left_out_and_told(runner: Any) -> None:
    runner.train(*FLAKY, "reward=flaky_lab/flaky", "steps=6", "max_invalid=0.6")  # an evaluation has only eight
    found = runner.summary()["invalid"]
    lines = runner.metrics()[1:]
    assert found["rollouts"] == sum(line["rollouts/invalid"] for line in lines)
    assert 0.01 < found["share"] < 0.12
    reasons = " ".join(found["reasons"])
    assert all(reason in reasons for reason in ("referee is ill", "longer than 2 s", "process ended"))
    assert "could not be scored and were left out" in runner.console()
    assert all(line["actor/grad_norm"] > 0 for line in lines)


@pytest.mark.parametrize(
    ("when", "setting"), [("step 1", "eval.before=false"), ("evaluation at step 0", "eval.limit=16")]
)
def test_many_failures_stop_the_run_with_the_cause(runner: Any, when: str, setting: str) -> None:
    # Without the trial of made-up answers: of five that each fail every other time, all do once in thirty-two runs.
    runner.train(*FLAKY, "reward={use: flaky_lab/flaky, share: 0.5}", "scoring.trial=false", setting, code=1)
    said = " ".join(runner.console().split())
    assert f"{when}: " in said
    assert "trajectories could not be scored, more than max_invalid=0.2 allows" in said
    assert f"task 'countdown/{'test' if 'evaluation' in when else 'train'}/" in said
    assert "flaky_lab/flaky: " in said
    assert said.count("referee is ill (") == 1 and "flaky_lab.py, line " in said  # each cause once, with its line


def test_a_reward_model_scores_in_an_actor(runner: Any, classifier: Path) -> None:
    judged = f"{{use: reward_model, path: {classifier}, activation: sigmoid, weight: 0.5}}"
    runner.train("engine=transformers", f"reward=[countdown, {judged}]")
    lines = runner.metrics()[1:]
    assert all(0 < line["reward/reward_model"] < 1 for line in lines)
    assert all(line["rollouts/invalid"] == 0 for line in lines)
    for line in lines:
        assert line["reward/mean"] == pytest.approx(line["reward/countdown"] + 0.5 * line["reward/reward_model"])
