"""A run's configuration: read, checked as a whole, every fault reported at once, before anything starts."""

from rlsdk.config.read import read
from rlsdk.config.resolve import Plan, RewardPart, check
from rlsdk.config.schema import RunConfig

__all__ = ["Plan", "RewardPart", "RunConfig", "check", "read"]
