"""Estimators of KL(policy ‖ reference) from samples of the policy, one value per token.

With `d = logprobs - ref_logprobs`. The names k1, k2, k3 are Schulman's (http://joschu.net/blog/kl-approx.html). In a
loss, an estimator's value and its gradient are different matters: the expected gradient of k1 is zero, that of k2 is
the gradient of the KL. A name with `+` combines the value of the estimator with the gradient of k2
("straight-through").
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlsdk.marks import kl

Estimator = Callable[[Tensor, Tensor], Tensor]
INPUT_BOUND = 20.0
RESULT_BOUND = 10.0


@kl("k1")
def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased, with high variance, sometimes negative: for KL in the reward.

    Source: Schulman, http://joschu.net/blog/kl-approx.html.
    Formula: `d`.
    When to use: in the reward (`kl_penalty`); not in the loss, where its expected gradient is zero.
    """
    return logprobs - ref_logprobs


@kl("k2")
def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Biased, with low variance; its gradient is the KL's: for KL in the loss.

    Source: Schulman, http://joschu.net/blog/kl-approx.html.
    Formula: `d² / 2`.
    When to use: in the loss, to get the gradient of the KL: REINFORCE++.
    """
    return 0.5 * (logprobs - ref_logprobs).square()


@kl("k3")
def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased and never negative: GRPO's KL term in the loss. Not clamped; see `low_var`.

    Paper: GRPO, arXiv:2402.03300, eq. 4; the estimator is Schulman's, http://joschu.net/blog/kl-approx.html.
    Formula: `exp(-d) - 1 + d`.
    When to use: in the loss, if every token stays near the reference: a token that is 30 nats off has a gradient of
    e^30. The named algorithms use `low_var`.
    """
    difference = ref_logprobs - logprobs
    return torch.expm1(difference) - difference


@kl("abs")
def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Absolute log-ratio; not an estimate of the KL.

    Source: verl (abs).
    Formula: `|d|`.
    When to use: to keep tokens near the reference with a gradient that does not grow with their distance.
    """
    return (logprobs - ref_logprobs).abs()


@kl("low_var")
def low_var(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """k3, clamped so that a single token cannot dominate.

    Source: verl (low_var_kl), with its bounds.
    Formula: `clamp(exp(-c) - 1 + c, ±10)` with `c = clamp(d, ±20)`.
    When to use: in the loss, in place of k3; identical up to 2.6 nats.
    """
    difference = (ref_logprobs - logprobs).clamp(-INPUT_BOUND, INPUT_BOUND)
    return (torch.expm1(difference) - difference).clamp(-RESULT_BOUND, RESULT_BOUND)


@kl("k1+")
def k1_through(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The value of k1 with the gradient of k2.

    Source: verl (k1+).
    Formula: `sg[k1] + k2 - sg[k2]`.
    When to use: in the loss, if the metric should be an unbiased KL.
    """
    return _through(k1, logprobs, ref_logprobs)


@kl("k3+")
def k3_through(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2.

    Source: verl (k3+).
    Formula: `sg[k3] + k2 - sg[k2]`.
    When to use: in the loss, if the metric should be an unbiased KL that is never negative.
    """
    return _through(k3, logprobs, ref_logprobs)


@kl("abs+")
def absolute_through(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The value of abs with the gradient of k2.

    Source: verl (abs+).
    Formula: `sg[abs] + k2 - sg[k2]`.
    When to use: in the loss, if the metric should be a distance.
    """
    return _through(absolute, logprobs, ref_logprobs)


@kl("low_var+")
def low_var_through(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The value of low_var with the gradient of k2.

    Source: verl (low_var_kl+).
    Formula: `sg[low_var] + k2 - sg[k2]`.
    When to use: in the loss, if the metric should be the KL without outliers.
    """
    return _through(low_var, logprobs, ref_logprobs)


def _through(value: Estimator, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    slope = k2(logprobs, ref_logprobs)
    return value(logprobs, ref_logprobs).detach() + slope - slope.detach()
