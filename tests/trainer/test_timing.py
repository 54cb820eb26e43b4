"""Metrics of a step's time and devices."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from rlsdk.config.schema import PlacementSection
from rlsdk.engines.actor import STEP
from rlsdk.trainer.timing import decode_rates, device_metrics, time_metrics

SPENT = {"engine": 3.0, "engines": 2.5, "learner": 4.0, "tokens": 100.0, "steps": 20.0}
SPENT |= {f"all_{name}": 0.0 for name in STEP}


def test_the_use_of_devices_is_per_gpu_and_against_the_peak() -> None:
    before, after = {"update_flop": 1e12}, {"update_flop": 3e12, "gpu_bytes": 1.0, "peak_tflops": 4.0}
    step = {"apart": 1, "tokens": 1200.0, "wall": 10.0, "update": 2.0}
    shared = PlacementSection(engines=1, gpus_per_engine=2, learners=2)
    found = device_metrics(shared, before, after, **step)
    assert found == {"time/tokens_per_second_per_gpu": 40.0, "time/update_mfu": 0.25}
    divided = attrs.evolve(shared, colocate=False, peak_tflops=2.0)
    found = device_metrics(divided, before, after, **step)
    assert found == {"time/tokens_per_second_per_gpu": 24.0, "time/update_mfu": 0.5}
    assert device_metrics(shared, before, {"update_flop": 3e12}, **step) == {}
    assert device_metrics(divided, before, {"update_flop": 3e12}, **step) == {"time/update_mfu": 0.5}
    assert device_metrics(divided, before, {"update_flop": 3e12}, **{**step, "update": 0.0}) == {}


def test_times_of_a_run_ahead_say_who_waited_for_whom() -> None:
    phases = {"take": 1.0, "produce": 1.5, "learn": 5.0, "update": 4.0, "sync": 0.5}
    found = time_metrics(phases, 10.0, SPENT, generated=2.0, ahead=True)
    assert {name: found[f"time/{name}_share"] for name in phases if name not in ("take", "learn")} == {
        name: seconds / 10 for name, seconds in phases.items() if name not in ("take", "learn")
    }
    assert found["time/wait_for_rollouts"] == 1.0
    assert found["time/overlap"] == pytest.approx(0.4)
    assert found["time/engines_idle"] == pytest.approx(0.75)
    assert (found["time/produce"], found["time/step"], found["engine/steps"]) == (1.5, 10.0, 20.0)
    assert not {"time/take", "time/learn"} & found.keys()
    assert found["time/outside_share"] == pytest.approx(
        0.5
    )  # two of the three seconds in engines overlap the learner's


def test_metrics_that_are_constant_without_running_ahead_are_not_logged() -> None:
    phases = {"take": 1.0, "produce": 1.5, "learn": 5.0}
    found = time_metrics(phases, 10.0, SPENT, generated=0.0, ahead=False)
    assert not {"time/overlap", "time/wait_for_rollouts"} & found.keys()
    assert "time/engines_idle" in found
    without = time_metrics(phases, 10.0, {**SPENT, "steps": 0.0}, generated=0.0, ahead=True)
    assert not {"time/engines_idle", "engine/steps"} & without.keys()  # there are no engines


def sums(running: list[int], seconds: list[float]) -> list[float]:
    r, s = np.array(running, float), np.array(seconds)
    return [float(s.sum()), float(len(r)), float(r.sum()), float((r * r).sum()), float((r * s).sum())]


def test_the_cost_of_a_decode_step_is_fitted() -> None:
    running = [256, 100, 10, 1]
    found = decode_rates(*sums(running, [0.01 + 1e-4 * n for n in running]))
    assert found == pytest.approx({"engine/step_seconds": 0.01, "engine/sequence_seconds": 1e-4})
    assert decode_rates(*sums([8, 8, 8], [0.1, 0.2, 0.3])) == {}  # nothing tells the two apart
    below = decode_rates(*sums([1, 2, 3], [0.0, 2.0, 4.0]))
    assert below["engine/step_seconds"] == 0.0
    assert below["engine/sequence_seconds"] == pytest.approx(16 / 14)
    falling = decode_rates(*sums([1, 2, 3], [3.0, 2.0, 1.0]))
    assert falling == {"engine/step_seconds": 2.0, "engine/sequence_seconds": 0.0}
