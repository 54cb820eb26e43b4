"""Weights of several kinds, in parts."""

from __future__ import annotations

import torch

from rlsdk.contracts import Weights
from rlsdk.weights import to_weights


def mixed(tied: torch.Tensor) -> list[Weights]:
    """Tied tensors, a number, an empty tensor, integers, and one that is not contiguous."""
    scale = torch.tensor(0.5, dtype=torch.float64)
    return [
        to_weights(5, {"embeddings": tied, "head": tied, "scale": scale, "none": torch.empty(0, 3)}, host=False),
        to_weights(5, {"turned": torch.randn(600, 500).T, "count": torch.arange(9)}, host=False),
        to_weights(5, {"last": torch.randn(600, 500)}, host=False),
    ]
