"""Algorithms: pure functions on packed tensors, and the classes of defaults that bundle them."""

from rlsdk.algorithms.base import Algorithm

__all__ = ["Algorithm"]
