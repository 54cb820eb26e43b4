"""Algorithms: pure functions on packed tensors, and the classes of defaults that bundle them."""

from rlsdk.algorithms.base import Algorithm
from rlsdk.algorithms.marking import algorithm

__all__ = ["Algorithm", "algorithm"]
