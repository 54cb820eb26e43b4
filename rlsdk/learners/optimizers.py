"""Built-in optimisers: adamw, sgd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from rlsdk.learners.options import Group
from rlsdk.limits import at_least, below
from rlsdk.marks import optimizer

if TYPE_CHECKING:
    from torch.optim import Optimizer


@optimizer("adamw")
def adamw(groups: list[Group]) -> Optimizer:
    """AdamW, with the learner's `betas` and `eps`.

    Paper: arXiv:1711.05101, algorithm 2.
    Formula: `w ← w - lr · (m̂ / (√v̂ + eps) + weight_decay · w)`, with the corrected moments `m̂` and `v̂` of the
    gradient.
    When to use: by default. Its state takes 8 bytes per trained parameter.

    Args:
        groups: Parameter groups, with `betas` and `eps`.
    """
    import torch

    return torch.optim.AdamW(groups, fused=True)


@optimizer("sgd")
def sgd(
    groups: list[Group], *, momentum: Annotated[float, at_least(0), below(1)] = 0.0, nesterov: bool = False
) -> Optimizer:
    """Stochastic gradient descent, optionally with momentum.

    The weight decay is an L2 penalty, which is added to the clipped gradient.
    Paper: used for RL of language models in arXiv:2602.07729; computed by torch.optim.SGD.
    Formula: `b ← momentum · b + g + weight_decay · w; w ← w - lr · b`, with `b = 0` before the first step.
    When to use: to save the memory of AdamW's state. Without momentum it has no state, with momentum it
    takes 4 bytes per trained parameter. A step is proportional to the clipped gradient, so it needs a far greater
    learning rate than AdamW.

    Args:
        groups: Parameter groups.
        momentum: Share of the last step's direction that is kept.
        nesterov: Add the gradient to the momentum once more; needs a momentum.
    """
    import torch

    return torch.optim.SGD(groups, momentum=momentum, nesterov=nesterov)
