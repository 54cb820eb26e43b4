"""Corrections: hand-computed weights, bounds on the ratio itself, metrics."""

from __future__ import annotations

import math

import pytest
import torch

import rlsdk
from rlsdk.batch import LossInputs
from rlsdk.components import needs_of
from rlsdk.contracts import LossSpec
from rlsdk.learners.objective import needs_reference
from rlsdk.plugins import ComponentRef

ALL = rlsdk.names("correction")


def inputs(rows: list[list[float]]) -> LossInputs:
    """Rollouts whose tokens have these ratios of trainer to sampler."""
    flat = torch.tensor([r for row in rows for r in row], dtype=torch.float64)
    segments = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([len(row) for row in rows]))
    return LossInputs(
        flat.log() + 3, flat.log(), torch.ones_like(flat), torch.ones_like(flat).bool(), segments,
        behaviour_logprobs=torch.zeros_like(flat),
    )  # fmt: skip


@pytest.mark.parametrize(
    "name, options, expected, cut",
    [
        ("tis", {}, [2.0, 0.25, 1.0, 2.0, 1.5], 1 / 5),
        ("tis", {"cap": 1.2}, [1.2, 0.25, 1.0, 1.2, 1.2], 3 / 5),
        ("tis", {"level": "sequence"}, [1.0, 1.0, 2.0, 2.0, 2.0], 3 / 5),
        ("mis", {"level": "token"}, [0.0, 0.0, 1.0, 2.0, 1.5], 2 / 5),
        ("mis", {}, [1.0, 1.0, 0.0, 0.0, 0.0], 3 / 5),
        ("icepop", {}, [4.0, 0.0, 1.0, 2.0, 1.5], 1 / 5),
        ("token_mask", {}, [0.0, 0.0, 1.0, 1.0, 1.0], 2 / 5),
        ("token_mask", {"low": 0.2, "high": 1.2}, [0.0, 1.0, 1.0, 0.0, 0.0], 3 / 5),
        ("sequence_mask", {}, [1.0, 1.0, 0.0, 0.0, 0.0], 3 / 5),
        ("geometric", {}, [1.0, 1.0, 0.0, 0.0, 0.0], 3 / 5),
        ("geometric", {"high": 1.45}, [1.0] * 5, 0.0),  # the third root of 3 is 1.442
        # k3 of the tokens: 1.614, 0.636, 0, 0.307, 0.095; k2: 0.961, 0.961, 0, 0.240, 0.082
        ("divergence_mask", {}, [0.0] * 5, 1.0),
        ("divergence_mask", {"threshold": 0.2}, [0.0, 0.0, 1.0, 1.0, 1.0], 2 / 5),  # means 1.125 and 0.134
        ("divergence_mask", {"level": "token", "threshold": 0.7}, [0.0, 1.0, 1.0, 1.0, 1.0], 1 / 5),
        ("divergence_mask", {"level": "sum", "threshold": 0.5}, [0.0, 0.0, 1.0, 1.0, 1.0], 2 / 5),  # 2.25 and 0.401
        ("divergence_mask", {"level": "sum", "threshold": 0.4}, [0.0] * 5, 1.0),
        ("divergence_mask", {"level": "max", "threshold": 0.31}, [0.0, 0.0, 1.0, 1.0, 1.0], 2 / 5),
        ("divergence_mask", {"level": "max", "threshold": 0.3}, [0.0] * 5, 1.0),
        ("divergence_mask", {"estimator": "k2", "level": "max", "threshold": 0.3}, [0.0, 0.0, 1.0, 1.0, 1.0], 2 / 5),
        ("divergence_mask", {"estimator": "k2", "level": "token", "threshold": 0.2}, [0.0, 0.0, 1.0, 0.0, 1.0], 3 / 5),
    ],
)
def test_hand_computed(name, options, expected, cut):
    weights, metrics = rlsdk.load("correction", name, **options)(inputs([[4.0, 0.25], [1.0, 2.0, 1.5]]))
    assert weights.tolist() == pytest.approx(expected)
    assert float(metrics["cut"]) == pytest.approx(cut)


