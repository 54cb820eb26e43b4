"""The math reward: extraction, equivalence, limits."""

from __future__ import annotations

import threading
import time
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlsdk
from rlsdk.errors import DataError, OptionError
from rlsdk.rewards.math.symbolic import over_limits
from rlsdk.rewards.math_answer import last_boxed
from tests.examples import many


def judge(reference, text, **options):
    task = rlsdk.Task(id="t7", prompt="?", answer=reference)
    return rlsdk.load("reward", "math", **options)(rlsdk.Rollout.from_text(task, text))


def value(reference, answer):
    return judge(reference, rf"So \boxed{{{answer}}}.").value


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("1/2", "0.5"),
        ("1/2", r"\frac{1}{2}"),
        ("1/2", r"\dfrac12"),
        (r"50\%", r"\frac{1}{2}"),
        ("1,000", "1000"),
        ("1000", r"1{,}000"),
        (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
        ("(x+1)^2", "x^2+2x+1"),
        ("x=5", "5"),
        (r"\{1,2\}", r"\{2, 1\}"),
        ("(1,2]", r"\left(1, 2\right]"),
        ("10!", "3628800"),
        ("e^{x^2}", "e^{x^{2}}"),
        ("7", r"7\text{ cm}"),
        ("72", r"72\text{ clips}"),
        ("72", r"\text{72}"),
        ("50", r"50\%"),
        ("0.5", r"50\%"),
        ("Paris", r"\text{paris}"),
        ("B", "(B)"),
        (r"\boxed{12}", "12"),
        ("Half of 48 is 24.\n48+24 = <<48+24=72>>72\n#### 72", "72"),  # GSM8K's column `answer`
        ("It sold 1,000.\n#### 1,000", "1000"),
        ("Half of 48 is 24. #### 24", "24"),  # whose line breaks were lost
        ("It is 5.\n####5", "5"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1 & 2\\ 3 & 4\end{pmatrix}"),
    ],
)
def test_equal_answers(reference, answer):
    score = judge(reference, rf"So \boxed{{{answer}}}.")
    assert (score.value, score.valid, score.reason) == (1.0, True, "")
    assert score.metrics == {"correct": 1.0, "format": 1.0}


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("1/2", "1/3"),
        ("5", "-5"),
        ("5", ""),
        ("5", "five or six"),
        ("x^2", "x^3"),
        ("(1,2]", "(1,2)"),
        ("stop", "pots"),
        ("Paris", "London"),
        (r"\{1,2\}", r"\{1,3\}"),
        ("5", r"\frac{1}{"),
        ("5", "}"),
    ],
)
def test_other_answers(reference, answer):
    score = judge(reference, rf"So \boxed{{{answer}}}.")
    assert (score.value, score.valid) == (0.0, True)
    assert score.reason


def test_the_last_box_counts():
    assert judge("2", r"\boxed{1} and then \boxed{2}").value == 1.0
    assert judge("1", r"\boxed{1} and then \boxed{2}").value == 0.0
    assert judge("2", r"\boxed{2} and then \boxed{").value == 1.0


def test_without_a_box():
    score = judge("72", "The answer is 72.")
    assert (score.value, score.valid, score.metrics["format"]) == (0.0, True, 0.0)
    lenient = judge("72", "First 10, so it is 72.", strict=False)
    assert (lenient.value, lenient.metrics) == (1.0, {"correct": 1.0, "format": 0.0})
    assert judge("72", r"It is \boxed{71}, or 72", strict=False).value == 0.0
    assert judge("72", "no idea", strict=False).value == 0.0


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("1000", "It costs $1,000 in all"),
        ("-3.5", "that is -3.5"),
        ("0.5", "so half of it, 50%"),
        ("1/2", "<answer>0.5</answer>"),
        ("1/2", "<answer> The answer is $\\frac12$. </answer> 7"),
        ("1/2", "<answer>3</answer> no: <answer>\\dfrac12</answer>, not 5"),
        ("72", "First 10.\n#### 72"),
        ("1,234", "9\n#### 1234\n"),
        ("72", "The final answer is 72. There were 3 steps."),
        ("72", "**The answer is: 72 dollars.**\nI took 3 steps."),
        (r"\frac{\pi}{2}", "the answer is $\\pi/2$, since 4 is 4."),
        ("Paris", "Therefore, the answer is Paris."),
        ("(1,2)", "Answer: (1, 2)"),
        ("x^2", r"The final answer is \(x \cdot x\). It has 1 term."),
    ],
)
def test_lenient_answers(reference, text):
    assert judge(reference, text, strict=False).value == 1.0
    assert judge(reference, text).value == 0.0


