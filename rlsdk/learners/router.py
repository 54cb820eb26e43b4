"""The load-balancing loss of mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from rlsdk.exact import expert_count


@attrs.frozen
class RouterLoss:
    """Penalise uneven use of experts, in float32.

    Paper: Switch Transformers, arXiv:2101.03961, eq. 4 to 6, as transformers computes it.
    Formula: `E · Σ f_e · P_e`, with `f_e` the share of tokens that chose expert `e`, and `P_e` its mean probability.

    Attributes:
        coefficient: Weight of the penalty in the actor's loss.
        experts: Number of experts, `E`.
        chosen: Number of experts chosen per token.
    """

    coefficient: float
    experts: int
    chosen: int

    @classmethod
    def of(cls, config: Any) -> RouterLoss | None:
        """Build the penalty that a model's config enables, as transformers does; None if there is none.

        A config enables it by `output_router_logits: true` and a `router_aux_loss_coef` above 0.
        """
        text = config.get_text_config()
        coefficient = getattr(text, "router_aux_loss_coef", None)
        if not getattr(text, "output_router_logits", False) or not coefficient:
            return None
        return cls(float(coefficient), expert_count(text), int(text.num_experts_per_tok))

    def __call__(self, logits: Sequence[Tensor]) -> Tensor:
        """Compute the penalty over all layers, without the coefficient.

        Args:
            logits: Router logits of each layer for the same tokens, `[t, E]`.

        Returns:
            Scalar, float32; equal to `chosen` if tokens are spread evenly over experts.
        """
        probabilities = torch.cat([layer.float().softmax(-1) for layer in logits])
        chosen = probabilities.topk(self.chosen, dim=-1).indices
        shares = torch.bincount(chosen.reshape(-1), minlength=self.experts) / len(probabilities)
        return self.experts * (shares * probabilities.mean(0)).sum()
