"""Event loops in separate threads: calls between them, and detection of blocked loops."""

from rlsdk.loops.bridge import LoopBridge, UserLoop, contained, is_cancelled
from rlsdk.loops.watch import LoopWatch, culprit

__all__ = ["LoopBridge", "LoopWatch", "UserLoop", "contained", "culprit", "is_cancelled"]
