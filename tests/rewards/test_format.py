"""The format reward: tags, patterns, time limits."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlsdk
from rlsdk.errors import OptionError


def judge(text, prompt="?", **options):
    return rlsdk.load("reward", "format", **options)(rlsdk.Rollout.from_text(rlsdk.Task(id="t", prompt=prompt), text))


@pytest.mark.parametrize(
    "text",
    [
        "<think>a</think><answer>b</answer>",
        " \n<think>a\nb</think>\n\n<answer>c</answer>\n",
        "<think></think><answer></answer>",
        "<think>a < b > c </b></think><answer><i>x</i></answer>",
    ],
)
def test_tags_in_order(text):
    score = judge(text)
    assert (score.value, score.valid, score.metrics["format"], score.reason) == (1.0, True, 1.0, "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<answer>b</answer><think>a</think>",
        "<think>a</think>",
        "<think>a</think><answer>b",
        "x<think>a</think><answer>b</answer>",
        "<think>a</think>x<answer>b</answer>",
        "<think>a</think><answer>b</answer>x",
        "<think>a</think><answer>b</answer><answer>c</answer>",
        "<think>a<think></think><answer>b</answer>",
        "<think>a<answer>b</answer></think>",
        "<think>a<answer></think>b</answer>",
        "</think>a<think><answer>b</answer>",
        "<think>a</think></answer>b<answer>",
    ],
)
def test_anything_else_earns_nothing(text):
    score = judge(text)
    assert (score.value, score.valid, score.metrics["format"]) == (0.0, True, 0.0)
    assert score.reason


def test_a_text_prompt_that_opens_the_first_tag():
    assert judge("a</think><answer>b</answer>", prompt="Well:\n<think>").value == 1.0
    assert judge("a</think><answer>b</answer>", prompt="Well:").value == 0.0
    assert judge("<think>a</think><answer>b</answer>", prompt="Well:\n<think>").value == 0.0


def test_other_tags():
    assert judge("<answer>b</answer>", tags=["answer"]).value == 1.0
    assert judge("<a>1</a> <b-2>2</b-2> <c>3</c>", tags=["a", "b-2", "c"]).value == 1.0


def test_a_pattern_must_match_all():
    assert judge("42", pattern=r"\d+").value == 1.0
    assert judge("42 ", pattern=r"\d+").value == 0.0
    assert judge("a\nb", pattern=r"(?s)a.b").value == 1.0


def test_a_catastrophic_pattern_gives_an_invalid_score():
    began = time.monotonic()
    score = judge("a" * 5_000 + "b", pattern=r"(a|a)+c|(a+)+$", timeout=0.2)
    assert not score.valid
    assert "0.2 s" in score.reason
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "options",
    [
        {"pattern": "("},
        {"tags": []},
        {"tags": ["a", "a"]},
        {"tags": ["<a>"]},
        {"tags": "think"},
        {"timeout": 0},
        {"tag": ["a"]},
    ],
)
def test_wrong_options_are_found_at_once(options):
    with pytest.raises(OptionError, match="format"):
        rlsdk.load("reward", "format", **options)


@settings(max_examples=500, deadline=500)
@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", " ", "\n"]), max_size=12))
def test_tags_agree_with_a_regular_expression(parts):
    text = "".join(parts)
    inside = r"((?!</?(think|answer)>)[\s\S])*"
    pattern = rf"\s*<think>{inside}</think>\s*<answer>{inside}</answer>\s*"
    assert judge(text).value == judge(text, pattern=pattern).value


def test_megabytes_take_no_time():
    began = time.process_time()
    assert judge("<think>" * 400_000).value == 0.0
    assert judge(" " * 3_000_000).value == 0.0
    assert judge("<think>" + "</thin" * 500_000 + "</think><answer>1</answer>").value == 1.0
    assert time.process_time() - began < 0.5
