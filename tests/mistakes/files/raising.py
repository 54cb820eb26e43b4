"""A reward that raises."""

import rlsdk


@rlsdk.reward("mine")
def mine(rollout):
    return rollout.task.metadata["x"]
