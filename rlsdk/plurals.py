"""Counts with their nouns, singular or plural."""

from __future__ import annotations


def counted(count: float, noun: str, plural: str = "") -> str:
    """Return a count with its noun: `1 rollout`, `1,024 rollouts`; the plural is by default the singular with an s."""
    number = f"{int(count):,}" if count == int(count) else f"{count:g}"
    return f"{number} {noun if count == 1 else plural or f'{noun}s'}"


def every(count: int, noun: str) -> str:
    """Return an interval: `every step`, `every 10 steps`."""
    return f"every {noun}" if count == 1 else f"every {counted(count, noun)}"
