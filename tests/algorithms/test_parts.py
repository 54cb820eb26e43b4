"""Batches processed in parts give the same results as whole batches."""

from __future__ import annotations

import itertools

import pytest
import torch

import rlsdk
from rlsdk.algorithms import parts
from rlsdk.batch import Credit
from rlsdk.batch.arithmetic import whiten

OPTIONS = {
    "gae": {"gamma": 0.9, "lam": 0.8},
    "reinforce_plus_plus": {"gamma": 0.9},
    "remax": {},
    "segment_returns": {"gamma": 0.5, "whiten": True},
    "optimal_token_baseline": {},
}


def run(name, x) -> Credit:
    return rlsdk.load("advantage", name, **OPTIONS[name])(x)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("token_rewards", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_parts_give_what_the_whole_gives(make_credit, monkeypatch, name, token_rewards, in_order, tokens):
    x = make_credit(3, 40, token_rewards=token_rewards)
    if in_order:  # otherwise groups are spread over the batch, and only a whole holds all of one
        x = x.replace(groups=x.groups.sort().values)
    expected = run(name, x)
    monkeypatch.setattr(parts, "PART_TOKENS", tokens)
    found = run(name, x)
    torch.testing.assert_close(found.advantages, expected.advantages)
    torch.testing.assert_close(found.returns, expected.returns)


def test_parts_hold_whole_rollouts_and_whole_groups(make_credit, monkeypatch):
    x = make_credit(4, 30)
    x = x.replace(groups=torch.arange(30) // 4)
    monkeypatch.setattr(parts, "PART_TOKENS", 20)
    alone, grouped = [], []

    def note(into):
        def estimate(part):
            into.append(part.groups.tolist())
            return (part.logprobs,)

        return estimate

    (found,) = parts.in_parts(note(alone), x)
    assert torch.equal(found, x.logprobs)
    parts.in_parts(note(grouped), x, together=x.groups)
    assert len(alone) >= len(grouped) > 3
    assert list(itertools.chain(*alone)) == list(itertools.chain(*grouped)) == x.groups.tolist()
    assert all(before[-1] != after[0] for before, after in itertools.pairwise(grouped))


def test_the_batch_is_left_as_it_was(make_credit):
    x = make_credit(5, 9, token_rewards=True)
    before = {k: v.clone() for k, v in vars(x).items() if isinstance(v, torch.Tensor)}
    for name in OPTIONS:
        run(name, x)
    assert all(torch.equal(getattr(x, k), v) for k, v in before.items())
    one = {"lengths": torch.tensor([1]), "loss_mask": torch.tensor([True])}
    single = x.replace(**{k: v[:1] for k, v in before.items()} | one)
    kept = single.token_rewards.clone()
    rlsdk.load("advantage", "reinforce_plus_plus")(single)
    assert torch.equal(single.token_rewards, kept)


@pytest.mark.parametrize("tokens", [3, 1000])
def test_whitening_in_place_equals_that_of_sampled_rollouts(monkeypatch, tokens):
    monkeypatch.setattr(parts, "PART_TOKENS", tokens)
    mask = torch.rand(50) < 0.6
    values = torch.where(mask, torch.randn(50, dtype=torch.float64), 0)
    expected = torch.zeros(50, dtype=torch.float64).masked_scatter(mask, whiten(values[mask]))
    torch.testing.assert_close(parts.whiten_sampled(values, mask), expected)
    nothing = torch.zeros(0)
    assert parts.whiten_sampled(nothing, nothing.bool()).tolist() == []
    assert parts.whiten_sampled(torch.tensor([4.0, 0.0]), torch.tensor([True, False])).tolist() == [0.0, 0.0]
