"""Values with their units, read from tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from rlsdk.rewards import intervals, values
from rlsdk.rewards.expressions import apply, constant, read_expression
from rlsdk.rewards.forms import Value
from rlsdk.rewards.latex import FUNCTIONS, Token, UnreadableError
from rlsdk.rewards.units import Unit, is_unit_word, read_unit

_APPLIED = FUNCTIONS - {"frac", "sqrt", "binom"}


def read_quantity(tokens: Sequence[Token]) -> Value:
    """The value that tokens are, all of them.

    Args:
        tokens: At least one.

    Raises:
        UnreadableError: They are none, or hold a word that is no unit.
    """
    infinite = _infinity(tokens)
    if infinite is not None:
        return infinite
    body, unit = _unit(list(tokens))
    expression = read_expression(body)
    if unit is not None and unit.scale != 1:
        expression = apply(lambda a, b: values.multiply([a, b]), expression, constant(unit.scale))
        unit = Unit(unit.powers, unit.factor) if unit.powers else None
    return Value(expression, unit, None if unit else _with_last_letter(body))


def _with_last_letter(tokens: list[Token]) -> Value | None:
    last = tokens[-1]
    if len(tokens) < 2 or last.kind != "symbol" or not last.spaced or tokens[-2].kind not in {"number", "sign"}:
        return None
    try:
        return Value(read_expression(tokens[:-1]), read_unit(last.text))
    except UnreadableError:
        return None


def _infinity(tokens: Sequence[Token]) -> Value | None:
    texts = [token.text for token in tokens]
    if texts in (["infty"], ["+", "infty"]):
        return Value(constant(intervals.INFINITY))
    return Value(constant(-intervals.INFINITY)) if texts == ["-", "infty"] else None


def _unit(tokens: list[Token]) -> tuple[list[Token], Unit | None]:
    """The tokens without their unit, and that."""
    if tokens[-1].text == "degree" and len(tokens) > 1 and not _APPLIED & {t.text for t in tokens}:
        return tokens[:-1], read_unit("degree")
    money = next((i for i in (0, 1) if i < len(tokens) and tokens[i].kind == "words"), None)
    if money is not None and tokens[money].text in {"dollars", "euros", "gbp"} and len(tokens) > money + 1:
        rest = tokens[:money] + tokens[money + 1 :]
        name = tokens[money].text
        if rest and rest[-1].kind == "words":
            scaled = read_unit(f"{rest[-1].text} {name}")
            return rest[:-1], scaled
        return rest, read_unit(name)
    start = next((i for i, token in enumerate(tokens) if i and _begins_unit(tokens, i)), None)
    if start is None:
        return tokens, None
    unit = tokens[start:]
    if any(token.kind == "number" and before.text not in {"^", "{", "-"} for before, token in pairwise(unit)):
        raise UnreadableError("a number stands between units")  # 3 feet 2 inches
    return tokens[:start], read_unit("".join(map(_unit_part, unit)))


def _begins_unit(tokens: list[Token], index: int) -> bool:
    token = tokens[index]
    if token.kind != "words":
        return False
    before = tokens[index - 1]
    behind_number = before.kind in {"number", "symbol"} or before.text in {"}", ")", "!", "%"}
    return behind_number and all(is_unit_word(word) or len(word) == 1 for word in re.findall("[A-Za-z]+", token.text))


def _unit_part(token: Token) -> str:
    if token.kind in {"words", "symbol"}:
        return f" {token.text} "
    if token.text in {"{", "}"}:
        return ""
    if token.text in {"/", "^", "*", "-"} or token.kind == "number":
        return token.text
    raise UnreadableError(f"{token.text!r} belongs to no unit")
