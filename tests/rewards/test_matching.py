"""exact_match and regex: equal texts, pattern matches, and hostile texts."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlsdk
from rlsdk.errors import DataError, OptionError
from rlsdk.types import Message


def judge(name, text, answer="Paris", **options):
    return rlsdk.load("reward", name, **options)(rlsdk.Rollout.from_text(rlsdk.Task("t", "?", answer), text))


@pytest.mark.parametrize(
    ("text", "answer", "options"),
    [
        ("Paris", "Paris", {}),
        ("  Paris\n", "Paris", {}),
        ("New \n York", "New York", {}),
        ("cafe\u0301", "caf\u00e9", {}),  # the accent on its own, and as part of the letter
        ("42", 42, {}),
        ("0.5", 0.5, {}),
        ("42", 42.0, {}),
        ("42.0", 42.0, {}),
        ("b", ["a", "b"], {}),
        ("PARIS", "Paris", {"ignore_case": True}),
        ("STRASSE", "straße", {"ignore_case": True}),
        ("Paris!", "Paris", {"ignore_punctuation": True}),
        ("it's", "its", {"ignore_punctuation": True}),
        ("**$1,000.**", "1000", {"ignore_punctuation": True}),
        ("It is −1.5!", "it is -1.5", {"ignore_punctuation": True, "ignore_case": True}),
        ("...", "...", {"ignore_punctuation": True}),
        ("Well. <answer> Paris </answer>", "Paris", {"where": "answer"}),
        ("<answer>Rome</answer><answer>Paris</answer>", "Paris", {"where": "answer"}),
        ("", "", {}),
    ],
)
def test_the_same_text(text, answer, options):
    score = judge("exact_match", text, answer, **options)
    assert (score.value, score.valid, score.reason) == (1.0, True, "")
    assert score.metrics == {"correct": 1.0}


@pytest.mark.parametrize(
    ("text", "answer", "options", "reason"),
    [
        ("PARIS", "Paris", {}, "not the reference"),
        ("Paris.", "Paris", {}, "not the reference"),
        ("NewYork", "New York", {}, "not the reference"),
        ("", "Paris", {}, "not the reference"),
        ("-5", "5", {"ignore_punctuation": True}, "not the reference"),
        ("15", "1.5", {"ignore_punctuation": True}, "not the reference"),
        ("12", "1/2", {"ignore_punctuation": True}, "not the reference"),
        ("5", ".5", {"ignore_punctuation": True}, "not the reference"),
        ("", "?", {"ignore_punctuation": True}, "not the reference"),
        ("c", ["a", "b"], {}, "not the reference"),
        ("42.0", 42, {}, "not the reference"),
        ("Paris", "Paris", {"where": "answer"}, "there is no <answer>"),
        ("４２", "42", {}, "not the reference"),  # full-width digits
        ("Paris " * 1_000, "Paris", {}, "6000 characters, far more"),
    ],
)
def test_another_text(text, answer, options, reason):
    score = judge("exact_match", text, answer, **options)
    assert (score.value, score.valid, score.metrics["correct"]) == (0.0, True, 0.0)
    assert reason in score.reason


def test_the_last_message_or_all_of_them():
    task = rlsdk.Task("t", "?", "a b")
    turns = (Message("user", "?"), Message("assistant", "a"), Message("user", "go on"), Message("assistant", "b"))
    rollout = rlsdk.Rollout(task, turns, [], [], [], [])
    assert rlsdk.load("reward", "exact_match")(rollout).value == 0.0
    assert rlsdk.load("reward", "exact_match", where="response")(rollout).value == 1.0


@pytest.mark.parametrize("answer", [None, [], [None], {"a": 1}, True])
def test_a_task_without_an_answer_is_named(answer):
    with pytest.raises(DataError, match="task 't': expected its answer as text"):
        judge("exact_match", "x", answer)
    with pytest.raises(DataError, match="task 't'"):
        judge("regex", "x", answer, pattern="(x)", group=1)


@given(st.text(max_size=50))
def test_every_text_is_itself(text):
    assert judge("exact_match", text, text, ignore_case=True).value == 1.0
    assert judge("exact_match", f"{text}x", text).value == 0.0


# --- regex


def test_a_pattern_is_found():
    assert judge("regex", "so a 42 it is", pattern=r"\d+").metrics == {"match": 1.0}
    assert judge("regex", "so it is", pattern=r"\d+").reason == "the pattern is not found"
    assert judge("regex", "42 ", pattern=r"\d+", whole=True).value == 0.0
    assert judge("regex", "42", pattern=r"\d+", whole=True).value == 1.0
    assert judge("regex", "x <answer>42</answer>", pattern=r"\d+", whole=True, where="answer").value == 1.0
    assert judge("regex", "42", pattern=r"\d+", where="answer").value == 0.0


def test_the_group_of_the_last_match_holds_the_answer():
    options = {"pattern": r"#### (?P<n>-?\d+)", "group": "n"}
    right = judge("regex", "#### 7\nno:\n#### 42", 42, **options)
    assert (right.value, right.metrics) == (1.0, {"correct": 1.0})
    wrong = judge("regex", "#### 42\nno:\n#### 7", 42, **options)
    assert (wrong.value, wrong.reason) == (0.0, "the text of the group is not the reference")
    assert judge("regex", "42", 42, **options).reason == "the pattern is not found"
    assert judge("regex", "a", "", pattern="(b)?a", group=1).value == 1.0  # a group that took no part holds nothing
    assert judge("regex", "it is 42", 42, pattern=r"\d*", group=0).value == 1.0  # and not the empty match at the end
    assert judge("regex", "1 or 2", 2, pattern=r"(?=(\d))", group=1).value == 1.0


@pytest.mark.parametrize("options", [{"pattern": r"(a|a)+c"}, {"pattern": r"((a|a)+c|b)", "group": 1}])
def test_a_catastrophic_pattern_gives_an_invalid_score(options):
    began = time.process_time()
    score = judge("regex", "a" * 5_000 + "d", timeout=0.2, **options)
    assert (score.valid, "0.2 s" in score.reason) == (False, True)
    assert time.process_time() - began < 5
    assert judge("regex", "aac", "aac", timeout=0.2, **options).value == 1.0


def test_many_quick_matches_end_in_time():
    began = time.process_time()
    judge("regex", "a" * 20_000_000, "a", pattern="(a)", group=1, timeout=0.2)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({}, "pattern: is required"),
        ({"pattern": "("}, "is not a regular expression: missing \\)"),
        ({"pattern": "a", "timeout": 0.0}, "timeout: expected float > 0, got 0.0"),
        ({"pattern": "(a)(?P<b>b)", "group": "c"}, "group 'c' is not in the pattern; it has: 0, 1, 2, b"),
        ({"pattern": "a", "group": 1}, "group 1 is not in the pattern; it has: 0"),
        ({"pattern": "a", "where": "tags"}, "expected 'message' | 'response' | 'answer'"),
    ],
)
def test_wrong_options_are_found_at_once(options, cause):
    with pytest.raises(OptionError, match=cause.replace("|", r"\|")):
        rlsdk.load("reward", "regex", **options)


@pytest.mark.parametrize("text", ["a" * 3_000_000, " " * 3_000_000, "\u0301\u0323" * 500_000, "<answer>" * 300_000])
def test_megabytes_take_no_time(text):
    began = time.process_time()
    assert judge("exact_match", text, ignore_case=True, ignore_punctuation=True).value == 0.0
    assert judge("exact_match", text, where="answer").value == 0.0
    assert judge("regex", text, pattern=r"\d").value == 0.0
    assert time.process_time() - began < 2


def test_combining_marks_of_a_length_that_is_compared_take_no_time():
    began = time.process_time()
    assert judge("exact_match", "a" + "\u0301\u0323" * 5_000, "x" * 20_000).value == 0.0
    assert judge("exact_match", "a" + "\u0301\u0323" * 100_000, "x" * 100_000).value == 0.0
    assert time.process_time() - began < 2


def test_they_tell_the_text_that_was_compared():
    assert judge("exact_match", " New  Lyon", ignore_case=True).answer == "new lyon"
    assert judge("exact_match", "<answer>Rome</answer>", where="answer").answer == "Rome"
    assert judge("exact_match", "no tags", where="answer").answer == ""
    assert judge("regex", "It is (B).", "C", pattern=r"\(([A-D])\)", group=1).answer == "B"
    assert judge("regex", "It is (B).", pattern="B").answer == ""
