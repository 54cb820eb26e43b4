"""Random batches: ragged rollouts with gaps, one of them with nothing trained, one an expert's in three."""

from __future__ import annotations

import pytest
import torch

import rlsdk


def make_loss(seed: int = 0, rows: int = 8, *, dtype: torch.dtype = torch.float64) -> rlsdk.LossInputs:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (rows,), generator=g)
    segments = torch.repeat_interleave(torch.arange(rows), lengths)
    total = int(lengths.sum())
    mask = torch.rand(total, generator=g) < 0.75
    mask[segments == 3] = False
    old = -0.05 - 2 * torch.rand(total, generator=g)
    noise = 0.3 * torch.randn(2, total, generator=g)
    return rlsdk.LossInputs(
        (old + noise[0]).clamp(max=-1e-3).to(dtype),
        old.to(dtype),
        torch.randn(total, generator=g).to(dtype),
        mask,
        segments,
        behaviour_logprobs=(old + noise[1]).clamp(max=-1e-3).to(dtype),
        expert=torch.arange(rows) % 3 == 0,
    )


@pytest.fixture(name="make_loss")
def _make_loss():
    return make_loss


@pytest.fixture(autouse=True)
def _one_thread():
    """These tensors are tiny: a second thread would only wait for the first."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
