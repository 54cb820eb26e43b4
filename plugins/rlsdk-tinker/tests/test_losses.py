"""Tinker's losses: values by hand, and weights that are the derivative of the values."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlsdk_tinker.losses import LOSSES

LOG = math.log


@pytest.mark.parametrize(
    ("name", "logprob", "inputs", "value"),
    [
        ("cross_entropy", -2.0, {"weights": 0.5}, 1.0),
        ("importance_sampling", LOG(0.3), {"logprobs": LOG(0.2), "advantages": 2.0}, -3.0),
        ("ppo", LOG(0.3), {"logprobs": LOG(0.2), "advantages": 2.0}, -2.4),
        ("ppo", LOG(0.3), {"logprobs": LOG(0.2), "advantages": -2.0}, 3.0),
        ("ppo", LOG(0.1), {"logprobs": LOG(0.2), "advantages": -2.0}, 1.6),
        ("cispo", LOG(0.3), {"logprobs": LOG(0.2), "advantages": 2.0}, -2.4 * LOG(0.3)),
        ("dro", -1.0, {"logprobs": -3.0, "advantages": 2.0}, 2.0 + 0.5 * 0.05 * 4),
    ],
)
def test_the_loss_of_one_token(name: str, logprob: float, inputs: dict[str, float], value: float) -> None:
    arrays = {key: np.array([each]) for key, each in inputs.items()}
    found = LOSSES[name].compute(np.array([logprob]), arrays, LOSSES[name].options)
    assert found.values == pytest.approx([value])


def test_ppo_has_no_gradient_where_its_clip_is_active() -> None:
    arrays = {"logprobs": np.full(4, LOG(0.2)), "advantages": np.array([1.0, -1.0, 1.0, -1.0])}
    found = LOSSES["ppo"].compute(np.log([0.3, 0.3, 0.1, 0.1]), arrays, LOSSES["ppo"].options)
    assert found.weights == pytest.approx([0.0, -1.5, 0.5, 0.0])


@given(
    name=st.sampled_from(sorted(LOSSES)),
    logprobs=st.lists(st.floats(-6, 0), min_size=1, max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_weights_are_minus_the_derivative_by_the_logprobs(name: str, logprobs: list[float], seed: int) -> None:
    draw, now, step = np.random.default_rng(seed), np.array(logprobs), 1e-6
    loss = LOSSES[name]
    arrays = {key: draw.normal(size=len(now)) for key in loss.inputs}
    if "logprobs" in arrays:
        arrays["logprobs"] = now + draw.uniform(-1, 1, len(now))
        # The derivative jumps at the bounds of a clip.
        ratio = np.exp(now - arrays["logprobs"])
        for bound in (loss.options.get(key, -1.0) for key in ("clip_low_threshold", "clip_high_threshold")):
            arrays["logprobs"] = np.where(np.abs(ratio - bound) < 1e-4, now, arrays["logprobs"])

    def total(at: np.ndarray) -> np.ndarray:
        if name == "cispo":  # its ratio is a constant
            return -loss.compute(now, arrays, loss.options).weights * at
        return loss.compute(at, arrays, loss.options).values

    slope = (total(now + step) - total(now - step)) / (2 * step)
    assert loss.compute(now, arrays, loss.options).weights == pytest.approx(-slope, rel=1e-4, abs=1e-5)
