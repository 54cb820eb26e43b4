"""Algorithms: pure functions on packed tensors, and the classes of defaults that bundle them."""

from rlsdk.algorithms.marking import Algorithm, algorithm

__all__ = ["Algorithm", "algorithm"]
