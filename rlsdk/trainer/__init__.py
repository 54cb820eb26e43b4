"""The trainer: one direction, from tasks to new weights, on Ray."""

from rlsdk.trainer.run import train

__all__ = ["train"]
