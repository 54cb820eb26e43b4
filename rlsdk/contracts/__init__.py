"""What engines, learners, workflows, environments and trackers must offer, and the values that they exchange.

Engines and learners are plain Python objects with one owner; the Ray actors around them are rlsdk's business, so that a
plugin's engine is written and tested without Ray.
"""

from rlsdk.contracts.generation import (
    Adapter,
    Completion,
    DType,
    Engine,
    Finish,
    Model,
    Place,
    Request,
    Sampling,
    TakesAdapter,
    Weights,
)
from rlsdk.contracts.running import AlgorithmDefaults, Chat, Environment, Run, Served, Speaker, Tracker, Workflow, World
from rlsdk.contracts.scoring import Rule, ScoringLimits
from rlsdk.contracts.training import GivesAdapter, Learner, LossSpec, Requires, RequiresPrograms, Roles, TrainBatch

__all__ = [
    "Adapter",
    "AlgorithmDefaults",
    "Chat",
    "Completion",
    "DType",
    "Engine",
    "Environment",
    "Finish",
    "GivesAdapter",
    "Learner",
    "LossSpec",
    "Model",
    "Place",
    "Request",
    "Requires",
    "RequiresPrograms",
    "Roles",
    "Rule",
    "Run",
    "Sampling",
    "ScoringLimits",
    "Served",
    "Speaker",
    "TakesAdapter",
    "Tracker",
    "TrainBatch",
    "Weights",
    "Workflow",
    "World",
]
