"""The action in a model's text."""

from __future__ import annotations

import time

import pytest

from rlsdk.environments.actions import LONGEST, ActionPattern
from rlsdk.errors import ValueFault

THINK = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        ("<answer>(.*?)</answer>", "so <answer> Up\n</answer> <answer>Down</answer>", "Up"),
        ("<answer>(.*?)</answer>", "<answer>Up", None),
        ("<answer>(.*?)</answer>", "<answer></answer>", ""),
        (THINK, "<think>a\nb</think>\n<answer>Up</answer>", "Up"),
        (THINK, "<answer>Up</answer>", None),
        ("(?P<action>[a-z]+)=(.*)", "go=1", "go"),
        ("[a-z]+", "1 go", "go"),
        ("(a)|(b)", "a", None),
    ],
)
def test_what_is_found(pattern, text, found):
    assert ActionPattern(pattern).find(text) == found


def test_the_text_may_lack_what_was_written_for_the_model():
    pattern = ActionPattern(opening="<answer>")
    assert pattern.find("Up</answer>") == "Up"
    assert pattern.find("<answer>Up</answer>") == "Up"
    assert pattern.find("I go <answer>Up</answer>") == "Up"
    assert pattern.find("Up") is None


def test_a_search_ends():
    start = time.process_time()
    assert ActionPattern("(a+)+$").find("a" * 5_000 + "b") is None
    assert ActionPattern().find("<answer>" * (LONGEST // 8)) is None
    assert time.process_time() - start < 5
    assert ActionPattern().find("<answer>Up</answer>" + "a" * LONGEST) is None


def test_no_pattern():
    with pytest.raises(ValueFault, match=r"action_pattern '\(' is not a regular expression: missing \)"):
        ActionPattern("(")
