"""A plugin of rlsdk in one file."""

from __future__ import annotations

import rlsdk


@rlsdk.algorithm("my_algorithm")
class MyAlgorithm(rlsdk.Algorithm):
    """Leave-one-out advantages, PPO's loss with a higher upper clip, and groups that differ in reward.

    A part is a component of rlsdk, or of this package by its bare name; a configuration may replace each.
    """

    advantage = rlsdk.Use("rloo")
    policy_loss = rlsdk.Use("ppo", {"clip_high": 0.28})
    filters = (rlsdk.Use("nonzero_variance"),)
    aggregate = "token-mean"
