"""A run's configuration: read, checked as a whole, every fault reported at once, before anything starts."""

from rlsdk.config.parts import RewardPart, TaskSource
from rlsdk.config.resolve import Plan, check
from rlsdk.config.schema import RunConfig
from rlsdk.config.tree import read

__all__ = ["Plan", "RewardPart", "RunConfig", "TaskSource", "check", "read"]
