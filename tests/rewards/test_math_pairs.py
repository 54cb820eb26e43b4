"""The math reward on labelled pairs: it accepts equal answers and no others, and the labels are right."""

from __future__ import annotations

import cmath
import math
from pathlib import Path
from random import Random

import attrs
import mpmath
import pytest
import yaml

import rlsdk

FILE = Path(__file__).with_name("math_pairs.yaml")


@attrs.frozen
class Pair:
    category: str
    label: str
    reference: str
    answer: str
    values: tuple[str | None, str | None] = (None, None)

    def __str__(self) -> str:
        return f"{self.category}: {self.reference} | {self.answer}"


def _pairs():
    for group in yaml.safe_load(FILE.read_text(encoding="utf-8")):
        for label in ("equal", "unequal", "hostile"):
            for reference, answer, *values in group.get(label, ()):
                yield Pair(group["category"], label, reference, answer, tuple(values) or (None, None))


PAIRS = list(_pairs())
LABELLED = {label: [pair for pair in PAIRS if pair.label == label] for label in ("equal", "unequal", "hostile")}
REWARD = rlsdk.load("reward", "math")


def accepted(reference, answer):
    task = rlsdk.Task(id="t", prompt="?", answer=reference)
    score = REWARD(rlsdk.Rollout.from_text(task, rf"So \boxed{{{answer}}}"))
    assert score.valid
    return score.value == 1.0


def test_there_are_enough_of_each():
    assert len(LABELLED["equal"]) >= 170
    assert len(LABELLED["unequal"]) >= 110
    assert len(LABELLED["hostile"]) >= 30
    assert len(PAIRS) >= 320
    assert len({(pair.reference, pair.answer) for pair in PAIRS}) == len(PAIRS)


def test_text_comparison_misses_the_equal_ones():
    assert sum(pair.reference.strip() != pair.answer.strip() for pair in LABELLED["equal"]) >= 170


def test_equal_pairs_are_accepted():
    missed = [str(pair) for pair in LABELLED["equal"] if not accepted(pair.reference, pair.answer)]
    print(*missed, sep="\n")
    assert len(missed) <= 0.05 * len(LABELLED["equal"]), missed


def test_no_unequal_or_hostile_pair_is_accepted():
    wrong = [str(p) for p in PAIRS if p.label != "equal" and accepted(p.reference, p.answer)]
    assert wrong == []


@pytest.mark.parametrize("label", ["equal", "unequal"])
def test_the_order_of_the_two_does_not_matter(label):
    other = [
        str(pair)
        for pair in LABELLED[label]
        if accepted(pair.reference, pair.answer) != accepted(pair.answer, pair.reference)
    ]
    assert other == []


# The second opinion: Python, written by hand for each side, at points.


class Multi(tuple):
    """Several values in any order."""


def multi(*items):
    return Multi(items)


def real_power(value, exponent):
    return math.copysign(abs(value) ** exponent, value)


NAMES = {
    **{name: getattr(cmath, name) for name in ("sin", "cos", "tan", "asin", "acos", "atan", "exp", "sqrt")},
    "ln": cmath.log,
    "log": lambda value, base: cmath.log(value) / cmath.log(base),
    "cbrt": lambda value: real_power(value, 1 / 3),
    "floor": math.floor,
    "ceil": math.ceil,
    "fact": lambda value: math.factorial(value) if isinstance(value, int) else mpmath.gamma(value + 1),
    "comb": math.comb,
    "abs": abs,
    "multi": multi,
    "pi": math.pi,
    "e": math.e,
    "i": 1j,
    "oo": math.inf,
    "__builtins__": {},
}


def points():
    random = Random(0)
    for index in range(400):
        point = {name: random.randrange(-24, 25) / 4 for name in "xyzabcnktrv"}
        if index < 40:  # every number at which a condition on v may change, and its neighbours
            point["v"] = (index - 20) / 4
        if index % 2:  # on curves that the equations name
            point["y"] = [2 * point["x"] + 1, 3 - 1.5 * point["x"], 2, 0, 5][index % 5]
            point["x"] = [point["x"], point["x"], 0.0, 2.0, 5.0][index % 5]
        if index % 7 == 0:
            point["x"], point["y"] = [(2, 3), (3, 2), (5, 1), (1, 5)][index % 4]
        yield point


def value(expression, point):
    """Value of an expression at a point; None if it is undefined."""
    try:
        return eval(expression, dict(NAMES), point)  # the file is ours, and no answer of a model gets here
    except (ArithmeticError, ValueError):
        return None


def same(one, other):
    if one is other is None:
        return True
    if isinstance(one, set | frozenset) and isinstance(other, Multi):
        one = Multi(one)
    if isinstance(one, set | frozenset | Multi) and isinstance(other, set | frozenset | Multi):
        left = list(other)
        for item in one:
            match = next((index for index, each in enumerate(left) if same(item, each)), None)
            if match is None:
                return False
            left.pop(match)
        return not left
    if isinstance(one, tuple) and isinstance(other, tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(same, one, other))
    kinds = {type(each) in (set, frozenset, tuple, Multi) for each in (one, other)}
    if kinds != {False} or isinstance(one, bool) != isinstance(other, bool):
        return False
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    if math.inf in (abs(one), abs(other)):
        return one == other
    return one == other or abs(complex(one) - complex(other)) <= 1e-9 * max(abs(one), abs(other), 1e-6)


VALUED = [pair for pair in PAIRS if None not in pair.values]


def test_most_pairs_have_values():
    assert len([pair for pair in VALUED if pair.label == "equal"]) >= 170
    assert len([pair for pair in VALUED if pair.label == "unequal"]) >= 100


@pytest.mark.parametrize("pair", VALUED, ids=str)
def test_labels_agree_with_hand_written_values(pair):
    found = [[value(expression, point) for expression in pair.values] for point in points()]
    found = [(one, other) for one, other in found if one is not None and other is not None]
    assert len(found) >= 20
    agree = [same(one, other) for one, other in found]
    assert all(agree) if pair.label == "equal" else not all(agree)
