"""Parse expressions from tokens by recursive descent and evaluate them at points, without simplifying them.

Ambiguous notation (`1/2x`, `2^3^4`, `f(2)`) is rejected, because readers could understand it as different values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

import attrs

from rlsdk.rewards.math import values
from rlsdk.rewards.math.latex import Token, UnreadableError, letters_of, with_braces
from rlsdk.rewards.math.values import Number

MAX_DEPTH = 25
"""Maximum nesting of brackets, fractions, roots and powers."""

LOGARITHM_BASE = "the base of log"
"""Symbol for the unknown base of `log` without a base."""

Point = Mapping[str, Fraction]


@attrs.frozen(slots=True)
class Expression:
    """An expression that can be evaluated at a point.

    Attributes:
        symbols: Variables of the expression.
        compute: Function from values of the variables to the value; raises `NoValueError` if there is none.
        imaginary: True if it contains the imaginary unit.
    """

    symbols: frozenset[str]
    compute: Callable[[Point], Number]
    imaginary: bool = False


def constant(value: Number) -> Expression:
    """Return a constant expression."""
    return Expression(frozenset(), lambda _: value)


def apply(function: Callable[..., Number], *operands: Expression) -> Expression:
    """Return the expression that applies a function to other expressions."""
    if not any(operand.symbols for operand in operands):
        return _computed_once(lambda: function(*(operand.compute({}) for operand in operands)), operands)
    return Expression(
        frozenset().union(*(operand.symbols for operand in operands)),
        lambda at: function(*(operand.compute(at) for operand in operands)),
        any(operand.imaginary for operand in operands),
    )


def _computed_once(compute: Callable[[], Number], operands: Sequence[Expression]) -> Expression:
    """Compute a constant once and keep its value, which is needed at every point."""
    found: list[Number] = []

    def value(_: Point) -> Number:
        if not found:
            found.append(compute())
        return found[0]

    return Expression(frozenset(), value, any(operand.imaginary for operand in operands))


_UNIT = Expression(frozenset(), lambda _: values.context().mpc(0, 1), imaginary=True)
_CONSTANTS = {
    "pi": Expression(frozenset(), lambda _: values.inexact(Fraction(1)) * values.context().pi),
    "e": Expression(frozenset(), lambda _: values.exponential(Fraction(1))),
    "i": _UNIT,
}
_INVERSE = {"sin": "asin", "cos": "acos", "tan": "atan", "cot": "acot", "sec": "asec", "csc": "acsc"}
_OF_ONE: dict[str, Callable[[Number], Number]] = {
    **{name: values.function(name) for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
    **{f"arc{name}": values.function(f"a{name}") for name in ("sin", "cos", "tan")},
    "ln": values.logarithm,
    "exp": values.exponential,
}
_DEGREE = apply(values.divide, _CONSTANTS["pi"], constant(Fraction(180)))
_CLOSING = {"(": ")", "[": "]", "{": "}", "lfloor": "rfloor", "lceil": "rceil", "|": "|"}
_UNAPPLIED = frozenset("fg")
"""Letters that name unknown functions before a bracket; so does h before a bracket with one item."""


def read_expression(tokens: Sequence[Token]) -> Expression:
    """Parse all tokens as one expression."""
    spelt: list[Token] = []
    for token in tokens:
        letters = letters_of(token.text) if token.kind == "words" else [token]
        if not letters:
            raise UnreadableError(f"unknown word {token.text[:20]!r} in an expression")
        spelt += letters
    spelt = with_braces(spelt)
    parser = _Parser(spelt)
    found = parser.sum(0)
    if parser.position < len(spelt):
        raise UnreadableError(f"unexpected {spelt[parser.position].text!r}")
    return found


class _Parser:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = tokens
        self.position = 0
        self.bars = 0

    def sum(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise UnreadableError(f"it is nested more than {MAX_DEPTH} levels deep")
        terms = [self._signed_term(depth)]
        while self._at("+", "-"):
            terms.append(self._signed_term(depth))
        return terms[0] if len(terms) == 1 else apply(lambda *all_: values.add(all_), *terms)

    def _signed_term(self, depth: int) -> Expression:
        """Parse a term with at most one sign before it."""
        negative = self._take("-")
        if not negative:
            self._take("+")
        term = self._term(depth)
        return apply(values.negate, term) if negative else term

    def _term(self, depth: int) -> Expression:
        product = [self._power(depth)]
        divided = False  # True after a division, where a factor could belong to either part
        while True:
            if self._take("*"):
                product.append(self._signed_factor(depth))
                divided = False
            elif self._take("/"):
                below = self._signed_factor(depth)
                product = [apply(lambda *all_: values.multiply(all_), *product)]
                product = [apply(values.divide, product[0], below)]
                divided = True
            elif self._begins_factor():
                if divided:
                    raise UnreadableError("ambiguous: a factor after / may or may not belong to the divisor")
                product.append(self._power(depth))
            else:
                break
        return product[0] if len(product) == 1 else apply(lambda *all_: values.multiply(all_), *product)

    def _signed_factor(self, depth: int) -> Expression:
        if self._take("-"):
            return apply(values.negate, self._power(depth))
        return self._power(depth)

    def _power(self, depth: int) -> Expression:
        base = self._postfix(self._primary(depth))
        if not self._take("^"):
            return base
        raised = apply(values.power, base, self._exponent(depth))
        if self._at("^"):
            raise UnreadableError("a power of a power needs brackets")
        return self._postfix(raised)

    def _exponent(self, depth: int) -> Expression:
        if self._take("-"):
            return apply(values.negate, self._exponent_operand(depth))
        return self._exponent_operand(depth)

    def _exponent_operand(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise UnreadableError(f"it is nested more than {MAX_DEPTH} levels deep")
        operand = self._primary(depth + 1, mixed=False)
        if self._at("!"):
            raise UnreadableError("ambiguous: ! may or may not belong to the exponent")
        return operand

    def _postfix(self, operand: Expression) -> Expression:
        if self._take("!"):
            if self._at("!"):
                raise UnreadableError("double factorials are not supported")
            return apply(values.factorial, operand)
        if self._take("degree"):
            return apply(lambda a, b: values.multiply([a, b]), operand, _DEGREE)
        if self._take("%"):
            return apply(values.divide, operand, constant(Fraction(100)))
        return operand

    def _primary(self, depth: int, mixed: bool = True) -> Expression:
        token = self._advance()
        if token.kind == "number":
            return self._number(token, mixed)
        if token.kind == "symbol":
            return self._symbol(token)
        if token.kind == "function":
            return self._function(token, depth)
        if token.kind == "sign" and token.text in _CLOSING:
            return self._bracket(token.text, depth)
        raise UnreadableError(f"unexpected {token.text!r}")

    def _bracket(self, opening: str, depth: int) -> Expression:
        self.bars += opening == "|"
        inner = self.sum(depth + 1)
        if not self._take(_CLOSING[opening]):
            raise UnreadableError(f"{opening} is not closed")
        self.bars -= opening == "|"
        if opening == "|":
            return apply(values.absolute, inner)
        if opening in {"lfloor", "lceil"}:
            return apply(values.rounded(down=opening == "lfloor"), inner)
        return inner

    def _number(self, token: Token, mixed: bool) -> Expression:
        fraction = self._proper_fraction() if mixed and token.text.isdigit() else None
        if fraction is not None:
            return constant(token.value + fraction)
        if self._next_is("number") or self._at("_"):
            raise UnreadableError("a number directly follows another, or has an index")
        return constant(token.value)

    def _proper_fraction(self) -> Fraction | None:
        r"""Consume the fraction of a mixed number, `\frac{1}{2}` or ` 1/2`; None if there is none."""
        following = self.tokens[self.position : self.position + 7]
        texts = [token.text for token in following]
        if texts[:1] == ["frac"]:
            digits = [token for token in following[1:] if token.text not in {"{", "}"}][:2]
            braced = texts[1:7] == ["{", digits[0].text, "}", "{", digits[1].text, "}"] if len(digits) == 2 else False
            above, below, length = digits[0] if digits else None, digits[-1] if digits else None, 7
        else:
            braced = len(texts) > 2 and texts[1] == "/" and following[0].spaced
            above, below, length = (following[0], following[2], 3) if braced else (None, None, 0)
        if not braced or above is None or below is None or not (above.text.isdigit() and below.text.isdigit()):
            return None
        if not 0 < above.value < below.value:
            return None
        self.position += length
        return above.value / below.value

    def _symbol(self, token: Token) -> Expression:
        name = token.text
        if self._take("_"):
            return self._named(f"{name}_{self._index()}")
        if self._at("(") and (name in _UNAPPLIED or (name == "h" and self._texts(3)[2:] == [")"])):
            raise UnreadableError(f"unknown function {name}")
        return _CONSTANTS.get(name) or self._named(name)

    def _named(self, name: str) -> Expression:
        return Expression(frozenset({name}), lambda at: at[name])

    def _index(self) -> str:
        if not self._take("{"):
            return self._simple(self._advance())
        parts = []
        while not self._take("}"):
            parts.append(self._simple(self._advance()))
        return "".join(parts)

    def _simple(self, token: Token) -> str:
        if token.kind not in {"number", "symbol"} and token.text not in {"+", "-", ","}:
            raise UnreadableError("an index may contain only letters and numbers")
        return token.text

    def _function(self, token: Token, depth: int) -> Expression:
        name = token.text
        if name == "frac":
            return apply(values.divide, self._argument(depth), self._argument(depth))
        if name == "binom":
            return apply(values.binomial, self._argument(depth), self._argument(depth))
        if name == "sqrt":
            return self._root(depth)
        base = self._base(depth) if name == "log" else None
        exponent = self._function_exponent(name, depth)
        operand = self._operand(depth)
        if base is not None:
            found = apply(lambda a, b: values.divide(values.logarithm(a), values.logarithm(b)), operand, base)
        elif exponent == "inverse":
            return apply(values.function(_INVERSE[name]), operand)
        else:
            found = apply(_OF_ONE[name], operand)
        return found if exponent is None or isinstance(exponent, str) else apply(values.power, found, exponent)

    def _root(self, depth: int) -> Expression:
        degree = constant(Fraction(2))
        if self._take("["):
            degree = self.sum(depth + 1)
            if not self._take("]"):
                raise UnreadableError("the degree of a root is not closed")
        operand = self._argument(depth)
        return apply(lambda a, n: values.power(a, values.divide(Fraction(1), n)), operand, degree)

    def _argument(self, depth: int) -> Expression:
        r"""Parse an argument of `\frac` or `\sqrt`: a group, or a single digit or letter, as in LaTeX."""
        token = self._advance()
        if token.text in {"{", "("}:
            return self._bracket(token.text, depth)
        if token.kind == "symbol":
            return self._symbol(token)
        if token.kind == "number" and len(token.text) == 1:
            return constant(token.value)
        raise UnreadableError(f"expected an argument in braces, got {token.text!r}")

    def _base(self, depth: int) -> Expression:
        if not self._take("_"):
            return Expression(frozenset({LOGARITHM_BASE}), lambda at: at[LOGARITHM_BASE])
        token = self._advance()
        if token.text == "{":
            return self._bracket("{", depth)
        if token.kind == "number":
            if not self._next_is("number") and not self._begins_factor():
                raise UnreadableError("ambiguous: the base of a logarithm may have one digit or more")
            return constant(token.value)
        if token.kind == "symbol":
            return self._symbol(token)
        raise UnreadableError("the base of a logarithm must be a number, a letter or a group")

    def _function_exponent(self, name: str, depth: int) -> Expression | str | None:
        if not self._take("^"):
            return None
        start = self.position
        exponent = self._exponent(depth)
        written = "".join(token.text for token in self.tokens[start : self.position]).strip("{}()")
        if written != "-1":
            return exponent
        if name not in _INVERSE:
            raise UnreadableError(f"ambiguous: {name}^-1 may be the inverse function or the reciprocal")
        return "inverse"

    def _operand(self, depth: int) -> Expression:
        """Parse the operand of a function: a bracketed group, or the factors up to the next operator or function."""
        if self._at("(", "{", "["):
            return self._bracket(self._advance().text, depth)
        factors: list[Expression] = []
        if self._is_applied():
            return self._function(self._advance(), depth + 1)
        while not factors or (self._begins_factor() and not self._at("(", "[", "|") and not self._is_applied()):
            factors.append(self._power(depth + 1))
        return apply(lambda *all_: values.multiply(all_), *factors)

    def _is_applied(self) -> bool:
        return self._next_is("function") and self._texts(1)[0] not in {"frac", "sqrt"}

    def _begins_factor(self) -> bool:
        if self.position >= len(self.tokens):
            return False
        token = self.tokens[self.position]
        if token.kind == "sign":
            return token.text in _CLOSING and (token.text != "|" or not self.bars)
        after_factorial = token.kind == "number" and self.tokens[self.position - 1].text == "!"
        return token.kind in {"symbol", "function"} or after_factorial

    def _next_is(self, kind: str) -> bool:
        return self.position < len(self.tokens) and self.tokens[self.position].kind == kind

    def _texts(self, count: int) -> list[str]:
        return [token.text for token in self.tokens[self.position : self.position + count]]

    def _at(self, *signs: str) -> bool:
        if self.position >= len(self.tokens):
            return False
        token = self.tokens[self.position]
        return token.kind == "sign" and token.text in signs

    def _take(self, sign: str) -> bool:
        found = self._at(sign)
        self.position += found
        return found

    def _advance(self) -> Token:
        if self.position >= len(self.tokens):
            raise UnreadableError("it ends unexpectedly")
        self.position += 1
        return self.tokens[self.position - 1]
