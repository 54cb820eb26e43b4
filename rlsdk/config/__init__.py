"""The configuration of a run: read and checked as a whole before anything starts, with all faults reported at once."""

from rlsdk.config.parts import RewardPart, TaskSource
from rlsdk.config.plan import Plan
from rlsdk.config.resolve import check
from rlsdk.config.schema import RunConfig
from rlsdk.config.tree import read

__all__ = ["Plan", "RewardPart", "RunConfig", "TaskSource", "check", "read"]
