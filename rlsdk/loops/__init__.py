"""Event loops in threads of their own: calls between loops, and a watch over them."""

from rlsdk.loops.bridge import LoopBridge
from rlsdk.loops.user import UserLoop
from rlsdk.loops.watch import LoopWatch, culprit

__all__ = ["LoopBridge", "LoopWatch", "UserLoop", "culprit"]
