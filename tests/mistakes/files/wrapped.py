"""Another decorator stands above the mark."""

import functools

import rlsdk


def timed(function):
    @functools.wraps(function)
    def call(rollout):
        return function(rollout)

    return call


@timed
@rlsdk.reward("mine")
def mine(rollout):
    return 1.0
