"""The mark has no name."""

import rlsdk


@rlsdk.reward
def mine(rollout):
    return 1.0
