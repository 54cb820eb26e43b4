"""A plugin of rlsdk in one file."""

from __future__ import annotations

from typing import Any

import rlsdk
import torch


@rlsdk.optimizer("my_optimizer")
class MyOptimizer(torch.optim.Optimizer):
    """Steps of one size for all weights, along the sign of an average gradient.

    Args:
        groups: Parameter groups, each with a learning rate and a weight decay.
        momentum: Share of the average gradient that each step keeps.
    """

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float = 0.9) -> None:
        super().__init__(groups, {"momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Change the weights; the gradient is complete and clipped."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["average"] = torch.zeros_like(weight)
                average = state["average"].lerp_(weight.grad, 1 - group["momentum"])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(average.sign(), alpha=-group["lr"])
