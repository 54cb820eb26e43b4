"""A plugin of rlsdk in one file."""

from __future__ import annotations

import rlsdk
from rlsdk.kit import bounded
from rlsdk.limits import Positive
from torch import Tensor


@rlsdk.correction("my_correction")
def my_correction(x: rlsdk.LossInputs, *, cap: Positive = 2.0) -> Tensor:
    """Weigh tokens by how much likelier the trainer finds them than the engine that sampled them.

    Formula: `min(π_old / μ, cap)`.

    Args:
        x: The batch: old_logprobs and behaviour_logprobs `[t]`, both without a gradient.
        cap: Greatest weight.

    Returns:
        float `[t]`, detached; 0 takes a token out of the sum.
    """
    return bounded(x.old_logprobs - x.behaviour_logprobs).exp().clamp(max=cap)
