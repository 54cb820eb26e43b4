"""A plugin of rlsdk in one file."""

from __future__ import annotations

import rlsdk
from rlsdk.limits import Positive
from torch import Tensor


@rlsdk.kl("my_kl")
def my_kl(logprobs: Tensor, ref_logprobs: Tensor, *, power: Positive = 2.0) -> Tensor:
    """Distance of the policy from the reference model, one value per token.

    Formula: `|d|^power / power` with `d = logprobs - ref_logprobs`, bounded to ±20.

    Args:
        logprobs: float `[t]`, with the gradient.
        ref_logprobs: float `[t]`, of the reference model.
        power: 2 is the estimator k2.
    """
    return (logprobs - ref_logprobs).clamp(-20, 20).abs() ** power / power
