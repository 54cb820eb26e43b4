"""A source of tasks that fails."""

import rlsdk


@rlsdk.tasks("failing")
def failing(*, split: str = "train"):
    return {}["no such split"]
