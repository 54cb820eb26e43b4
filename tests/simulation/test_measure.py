"""Rates from a run's folder, and the command: a simulated run yields the rates that it was created with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from rlsdk.cli.simulate import simulate
from rlsdk.errors import ConfigError, RunError
from rlsdk.runlog.store import Address, RolloutStore
from rlsdk.runlog.tables import Entry
from rlsdk.simulation.measure import fit, lengths_of, measure
from rlsdk.simulation.prediction import changed, divided
from rlsdk.simulation.rates import Rates
from rlsdk.types import Group, Rollout, Score, Task

CONFIG: dict[str, Any] = {
    "name": "run",
    "model": {"path": str(Path(__file__).parents[2] / "examples/models/countdown-nano"), "max_length": 300},
    "tasks": {"train": {"use": "countdown", "size": 20}},
    "reward": "countdown",
    "algorithm": {"use": "grpo", "kl_coef": 0.0},
    "sampling": {"max_tokens": 200},
    "steps": 3,
    "batch_size": 8,
    "group_size": 4,
    "placement": {"engines": 2, "learners": 2, "colocate": False},
}
TRUE = Rates(
    step_seconds=0.01,
    sequence_seconds=0.002,
    score_seconds=0.05,
    token_seconds=1e-3,
    learner_seconds=0.3,
    sync_seconds=0.4,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Files of a synchronous run at these rates: each engine generates half, one response after the other."""
    folder = tmp_path / "run"
    folder.mkdir()
    store = RolloutStore(Address.make(folder, None, None))
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    draw = np.random.default_rng(0)
    lines = [{"step": 0, "eval/greedy": 0.5}]
    for step in range(1, 13):
        lengths = np.minimum(200, 1 + (30 * np.exp(draw.standard_normal(32))).astype(int))
        task = Task(str(step), "p")
        answers = [Rollout(task, (), [1] * n, [True] * n, [0.0] * n, [0] * n) for n in lengths.tolist()]
        group = Group(task, answers, [Score(0.0)] * len(answers))
        with store.transaction():
            store.put([Entry(number=step, source="", state="trained", step=step, uses=1, group=group)])
        tokens, steps = float(lengths.sum()), float(lengths.max())
        engine = steps * TRUE.step_seconds + tokens / 2 * TRUE.sequence_seconds
        update = TRUE.learn(tokens * 0.75, 2)
        line = {
            "step": step,
            "rollouts/tokens": tokens,
            "rollouts/length": tokens / 32,
            "groups/trained": 0.75,
            "engine/steps": steps,
            "staleness/max": 0.0,
            "time/engine_inside": engine,
            "time/produce": engine + TRUE.score_seconds,
            "time/update": update,
            "time/sync": TRUE.sync_seconds,
        }
        line["time/step"] = line["time/produce"] + update + TRUE.sync_seconds
        lines.append(line if step > 3 else line | {"time/step": 99.0, "time/engine_inside": 99.0})  # compilation
    store.close()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_rates_come_back_from_what_a_run_left(run: Path) -> None:
    found = measure(run, Rates(weights_bytes=0.0))
    for name in (
        "step_seconds",
        "sequence_seconds",
        "score_seconds",
        "token_seconds",
        "learner_seconds",
        "sync_seconds",
    ):
        assert getattr(found.rates, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name
    assert found.rates.filtered == pytest.approx(0.25)
    shared = measure(run, Rates(weights_bytes=0.0, driver_seconds=1e-3)).rates  # for each of 32 rollouts
    assert (shared.driver_seconds, shared.score_seconds) == pytest.approx((1e-3, TRUE.score_seconds - 0.032), rel=1e-3)
    assert measure(run, Rates(weights_bytes=0.0, driver_seconds=1.0)).rates.score_seconds == pytest.approx(0.0)
    assert (found.steps, found.staleness, found.engines_idle) == (9, 0.0, None)
    assert len(found.lengths.seen) == 12 * 32
    assert found.lengths.limit == 200


@pytest.mark.parametrize("mean", [2.0, 30.0, 150.0, 200.0])
def test_lengths_that_were_not_saved_have_the_mean_of_the_run_though_the_limit_cuts_them_off(
    tmp_path: Path, mean: float
) -> None:
    found = lengths_of(tmp_path, [{"rollouts/length": mean - 1}, {"rollouts/length": mean + 1}], 200)
    assert np.mean(found.draw(np.random.default_rng(0), 20_000)) == pytest.approx(mean, rel=0.03)


def test_a_spread_that_is_given_keeps_the_measured_median(run: Path) -> None:
    found = measure(run, Rates(weights_bytes=0.0)).lengths
    assert found.median == np.median(found.seen)
    _, wider = changed(Rates(), found, {"sigma": 0.0})
    assert set(wider.draw(np.random.default_rng(0), 3)) == {round(found.median)}


def test_steps_of_nearly_equal_tokens_do_not_tell_what_a_step_without_any_takes(run: Path) -> None:
    draw, lines = (
        np.random.default_rng(0),
        [json.loads(each) for each in (run / "metrics.jsonl").read_text().split("\n") if each],
    )
    for spread, fixed, error in ((0.03, 0.0, 1e-9), (0.5, TRUE.learner_seconds, 0.15)):
        for line in lines[1:]:
            tokens = 2000 * (1 + spread * draw.uniform(-1, 1))
            update = TRUE.learn(tokens, 2) * (1 + 0.03 * draw.standard_normal())
            line |= {"rollouts/tokens": tokens, "groups/trained": 1.0, "time/update": update}
            line["time/step"] = line["time/produce"] + update + TRUE.sync_seconds
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        rates = measure(run, Rates(weights_bytes=0.0)).rates
        assert rates.learner_seconds == pytest.approx(fixed, abs=error)
        assert rates.learn(2000, 2) == pytest.approx(TRUE.learn(2000, 2), rel=0.03)  # where it was measured


def test_what_was_trained_again_is_part_of_what_the_learner_did(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        again = 8 * line["rollouts/length"]
        line["rollouts/reused"] = 8.0
        line["time/step"] -= line["time/update"]
        line["time/update"] = TRUE.learn(line["rollouts/tokens"] * 0.75 + again, 2)
        line["time/step"] += line["time/update"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = measure(run, Rates(weights_bytes=0.0))
    assert found.rates.token_seconds == pytest.approx(TRUE.token_seconds, rel=1e-3)
    assert found.rates.learner_seconds == pytest.approx(TRUE.learner_seconds, rel=1e-3)
    trained = sum(line["rollouts/tokens"] for line in lines[4:])  # a quarter is filtered, and as much trained again
    assert found.tokens_per_second * found.step * found.steps == pytest.approx(trained)


def test_rates_are_never_negative() -> None:
    one, two = np.array([1.0, 1.0, 1.0]), np.array([1.0, 2.0, 3.0])
    assert fit(one, two, 2 + 3 * two) == pytest.approx((2, 3))
    assert fit(one, two, np.array([3.0, 2.0, 1.0])) == pytest.approx((2, 0))
    assert fit(one, two, 3 * two - 1) == pytest.approx((0, 3 - 6 / 14))


def test_a_folder_that_says_too_little_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"metrics\.jsonl of at least 5 training steps; found 0"):
        measure(tmp_path, Rates())


def command(run: Path, *arguments: str, fails: bool = False) -> Any:
    called = CliRunner().invoke(simulate, [str(run / "config.yaml"), *arguments], catch_exceptions=not fails)
    assert called.exit_code == 0, called.output
    return called.output


def test_the_command_predicts_the_run_that_it_measured(run: Path) -> None:
    """Within a few percent, though it draws new lengths."""
    told = json.loads(command(run, "--rates", str(run), "--against", str(run), "--json", "--steps", "40"))
    (found,), measured = told["predictions"], told["measured"]
    assert (found["engines"], found["learners"], found["gpus"]) == (2, 2, None)
    assert found["configured"] == found["synchronous"]
    assert found["configured"]["step"] == pytest.approx(measured["step"], rel=0.1)
    assert found["configured"]["learner_idle"] == pytest.approx(measured["learner_idle"], rel=0.1)
    assert found["configured"]["tokens_per_second"] == pytest.approx(measured["tokens_per_second"], rel=0.1)


def test_the_command_predicts_other_settings_and_sizes(run: Path) -> None:
    told = json.loads(
        command(run, "rollout.max_staleness=2", "--gpus", "8,32", "--per-gpu", "1", "--json", "--rate", "median=50")
    )
    small, large = told["predictions"]
    assert [(p["gpus"], p["engines"], p["learners"], p["batch_size"]) for p in (small, large)] == [
        (8, 6, 2, 8),
        (32, 24, 8, 32),
    ]
    for found in (small, large):
        assert found["configured"]["step"] < found["synchronous"]["step"]
        assert found["of_bound"] == pytest.approx(
            max(found["engines_alone"], found["learner_alone"]) / found["configured"]["step"]
        )
    assert large["configured"]["tokens_per_second"] > 2 * small["configured"]["tokens_per_second"]


def test_the_command_uses_the_rollout_section_of_the_config(run: Path, tmp_path: Path) -> None:
    """A plugin's rule and policy, and answers interrupted by a sync."""
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import rlsdk\n\n"
        "@rlsdk.stop('half')\ndef half(*, available: int, target: int) -> bool:\n    return 2 * available >= target\n\n"
        "@rlsdk.buffer('short')\ndef short(group: rlsdk.Group, *, step: int, uses: int) -> float | None:\n"
        "    return None if len(group.rollouts[0].token_ids) > 40 else 0.0\n"
    )

    def found(*settings: str) -> dict[str, Any]:
        (prediction,) = json.loads(
            command(run, *settings, "rollout.max_staleness=1", "--rates", str(run), "--json", "--steps", "8")
        )["predictions"]
        configured: dict[str, Any] = prediction["configured"]
        return configured

    plain = found()
    own = found("rollout.stop=mine/half", "rollout.buffer=mine/short", "--plugin", str(plugin))
    anew = found("rollout.in_flight=false", "rollout.partial_rollouts=false")
    assert own["step"] < 0.9 * plain["step"]
    assert own["wasted"] > plain["wasted"] + 0.1
    assert anew["wasted"] > plain["wasted"] + 0.05


def test_a_batch_emptied_by_replay_is_reported(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"replay\.share: 0\.75 of a batch of 2 leaves no new group"):
        given = ("rollout.max_staleness=1", "rollout.replay={share: 0.75}", "--gpus", "2", "--per-gpu", "1")
        command(run, *given, fails=True)


def test_the_table_says_what_the_figures_are(run: Path) -> None:
    shown = command(run, "--engines", "3", "--learners", "1", "--rates", str(run), "--against", str(run))
    assert "synchronous" not in shown  # as configured
    assert "synchronous" in command(run, "rollout.max_staleness=1", "--steps", "4")
    for text in (
        "3 engines, 1 rank, 8 × 4 rollouts a step",
        "as configured",
        "measured, 9 steps",
        "alone:",
        "from the run",
    ):
        assert text in shown
    assert "No rate was measured" not in shown and "comparable" not in shown


def test_a_comparison_with_a_run_of_another_batch_size_is_warned_of(run: Path) -> None:
    shown = command(run, "batch_size=4", "--rates", str(run), "--against", str(run), "--steps", "4")
    assert "the run has 8 × 4 rollouts a step, not 4 × 4 as predicted, so the figures are not comparable" in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rate", "speed=3"), r"--rate speed: unknown; the names are bandwidth, "),
        (("--rate", "meadian=3"), r"weights_bytes; did you mean 'median'\?"),
        (("--rate", "bandwidth=0"), r"--rate bandwidth must be above 0; got 0"),
        (("--rate", "bandwidth=inf"), r"--rate bandwidth must be above 0 and finite; got inf"),
        (("--rate", "step_seconds=inf"), r"--rate step_seconds must be at least 0 and finite; got inf"),
        (("--rate", "slots=nan"), r"--rate slots must be above 0; got nan"),
        (("--rate", "filtered=1.5"), r"--rate filtered must be from 0 to 1; got 1.5"),
        (("--rate", "filtered=1", "rollout.dynamic_sampling=true"), r"filters drop every group"),
        (("--gpus", "8,1"), r"--gpus 1: an engine needs 1 and the learner at least 1; give 2 or more"),
        (("algorithm=sft",), r"trains on demonstrations"),
    ],
)
def test_configurations_that_cannot_be_simulated_are_reported(run: Path, arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        command(run, *arguments, fails=True)


def test_tasks_per_gpu_need_a_number_of_gpus(run: Path) -> None:
    called = CliRunner().invoke(simulate, [str(run / "config.yaml"), "--per-gpu", "2"])
    assert called.exit_code == 2
    assert "--per-gpu is a number of tasks for each GPU of --gpus" in called.output


def test_gpus_are_divided_so_that_both_halves_have_some() -> None:
    assert divided(1024, 0.25, 1) == (768, 256)
    assert divided(2, 0.0, 1) == (1, 1)
    assert divided(16, 1.0, 4) == (1, 12)
    assert divided(64, 0.25, 8) == (6, 16)
