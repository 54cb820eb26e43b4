"""Named algorithms: their parts exist, take their options, and compute on one batch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

import rlsdk
from rlsdk.algorithms import Algorithm
from rlsdk.batch import Credit, LossInputs, aggregate
from rlsdk.batch.arithmetic import adjusted
from rlsdk.components import component_of
from rlsdk.docstrings import labelled
from rlsdk.learners.rank_calls import bounded_below
from rlsdk.plugins import Plugins

ALL = rlsdk.names("algorithm")
EXPECTED = [
    "ppo",
    "grpo",
    "dr_grpo",
    "gdpo",
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
    "kto",
    "mix",
    "opd",
]


def test_all_are_there():
    assert sorted(EXPECTED) == ALL


def take_a_step(algorithm, x, *, logprobs=None, behaviour=None):
    """Rewards to a loss, through the parts that the algorithm names: the loss and its gradient by token."""
    for use in algorithm.shaping:
        shaping = rlsdk.load("shaping", use.name, **use.options)
        x = x.shaped(shaping(x.only(component_of(shaping).needs)))
    for use in algorithm.filters:
        rlsdk.load("filter", use.name, **use.options)
    result = rlsdk.load("advantage", algorithm.advantage.name, **algorithm.advantage.options)(x)
    advantages = result.advantages if isinstance(result, Credit) else result
    advantages = x.per_token(advantages) if len(advantages) == len(x.rewards) else advantages
    whiten, clip = algorithm.whiten_advantages, algorithm.clip_advantages
    advantages = adjusted(advantages, x.loss_mask, whitened=whiten, clip=clip)
    logprobs = (x.logprobs if logprobs is None else logprobs).clone().requires_grad_()
    row = torch.arange(12)
    kinds = {"pairs": row // 2, "preferred": row % 2 == 0, "expert": row == 5, "ref_logprobs": x.ref_logprobs}
    kinds["behaviour_logprobs"] = behaviour
    y = LossInputs(logprobs, x.logprobs - 0.1, advantages, x.loss_mask, x.segments, **kinds)
    loss = rlsdk.load("policy_loss", algorithm.policy_loss.name, **algorithm.policy_loss.options)(y)
    loss = loss[0] if isinstance(loss, tuple) else loss
    if algorithm.kl_coef and algorithm.kl is not None:
        loss = loss + algorithm.kl_coef * rlsdk.load("kl", algorithm.kl.name)(logprobs, x.ref_logprobs)
    value = aggregate(loss, y.loss_mask, y.segments, algorithm.aggregate, norm=algorithm.norm or 12.0)
    value.backward()
    return value.detach(), logprobs.grad


@pytest.mark.parametrize("name", ALL)
def test_a_step_of_every_algorithm(make_credit, name):
    algorithm = rlsdk.load("algorithm", name)
    assert isinstance(algorithm, Algorithm)
    x = make_credit(3, 12)
    value, gradient = take_a_step(algorithm, x)
    assert value.isfinite() and gradient.isfinite().all()
    assert gradient.count_nonzero() > 0 or name == "gspo"  # its clip is a hundred times narrower than 0.1
    assert gradient[~x.loss_mask].count_nonzero() == 0 or algorithm.kl_coef


@pytest.mark.parametrize("nats", [15.0, 30.0, -15.0, -30.0, -1000.0])
@pytest.mark.parametrize("who", ["logprobs", "behaviour", "ref_logprobs"])
@pytest.mark.parametrize("name", ALL)
def test_one_token_cannot_outweigh_the_batch(make_credit, name, who, nats):
    """A token far from where the sampler, the old policy or the reference saw it: 1e8 and more without a bound."""
    algorithm, x = rlsdk.load("algorithm", name), make_credit(3, 12)
    calm = take_a_step(algorithm, x, logprobs=x.logprobs - 0.1)[1].norm()
    for token in x.loss_mask.nonzero()[:, 0][::4]:
        moved = (x.ref_logprobs if who == "ref_logprobs" else x.logprobs).clone()
        moved[token] += nats
        y = x.replace(ref_logprobs=moved) if who == "ref_logprobs" else x
        value, gradient = take_a_step(algorithm, y, **({} if who == "ref_logprobs" else {who: moved}))
        assert value.isfinite() and gradient.norm() < 100 * calm


@pytest.mark.parametrize("name", [name for name in ALL if rlsdk.load("algorithm", name).kl_coef])
def test_a_token_that_the_reference_rules_out_leaves_the_kl_finite(name):
    estimator = rlsdk.load("kl", rlsdk.load("algorithm", name).kl.name)
    impossible = torch.from_numpy(bounded_below(np.array([-np.inf], np.float32)))
    logprobs = torch.tensor([-1.0], requires_grad=True)
    value = estimator(logprobs, impossible).sum()
    value.backward()
    assert value.isfinite() and logprobs.grad.isfinite()


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
