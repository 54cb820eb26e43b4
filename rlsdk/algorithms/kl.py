"""Estimators of KL(policy ‖ reference) from samples of the policy, one value per token.

With `d = logprobs - ref_logprobs`. The names k1, k2, k3 are Schulman's (http://joschu.net/blog/kl-approx.html). In a
loss, the value of an estimator and the gradient of that value are two things: the expected gradient of k1 is zero, that
of k2 is the gradient of the KL. A name with `+` has the value of the estimator and the gradient of k2
("straight-through").
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlsdk.components import kl

Estimator = Callable[[Tensor, Tensor], Tensor]
INPUT_BOUND = 20.0
RESULT_BOUND = 10.0


@kl("k1")
def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased, of high variance, negative at times: for KL in the reward.

    Formula: `d`.
    """
    return logprobs - ref_logprobs


@kl("k2")
def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Biased, of low variance; its gradient is that of the KL: for KL in the loss.

    Formula: `d² / 2`.
    """
    return 0.5 * (logprobs - ref_logprobs).square()


@kl("k3")
def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased and never negative: GRPO's term in the loss (arXiv:2402.03300, eq. 4). Not clamped; see `low_var`.

    Formula: `exp(-d) - 1 + d`.
    """
    difference = ref_logprobs - logprobs
    return torch.expm1(difference) - difference


@kl("abs")
def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Distance whatever the direction; not an estimate of the KL.

    Formula: `|d|`.
    """
    return (logprobs - ref_logprobs).abs()


@kl("low_var")
def low_var(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3 that a single token cannot blow up.

    Formula: `clamp(exp(-c) - 1 + c, ±10)` with `c = clamp(d, ±20)`.
    """
    difference = (ref_logprobs - logprobs).clamp(-INPUT_BOUND, INPUT_BOUND)
    return (torch.expm1(difference) - difference).clamp(-RESULT_BOUND, RESULT_BOUND)


@kl("k1+")
def k1_through(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The value of k1 with the gradient of k2.

    Formula: `sg[k1] + k2 - sg[k2]`.
    """
    return _through(k1, logprobs, ref_logprobs)


@kl("k3+")
def k3_through(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2.

    Formula: `sg[k3] + k2 - sg[k2]`.
    """
    return _through(k3, logprobs, ref_logprobs)


@kl("abs+")
def absolute_through(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The value of abs with the gradient of k2.

    Formula: `sg[abs] + k2 - sg[k2]`.
    """
    return _through(absolute, logprobs, ref_logprobs)


@kl("low_var+")
def low_var_through(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The value of low_var with the gradient of k2.

    Formula: `sg[low_var] + k2 - sg[k2]`.
    """
    return _through(low_var, logprobs, ref_logprobs)


def _through(value: Estimator, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    slope = k2(logprobs, ref_logprobs)
    return value(logprobs, ref_logprobs).detach() + slope - slope.detach()
