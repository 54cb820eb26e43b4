"""Encode Python values as plain data, the only data that leaves the process of the tested code."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

MAX_DIGITS = 4_000
"""Integers with more digits are written in hexadecimal, because Python refuses to convert them to or from decimal."""

_WRITTEN = {
    "decimal.Decimal": "",
    "fractions.Fraction": "",
    "datetime.date": "fromisoformat",
    "datetime.datetime": "fromisoformat",
    "datetime.time": "fromisoformat",
}
"""Types of the standard library that are sent as text -> name of the parser; empty for the type itself."""


def encode(value: Any, other: Callable[[Any], Any] = lambda value: {"other": type(value).__name__}) -> Any:
    """Return a value as JSON that distinguishes the types of Python's literals.

    Numbers, text, booleans and None stay as they are; lists, tuples, sets, mappings, bytes, very large numbers,
    decimals, fractions, dates and times become objects with one key.

    Args:
        value: Any value; an instance of a subclass of these types is encoded like the type.
        other: Encodes anything else; by default as the name of its type, which equals nothing.
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
    """Return the encoded value, built only from Python's own types.

    Args:
        found: Result of `encode`, parsed from JSON; hostile code may have written anything instead.
        other: Decodes values that the `other` of `encode` encoded, from their key and content.

    Raises:
        Exception: `encode` did not produce this.
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
        reader = _WRITTEN[name]  # looked up before any import, since hostile code may name any module
        module, _, made_by = name.partition(".")
        maker = getattr(import_module(module), made_by)
        return getattr(maker, reader)(text) if reader else maker(text)
    return complex(*held) if kind == "complex" else other(kind, held)
