"""A plugin that only observes."""

import rlsdk


@rlsdk.hookimpl
def rlsdk_step_end(step):
    pass