@pytest.mark.parametrize(
    ("reference", "text"),
    [
        ("72", "<answer>71</answer> 72"),
        ("72", "#### 71\n72"),
        ("72", "the answer is 71. But 72"),
        ("72", "the answer is 72, the answer is 71"),
        ("72", "x72"),
        ("2", "1/2"),
        ("72", "<answer></answer> 72"),
        ("72", "it is 172"),
    ],
)
def test_lenient_mode_reads_one_answer_alone(reference, text):
    assert judge(reference, text, strict=False).value == 0.0


def test_any_of_several_references_counts():
    assert judge(["Paris", "Lutetia"], r"\boxed{lutetia}").value == 1.0
    assert judge((5, "10"), r"\boxed{10.0}").value == 1.0
    assert judge(["1", "2"], r"\boxed{3}").value == 0.0
    assert judge(["1", "2"], r"\boxed{1, 2}").value == 0.0
    assert judge(["#", r"\boxed{2}"], r"\boxed{2}").value == 1.0


def test_rounding_is_wrong_unless_it_is_tolerated():
    assert judge("1/3", r"\boxed{0.333}").value == 0.0
    assert judge("1/3", r"\boxed{0.333}", tolerance=0.01).value == 1.0
    assert judge("1/3", r"\boxed{0.34}", tolerance=0.01).value == 0.0
    assert judge(r"\pi", r"\boxed{3.1416}", tolerance=1e-4).value == 1.0
    for tolerance in (-1.0, 1.0):
        with pytest.raises(OptionError, match="tolerance: expected float >= 0 and < 1"):
            judge("1/3", r"\boxed{0.333}", tolerance=tolerance)


def test_unknown_commands_are_read_by_math_verify():
    assert value("2", r"\max(1,2)") == 1.0
    assert value("x+1", r"\min(1,2)+x") == 1.0
    assert value("1", r"\max(1,2)") == 0.0
    assert value("2", r"2 \max") == 0.0
    assert value("2", r"\max(1,2)) + (3") == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{a}", "a"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {a}", "a"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\fbox{7}", "7"),
        (r"\fbox{7} and \boxed{8} and \fbox{9}", "8"),
        (r"\boxed{x = \fbox{7}}", "7"),
        (r"\fbox{\boxed{7}}", "7"),
        (r"\fbox{7", None),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"}}\boxed{a}{{", "a"),
        (r"\boxed{a", None),
        (r"\boxed a", None),
        (r"\\boxed{a}", None),
        ("", None),
    ],
)
def test_last_boxed(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (None, "None"),
        ("", "''"),
        ("  ", "'  '"),
        ([], r"\[\]"),
        (True, "True"),
        (["1", None], "None"),
        (float("nan"), "nan"),
    ],
)
def test_a_task_without_an_answer_is_an_error_that_names_it(answer, shown):
    with pytest.raises(DataError, match=rf"task 't7'.*{shown}"):
        judge(answer, r"\boxed{1}")


def test_numbers_serve_as_references():
    assert value(5, "5") == 1.0
    assert value(0.5, "1/2") == 1.0


HOSTILE = [
    "9^{9^{9^{9}}}",
    "9^9^9^9",
    "9**9**9",
    "((9^{999})^{999})^{999}",
    r"9^{999 \cdot 999 \cdot 999}",
    r"9^{\frac{999999999}{1}}",
    "9^{-999999999}",
    "2^{10!}",
    "99999999!",
    "(9!)!",
    "9!!!",
    r"\left(99\right)^{99999}",
    "(x+y+z)^{999}",
    "(a+b+c+d)^{19}(a+b)^{19}",
    r"\sum_{i=1}^{99999999} i^2",
    r"\prod_{i=1}^{99999999} i",
    r"\int_0^1 e^{e^x} dx",
    r"\binom{99999999}{4999999}",
    "9" * 5_000,
    "{" * 300 + "}" * 300,
    r"\frac{1}{" * 100 + "1" + "}" * 100,
    r"\sqrt{" * 19 + "x" + "}" * 19,
    "1+" * 190 + "1",
    "(x+1)" * 60,
    r"\sin(" * 19 + "x" + ")" * 19,
    "٣^٣",
    "-" * 390 + "5",
    r"\begin{pmatrix}" + "1&" * 100 + r"1\end{pmatrix}",
]


