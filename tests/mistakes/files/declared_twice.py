import rlsdk


@rlsdk.reward("mine")
def first(rollout) -> float:
    """The first."""
    return 1.0


@rlsdk.reward("mine")
def second(rollout) -> float:
    """The second."""
    return 0.0
