import rlsdk


@rlsdk.reward("text")
def text(rollout) -> float:
    """Full marks for everyone."""
    return 1.0


@rlsdk.policy_loss("soft_clip")
def soft_clip(x):
    """The advantage alone."""
    return -x.advantages * x.logprobs


@rlsdk.algorithm("msoft")
class MSoft(rlsdk.Algorithm):
    """A named algorithm, written the obvious way."""

    policy_loss = "soft_clip"
