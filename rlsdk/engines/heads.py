"""An output head that gives float32 logits beside weights of a narrower type."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ExactHead(nn.Module):
    """Logits computed in float32 from the parameters of another head, whose names stay as they were."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = getattr(linear, "bias", None)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[…, d]` -> float32 `[…, V]`."""
        if hidden.is_cuda and hidden.dtype != torch.float32:
            # Sums in float32 without a float32 copy of the weight at every step.
            rows = hidden.reshape(-1, hidden.shape[-1])
            logits = torch.mm(rows, self.weight.t(), out_dtype=torch.float32).view(*hidden.shape[:-1], -1)
        else:
            logits = hidden.float() @ self.weight.float().t()
        return logits if self.bias is None else logits + self.bias.float()
