"""Random batches with gaps, uneven lengths, groups of one, and groups of equal rewards."""

from __future__ import annotations

import pytest
import torch

from rlsdk.batch import CreditInputs, LossInputs


@pytest.fixture(autouse=True)
def _one_thread():
    """These tensors are tiny: a second thread would only wait for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_credit(seed: int = 0, rows: int = 11, *, token_rewards: bool = False, dtype: torch.dtype = torch.float64):
    """Groups 0 (one member), 1 (equal rewards), 2 and 3; tool gaps; a rollout with nothing sampled."""
    g = _generator(seed)
    lengths = torch.randint(1, 9, (rows,), generator=g)
    groups = torch.tensor([0, 1, 1, 1, *([2, 3] * rows)])[:rows]
    total = int(lengths.sum())
    mask = torch.rand(total, generator=g) < 0.75
    mask[int(lengths[:4].sum()) : int(lengths[:5].sum())] = False
    rewards = torch.randint(0, 4, (rows,), generator=g) / 3
    rewards = torch.where(groups == 1, 0.1, rewards).to(dtype)
    logprobs, values, entropy = (-torch.rand(3, total, generator=g)).to(dtype)
    x = CreditInputs(
        rewards,
        groups,
        lengths,
        mask,
        values=values,
        logprobs=logprobs,
        ref_logprobs=(logprobs + 0.3 * torch.randn(total, generator=g)).to(dtype),
        entropy=-entropy,
        probs_squared_sum=logprobs.exp() ** 2 + 0.1 * (1 - logprobs.exp()) ** 2,
        baseline_rewards=torch.rand(rows, generator=g).to(dtype),
        sources=torch.randint(0, 2, (rows,), generator=g),
        trajectories=torch.arange(rows) // 4 + 3 * groups,
        steps=torch.arange(rows) % 4,
        states=torch.randint(0, 2, (rows,), generator=g),
        reward_parts={
            "format": torch.where(groups == 1, 1, torch.randint(0, 2, (rows,), generator=g)).to(dtype),
            "length": torch.randint(-8, 1, (rows,), generator=g).to(dtype) / 4,
        },
        reward_weights={"format": 1.0, "length": 0.5},
    )
    if not token_rewards:
        return x
    along = torch.where(mask, torch.randn(total, generator=g), 0).to(dtype)
    return x.replace(token_rewards=along, rewards=x.sequence_sum(along))


def make_loss(seed: int = 0, rows: int = 8, *, dtype: torch.dtype = torch.float64):
    """Four pairs of rollouts, each with tokens that are not trained on, one rollout with nothing trained."""
    g = _generator(seed)
    lengths = torch.randint(1, 9, (rows,), generator=g)
    segments = torch.repeat_interleave(torch.arange(rows), lengths)
    total = int(lengths.sum())
    mask = torch.rand(total, generator=g) < 0.75
    mask[segments == 3] = False
    old = -3 * torch.rand(total, generator=g)
    noise = torch.randn(3, total, generator=g)
    return LossInputs(
        (old + 0.4 * noise[0]).to(dtype),
        old.to(dtype),
        torch.randn(total, generator=g).to(dtype),
        mask,
        segments,
        behaviour_logprobs=(old + 0.3 * noise[1]).to(dtype),
        ref_logprobs=(old + 0.3 * noise[2]).to(dtype),
        pairs=torch.arange(rows) // 2,
        preferred=torch.arange(rows) % 2 == torch.arange(rows) // 2 % 2,
        expert=torch.arange(rows) % 3 == 0,
    )


@pytest.fixture(name="make_credit")
def _make_credit():
    return make_credit


@pytest.fixture(name="make_loss")
def _make_loss():
    return make_loss
