"""The countdown reward: rules, exactness, hostile answers, malformed tasks."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from fractions import Fraction
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rlsdk
from rlsdk.errors import DataError, OptionError
from rlsdk.rewards.countdown import last_answer
from tests.examples import many

GOAL = {"target": 65, "numbers": [19, 36, 55, 7]}
RIGHT = "55 + 36 - 7 - 19"


def task(answer=GOAL):
    return rlsdk.Task(id="t7", prompt="?", answer=answer, source="here")


REWARD = rlsdk.load("reward", "countdown")


def judge(text, answer=GOAL, status="finished", **options):
    reward = rlsdk.load("reward", "countdown", **options) if options else REWARD
    return reward(rlsdk.Rollout.from_text(task(answer), text, status))


def value(expression, answer=GOAL):
    return judge(f"<answer>{expression}</answer>", answer).value


@pytest.mark.parametrize(
    "text",
    [
        f"<answer>{RIGHT}</answer>",
        f"I think so.</think>\n<answer> {RIGHT} = 65 </answer>",  # TinyZero: 0.1
        f"<answer>{RIGHT}</answer>\nThat is my answer.",  # TinyZero: 0, since it reads the last line alone
        "<answer>\n55 + 36\n- 7 - 19\n</answer>",  # TinyZero: 0
        f"<answer>1 + 1</answer> no: <answer>{RIGHT}</answer>",
        f"Assistant: <answer>{RIGHT}</answer><|im_end|>",
        f"<answer>{RIGHT}</answer></answer>",
        f"<answer>{RIGHT}</answer> or <answer> 55",
        "<answer>55+36−7−19=65</answer>",
        "<answer>-(7 - 55) + 36 - 19</answer>",
        "<answer>+55+36-(7+19)</answer>",
        "<answer>((((55)))+(36))-(7+(19))</answer>",
    ],
)
def test_right_answers_earn_the_score(text):
    score = judge(text)
    assert (score.value, score.valid, score.reason) == (1.0, True, "")
    assert score.metrics == {"correct": 1.0, "format": 1.0}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (f"<answer>{RIGHT}</answer>", "65"),
        ("<answer>(55 - 7) + (36 - 19) = 65</answer>", "65"),
        ("<answer>55+36+7+19</answer>", "117"),
        ("<answer>19 + 36 + 7 + 55</answer>", "117"),
        ("<answer>55 / 7 + 36 - 19</answer>", "174/7"),
        ("<answer>55+36 −7</answer>", "55 + 36 - 7"),  # not the numbers of the task
        (f"<answer>{RIGHT} = 66</answer>", f"{RIGHT} = 66"),
        ("<answer>I do\nnot  know</answer>", "I do not know"),
        ("<answer>55 / (7 - 7)</answer>", "55 / ( 7 - 7 )"),
        ("<answer></answer>", ""),
        ("65", ""),
    ],
)
def test_votes_are_values_of_expressions(text, answer):
    assert judge(text).answer == answer


def test_a_vote_is_short():
    assert len(judge(f"<answer>{'1 + ' * 2_000}1</answer>").answer) == 500
    assert len(judge(f"<answer>{'a' * 9_000}</answer>").answer) == 500
    goal = {"target": 1, "numbers": [10**400, 10**400]}
    assert len(judge(f"<answer>{10**400} * {10**400}</answer>", goal).answer) == 500


@pytest.mark.parametrize(
    "expression",
    [
        "55 + 36 - 7",  # one left out
        "55 + 36 - 7 - 19 + 7 - 7",  # one used more than once
        "55 + 36 - 7 - 20",  # one not offered
        "55 + 36 + 7 + 19",  # another value
        f"{RIGHT} = 66",
        f"{RIGHT} = 65 = 65",
        f"{RIGHT} = 60 + 5",
        f"{RIGHT} =",
        f"65 = {RIGHT}",
        f"{RIGHT}; 65",
        f"{RIGHT} # so",
        f"<answer>{RIGHT}",  # nested tags
        "55 / (7 - 7) + 36 - 19",
        "55 // 19 + 36 + 7",
        "55 ** 36 - 7 - 19",
        "5_5 + 36 - 7 - 19",
        "55.0 + 36 - 7 - 19",
        "055 + 36 - 7 - 19",
        "5 5 + 36 - 7 - 19",
        "٥٥ + 36 - 7 - 19",  # another script's digits
        "\uff15\uff15 + 36 - 7 - 19",
        "55(36) - 7 - 19",
        "(55 + 36) - 7 - 19)",
        "((55 + 36) - 7 - 19",
        "55 + 36 - 7 - 19 +",
        "*55 + 36 - 7 - 19",
        "55 + 36 - 7 - 19 ()",
        "()",
        "the answer",
        "__import__('os').system('true')",
        "[55, 36, 7, 19]",
        "\x00",
    ],
)
def test_wrong_answers_earn_the_format_score(expression):
    score = judge(f"<answer>{expression}</answer>")
    assert (score.value, score.valid) == (0.1, True)
    assert score.reason
    assert score.metrics == {"correct": 0.0, "format": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        "",
        RIGHT,
        "<answer></answer>",
        "<answer> \n\t</answer>",
        f"<answer>{RIGHT}",
        f"{RIGHT}</answer>",
        f"</answer>{RIGHT}<answer>",
        f"<Answer>{RIGHT}</Answer>",
        f"<answer>{RIGHT}</answer><answer></answer>",  # the last one is empty
    ],
)
def test_no_answer_earns_nothing(text):
    score = judge(text)
    assert (score.value, score.valid) == (0.0, True)
    assert score.reason
    assert score.metrics == {"correct": 0.0, "format": 0.0}


def test_division_by_zero_with_the_right_numbers():
    score = judge("<answer>8 / (3 - 3)</answer>", {"target": 24, "numbers": [3, 3, 8]})
    assert score.value == 0.1
    assert "zero" in score.reason


def test_options_set_the_values():
    assert judge(f"<answer>{RIGHT}</answer>", score=2, format_score=0.5).value == 2.0
    assert judge("<answer>1</answer>", score=2, format_score=0.5).value == 0.5
    with pytest.raises(OptionError, match="format_score"):
        rlsdk.load("reward", "countdown", format_score="0.1")


def test_truncated_responses_earn_nothing_where_asked():
    text = f"<answer>{RIGHT}</answer>"
    assert judge(text, status="truncated").value == 1.0
    assert judge(text, status="truncated", zero_truncated=True).value == 0.0
    assert judge(text, status="finished", zero_truncated=True).value == 1.0


def test_the_response_is_all_that_the_policy_wrote_and_not_the_prompt():
    messages = (rlsdk.Message("user", f"as in <answer>{RIGHT}</answer>"), rlsdk.Message("assistant", "no idea"))
    assert rlsdk.load("reward", "countdown")(rlsdk.Rollout(task(), messages, (), (), (), ())).value == 0.0


def test_comparison_is_exact():
    assert value("8 / (3 - 8 / 3)", {"target": 24, "numbers": [3, 3, 8, 8]}) == 1.0
    # Within 1e-5 of 24, which TinyZero accepts.
    assert (
        value(
            "2400000 * 10000000 / 1000001 / 1000000", {"target": 24, "numbers": [2400000, 10000000, 1000001, 1000000]}
        )
        == 0.1
    )
    assert value("1 / 3 + 1 / 6", {"target": 0.5, "numbers": [1, 3, 1, 6]}) == 1.0
    assert value("3 - 8", {"target": -5, "numbers": [3, 8]}) == 1.0
    assert value("3 - 8 = -5", {"target": -5, "numbers": [3, 8]}) == 1.0
    assert value("3 - 8 = 5", {"target": -5, "numbers": [3, 8]}) == 0.1


def test_operators_bind_as_usual():
    assert value("20 - 5 - 3", {"target": 12, "numbers": [3, 5, 20]}) == 1.0
    assert value("20 / 5 * 3", {"target": 12, "numbers": [3, 5, 20]}) == 1.0
    assert value("20 + 5 * 3", {"target": 35, "numbers": [3, 5, 20]}) == 1.0
    assert value("20 ÷ 5 × 3", {"target": 12, "numbers": [3, 5, 20]}) == 1.0
    assert value("20 - -5 * -3", {"target": 5, "numbers": [3, 5, 20]}) == 1.0


def test_repeated_numbers_are_counted():
    answer = {"target": 9, "numbers": [3, 3, 3]}
    assert value("3 + 3 + 3", answer) == 1.0
    assert value("3 * 3", answer) == 0.1


@pytest.mark.parametrize(
    "answer",
    [
        {"target": 65.0, "numbers": [19.0, 36.0, 55.0, 7.0]},
        {"target": np.int64(65), "numbers": np.array([19, 36, 55, 7])},
        {"target": np.float32(65), "numbers": (19, 36, 55, 7)},
    ],
)
def test_numbers_of_data_files_serve(answer):
    assert value(RIGHT, answer) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        None,
        65,
        "65",
        {},
        {"target": 65},
        {"numbers": [1]},
        {"target": "65", "numbers": [1]},
        {"target": True, "numbers": [1]},
        {"target": float("nan"), "numbers": [1]},
        {"target": 65, "numbers": []},
        {"target": 65, "numbers": None},
        {"target": 65, "numbers": "65"},
        {"target": 65, "numbers": [1.5]},
        {"target": 65, "numbers": [-1]},
        {"target": 65, "numbers": [None]},
        {"target": 65, "numbers": {"a": 1}},
    ],
)
def test_a_task_without_a_usable_answer_is_an_error_that_names_it(answer):
    with pytest.raises(DataError, match=r"task 't7' of 'here'"):
        judge(f"<answer>{RIGHT}</answer>", answer)


MEGABYTES = 3_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>" * (MEGABYTES // 8), 0.0),
        ("<answer></answer>" * (MEGABYTES // 17), 0.0),
        ("</answer>" * (MEGABYTES // 9), 0.0),
        ("<answer" * (MEGABYTES // 7), 0.0),
        ("x" * MEGABYTES, 0.0),
        ("<answer>" + "9" * MEGABYTES + "</answer>", 0.1),
        ("<answer>" + "9" * 9_000 + "</answer>", 0.1),
        ("<answer>" + " " * MEGABYTES + "</answer>", 0.0),
        ("<answer>" + " " * MEGABYTES + RIGHT + "</answer>", 1.0),
        ("<answer>" + "(" * 10_000 + "</answer>", 0.1),
        ("<answer>" + "(" * 10_000 + RIGHT + ")" * 10_000 + "</answer>", 0.1),
        ("<answer>" + "(" * 1_000 + RIGHT + ")" * 1_000 + "</answer>", 0.1),
        ("<answer>" + "(" * 100 + RIGHT + ")" * 100 + "</answer>", 1.0),
        ("<answer>" + "-" * 9_900 + RIGHT + "</answer>", 0.1),
        ("<answer>" + "9**" * 2_000 + "9</answer>", 0.1),
        ("<answer>" + "9*" * 4_000 + "9</answer>", 0.1),
        (f"<answer>{RIGHT}=" + "6" * MEGABYTES + "</answer>", 0.1),
        (f"<answer>{RIGHT}=" + " " * MEGABYTES + "65x</answer>", 0.1),
        (f"<answer>{RIGHT}" + "=" * MEGABYTES + "</answer>", 0.1),
    ],
)
def test_hostile_text_takes_no_time(text, expected):
    began = time.process_time()
    assert judge(text).value == expected
    assert time.process_time() - began < 0.5


@settings(max_examples=many(1_500), deadline=5_000)
@given(st.text(st.one_of(st.sampled_from("0123456789+-*/()= −×÷._<>٣x\n"), st.characters()), max_size=80))
def test_any_text_gets_a_valid_score(text):
    assert judge(text).valid
    assert judge(f"<answer>{text}</answer>").value in (0.0, 0.1, 1.0)


@settings(max_examples=many(500), deadline=5_000)
@given(st.lists(st.sampled_from(["<answer>", "</answer>", "55+36-7-19", "1", " ", "=65", "(", "\n"]), max_size=30))
def test_any_mixture_of_tags_gets_a_valid_score(parts):
    assert judge("".join(parts)).value in (0.0, 0.1, 1.0)


@st.composite
def expressions(draw, depth=0):
    """(text, exact value, numbers) of an expression that divides by nothing that is 0; None where it would."""
    if depth == 4 or draw(st.booleans()):
        number = draw(st.integers(0, 200))
        return str(number), Fraction(number), [number]
    left, a, first = draw(expressions(depth + 1))
    right, b, second = draw(expressions(depth + 1))
    operator = draw(st.sampled_from("+-*/−×÷"))
    assume(operator not in "/÷" or b != 0)
    exact = {"+": a + b, "-": a - b, "−": a - b, "*": a * b, "×": a * b}.get(operator)
    space = draw(st.sampled_from(["", " ", "\n"]))
    text = f"({left}{space}{operator}{space}{right})"
    return (
        (f"-{text}", -(a / b if exact is None else exact), [*first, *second])
        if draw(st.booleans())
        else (
            text,
            a / b if exact is None else exact,
            [*first, *second],
        )
    )


@settings(max_examples=many(800), deadline=5_000)
@given(expressions(), st.randoms(use_true_random=False))
def test_an_expression_is_right_exactly_when_its_value_is_the_target(built, random):
    text, exact, numbers = built
    random.shuffle(numbers)
    nearest = round(exact)
    assert value(text, {"target": nearest, "numbers": numbers}) == (1.0 if nearest == exact else 0.1)
    assert value(text, {"target": nearest + 1, "numbers": numbers}) == 0.1
    assert value(text, {"target": nearest, "numbers": [*numbers, 1]}) == 0.1
    assert value(text + " = " + str(nearest), {"target": nearest, "numbers": numbers}) == (
        1.0 if nearest == exact else 0.1
    )


def test_all_expressions_of_three_numbers():
    """Every order, pair of operators and bracketing, at every target near, against Python's own arithmetic."""
    right = 0
    for numbers, first, second in product(permutations([2, 3, 4], 3), "+-*/", "+-*/"):
        for shape in ("{} {} {} {} {}", "({} {} {}) {} {}", "{} {} ({} {} {})"):
            text = shape.format(numbers[0], first, numbers[1], second, numbers[2])
            exact = eval(re.sub("[0-9]", r"Fraction(\g<0>)", text))  # written here, by no model
            for target in range(-10, 25):
                correct = exact == target
                assert value(text, {"target": target, "numbers": [4, 3, 2]}) == (1.0 if correct else 0.1), text
                right += correct
            assert value(text, {"target": float(exact), "numbers": [4, 3]}) == 0.1
            assert value(text, {"target": float(exact), "numbers": [4, 3, 3]}) == 0.1
    assert right > 150


def test_last_answer():
    assert last_answer("<answer> a </answer><answer>b\nc</answer>d") == "b\nc"
    assert last_answer("<answer><answer>a</answer></answer>") == "<answer>a"
    assert last_answer("<answer>a") is None


def test_a_thousand_samples_take_about_ten_milliseconds():
    reward = rlsdk.load("reward", "countdown")
    rollouts = [rlsdk.Rollout.from_text(task(), f"Let me see.</think> <answer>{RIGHT}</answer>") for _ in range(1_024)]
    seconds = []
    for _ in range(5):
        began = time.process_time()
        for rollout in rollouts:
            reward(rollout)
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.05  # 0.007 on the machine it was written on


def test_loading_it_imports_nothing_heavy():
    code = (
        "import sys, rlsdk; rlsdk.load('reward', 'countdown'); rlsdk.load('tasks', 'countdown');"
        "heavy = 'torch ray vllm deepspeed transformers sympy math_verify datasets pyarrow pandas'.split();"
        "print(*set(heavy) & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []
