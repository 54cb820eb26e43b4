"""The load-balancing loss of mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from rlsdk.exact import expert_count

_BIAS = "e_score_correction_bias"
"""Ending of the name of a tensor that routers add to their scores before they choose experts."""


@attrs.frozen(eq=False)
class ExpertUse:
    """Use of experts by the tokens of a pass, summed over all layers.

    Attributes:
        counts: float32 `[E]`, how often each expert was chosen.
        probabilities: float32 `[E]`, sum of its probabilities, with a graph.
        tokens: Number of tokens times number of layers.
    """

    counts: Tensor
    probabilities: Tensor
    tokens: int


@attrs.frozen(eq=False)
class ExpertTotals:
    """Use of experts by the rollouts of an optimiser step, over all ranks.

    Attributes:
        counts: float32 `[E]`, as in `ExpertUse`.
        tokens: As in `ExpertUse`.
        share: Share of the optimiser step's trained tokens; 1 unless it accumulates several batches.
    """

    counts: Tensor
    tokens: int
    share: float


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
    def of(cls, config: Any, coefficient: float | None = None) -> RouterLoss | None:
        """Build the penalty of a model; None if there is none.

        Args:
            config: The model's config. As in transformers, it enables the penalty by `output_router_logits: true` and a
                `router_aux_loss_coef` above 0.
            coefficient: Weight in place of the config's; 0 for no penalty, None for the config's choice.
        """
        text = config.get_text_config()
        if coefficient is None and getattr(text, "output_router_logits", False):
            coefficient = getattr(text, "router_aux_loss_coef", None)
        experts = expert_count(text)
        return cls(float(coefficient), experts, int(text.num_experts_per_tok)) if coefficient and experts else None

    def use(self, logits: Sequence[Tensor]) -> ExpertUse:
        """Return the use of experts by tokens.

        Args:
            logits: Router logits of each layer for the same tokens, `[t, E]`.
        """
        probabilities = torch.cat([layer.float().softmax(-1) for layer in logits])
        chosen = probabilities.topk(self.chosen, dim=-1).indices.reshape(-1)
        # Not by `bincount`, which fails on the fake tensors that estimate memory.
        counts = chosen.new_zeros(self.experts).index_add_(0, chosen, torch.ones_like(chosen))
        return ExpertUse(counts.float(), probabilities.sum(0), len(probabilities))

    def __call__(self, part: ExpertUse, totals: ExpertTotals) -> Tensor:
        """Compute a micro-batch's contribution to the penalty of a whole batch, without the coefficient.

        Returns:
            Scalar, float32. All contributions add up to `chosen` if tokens are spread evenly over experts.
        """
        shares = totals.counts / totals.tokens
        return self.experts * (shares * (part.probabilities / totals.tokens)).sum()


def shared_rows_fault(net: Any, coefficient: float | None) -> str:
    """Return why ranks that share rollouts cannot train a model; empty if it is trained without a load-balancing loss.

    Args:
        net: A transformers causal language model; it may have no weights.
        coefficient: Weight given by the learner's option; None for that of the model's config.
    """
    if RouterLoss.of(net.config, coefficient) is None:
        return ""
    return (
        f"a {type(net).__name__} is trained with a load-balancing loss (output_router_logits: true in its config), "
        "which ranks that share rollouts do not compute; set learner.router_loss_coef=0"
    )


def router_faults(net: Any) -> list[str]:
    """Return why a model has no load-balancing loss, whatever its config asks for; it may have no weights."""
    text, kind = net.config.get_text_config(), type(net).__name__
    if not expert_count(text):
        return [f"router_loss_coef: a {kind} has no experts to balance; leave it out"]
    recorded = getattr(net.base_model, "_can_record_outputs", None) or {}
    if "router_logits" not in recorded or not hasattr(text, "num_experts_per_tok"):
        return [f"router_loss_coef: transformers reports no router logits of a {kind}; leave it out"]
    tensors = (name for named in (net.named_parameters(), net.named_buffers()) for name, _ in named)
    if not hasattr(text, "router_aux_loss_coef") or any(name.endswith(_BIAS) for name in tensors):
        return [
            f"router_loss_coef: a {kind} does not simply choose the experts of greatest probability (it has a bias or "
            "groups that balance them), so transformers' loss would not count the chosen ones; leave it out"
        ]
    return []
