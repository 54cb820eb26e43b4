"""Optimisers: lion, muon."""

from __future__ import annotations

from typing import Annotated, Any

import torch

import rlsdk
from rlsdk.limits import Count, NonNegative, at_least, below

Decay = Annotated[float, at_least(0), below(1)]
Group = dict[str, Any]


@rlsdk.optimizer("lion")
class Lion(torch.optim.Optimizer):
    """Steps of one size for all weights, along the sign of an average gradient.

    Paper: Lion, arXiv:2302.06675, algorithm 2.
    Formula: `w ← w - lr · (sign(β1 · m + (1 - β1) · g) + weight_decay · w)`, then `m ← β2 · m + (1 - β2) · g`.
    When to use: to halve the optimiser's state, 4 bytes per trained parameter. The paper advises a learning rate three
    to ten times smaller than AdamW's, and a weight decay as many times greater.

    Args:
        groups: Parameter groups.
        betas: Decay rates of the average, in the step and in the state.
    """

    def __init__(self, groups: list[Group], *, betas: tuple[Decay, Decay] = (0.9, 0.99)) -> None:
        super().__init__(groups, {"betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        for group in self.param_groups:
            fast, slow = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weight)
                direction = state["exp_avg"].lerp(weight.grad, 1 - fast).sign_()
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                state["exp_avg"].lerp_(weight.grad, 1 - slow)


class MuonWithAdamW(torch.optim.Optimizer):
    """Torch's Muon for some groups and AdamW for the others, with a common state."""

    def __init__(self, matrices: list[Group], others: list[Group], muon: Group, adamw: Group) -> None:
        self._parts: list[tuple[bool, torch.optim.Optimizer]] = []
        if matrices:
            self._parts.append((True, torch.optim.Muon(matrices, **muon)))
        if others:
            self._parts.append((False, torch.optim.AdamW(others, fused=True, **adamw)))
        # Torch has added each optimiser's settings to its groups.
        super().__init__([{**group, "muon": muon} for muon, part in self._parts for group in part.param_groups], {})

    def step(self, closure: Any = None) -> Any:
        """Take a step with each of the two."""
        for muon, part in self._parts:
            # `load_state_dict` replaces both.
            part.param_groups = [group for group in self.param_groups if group["muon"] is muon]
            part.state = self.state
            part.step()


@rlsdk.optimizer("muon", whole_tensors=True)
def muon(
    groups: list[Group],
    *,
    momentum: Decay = 0.95,
    nesterov: bool = True,
    ns_steps: Count = 5,
    betas: tuple[Decay, Decay] = (0.9, 0.95),
    eps: NonNegative = 1e-8,
) -> torch.optim.Optimizer:
    """Steps of the layers' matrices along an orthogonal matrix near the momentum; AdamW for all other weights.

    Embeddings, output heads, norms and biases are trained by AdamW. A step has the root mean square of AdamW's, so
    AdamW's learning rate and weight decay fit.
    Paper: Muon, https://kellerjordan.github.io/posts/muon/; scaled as in Moonlight, arXiv:2502.16982, eq. 4.
    Formula: `m ← momentum · m + g`; `w ← w - lr · (0.2 √max(rows, columns) · NS(g + momentum · m) + weight_decay · w)`;
    `NS` moves all singular values near 1 by Newton–Schulz iterations.
    When to use: models in float32 with `zero_stage: 0`, as it needs whole matrices. Its state takes 4 bytes per
    parameter of a matrix.

    Args:
        groups: Parameter groups.
        momentum: Share of the momentum that each step keeps.
        nesterov: Add the gradient to the momentum once more.
        ns_steps: Number of Newton–Schulz iterations.
        betas: AdamW's decay rates of the two moments.
        eps: AdamW's epsilon.
    """
    matrices: list[Group] = []
    others: list[Group] = []
    for group in groups:
        named = list(zip(group["param_names"], group["params"], strict=True))
        # Matrices of numbered layers, such as `model.layers.0.mlp.up_proj.weight`; heads and embeddings have no number.
        chosen = [weight.dim() == 2 and any(map(str.isdigit, name.split("."))) for name, weight in named]
        for part, wanted in ((matrices, True), (others, False)):
            held = [pair for pair, in_layer in zip(named, chosen, strict=True) if in_layer is wanted]
            if held:
                part.append({**group, "param_names": [n for n, _ in held], "params": [w for _, w in held]})
    scaled = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": "match_rms_adamw"}
    return MuonWithAdamW(matrices, others, scaled, {"betas": betas, "eps": eps})
