import rlsdk


@rlsdk.advantage("needy", needs=("ref_logprob",))
def needy(x):
    """Reads a field that there is not."""
    return x.rewards
