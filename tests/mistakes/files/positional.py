import rlsdk


@rlsdk.reward("short")
def short(rollout, limit=3) -> float:
    """Its option is not keyword-only."""
    return float(len(rollout.text) < limit)
