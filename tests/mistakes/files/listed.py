import rlsdk


@rlsdk.reward("rank")
def rank(rollouts: list[rlsdk.Rollout]) -> list[float]:
    """Takes a list, and does not say so in its mark."""
    return [float(place) for place in range(len(rollouts))]
