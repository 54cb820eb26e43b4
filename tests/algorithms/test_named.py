"""Named algorithms: their parts exist, take their options, and compute on one batch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import rlsdk
from rlsdk.algorithms import Algorithm
from rlsdk.batch import Credit, LossInputs, aggregate
from rlsdk.components import component_of
from rlsdk.options import labelled
from rlsdk.plugins import Plugins

ALL = rlsdk.names("algorithm")
EXPECTED = [
    "ppo",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gpg",
    "opmd",
    "topr",
    "raft",
    "pass_at_k",
    "gigpo",
    "decoupled_ppo",
    "sft",
    "dpo",
    "mix",
    "opd",
]


def test_all_are_there():
    assert sorted(EXPECTED) == ALL


@pytest.mark.parametrize("name", ALL)
def test_a_step_of_every_algorithm(make_credit, name):
    """Rewards to a finite loss with a gradient, through the parts that the algorithm names."""
    algorithm = rlsdk.load("algorithm", name)
    assert isinstance(algorithm, Algorithm)
    x = make_credit(3, 12)
    for use in algorithm.shaping:
        shaping = rlsdk.load("shaping", use.name, **use.options)
        x = x.shaped(shaping(x.only(component_of(shaping).needs)))
    for use in algorithm.filters:
        rlsdk.load("filter", use.name, **use.options)
    result = rlsdk.load("advantage", algorithm.advantage.name, **algorithm.advantage.options)(x)
    advantages = result.advantages if isinstance(result, Credit) else result
    advantages = x.per_token(advantages) if len(advantages) == len(x.rewards) else advantages
    logprobs = x.logprobs.clone().requires_grad_()
    row = torch.arange(12)
    kinds = {"pairs": row // 2, "preferred": row % 2 == 0, "expert": row == 5, "ref_logprobs": x.ref_logprobs}
    y = LossInputs(logprobs, x.logprobs - 0.1, advantages, x.loss_mask, x.segments, **kinds)
    loss = rlsdk.load("policy_loss", algorithm.policy_loss.name, **algorithm.policy_loss.options)(y)
    loss = loss[0] if isinstance(loss, tuple) else loss
    if algorithm.kl_coef and algorithm.kl is not None:
        loss = loss + algorithm.kl_coef * rlsdk.load("kl", algorithm.kl.name)(logprobs, x.ref_logprobs)
    value = aggregate(loss, y.loss_mask, y.segments, algorithm.aggregate, norm=algorithm.norm)
    value.backward()
    assert value.isfinite() and logprobs.grad.isfinite().all()
    assert logprobs.grad.count_nonzero() > 0 or name == "gspo"  # its clip is a hundred times narrower than 0.1
    assert logprobs.grad[~x.loss_mask].count_nonzero() == 0 or algorithm.kl_coef


@pytest.mark.parametrize("kind", ["advantage", "policy_loss", "correction", "shaping", "filter", "kl", "algorithm"])
def test_every_component_says_what_it_is(kind):
    """The pages of docs/algorithms are made of this."""
    for (_, name), component in Plugins().components("core", kind).items():
        assert component.summary.endswith("."), (kind, name)
        missing = [o.name for o in component.options if not o.help]
        assert not missing, (kind, name, missing)
        found = labelled(component.help)
        assert "Paper" in found or "Source" in found, (kind, name)
        assert "When to use" in found, (kind, name)
        assert "Formula" in found or kind == "algorithm", (kind, name)  # an algorithm has those of its parts
        assert all(text.endswith(".") for text in found.values()), (kind, name)


def test_listing_algorithms_and_filters_does_not_load_torch():
    code = (
        "import sys, rlsdk; rlsdk.load('algorithm', 'grpo'); rlsdk.names('filter'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
