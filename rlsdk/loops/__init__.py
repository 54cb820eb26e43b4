"""Event loops in separate threads: calls between them, and detection of blocked loops."""

from rlsdk.loops.bridge import LoopBridge, UserLoop
from rlsdk.loops.watch import LoopWatch, culprit

__all__ = ["LoopBridge", "LoopWatch", "UserLoop", "culprit"]
