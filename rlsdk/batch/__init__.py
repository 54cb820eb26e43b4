"""Packed tensors that the algorithms read: `CreditInputs` for advantages, `LossInputs` for losses.

Two axes and no padding: `n` rollouts, and `t` tokens, the responses of all rollouts one after another. A response
runs from the first sampled token to the last; tool results and observations between them belong to it, with `loss_mask`
false.

An optional field that was not given is absent: reading it raises `MissingFieldError`, which names it. The trainer gives
exactly what a component declared with `needs`.
"""

from __future__ import annotations

from rlsdk.batch.arithmetic import row_sums, wide
from rlsdk.batch.credit import Credit, CreditInputs
from rlsdk.batch.groups import EPSILON, Groups
from rlsdk.batch.loss import LossInputs
from rlsdk.batch.reduction import AGGREGATIONS, Aggregation, Totals, aggregate

__all__ = [
    "AGGREGATIONS",
    "EPSILON",
    "Aggregation",
    "Credit",
    "CreditInputs",
    "Groups",
    "LossInputs",
    "Totals",
    "aggregate",
    "row_sums",
    "wide",
]
