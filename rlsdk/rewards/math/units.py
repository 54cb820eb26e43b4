"""Parse units after a number and convert between them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction

import attrs

from rlsdk.rewards.math.latex import UnreadableError


@attrs.frozen
class Unit:
    """A product of powers of base units, times a factor.

    Attributes:
        powers: Pairs (base unit, exponent), sorted by name, without zero exponents.
        factor: Conversion factor from this unit to the base units.
        scale: Scale from number words: a million for `million dollars`.
    """

    powers: tuple[tuple[str, int], ...]
    factor: Fraction = Fraction(1)
    scale: Fraction = Fraction(1)


_COUNTED = """
apple orange student person people child children boy girl man men woman women dog cat chicken cow horse fish
book page pencil pen marble ball coin card cookie candy candie ticket way choice solution triangle side edge
vertex vertices face diagonal point egg flower tree car bus buse seat table chair box boxe bag bottle cup
piece slice game team player row column tile digit number integer word letter outcome arrangement subset
permutation combination path pair handshake worker employee customer guest friend toy brick block square bead
sticker stamp ribbon cupcake cake pie pizza banana pear peach peache plant bird penny pennie nickel dime item
passenger house room mph
"""
_NOUNS = frozenset(_COUNTED.split())
"""Countable things: `8 apples` is 8."""


_CHANGING = """
one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen twenty thirty forty fifty sixty seventy eighty ninety zero none nil half halves third fourth quarter fifth
sixth seventh eighth ninth tenth hundredth thousandth millionth lakh crore score gross couple double triple twice
plus minus times over divided multiplied added subtracted squared cubed square cubic factorial root power mod modulo
base sqrt log exp sin cos tan lcm gcd max min sum product remainder percent percentage decimal repeating recurring
point infinity negative positive imaginary degree and not nor but the than more less fewer greater larger smaller
most least about approximately roughly nearly almost around between under above below from through until off are is
was were equal equals isn wrong incorrect false correct true maybe perhaps possibly unless except instead rather
either neither any all many some other others undefined nothing
"""
_OTHER_WORDS = frozenset(_CHANGING.split())
"""Words after a number that may change or revoke it instead of naming counted things."""


def _table() -> Mapping[str, tuple[str, Fraction]]:
    """Return the table of units: name -> (base unit, factor)."""
    metre, foot, second = Fraction(1), Fraction(3048, 10_000), Fraction(1)
    gram, pound = Fraction(1), Fraction(45359237, 100_000)
    rows: list[tuple[str, str, Fraction]] = [
        ("metre", "m meter metre", metre),
        ("metre", "km kilometer kilometre", 1_000 * metre),
        ("metre", "dm decimeter decimetre", metre / 10),
        ("metre", "cm centimeter centimetre", metre / 100),
        ("metre", "mm millimeter millimetre", metre / 1_000),
        ("metre", "nm nanometer nanometre", metre / 10**9),
        ("metre", "ft foot feet", foot),
        ("metre", "in inch inche", foot / 12),
        ("metre", "yd yard", 3 * foot),
        ("metre", "mi mile", 5_280 * foot),
        ("second", "s sec second", second),
        ("second", "ms millisecond", second / 1_000),
        ("second", "min minute", 60 * second),
        ("second", "h hr hour", 3_600 * second),
        ("second", "d day", 86_400 * second),
        ("second", "wk week", 7 * 86_400 * second),
        ("month", "month", Fraction(1)),
        ("month", "yr year", Fraction(12)),
        ("gram", "g gram", gram),
        ("gram", "kg kilogram", 1_000 * gram),
        ("gram", "mg milligram", gram / 1_000),
        ("gram", "t ton tonne", 10**6 * gram),
        ("gram", "lb pound", pound),
        ("gram", "oz ounce", pound / 16),
        ("litre", "L l liter litre", Fraction(1)),
        ("litre", "mL ml milliliter millilitre", Fraction(1, 1_000)),
        ("gallon", "gal gallon", Fraction(1)),
        ("gallon", "qt quart", Fraction(1, 4)),
        ("gallon", "pt pint", Fraction(1, 8)),
        ("dollar", "dollar usd USD buck", Fraction(1)),
        ("dollar", "cent ¢", Fraction(1, 100)),
        ("euro", "euro eur EUR", Fraction(1)),
        ("gbp", "gbp GBP", Fraction(1)),
        ("rupee", "rupee Rs", Fraction(1)),
        ("yen", "yen", Fraction(1)),
        ("degree", "degree deg", Fraction(1)),
        ("radian", "radian rad", Fraction(1)),
        ("newton", "N newton", Fraction(1)),
        ("joule", "J joule", Fraction(1)),
        ("joule", "kJ kilojoule", Fraction(1_000)),
        ("watt", "W watt", Fraction(1)),
        ("watt", "kW kilowatt", Fraction(1_000)),
        ("volt", "V volt", Fraction(1)),
        ("ampere", "A ampere amp", Fraction(1)),
        ("ohm", "ohm", Fraction(1)),
        ("pascal", "Pa pascal", Fraction(1)),
        ("hertz", "Hz hertz", Fraction(1)),
        ("kelvin", "K kelvin", Fraction(1)),
        ("mole", "mol mole", Fraction(1)),
        ("acre", "acre", Fraction(1)),
        ("unit", "unit", Fraction(1)),
    ]
    table = {name: (base, factor) for base, names, factor in rows for name in names.split()}
    return {**table, **{noun: (f"noun {noun}", Fraction(1)) for noun in _NOUNS}}


_UNITS = _table()
_SCALES = {
    "hundred": 100,
    "thousand": 1_000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "dozen": 12,
}
_PART = re.compile(
    r"\s*(?:(?P<sign>per(?![A-Za-z])|[/*·])|(?P<name>[A-Za-z¢]+)\.?(?:\s*\^?\s*(?P<power>-?[1-9])(?![0-9]))?)"
)
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}


def read_unit(text: str, *, any_noun: bool = False) -> Unit:
    """Parse a unit, such as `cm`, `square feet`, `m/s^2`, `million dollars`.

    Args:
        text: One or more words, possibly with signs and exponents.
        any_noun: Treat an unknown word as the name of counted things (`72 clips`).
    """
    factor, scaled, powers = Fraction(1), Fraction(1), dict[str, int]()
    position, sign, following = 0, 1, 1
    last: tuple[str, Fraction] | None = None
    text = text.strip()
    while position < len(text):
        match = _PART.match(text, position)
        if match is None:
            raise UnreadableError(f"{text[:30]!r} is not a unit")
        position = match.end()
        if match["sign"]:
            sign = -1 if match["sign"] in {"/", "per"} else sign
            continue
        name, power = match["name"], int(match["power"] or 1) * sign
        if name in _SCALES and not powers:
            scaled *= _SCALES[name]
        elif name.lower() in {"squared", "cubed"} and last is not None:
            base, scale = last
            extra = (_POWERS[name.lower()] - 1) * sign
            powers[base] += extra
            factor *= scale**extra
        elif name.lower() in {"square", "sq", "cubic", "cu"} and text[position:].strip():
            following = _POWERS[name.lower()]
        else:
            last = _known(name, any_noun=any_noun)
            base, scale = last
            if match["power"] and base.startswith("noun "):
                raise UnreadableError(f"a number follows {name[:30]!r}")
            power *= following
            powers[base] = powers.get(base, 0) + power
            factor *= scale**power
            following = 1
    return Unit(tuple(sorted((base, power) for base, power in powers.items() if power)), factor, scaled)


def _known(name: str, *, any_noun: bool = False) -> tuple[str, Fraction]:
    """Look up a unit; return its base unit and its factor."""
    for each in (name, name.lower() if len(name) > 2 else name):
        if each in _UNITS:
            return _UNITS[each]
        if each.endswith("s") and each[:-1] in _UNITS and len(each) > 3:
            return _UNITS[each[:-1]]
    if any_noun and is_noun(name):
        return f"noun {_singular(name)}", Fraction(1)
    raise UnreadableError(f"{name[:30]!r} is not a known unit")


def is_noun(word: str) -> bool:
    """Return True if a word after a number may name counted things, without changing the number."""
    return len(word) > 2 and not {word.lower(), _singular(word)} & _OTHER_WORDS


def _singular(word: str) -> str:
    return word.lower().removesuffix("s")


def is_unit_word(word: str) -> bool:
    """Return True if a word after a number is a unit even if it is not marked as text."""
    try:
        _known(word)
    except UnreadableError:
        return word in _SCALES or word.lower() in _POWERS or word == "per"
    return len(word) > 1
