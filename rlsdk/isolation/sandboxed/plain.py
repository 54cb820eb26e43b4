"""Encodes Python values as plain data, the only data that leaves the process of tested code."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

MAX_DIGITS = 4_000
"""Whole numbers with more are written in hexadecimal: Python refuses to read them, or write them, in decimal."""

_WRITTEN = {
    "decimal.Decimal": "",
    "fractions.Fraction": "",
    "datetime.date": "fromisoformat",
    "datetime.datetime": "fromisoformat",
    "datetime.time": "fromisoformat",
}
"""Types of the standard library that travel as text -> what reads it; empty: the type itself."""


def encode(value: Any, other: Callable[[Any], Any] = lambda value: {"other": type(value).__name__}) -> Any:
    """Return a value as JSON that keeps the types of Python's literals apart.

    Numbers, text, booleans and None stand for themselves; lists, tuples, sets, mappings, bytes, very large numbers,
    decimals, fractions, dates and times are objects with one key.

    Args:
        value: Any value; one of a class derived from these types counts as one of these types.
        other: Writes anything else; by default as the name of its type, which equals nothing.
    """
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() < 3 * MAX_DIGITS else {"hex": hex(value)}
    if isinstance(value, list | tuple):
        return {"list" if isinstance(value, list) else "tuple": [encode(each, other) for each in value]}
    if isinstance(value, set | frozenset):
        return {"set": [encode(each, other) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, other), encode(each, other)] for key, each in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    name = f"{type(value).__module__}.{type(value).__name__}"
    return {"written": [name, str(value)]} if name in _WRITTEN else other(value)


def decode(found: Any, other: Callable[[str, Any], Any]) -> Any:
    """Return the value that was encoded, built from nothing but Python's own types.

    Args:
        found: From `encode`, through JSON; or whatever hostile code wrote in its place.
        other: Reads what `encode` left to its own `other`, given as a key and its content.

    Raises:
        Exception: It was never encoded.
    """
    if found is None or isinstance(found, bool | str | float | int):
        return found
    ((kind, held),) = found.items()
    if kind in ("list", "tuple", "set"):
        made = [decode(each, other) for each in held]
        return made if kind == "list" else tuple(made) if kind == "tuple" else set(made)
    if kind == "dict":
        return {decode(key, other): decode(each, other) for key, each in held}
    if kind == "bytes":
        return bytes.fromhex(held)
    if kind == "hex":
        return int(held, 16)
    if kind == "written":
        name, text = held
        reader = _WRITTEN[name]  # before anything is imported: hostile code may name any module
        module, _, made_by = name.partition(".")
        maker = getattr(import_module(module), made_by)
        return getattr(maker, reader)(text) if reader else maker(text)
    return complex(*held) if kind == "complex" else other(kind, held)
