"""A plugin of rlsdk in one file."""

from __future__ import annotations

import rlsdk
from rlsdk.limits import NonNegative
from torch import Tensor


@rlsdk.shaping("my_shaping")
def my_shaping(x: rlsdk.CreditInputs, *, cost: NonNegative = 0.01) -> Tensor:
    """Take a small cost from the reward for each sampled token.

    Formula: `r - cost · length`.

    Args:
        x: The batch.
        cost: Cost of a token.
    """
    return x.outcomes - cost * x.sampled_tokens()