def test_bounds_are_on_the_ratio_itself():
    """verl's k1 bounds are on the inverse: "0.5_1.2" keeps 1.4 and rejects 0.6 there."""
    weights, _ = rlsdk.load("correction", "token_mask", low=0.5, high=1.2)(inputs([[1.4, 0.6]]))
    assert weights.tolist() == [0.0, 1.0]


def test_metrics():
    ratios = [4.0, 0.25, 1.0]
    _, metrics = rlsdk.load("correction", "tis")(inputs([ratios]))
    assert float(metrics["kl"]) == pytest.approx(sum(-math.log(r) for r in ratios) / 3)
    assert float(metrics["k3"]) == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 3)
    assert float(metrics["chi2"]) == pytest.approx(sum(r * r for r in ratios) / 3 - 1)


@pytest.mark.parametrize("name", ALL)
def test_weights_are_detached_and_ignore_untrained_tokens(make_loss, name):
    x = make_loss(1)
    fields = ("logprobs", "old_logprobs", "behaviour_logprobs")
    dirty = {f: torch.where(x.loss_mask, getattr(x, f), torch.nan).requires_grad_() for f in fields}
    clean, _ = rlsdk.load("correction", name)(x)
    soiled, metrics = rlsdk.load("correction", name)(x.replace(**dirty))
    assert torch.equal(clean, soiled) and not soiled.requires_grad
    assert all(math.isfinite(v) and not v.requires_grad for v in metrics.values())


@pytest.mark.parametrize("name", ALL)
def test_no_mismatch_no_correction(make_loss, name):
    x = make_loss(2)
    weights, metrics = rlsdk.load("correction", name)(x.replace(behaviour_logprobs=None))
    assert weights.tolist() == [1.0] * len(x.logprobs) and set(map(float, metrics.values())) == {0.0}


@pytest.mark.parametrize("name", ALL)
def test_finite_at_extremes_and_on_nothing(make_loss, name):
    x = make_loss(3, dtype=torch.float32)
    for shift in (400.0, -400.0):
        weights, metrics = rlsdk.load("correction", name)(x.replace(old_logprobs=x.old_logprobs + shift))
        assert weights.isfinite().all()
        assert all(math.isfinite(v) for v in metrics.values())
    weights, _ = rlsdk.load("correction", name)(x.replace(loss_mask=torch.zeros_like(x.loss_mask)))
    assert weights.isfinite().all()


def combined(*uses):
    """The reference to several corrections, each given as its name and options."""
    plugins = rlsdk.Plugins()
    return plugins, ComponentRef.combined([plugins.reference("correction", name, options) for name, options in uses])


def test_several_resolve_to_the_product_of_their_weights():
    """Geometric means 1 and 1.442, of all tokens of a rollout; k3 of the tokens 1.614, 0.636, 0, 0.307, 0.095."""
    plugins, reference = combined(
        ("tis", {}), ("geometric", {"low": 0.9, "high": 1.2}), ("divergence_mask", {"level": "token", "threshold": 0.7})
    )
    weights, metrics = plugins.resolve(reference)(inputs([[4.0, 0.25], [1.0, 2.0, 1.5]]))
    assert weights.tolist() == [0.0, 0.25, 0.0, 0.0, 0.0]
    cut = {name: float(value) for name, value in metrics.items() if name.endswith("cut")}
    assert cut == {"tis/cut": 0.2, "geometric/cut": 0.6, "divergence_mask/cut": 0.2}


def test_several_of_one_component_are_numbered():
    _, reference = combined(("divergence_mask", {}), ("tis", {}), ("divergence_mask", {"level": "max"}))
    assert list(reference.singles) == ["divergence_mask", "tis", "divergence_mask_2"]
    assert list(reference.parts[0].singles) == ["divergence_mask"]


def test_several_need_what_each_of_them_needs():
    @rlsdk.correction("by_reference", needs=("ref_logprobs",))
    def by_reference(x: LossInputs) -> torch.Tensor:
        return torch.ones_like(x.ref_logprobs)

    plugins, reference = combined(("tis", {}), (by_reference, {}))
    assert needs_of(plugins.resolve(reference)) == ("ref_logprobs",)
    assert needs_reference(LossSpec(policy_loss=plugins.reference("policy_loss", "ppo"), correction=reference))
