"""Advantages and corrections of the zoo: hand-computed values, degenerate batches, the conformance suite."""

from __future__ import annotations

import math

import pytest
import torch
from rlsdk_zoo.advantages import maxrl
from rlsdk_zoo.corrections import off_policy_mask, rejection

import rlsdk
from rlsdk.testing import check_component


def credit(rewards: list[float], groups: list[int]) -> rlsdk.CreditInputs:
    return rlsdk.CreditInputs.from_padded(
        torch.tensor(rewards, dtype=torch.float64), torch.ones(len(rewards), 1).bool(), torch.tensor(groups)
    )


def test_a_task_that_is_seldom_solved_weighs_more():
    """Group 0 is solved once in four times: (1 - 1/4) / (1/4) = 3; group 1 three times: (1 - 3/4) / (3/4) = 1/3."""
    x = credit([1, 0, 0, 0, 1, 1, 1, 0], [0] * 4 + [1] * 4)
    found = rlsdk.load("advantage", maxrl)(x).tolist()
    assert found == pytest.approx([3, -1, -1, -1, 1 / 3, 1 / 3, 1 / 3, -1], abs=1e-4)


@pytest.mark.parametrize(
    "rewards",
    [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.1, 0.1, 0.1], [-1.0, 0.0, 0.5], [1.0, -1.0, 0.0]],
)
def test_groups_without_a_difference_or_a_mean_above_zero_get_nothing(rewards):
    assert rlsdk.load("advantage", maxrl)(credit([*rewards, 0.7], [0, 0, 0, 1])).tolist() == [0.0] * 4


def rollouts(moved: list[list[float]], advantages: list[float]) -> rlsdk.LossInputs:
    """Rollouts whose tokens have become less likely by this many nats since they were sampled."""
    segments = torch.repeat_interleave(torch.arange(len(moved)), torch.tensor([len(row) for row in moved]))
    sampler = torch.full_like(segments, -1.0, dtype=torch.float64)
    logprobs = sampler - torch.tensor([nats for row in moved for nats in row], dtype=torch.float64)
    per_token = torch.tensor(advantages, dtype=torch.float64)[segments]
    trained = torch.ones_like(segments).bool()
    return rlsdk.LossInputs(logprobs, sampler, per_token, trained, segments, behaviour_logprobs=sampler)


def test_bad_rollouts_that_became_unlikely_are_masked():
    """Mean divergences 0.6, 0.4, 0.6 and -0.6; only the first is bad and beyond the threshold."""
    x = rollouts([[1.0, 0.2], [0.8, 0.0], [0.6], [-0.6]], [-1.0, -1.0, 1.0, -1.0])
    weights, metrics = rlsdk.load("correction", off_policy_mask)(x)
    assert weights.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert float(metrics["cut"]) == pytest.approx(1 / 3)
    stale = x.replace(old_logprobs=x.behaviour_logprobs + 0.5)  # ratios of 1.649
    plugins = rlsdk.Plugins()
    parts = [plugins.reference("correction", each) for each in ("tis", off_policy_mask)]
    both = parts[0].combined(parts)
    found, metrics = plugins.resolve(both)(stale)
    assert found.tolist() == pytest.approx([0.0, 0.0, *[math.exp(0.5)] * 4])
    assert [float(metrics[f"{name}/cut"]) for name in both.singles] == pytest.approx([0, 1 / 3])


def test_the_mask_is_detached_and_ignores_tokens_that_are_not_trained():
    x = rollouts([[1.0, 9.0]], [-1.0])
    part = x.replace(loss_mask=torch.tensor([True, False]), logprobs=x.logprobs.requires_grad_())
    weights, _ = rlsdk.load("correction", off_policy_mask, threshold=2.0)(part)
    assert weights.tolist() == [1.0, 1.0] and not weights.requires_grad


@pytest.mark.parametrize(
    "options, kept",
    [  # log-ratios: 0 and ln 2; -ln 2 and ln 2; ln 1.5
        ({"measure": "ratio", "level": "token", "low": 0.6, "high": 1.8}, [1, 0, 0, 0, 1]),
        ({"measure": "ratio", "level": "sum", "low": 0.6, "high": 1.8}, [0, 0, 1, 1, 1]),  # 2, 1, 1.5
        ({"measure": "ratio", "level": "mean", "low": 0.6, "high": 1.45}, [1, 1, 1, 1, 0]),  # sqrt 2, 1, 1.5
        ({"measure": "ratio", "level": "max", "high": 1.8}, [0, 0, 0, 0, 1]),
        ({"measure": "k2", "level": "max", "high": 0.2}, [0, 0, 0, 0, 1]),  # ln(2)² / 2 = 0.24, ln(1.5)² / 2 = 0.08
        ({"measure": "k2", "level": "mean", "high": 0.2}, [1, 1, 0, 0, 1]),  # 0.12, 0.24, 0.08
        ({"measure": "k3", "level": "token", "high": 0.2}, [1, 0, 1, 0, 1]),  # 2 - 1 - ln 2 = 0.31; ½ - 1 + ln 2 = 0.19
        ({"measure": "k3", "level": "sum", "high": 0.4}, [1, 1, 0, 0, 1]),  # 0.31, 0.5, 0.09
    ],
)
def test_rejection_compares_the_policy_being_trained_with_the_sampler(options, kept):
    two = math.log(2)
    x = rollouts([[0.0, -two], [two, -two], [-math.log(1.5)]], [1.0, 1.0, 1.0])
    weights, metrics = rlsdk.load("correction", rejection, **options)(x)
    assert weights.tolist() == kept and float(metrics["cut"]) == pytest.approx(1 - sum(kept) / 5)
    other = x.replace(old_logprobs=x.old_logprobs - 3)  # is not read
    assert rlsdk.load("correction", rejection, **options)(other)[0].tolist() == kept


def test_rejection_is_detached_and_ignores_tokens_that_are_not_trained():
    x = rollouts([[0.0, 9.0]], [1.0])
    part = x.replace(loss_mask=torch.tensor([True, False]), logprobs=x.logprobs.requires_grad_())
    for level in ("mean", "sum", "max"):
        weights, _ = rlsdk.load("correction", rejection, level=level)(part)
        assert weights.tolist() == [1.0, 1.0] and not weights.requires_grad


@pytest.mark.parametrize("component", [maxrl, off_policy_mask, rejection])
def test_the_conformance_suite_passes(component):
    for finding in check_component(component):
        assert finding.outcome == "passed", str(finding.fault or finding.reason)