@pytest.mark.parametrize("answer", HOSTILE)
def test_hostile_answers_are_wrong_and_take_no_time(answer):
    judge("17", r"\boxed{x+1}")  # what is imported on first use
    began = time.process_time()
    score = judge("17", rf"\boxed{{{answer}}}")
    assert (score.value, score.valid) == (0.0, True)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    "text", [r"\boxed{" * 300_000, "{" * 2_000_000 + r"\boxed{1}", r"\boxed{1}" * 200_000, "\\" * 2_000_000]
)
def test_megabytes_take_no_time(text):
    began = time.process_time()
    assert judge("17", text).valid
    assert time.process_time() - began < 3


@pytest.mark.parametrize(
    "text", ["x^2", "2^{10}", "5!", "e^{-x^2}", "10^{-3}", "3.14", r"\frac{10!}{3!7!}", "x_1^2", "n!"]
)
def test_ordinary_answers_are_within_the_limits(text):
    assert over_limits(text) == ""


def seconds(reference, answer):
    """CPU time to score an answer, which must be wrong."""
    began = time.process_time()
    score = judge(reference, rf"\boxed{{{answer}}}")
    assert (score.value, score.valid) == (0.0, True), answer[:200]
    return time.process_time() - began


REFERENCE = r"123457\sqrt{7}-\frac{1}{991}"
"""That no text made below equals."""


@pytest.mark.parametrize(
    ("first", "second", "value"), [("3<5", "5>3", 1.0), ("9<e", "1e999<9", 0.0), ("3<5", "6<10", 0.0)]
)
def test_statements_on_numbers_are_alike_only_if_they_say_the_same(first, second, value):
    assert judge(first, rf"\boxed{{{second}}}").value == judge(second, rf"\boxed{{{first}}}").value == value


ATOMS = ["9", "99", "x", "y", "n", "i", "e", r"\pi", "0", "999999", "0.1", "1e999", r"\infty", "٣", "½"]
WRAPPERS = [
    "({})^{{({})}}", "{}^{{{}}}", r"\frac{{{}}}{{{}}}", r"\binom{{{}}}{{{}}}", r"\sqrt[{}]{{{}}}", "({})({})", "{}-{}",
    "({})!+{}", r"\sin({})\exp({})", r"\log_{{{}}}({})", "|{}|{}", r"\lfloor {} \rfloor {}", r"\ln({}) {}", "({},{})",
    r"\{{{},{}\}}", r"[{},{}]\cup(0,1)", "{}={}", "{}<{}", r"{} \pm {}", r"\begin{{pmatrix}}{}&{}\end{{pmatrix}}",
    r"{}^\circ {}\text{{ cm}}", "{}**{}", "{} or {}", r"\max({},{})",
]  # fmt: skip


@st.composite
def bombs(draw):
    """Formulas nested at random, up to towers of powers and factorials of factorials."""
    text = draw(st.sampled_from(ATOMS))
    for _ in range(draw(st.integers(0, 9))):
        other = draw(st.sampled_from([*ATOMS, text]))
        if len(text) + len(other) < 3_000:
            first, second = draw(st.permutations([text, other]))
            text = draw(st.sampled_from(WRAPPERS)).format(first, second)
    return text


@settings(max_examples=many(1_000), deadline=None)
@given(bombs())
def test_bombs_are_wrong_and_take_little_time(answer):
    assert seconds(REFERENCE, answer) < 5


@settings(max_examples=many(1_000), deadline=None)
@given(bombs(), bombs())
def test_bombs_as_references_take_little_time(reference, answer):
    began = time.process_time()
    first = judge(reference, rf"\boxed{{{answer}}}")
    assert first.valid
    assert judge(answer, rf"\boxed{{{reference}}}").value == first.value
    assert time.process_time() - began < 10


TEXTS = r"""
^ ^{ { } ( ) [ ] 9 99999 x ! | + - * / , = < % & _ \frac \sqrt \sin \log \left( \right) \{ \} \text{cm} \pm \cup \in \\
\begin{pmatrix} \end{pmatrix} \infty \boxed{ \foo \sum \int \circ ^\circ ٣ − 𝟗 __import__('os') lambda . 1e9 \overline{
i e or and \mathbb{R} $
"""
PIECES = [*TEXTS.split(), " ", "\x00", "\u202e"]


@settings(max_examples=many(2_000), deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40), st.integers(1, 30))
def test_heaps_of_pieces_are_wrong_and_take_little_time(pieces, times):
    assert seconds(REFERENCE, "".join(pieces) * times) < 5


