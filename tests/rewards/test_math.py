"""The math reward: extraction, equivalence, limits."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlsdk
from rlsdk.errors import DataError
from rlsdk.rewards.bounds import over_limits
from rlsdk.rewards.math import last_boxed


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
        ("Paris", r"\text{paris}"),
        ("B", "(B)"),
        (r"\boxed{12}", "12"),
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
    assert judge("1000", "It costs $1,000 in all", strict=False).value == 1.0
    assert judge("-3.5", "that is -3.5", strict=False).value == 1.0
    assert judge("72", r"It is \boxed{71}, or 72", strict=False).value == 0.0
    assert judge("72", "no idea", strict=False).value == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{a}", "a"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {a}", "a"),
        (r"\boxed{\boxed{5}}", "5"),
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
    ("answer", "shown"), [(None, "None"), ("", "''"), ("  ", "'  '"), ([], r"\[\]"), (True, "True")]
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
