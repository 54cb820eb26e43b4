"""The trainer: one direction, from tasks to new weights, on Ray."""

from rlsdk.trainer.run import run, train

__all__ = ["run", "train"]
