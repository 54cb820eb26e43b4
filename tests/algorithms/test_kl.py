"""KL estimators: values, gradients, and clamping."""

from __future__ import annotations

import math

import pytest
import torch

import rlsdk

D = [0.0, 0.5, -0.5, 1.5]


def estimate(name: str, difference: list[float]) -> tuple[list[float], list[float]]:
    """Values and derivatives at logprobs that exceed the reference's by these."""
    reference = torch.full((len(difference),), -2.0, dtype=torch.float64)
    logprobs = (reference + torch.tensor(difference, dtype=torch.float64)).requires_grad_()
    value = rlsdk.load("kl", name)(logprobs, reference)
    value.sum().backward()
    return value.tolist(), logprobs.grad.tolist()


@pytest.mark.parametrize(
    "name, value, slope",
    [
        ("k1", lambda d: d, lambda d: 1.0),
        ("k2", lambda d: d * d / 2, lambda d: d),
        ("k3", lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
        ("abs", abs, lambda d: math.copysign(1, d) if d else 0.0),
        ("low_var", lambda d: math.exp(-d) - 1 + d, lambda d: 1 - math.exp(-d)),
    ],
)
def test_values_and_gradients(name, value, slope):
    values, slopes = estimate(name, D)
    assert values == pytest.approx([value(d) for d in D], abs=1e-12)
    assert slopes == pytest.approx([slope(d) for d in D], abs=1e-12)


@pytest.mark.parametrize("name", ["k1", "k3", "abs", "low_var"])
def test_straight_through_has_the_gradient_of_k2(name):
    assert estimate(f"{name}+", D)[0] == pytest.approx(estimate(name, D)[0])
    assert estimate(f"{name}+", D)[1] == pytest.approx(D)


def test_k3_is_not_clamped_and_low_var_is():
    assert estimate("k3", [-30.0])[0] == pytest.approx([math.exp(30) - 31])
    assert estimate("low_var", [-30.0, 5.0, 30.0])[0] == pytest.approx([10.0, math.exp(-5) + 4, 10.0])


def test_k3_keeps_small_values():
    small = torch.full((1,), 1e-4)
    assert rlsdk.load("kl", "k3")(small, torch.zeros(1)).item() == pytest.approx(5e-9, rel=1e-2)
