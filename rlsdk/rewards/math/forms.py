"""Forms of answers: a value with its unit, a list, a tuple, a set, an interval, a matrix, an equation, words.

Values with units are also read from tokens here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import attrs

from rlsdk.rewards.math import intervals, values
from rlsdk.rewards.math.expressions import Expression, apply, constant, read_expression
from rlsdk.rewards.math.intervals import Interval
from rlsdk.rewards.math.latex import FUNCTIONS, Token, UnreadableError
from rlsdk.rewards.math.units import Unit, is_noun, is_unit_word, read_unit


@attrs.frozen
class Value:
    r"""An expression or an infinity, possibly with a unit.

    Attributes:
        expression: Expression without the unit.
        unit: Unit; None if there is none.
        with_unit: The same value with its last letter read as a unit instead of a variable (`5 m`).
        percent: Number before the percent sign, since `50\%` may be meant as 50.
    """

    expression: Expression
    unit: Unit | None = None
    with_unit: Value | None = None
    percent: Expression | None = None


@attrs.frozen
class Words:
    """Text that is compared word for word."""

    text: str


@attrs.frozen
class Listing:
    """Several answers in any order: `1, 2`, `{1, 2}`, `± 1`."""

    items: tuple[Form, ...]
    is_set: bool = False


@attrs.frozen
class Ordered:
    """A tuple, a point or an interval with its brackets, or a ratio (`:`)."""

    opening: str
    items: tuple[Form, ...]
    closing: str


@attrs.frozen
class Matrix:
    """Rows of forms, all of the same length."""

    rows: tuple[tuple[Form, ...], ...]


@attrs.frozen
class RealSet:
    """A union of intervals; `variable` is set if it comes from an inequality."""

    intervals: tuple[Interval, ...]
    variable: str | None = None


@attrs.frozen
class Relation:
    """`difference SIGN 0`, an equation or inequality.

    Attributes:
        difference: Left minus right side.
        sign: One of `=`, `!=`, `<` and `<=`.
        name: Left side of an assignment, such as `x` or `f(x)`.
        assigned: Assigned value.
    """

    difference: Expression | None
    sign: str
    name: str = ""
    assigned: Form | None = None


@attrs.frozen
class Based:
    """An integer with the base it is written in."""

    value: int
    base: int


Form = Value | Words | Listing | Ordered | Matrix | RealSet | Relation | Based


def as_set(form: Form) -> RealSet | None:
    """Return a form as a set of real numbers; None if it is not one."""
    if isinstance(form, RealSet):
        return form
    if isinstance(form, Listing) and form.is_set:
        numbers = [real_value(item) for item in form.items]
        if any(number is None or isinstance(number, float) for number in numbers):
            return None
        return RealSet(intervals.union(Interval(number, number, True, True) for number in numbers))
    if isinstance(form, Ordered) and form.opening in {"(", "["} and form.closing in {")", "]"} and len(form.items) == 2:
        low, high = (real_value(item) for item in form.items)
        interval = (
            None if low is None or high is None else Interval(low, high, form.opening == "[", form.closing == "]")
        )
        if interval is None or interval.empty or intervals.compare(low, high) == 0:
            return None
        if (interval.low_in and isinstance(low, float)) or (interval.high_in and isinstance(high, float)):
            return None
        return RealSet((interval,))
    return None


def real_value(form: Form) -> values.Number | None:
    """Return the value of a form that is a real number or infinity, without a unit; else None."""
    if not isinstance(form, Value) or form.unit is not None or form.expression.symbols:
        return None
    try:
        value = form.expression.compute({})
        return value if isinstance(value, Fraction | float) or values.real_part(value) is not None else None
    except values.NoValueError:
        return None


_APPLIED = FUNCTIONS - {"frac", "sqrt", "binom"}


def read_quantity(tokens: Sequence[Token]) -> Value:
    """Parse all tokens as one value."""
    texts = [token.text for token in tokens]
    if texts in (["infty"], ["+", "infty"], ["-", "infty"]):
        return Value(constant(-intervals.INFINITY if texts[0] == "-" else intervals.INFINITY))
    body, unit = _unit(list(tokens))
    expression = read_expression(body)
    if unit is not None and unit.scale != 1:
        expression = apply(lambda a, b: values.multiply([a, b]), expression, constant(unit.scale))
        unit = Unit(unit.powers, unit.factor) if unit.powers else None
    percent = read_expression(body[:-1]) if len(body) > 1 and body[-1].text == "%" else None
    return Value(expression, unit, None if unit else _with_last_letter(body), percent)


def _with_last_letter(tokens: list[Token]) -> Value | None:
    last = tokens[-1]
    if len(tokens) < 2 or last.kind != "symbol" or not last.spaced or tokens[-2].kind not in {"number", "sign"}:
        return None
    try:
        return Value(read_expression(tokens[:-1]), read_unit(last.text))
    except UnreadableError:
        return None


def _unit(tokens: list[Token]) -> tuple[list[Token], Unit | None]:
    """Split tokens into the number's tokens and the unit after them."""
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
    marked = all(token.marked for token in unit if token.kind == "words")
    return tokens[:start], read_unit("".join(map(_unit_part, unit)), any_noun=marked)


def _begins_unit(tokens: list[Token], index: int) -> bool:
    token = tokens[index]
    if token.kind != "words":
        return False
    before = tokens[index - 1]
    behind_number = before.kind in {"number", "symbol"} or before.text in {"}", ")", "!", "%"}
    words = re.findall("[A-Za-z]+", token.text)
    known = all(is_unit_word(word) or len(word) == 1 or (token.marked and is_noun(word)) for word in words)
    return behind_number and known


def _unit_part(token: Token) -> str:
    if token.kind in {"words", "symbol"}:
        return f" {token.text} "
    if token.text in {"{", "}"}:
        return ""
    if token.text in {"/", "^", "*", "-"} or token.kind == "number":
        return token.text
    raise UnreadableError(f"{token.text!r} is not part of a unit")
