import rlsdk


@rlsdk.algorithm("msoft")
class MSoft(rlsdk.Algorithm):
    """An algorithm with a part that there is not."""

    policy_los = "ppo"