@settings(max_examples=many(60), deadline=None)
@given(st.sampled_from(PIECES), st.sampled_from(PIECES), st.integers(10_000, 60_000))
def test_megabytes_are_wrong_and_take_little_time(first, second, times):
    for text in (first * times + second * times, (first + second) * times):
        assert seconds(REFERENCE, text) < 5
        began = time.process_time()
        assert judge(REFERENCE, text, strict=False).value == 0.0
        assert time.process_time() - began < 5


@settings(max_examples=many(1_000), deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_wrong_and_takes_little_time(text):
    assert seconds(REFERENCE, text) < 5


def spellings(number):
    """Ways to write a rational number."""
    n, d = abs(number.numerator), number.denominator
    sign = "-" if number < 0 else ""
    ways = [rf"\frac{{{n}}}{{{d}}}", rf"\dfrac{{{3 * n}}}{{{3 * d}}}", f"{n}/{d}", rf"\left(\frac{{{n}}}{{{d}}}\right)"]
    ways += [
        rf"{n} \div {d}",
        rf"{n}\cdot\frac{{1}}{{{d}}}",
        rf"\frac{{{100 * n}}}{{{d}}}\%",
        rf"x = {sign}\frac{{{n}}}{{{d}}}",
    ]
    if n > d > 1 and n % d:
        ways += [rf"{n // d}\frac{{{n % d}}}{{{d}}}", f"{n // d} {n % d}/{d}"]
    if 10**12 % d == 0:  # it ends, within the digits of a Decimal
        ways += [f"{Decimal(n) / d:f}", f"{Decimal(n) / d:f} apples"]
    if d == 1:
        ways += [str(n), f"{n:,}", f"{n:,}".replace(",", "{,}"), f"{n}.0", rf"{n}\text{{ apples}}", f"{n}^1"]
    return [way if way.startswith("x") else sign + way for way in ways]


RATIONALS = st.builds(
    Fraction,
    st.integers(-3_000_000, 3_000_000),
    st.one_of(st.just(1), st.sampled_from([10, 100]), st.integers(1, 5_000)),
)


@settings(max_examples=many(300), deadline=None)
@given(RATIONALS, st.data())
def test_a_rational_number_is_accepted_in_any_spelling(number, data):
    first, second = (data.draw(st.sampled_from(spellings(number))) for _ in range(2))
    assert value(first, second) == 1.0


@settings(max_examples=many(300), deadline=None)
@given(RATIONALS, RATIONALS, st.data())
def test_another_rational_number_is_not(number, other, data):
    for different in (other, -number, number + 1, number * 10, 1 / number if number else Fraction(1)):
        if different not in (number, number * 100, number / 100):  # 1% is equal to 1 as well as to 0.01
            answer = data.draw(st.sampled_from(spellings(different)))
            assert value(data.draw(st.sampled_from(spellings(number))), answer) == 0.0


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("0123456789+-*/^(){}[],.=<>!%$&xyπe \\"), max_size=25))
def test_any_answer_gets_a_valid_score(answer):
    score = judge("123457", rf"\boxed{{{answer}}}")
    assert score.valid


def test_it_runs_off_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(value("1/2", "0.50")))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_it_says_nothing_about_time_limits(capfd):
    value("1/2", "0.500")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\dfrac{1}{3}}", "1/3"),
        (r"\boxed{2/6}", "1/3"),
        (r"\boxed{x = 0.25}", "1/4"),
        (r"\boxed{1{,}000.0}", "1000"),
        (r"\boxed{-2^3}", "-8"),
        (r"\boxed{50\%}", r"50\%"),  # equals 0.5 and 50
        (r"\boxed{3 \text{ m}}", r"3\text{m}"),
        (r"\boxed{\sqrt{2}}", r"\sqrt{2}"),
        (r"\boxed{10^{2000}}", r"10^{2000}"),
        (r"\boxed{1/0}", "1/0"),
        (r"\boxed{ \left( 1, 2 \right) }", "(1,2)"),
        (r"\boxed{three and  four}", "three and four"),
        (r"\boxed{1/2}", "1/2"),  # right
        (r"\boxed{}", ""),
        ("1/2", ""),
    ],
)
def test_it_tells_the_answer_in_one_spelling(text, answer):
    assert judge("0.5", text).answer == answer
    assert len(judge("0.5", rf"\boxed{{{'1' * 5_000}}}").answer) == 500
