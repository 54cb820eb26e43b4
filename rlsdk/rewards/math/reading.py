"""Parse answers, whose brackets, separators and relations determine their form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import attrs

from rlsdk.rewards.math import intervals, values
from rlsdk.rewards.math.expressions import Expression, apply, read_expression
from rlsdk.rewards.math.forms import (
    Based,
    Form,
    Listing,
    Matrix,
    Ordered,
    RealSet,
    Relation,
    Value,
    Words,
    as_set,
    read_quantity,
    real_value,
)
from rlsdk.rewards.math.latex import Token, UnknownCommandError, UnreadableError, nesting, split, tokenize

_MAX_DEPTH = 6
"""Maximum nesting of lists, sets and tuples."""

_RELATIONS = frozenset({"=", "!=", "<", ">", "<=", ">="})
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_PLACES = (Fraction(1), Fraction(2), Fraction(-3), Fraction(7, 3))
"""Points for testing whether a function is linear."""
_MATRICES = frozenset({"matrix", "pmatrix", "bmatrix", "array", "smallmatrix"})
_BASED = re.compile(
    r"(?:\\(?:text|mathrm)\s?\{\s?([0-9A-F]+)\s?\}|([0-9A-F]+))\s?_\s?(?:\{\s?([0-9]{1,2})\s?\}|([0-9]))"
)
_PLAIN_WORDS = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mathbf|mathit|mbox|operatorname)\s?\{([^{}]*)\}")


@lru_cache(maxsize=4096)
def read(text: str) -> Form:
    """Parse an answer; results are cached, since rollouts of a group share a reference and often give equal answers."""
    based = _BASED.fullmatch(text.strip())
    if based:
        return _based(based[1] or based[2], int(based[3] or based[4]))
    words = wording(text)
    if words is not None:
        return Words(words)
    try:
        return _form(tokenize(text), 0)
    except UnknownCommandError:
        from rlsdk.rewards.math.symbolic import read_by_algebra

        return Value(read_by_algebra(text))
    except (values.NoValueError, RecursionError) as error:
        raise UnreadableError(str(error)) from error


def wording(text: str) -> str | None:
    """Return the text in lower case with single spaces if it consists only of words; otherwise None."""
    if len(text) > 1_000:
        return None
    plain = _PLAIN_WORDS.sub(r" \1 ", text).replace("~", " ").replace("$", " ").strip()
    choice = re.fullmatch(r"\(?\s*([A-Za-z])\s*\)?\.?", plain)
    if choice and (plain.startswith("(") or "\\" in text):
        return str(choice[1]).lower()
    plain = re.sub(r"[\s,.!?'’-]+", " ", plain).strip()
    if not re.fullmatch(r"[^\W\d_]+(?: [^\W\d_]+)*", plain):
        return None
    if not any(len(word) >= 2 for word in plain.split()):
        return None
    if "\\" not in text and _is_mathematics(plain):
        return None
    return plain.casefold()


def _is_mathematics(plain: str) -> bool:
    """Return True if all words are letters of a product, functions or constants (`ab`, `infinity`, `sin x`)."""
    try:
        _form(tokenize(plain), 0)
    except (UnreadableError, values.NoValueError):
        return False
    return True


def _based(digits: str, base: int) -> Based:
    if not 2 <= base <= 36 or len(digits) > 200:
        raise UnreadableError(f"{base} is not a base from 2 to 36, or the number is too long")
    try:
        return Based(int(digits, base), base)
    except ValueError as error:
        raise UnreadableError(f"{digits!r} is not a number in base {base}") from error


def _form(tokens: Sequence[Token], depth: int) -> Form:
    if depth > _MAX_DEPTH:
        raise UnreadableError(f"lists are nested more than {_MAX_DEPTH} levels deep")
    if not tokens:
        raise UnreadableError("a part of it is empty")
    while len(tokens) > 2 and tokens[0].text == "{" and _spans(tokens, "{"):
        tokens = tokens[1:-1]
    parts, between = split(tokens, frozenset({",", ";", "or", "and"}))
    if between:
        return _listing(parts, between, depth)
    return _single(tokens, depth)


def _spans(tokens: Sequence[Token], opening: str) -> bool:
    """Return True if the first opening bracket is closed by the last token."""
    if len(tokens) < 2 or tokens[0].kind not in {"sign", "environment"} or tokens[0].text != opening:
        return False
    depth = 0
    for index, token in enumerate(tokens):
        depth += nesting(token)
        if depth == 0:
            return index == len(tokens) - 1
    return False


def _listing(parts: list[list[Token]], between: list[str], depth: int) -> Form:
    filled = [part for index, part in enumerate(parts) if part or index == 0]  # `1, 2, and 3`
    if len(parts) - len(filled) > ("," in between and len(set(between)) > 1):
        raise UnreadableError("a part of it is empty")
    forms = [_form(part, depth + 1) for part in filled]
    sets = [form for form in forms if isinstance(form, RealSet)]
    if len(sets) == len(forms) and len({form.variable for form in sets}) == 1 and len(set(between)) == 1:
        variable = sets[0].variable
        if between[0] == "or":
            return RealSet(intervals.union(i for form in sets for i in form.intervals), variable)
        if between[0] == "and" and variable is not None:
            common = sets[0].intervals
            for form in sets[1:]:
                common = intervals.intersection(common, form.intervals)
            return RealSet(common, variable)
    return Listing(tuple(_without_name(forms)))


def _without_name(forms: list[Form]) -> list[Form]:
    """Reduce `x = 1, x = 2` and `x = 1, 2` to the values of x."""
    first = forms[0]
    if not isinstance(first, Relation) or first.assigned is None:
        return _flat(forms)
    found: list[Form] = []
    for form in forms:
        if isinstance(form, Relation):
            if form.assigned is None or form.name != first.name:
                return forms
            form = form.assigned
        found.append(form)
    return _flat(found)


def _flat(forms: list[Form]) -> list[Form]:
    """Replace lists, such as the one that `± 1` stands for, by their items."""
    items = (form.items if isinstance(form, Listing) and not form.is_set else (form,) for form in forms)
    return [item for each in items for item in each]


def _single(tokens: Sequence[Token], depth: int) -> Form:
    texts = {token.text for token in tokens if token.kind == "sign"}
    parts, between = split(tokens, frozenset({"in"}))
    if between:
        if len(parts) == 2 and len(parts[0]) == 1 and parts[0][0].kind == "symbol":
            return _form(parts[1], depth + 1)
        raise UnreadableError("the left side of ∈ must be a single letter")
    parts, between = split(tokens, _RELATIONS)
    if between:
        return _relation(parts, between, depth)
    if texts & {"cup", "cap", "setminus"}:
        parts, between = split(tokens, frozenset({"cup", "cap", "setminus"}))
        if between:
            return _combined(parts, between, depth)
    if texts & {"pm", "mp"}:
        return _both_signs(tokens, depth)
    return _bracketed(tokens, depth) or read_quantity(tokens)


def _combined(parts: list[list[Token]], between: list[str], depth: int) -> Form:
    if len(set(between)) > 1:
        raise UnreadableError("a mix of unions, intersections and differences needs brackets")
    found = [as_set(_form(part, depth + 1)) for part in parts]
    if any(each is None for each in found):
        raise UnreadableError("unions may contain only intervals and sets of numbers")
    sets = [each.intervals for each in found if each is not None]
    total = sets[0]
    for each in sets[1:]:
        if between[0] == "cup":
            total = intervals.union([*total, *each])
        else:
            total = intervals.intersection(total, each if between[0] == "cap" else intervals.complement(each))
    return RealSet(total)


def _both_signs(tokens: Sequence[Token], depth: int) -> Form:
    if sum(token.text in {"pm", "mp"} for token in tokens) > 1:
        raise UnreadableError("ambiguous: it contains several ±")

    def chosen(pm: str, mp: str) -> list[Token]:
        signs = {"pm": pm, "mp": mp}
        return [Token("sign", signs[t.text]) if t.kind == "sign" and t.text in signs else t for t in tokens]

    return Listing((_single(chosen("+", "-"), depth), _single(chosen("-", "+"), depth)))


def _bracketed(tokens: Sequence[Token], depth: int) -> Form | None:
    """Parse a tuple, an interval, a set, a matrix or a ratio; None if it is none of these."""
    first, last = tokens[0], tokens[-1]
    if first.kind == "sign" and len(tokens) == 1 and first.text in {"emptyset", "reals"}:
        return RealSet(() if first.text == "emptyset" else intervals.REALS)
    if first.kind == "environment" and _spans(tokens, first.text):
        return _matrix(tokens, depth)
    if first.text in {"(", "["} and len(tokens) > 2 and tokens[1].kind == "environment" and _spans(tokens, first.text):
        return _matrix(tokens[1:-1], depth) if _spans(tokens[1:-1], tokens[1].text) else None
    if first.kind == "sign" and first.text == r"\{" and last.text == r"\}" and _spans(tokens, r"\{"):
        return _set(tokens[1:-1], depth)
    if first.kind == "sign" and first.text in {"(", "[", "langle"} and _spans(tokens, first.text):
        parts, between = split(tokens[1:-1], frozenset({",", ";"}))
        if between and last.text in {")", "]", "rangle"}:
            return Ordered(first.text, tuple(_form(part, depth + 1) for part in parts), last.text)
    parts, between = split(tokens, frozenset({":"}))
    if between:
        return Ordered(":", tuple(_form(part, depth + 1) for part in parts), ":")
    return None


def _set(tokens: Sequence[Token], depth: int) -> Form:
    if not tokens:
        return RealSet(())
    parts, between = split(tokens, frozenset({"|", ":"}))
    if len(between) == 1 and parts[0] and parts[0][0].kind == "symbol":  # {x | x > 3}
        name = parts[0][0].text
        if len(parts[0]) > 1 and [token.text for token in parts[0][1:]] != ["in", "reals"]:
            raise UnreadableError("a set with a condition must begin with a letter or with a letter ∈ ℝ")
        found = _form(parts[1], depth + 1)
        if not isinstance(found, RealSet) or found.variable != name:
            raise UnreadableError("the condition of a set is not an inequality of its variable")
        return attrs.evolve(found, variable=None)
    parts, between = split(tokens, frozenset({",", ";"}))
    return Listing(tuple(_flat([_form(part, depth + 1) for part in parts])), is_set=True)


def _matrix(tokens: Sequence[Token], depth: int) -> Form:
    if tokens[0].text.split()[1] not in _MATRICES:
        raise UnreadableError(f"{tokens[0].text.split()[1]} is not a matrix")
    rows, _ = split(tokens[1:-1], frozenset({"row"}))
    if len(rows) > 1 and not rows[-1]:
        rows.pop()
    cells = [split(row, frozenset({"&"}))[0] for row in rows]
    if len({len(row) for row in cells}) != 1:
        raise UnreadableError("the rows of a matrix have different lengths")
    return Matrix(tuple(tuple(_form(cell, depth + 1) for cell in row) for row in cells))


def _relation(parts: list[list[Token]], signs: list[str], depth: int) -> Form:
    if not all(parts):
        raise UnreadableError("a side of a relation is empty")
    if len(signs) == 1:
        return _comparison(parts[0], signs[0], parts[1], depth)
    if set(signs) == {"="}:
        return _chain(parts, depth)
    if len(signs) != 2 or len({sign[0] for sign in signs}) != 1 or signs[0][0] not in "<>":
        raise UnreadableError("a chain must have two inequalities in the same direction")
    sides = [_comparison(parts[i], signs[i], parts[i + 1], depth) for i in range(2)]
    first, second = sides
    if not isinstance(first, RealSet) or not isinstance(second, RealSet) or first.variable != second.variable:
        raise UnreadableError("a chain of inequalities must bound one variable")
    return RealSet(intervals.intersection(first.intervals, second.intervals), first.variable)


def _chain(parts: list[list[Token]], depth: int) -> Form:
    """Read a chain such as `x = 2 + 3 = 5`, whose values must be equal."""
    named = _name(parts[0])
    forms = [_form(part, depth + 1) for part in (parts[1:] if named else parts)]
    numbers = [real_value(form) for form in forms]
    if any(number is None or not values.close(number, numbers[0]) for number in numbers):
        raise UnreadableError("the values in a chain of equations are not equal numbers")
    return Relation(None, "=", named, forms[-1]) if named else forms[-1]


def _name(tokens: Sequence[Token]) -> str:
    r"""Return the name that an equation assigns to: `x`, `x_1`, `f(x)`, `(x, y)`; empty for anything else."""
    texts = [token.text for token in tokens]
    kinds = [token.kind for token in tokens]
    simple = kinds == ["symbol"] or (kinds[:2] == ["symbol", "sign"] and texts[1] == "_" and len(texts) in {3, 5})
    applied = len(texts) == 4 and kinds[0] == kinds[2] == "symbol" and (texts[1], texts[3]) == ("(", ")")
    point = len(texts) in {5, 7} and texts[0] == "(" and texts[-1] == ")"
    point = point and all(k == "symbol" for k in kinds[1::2]) and all(t == "," for t in texts[2:-1:2])
    if not (simple or applied or point) or texts in (["e"], ["i"], ["pi"]):
        return ""
    return "".join(text for text in texts if text not in {"{", "}"})


def _comparison(left: list[Token], sign: str, right: list[Token], depth: int) -> Form:
    if sign == "=":
        return _equation(left, right, depth)
    difference = _difference(left, right)
    if difference is None:
        raise UnreadableError("the sides of an inequality are not expressions")
    bounded = _bounded(difference, sign)
    if bounded is not None:
        return bounded
    if sign in {">", ">="}:
        difference, sign = apply(values.negate, difference), _FLIPPED[sign]
    return Relation(difference, sign)


def _equation(left: list[Token], right: list[Token], depth: int) -> Form:
    name, other = _name(left), right
    if not name and (name := _name(right)):
        other = left
    difference = _difference(left, right)
    assigned = _form(other, depth + 1) if name else None
    if difference is None and assigned is None:
        raise UnreadableError("the sides of an equation are not expressions")
    if difference is not None and not difference.symbols:
        if not values.is_zero(difference.compute({})):
            raise UnreadableError("an equation between numbers is false")
        return _form(right, depth + 1)
    symbol = name in (difference.symbols if difference is not None else ())
    if symbol and isinstance(assigned, Value) and name in assigned.expression.symbols:  # x = x^2 gives x no value
        assigned, name = None, ""
    return Relation(difference, "=", name, assigned)


def _difference(left: list[Token], right: list[Token]) -> Expression | None:
    try:
        return apply(lambda a, b: values.add([a, values.negate(b)]), read_expression(left), read_expression(right))
    except UnreadableError:
        return None


def _bounded(difference: Expression, sign: str) -> RealSet | None:
    """Solve an inequality that is linear in one variable; None if it is not."""
    if len(difference.symbols) != 1:
        return None
    (name,) = difference.symbols
    try:
        zero, *others = (difference.compute({name: x}) for x in (Fraction(0), *_PLACES))
        slope = values.add([others[0], values.negate(zero)])
        on_line = all(
            values.close(values.add([zero, values.multiply([slope, x])]), found)
            for x, found in zip(_PLACES, others, strict=True)
        )
        if not on_line or values.is_zero(slope):
            return None
        bound, real = values.divide(values.negate(zero), slope), values.real_part(slope)
        if real is None or values.real_part(bound) is None:
            return None
    except values.NoValueError:
        return None
    return RealSet(intervals.half_line(sign if real > 0 else _FLIPPED[sign], bound), name)
