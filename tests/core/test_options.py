"""Options are read from signatures with strict types, and every fault has its path."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlsdk
from rlsdk.docstrings import documented, labelled
from rlsdk.errors import PluginError
from rlsdk.options import MISSING, check_options, options_of, structure, type_name

if TYPE_CHECKING:
    from nowhere import Imaginary

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
KINDS = {int: int, float: (int, float), bool: bool, str: str}


class Pace(enum.Enum):
    SLOW = "slow"
    FAST = "fast"


@attrs.frozen(kw_only=True)
class Inner:
    """Inner.

    Attributes:
        width: How wide.
    """

    width: int = 1


@attrs.frozen(kw_only=True)
class Outer:
    """Outer."""

    inner: Inner = Inner()
    many: tuple[Inner, ...] = ()
    named: Mapping[str, float] = attrs.field(factory=dict)
    mode: Literal["slow", "fast"] = "slow"
    pair: tuple[int, str] | None = None


def faults(value, kind):
    return structure(value, kind)[1]


@settings(deadline=None)
@given(PLAIN, st.sampled_from(list(KINDS)))
def test_a_plain_value_fits_its_own_type_alone(value, kind):
    """An int serves as a float; text never as a number or a bool, a bool never as a number."""
    fits = isinstance(value, KINDS[kind]) and (kind is bool or not isinstance(value, bool))
    structured, found = structure(value, kind)
    assert bool(found) is not fits
    if fits:
        assert type(structured) is kind
        assert structured == value


@settings(deadline=None)
@given(st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20))
def test_whatever_a_config_holds_becomes_a_value_or_a_fault(value):
    structured, found = structure(value, Outer)
    assert (structured is None) is bool(found)
    assert all(isinstance(path, str) and text for path, text in found)


def test_every_fault_has_its_path():
    wrong = {
        "inner": {"width": "3", "wdth": 1},
        "many": [{"width": 1}, {"width": True}],
        "named": {"a": "b"},
        "mode": "quick",
        "pair": [1, 2],
    }
    assert dict(faults(wrong, Outer)) == {
        ".inner.width": "expected int, got '3'; it is text: write the number without quotes, digits only, with '.' for "
        "decimals",
        ".inner.wdth": "unknown key 'wdth', did you mean 'width'?; known: width",
        ".many[1].width": "expected int, got True",
        ".named.a": "expected float, got 'b'",
        ".mode": "expected 'slow' | 'fast', got 'quick'",
        ".pair[1]": "expected str, got 2 (quote it to make it text)",
    }


@pytest.mark.parametrize(
    ("value", "kind", "help"),
    [
        ("10k", int, "write the plain number without a unit"),
        ("30s", float, "write the plain number without a unit"),
        ("4GB", int, "write the plain number without a unit"),
        ("50%", float, "write the plain number without a unit"),
        ("1,000", int, "digits only"),
        ("0.5", float, "write the number without quotes"),
        ("4 \\", int, "lost its continuation"),
        (" 4", int, "lost its continuation"),
        ("[1,2]", tuple[int, ...], "'key=[a,b]', all of it in single quotes"),
        ("[1,", int, "wrong quotes"),
        ("yes", bool, "write true or false without quotes"),
        (5, str, "quote it to make it text"),
    ],
)
def test_mistakes_that_shells_and_yaml_invite_get_a_sentence(value, kind, help):
    ((path, text),) = faults(value, kind)
    assert path == ""
    assert help in text
    assert repr(value) in text


def test_a_near_choice_is_suggested():
    assert "did you mean 'fast'?" in faults("fats", Literal["slow", "fast"])[0][1]
    assert faults("fats", Pace)[0][1] == "expected 'slow' | 'fast', got 'fats'; did you mean 'fast'?"
    assert structure("fast", Pace) == (Pace.FAST, [])


def test_null_is_allowed_where_it_says_so():
    assert structure(None, float | None) == (None, [])
    assert structure(1, float | None) == (1.0, [])
    assert faults("x", float | None)[0][1].startswith("expected float or null, got 'x'")
    assert faults(None, float)[0][1].startswith("expected float, got None")


def test_a_union_takes_the_arm_that_fits():
    assert structure(True, int | bool) == (True, [])
    assert structure("a", int | str) == ("a", [])
    assert structure(2, str | float) == (2.0, [])
    assert "expected int | str" in faults([], int | str)[0][1]


def test_lists_become_what_was_declared():
    assert structure([1, 2], tuple[float, ...]) == ((1.0, 2.0), [])
    assert structure((1, 2), list[int]) == ([1, 2], [])
    assert structure([1], Sequence[int])[1] == []
    assert faults("ab", list[str])[0][1].startswith("expected list of str, got 'ab'")
    assert "expected 2 values (int, str)" in faults([1], tuple[int, str])[0][1]


def test_options_of_a_function():
    def exact(rollout: Imaginary, *, scale: float = 2.0, mode: Literal["a", "b"], extra=None) -> Imaginary:
        """Exact.

        Args:
            rollout: What was written.
            scale: Factor,
                over two lines.
            mode: How.
        """

    scale, mode, extra = options_of(exact)
    assert (scale.name, scale.type, scale.default, scale.required) == ("scale", float, 2.0, False)
    assert scale.help == "Factor, over two lines."
    assert (mode.type_name, mode.default, mode.required, mode.help) == ("'a' | 'b'", MISSING, True, "How.")
    assert (extra.type_name, extra.default, extra.help) == ("anything", None, "")


def test_an_annotation_that_only_a_type_checker_sees_is_named():
    def lost(rollout, *, thing: Imaginary) -> float: ...

    with pytest.raises(PluginError, match=r"options of .*lost \(.*line \d+\) cannot be read \(NameError.*under TYPE_"):
        options_of(lost)


def test_options_of_a_class_with_init():
    class Judge:
        """Judge.

        Args:
            url: Where.
        """

        def __init__(self, *, url: str, tries: int = 3) -> None:
            """Start.

            Args:
                tries: How often.
            """

    assert [(o.name, o.help, o.required) for o in options_of(Judge)] == [
        ("url", "Where.", True),
        ("tries", "How often.", False),
    ]


def test_a_class_without_init_has_no_options():
    assert options_of(type("Empty", (), {})) == ()


def test_options_of_an_attrs_class_keep_order_and_help_of_its_base():
    @attrs.frozen(kw_only=True)
    class Wide(Inner):
        """Wide.

        Attributes:
            deep: How deep.
        """

        deep: list[int] = attrs.field(factory=list)
        width: int = 9
        _secret: int = attrs.field(default=1, init=False)

    assert [(o.name, o.default, o.help) for o in options_of(Wide)] == [
        ("width", 9, "How wide."),
        ("deep", [], "How deep."),
    ]


def test_given_options_are_checked_at_once():
    def exact(rollout, *, scale: float = 1.0, name: str) -> float: ...

    values, found = check_options(options_of(exact), {"scale": "x", "nme": 1})
    assert values == {"scale": None}
    assert [path for path, _ in found] == ["scale", "nme", "name"]
    assert found[1][1] == "unknown option 'nme', did you mean 'name'?; known: name, scale"
    assert found[2][1] == "is required (str)"
    assert check_options(options_of(exact), {"name": "n", "scale": 2}) == ({"name": "n", "scale": 2.0}, [])


def test_documented_reads_google_sections():
    doc = """What.

    Args:
        a: One.
        b (int): Two
            lines.

        **rest: Others.

    Returns:
        c: no option.
    """
    assert documented(doc) == {"a": "One.", "b": "Two lines.", "rest": "Others."}


def test_labelled_reads_the_text_after_labels():
    doc = """Summary, in one
    or two lines.

    A note. Not a Paper: this.

    Another.
    Paper: X, arXiv:1,
    eq. 2.
    Formula: `a`.

    Afterthought.
    When to use: now.

    Args:
        x: The batch.
            Source: not this.
    """
    assert labelled(doc) == {
        "": "A note. Not a Paper: this. Another. Afterthought.",
        "Paper": "X, arXiv:1, eq. 2.",
        "Formula": "`a`.",
        "When to use": "now.",
    }
    assert labelled("Only a summary.") == {}


# --- limits


@pytest.mark.parametrize(
    ("kind", "shown", "inside", "outside"),
    [
        (Annotated[float, rlsdk.at_least(0)], "float >= 0", (0, 2.5), (-1, -0.001)),
        (Annotated[float, rlsdk.above(0)], "float > 0", (0.001, 3), (0, -1)),
        (Annotated[int, rlsdk.at_most(8)], "int <= 8", (8, -3), (9,)),
        (Annotated[float, rlsdk.at_least(0), rlsdk.below(1)], "float >= 0 and < 1", (0, 0.5), (1, -0.5)),
        (Annotated[float, rlsdk.at_least(0), "for other readers"], "float >= 0", (0,), (-1,)),
    ],
)
def test_an_option_with_limits_takes_what_is_inside(kind, shown, inside, outside):
    assert type_name(kind) == shown
    for value in inside:
        assert structure(value, kind) == (value, [])
    for value in outside:
        assert structure(value, kind) == (None, [("", f"expected {shown}, got {value!r}")])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite_unless_a_limit_names_infinity(value):
    wrong = [("", f"expected a finite number, got {value}")]
    assert structure(value, float) == structure(value, Annotated[float, rlsdk.at_least(-5)]) == (None, wrong)
    endless = Annotated[float, rlsdk.at_least(0), rlsdk.at_most(math.inf)]
    assert structure(value, endless) == ((value, []) if value == math.inf else (None, wrong))


Rate = Annotated[float, rlsdk.above(0)]


@attrs.frozen
class Rates:
    """A class with a limited field."""

    rate: Rate | None = None


def test_limits_hold_inside_unions_lists_and_classes():
    assert structure(None, Rate | None) == (None, [])
    assert structure(-1, Rate | None)[1] == [("", "expected float > 0 or null, got -1")]
    assert structure([1, -1], tuple[Rate, Rate])[1] == [("[1]", "expected float > 0, got -1")]
    assert structure({"rate": 0}, Rates)[1] == [(".rate", "expected float > 0 or null, got 0")]


def test_a_value_of_the_wrong_type_is_refused_with_the_type():
    ((_, text),) = structure("2GB", Rate)[1]
    assert text == "expected float, got '2GB'; write the plain number without a unit"


def test_limits_are_read_from_functions_and_classes():
    def soft(x, *, temperature: Annotated[float, rlsdk.above(0)] = 0.3): ...

    @attrs.frozen(kw_only=True)
    class Soft:
        temperature: Annotated[float, rlsdk.above(0)] = 0.3

    for obj in (soft, Soft):
        (option,) = options_of(obj)
        assert option.type_name == "float > 0"
        assert check_options([option], {"temperature": 0})[1] == [("temperature", "expected float > 0, got 0")]


@dataclasses.dataclass
class Limits:
    """Options of a component in a class of their own."""

    length: int = 60


@attrs.frozen
class Margins:
    """The same as an attrs class."""

    length: int = 60


@pytest.mark.parametrize("kind", [Limits, Margins])
def test_a_class_of_options_takes_a_mapping_or_an_instance(kind):
    assert structure({"length": 3}, kind) == (kind(3), [])
    assert structure(kind(3), kind) == (kind(3), [])
    assert structure({"lenght": 3}, kind) == (
        None,
        [(".lenght", "unknown key 'lenght', did you mean 'length'?; known: length")],
    )


def test_options_of_a_pydantic_model_are_its_fields():
    pydantic = pytest.importorskip("pydantic")

    class Brief(pydantic.BaseModel):
        """Short answers.

        Attributes:
            limit: Characters.
        """

        limit: int = 60

    (option,) = options_of(Brief)
    assert (option.name, option.type, option.default, option.help) == ("limit", int, 60, "Characters.")
