"""Tinker's loss functions, as the derivative of each by the logprobs of the target tokens.

A loss is a sum over tokens. Since the server knows the current logprobs before it computes gradients, every loss is
given to the learner as the linear loss `-weights · logprobs` with the same gradient.
https://tinker-docs.thinkingmachines.ai/tinker/losses
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import numpy as np

Arrays = Mapping[str, np.ndarray]


@attrs.frozen(eq=False)
class TokenLoss:
    """A loss of each token, and the weights of the linear loss with the same gradient.

    Attributes:
        values: float64 `[t]`.
        weights: float64 `[t]`, minus the derivative of `values` by the logprobs.
    """

    values: np.ndarray
    weights: np.ndarray


@attrs.frozen
class LossFunction:
    """One of Tinker's losses.

    Attributes:
        inputs: Names of the arrays that each datum must have, float `[t]` each.
        options: Names of its options -> default.
        compute: Computes the loss from the current logprobs, float64 `[t]`, the inputs and the options.
    """

    inputs: tuple[str, ...]
    options: Mapping[str, float]
    compute: Callable[[np.ndarray, Arrays, Mapping[str, float]], TokenLoss]


def cross_entropy(logprobs: np.ndarray, arrays: Arrays, options: Mapping[str, float]) -> TokenLoss:
    """`-weight · logprob`."""
    return TokenLoss(-arrays["weights"] * logprobs, arrays["weights"])


def importance_sampling(logprobs: np.ndarray, arrays: Arrays, options: Mapping[str, float]) -> TokenLoss:
    """`-ratio · advantage`, with the ratio of the probability now to that of the sampler."""
    weighted = _ratio(logprobs, arrays) * arrays["advantages"]
    return TokenLoss(-weighted, weighted)


def ppo(logprobs: np.ndarray, arrays: Arrays, options: Mapping[str, float]) -> TokenLoss:
    """`-min(ratio · advantage, clipped ratio · advantage)` (arXiv:1707.06347, equation 7)."""
    ratio, advantages = _ratio(logprobs, arrays), arrays["advantages"]
    clipped = np.clip(ratio, options["clip_low_threshold"], options["clip_high_threshold"])
    free = ratio * advantages <= clipped * advantages
    return TokenLoss(-np.minimum(ratio * advantages, clipped * advantages), np.where(free, ratio * advantages, 0.0))


def cispo(logprobs: np.ndarray, arrays: Arrays, options: Mapping[str, float]) -> TokenLoss:
    """`-clipped ratio · advantage · logprob`, with the ratio as a constant (arXiv:2506.13585, equation 4)."""
    ratio = np.clip(_ratio(logprobs, arrays), options["clip_low_threshold"], options["clip_high_threshold"])
    weights = ratio * arrays["advantages"]
    return TokenLoss(-weights * logprobs, weights)


def dro(logprobs: np.ndarray, arrays: Arrays, options: Mapping[str, float]) -> TokenLoss:
    """`-(logprob · advantage - beta / 2 · (logprob - sampler's logprob)²)` (arXiv:2405.19107)."""
    beta, apart = options["beta"], logprobs - arrays["logprobs"]
    values = -(logprobs * arrays["advantages"] - 0.5 * beta * apart**2)
    return TokenLoss(values, arrays["advantages"] - beta * apart)


def _ratio(logprobs: np.ndarray, arrays: Arrays) -> np.ndarray:
    ratio: np.ndarray = np.exp(logprobs - arrays["logprobs"])
    return ratio


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SAMPLED = ("logprobs", "advantages")
LOSSES: Mapping[str, LossFunction] = {
    "cross_entropy": LossFunction(("weights",), {}, cross_entropy),
    "importance_sampling": LossFunction(_SAMPLED, {}, importance_sampling),
    "ppo": LossFunction(_SAMPLED, _CLIP, ppo),
    "cispo": LossFunction(_SAMPLED, _CLIP, cispo),
    "dro": LossFunction(_SAMPLED, {"beta": 0.05}, dro),
}
