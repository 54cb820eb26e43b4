"""Packed tensors for the algorithms: `CreditInputs` for advantages, `LossInputs` for losses.

There are two axes and no padding: `n` rollouts, and `t` tokens, which are the concatenated responses. A response runs
from the first sampled token to the last; it includes tool results and observations in between, whose `loss_mask` is
False.

Reading an absent optional field raises `MissingFieldError`, which names the field. The trainer provides exactly the
fields that a component declares with `needs`.
"""

from __future__ import annotations

from rlsdk.batch.arithmetic import row_sums, wide
from rlsdk.batch.credit import EPSILON, Credit, CreditInputs, Groups
from rlsdk.batch.loss import AGGREGATIONS, Aggregation, LossInputs, Totals, aggregate

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
