"""Seeds that depend on names, the same in every process."""

from __future__ import annotations

import hashlib
from typing import Any


def derive(*parts: Any) -> int:
    """31 bits that depend on every part."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big") >> 1
