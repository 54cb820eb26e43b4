"""A plugin whose only component waits for torch."""

from __future__ import annotations

import torch

import rlsdk


@rlsdk.reward("light-import")
def light_import(rollout) -> float:
    """Makes a tensor of a number."""
    return float(torch.tensor(len(rollout.text)))
