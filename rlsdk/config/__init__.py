"""The configuration of a run, read and checked as a whole before anything starts; all faults are reported together."""

from rlsdk.config.plan import Plan, RewardPart, TaskSource
from rlsdk.config.resolve import check
from rlsdk.config.schema import Config
from rlsdk.config.tree import Source, read

__all__ = ["Config", "Plan", "RewardPart", "Source", "TaskSource", "check", "read"]
