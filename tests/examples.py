"""Number of examples for costly property tests: few in `make test`, all in `make test-slow`."""

from __future__ import annotations

import os

ALL = "RLSDK_TEST_EXAMPLES"
"""Environment variable that is `all` where every example is tried."""


def many(count: int) -> int:
    """Return the number of examples to try, a fifth unless all are asked for."""
    return count if os.environ.get(ALL) == "all" else max(count // 5, 10)
