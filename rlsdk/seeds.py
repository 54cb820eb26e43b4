"""Seeds and random numbers that are equal in all processes: derived from names, or mixed from numbers."""

from __future__ import annotations

import hashlib
from typing import Any

_MASK = (1 << 64) - 1


def derive(*parts: Any) -> int:
    """Return a 31-bit seed that depends on all parts."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big") >> 1


def mix(*numbers: int) -> int:
    """Hash numbers to a pseudo-random 63-bit number, equal in every process (SplitMix64 over each number in turn)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1
