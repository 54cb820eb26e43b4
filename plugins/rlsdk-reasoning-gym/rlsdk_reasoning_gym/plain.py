"""Convert metadata of reasoning-gym's entries to JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> tuple[Any, bool]:
    """Convert a value to JSON types; also return True if the conversion lost nothing that affects a scorer.

    Tuples become lists, which does not affect any scorer of reasoning-gym (the tests try each). Keys become text, and
    types that JSON lacks become a list, a number or text, which counts as a loss.

    Args:
        value: Value from an entry's metadata.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value, True
    if isinstance(value, Mapping):
        items = {str(key): plain(each) for key, each in value.items()}
        whole = len(items) == len(value) and all(type(key) is str for key in value)
        return {key: each for key, (each, _) in items.items()}, whole and all(kept for _, kept in items.values())
    if isinstance(value, list | tuple):
        parts = [plain(each) for each in value]
        return [each for each, _ in parts], all(kept for _, kept in parts)
    if isinstance(value, set | frozenset):
        return sorted((plain(each)[0] for each in value), key=repr), False
    if hasattr(value, "tolist"):  # NumPy arrays and scalars
        return plain(value.tolist())[0], False
    return str(value), False
