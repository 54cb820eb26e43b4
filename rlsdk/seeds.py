"""Derive seeds from names, equal in all processes."""

from __future__ import annotations

import hashlib
from typing import Any


def derive(*parts: Any) -> int:
    """Return a 31-bit seed that depends on all parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big") >> 1
