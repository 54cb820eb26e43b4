"""length_penalty and repetition_penalty compared with hand-computed numbers."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlsdk
from rlsdk.errors import OptionError

TASK = rlsdk.Task("t", "?")


def judge(name, text, **options):
    return rlsdk.load("reward", name, **options)(rlsdk.Rollout.from_text(TASK, text))


def of_tokens(name, ids, mask=None, **options):
    mask = [1] * len(ids) if mask is None else mask
    messages = rlsdk.Rollout.from_text(TASK, "text").messages
    rollout = rlsdk.Rollout(TASK, messages, [9, *ids], [0, *mask], [0.0] * (len(ids) + 1), [0] * (len(ids) + 1))
    return rlsdk.load("reward", name, **options)(rollout)


@pytest.mark.parametrize(
    ("length", "expected"), [(0, 0.0), (10, 0.0), (11, -0.1), (15, -0.5), (19, -0.9), (20, -1.0), (500, -1.0)]
)
def test_length_penalty(length, expected):
    """free 10, limit 20: a tenth for each token above 10."""
    score = judge("length_penalty", "x" * length, limit=20, free=10, unit="characters")
    assert score.value == pytest.approx(expected)
    assert score.metrics == {"length": length}
    assert bool(score.reason) == (expected < 0)
    halved = judge("length_penalty", "x " * length, limit=20, free=10, penalty=0.5, unit="words")
    assert halved.value == pytest.approx(expected / 2)


def test_only_sampled_tokens_count():
    score = of_tokens("length_penalty", [1, 2, 3, 4], [1, 1, 0, 1], limit=4)
    assert (score.value, score.metrics["length"]) == (-0.75, 3)


def test_length_penalty_is_dapos():
    """Eq. 13 with L_max 100 and L_cache 20, at 90: (100 - 20 - 90) / 20."""
    assert of_tokens("length_penalty", [1] * 90, limit=100, free=80).value == -0.5


@pytest.mark.parametrize(
    ("text", "ngram", "expected"),
    [
        ("a b c d", 2, 0.0),  # ab bc cd
        ("a b a b", 2, -1 / 3),  # ab ba ab
        ("a a a a", 2, -2 / 3),  # aa aa aa
        ("a a a a", 1, -3 / 4),
        ("A a", 1, -1 / 2),
        ("a b", 3, 0.0),
        ("a b c", 3, 0.0),
        ("", 1, 0.0),
        ("a b c a b c a b c", 3, -4 / 7),  # abc bca cab abc bca cab abc
    ],
)
def test_repetition_penalty(text, ngram, expected):
    score = judge("repetition_penalty", text, ngram=ngram)
    assert score.value == pytest.approx(expected)
    assert score.metrics["repetition"] == pytest.approx(-expected)
    assert judge("repetition_penalty", text, ngram=ngram, penalty=2.0).value == pytest.approx(2 * expected)


def test_repetition_of_characters_and_tokens():
    assert judge("repetition_penalty", "哈哈哈哈", ngram=2, unit="characters").value == pytest.approx(-2 / 3)
    assert of_tokens("repetition_penalty", [5, 5, 5, 5], ngram=1, unit="tokens").value == -0.75
    assert of_tokens("repetition_penalty", [5, 6, 5, 6], [1, 1, 0, 1], ngram=1, unit="tokens").value == pytest.approx(
        -1 / 3
    )


@pytest.mark.parametrize(("name", "options"), [("length_penalty", {"limit": 3}), ("repetition_penalty", {})])
def test_text_without_tokens_cannot_be_counted_in_tokens(name, options):
    score = judge(name, "a b", unit="tokens", **options)
    assert (score.valid, "set unit to words or characters" in score.reason) == (False, True)
    assert judge(name, "", unit="tokens", **options).value == 0.0


@given(st.text(), st.integers(1, 5))
def test_penalties_stay_in_their_range(text, ngram):
    for unit in ("words", "characters"):
        assert -1.0 <= judge("repetition_penalty", text, ngram=ngram, unit=unit).value <= 0.0
        assert -1.0 <= judge("length_penalty", text, limit=10, free=2, unit=unit).value <= 0.0


@pytest.mark.parametrize(
    ("name", "options", "cause"),
    [
        ("length_penalty", {}, "limit: is required"),
        ("length_penalty", {"limit": 10, "free": 10}, "free=10, limit=10"),
        ("length_penalty", {"limit": 0}, "free=0, limit=0"),
        ("length_penalty", {"limit": 10, "penalty": -1.0}, "penalty must be above 0"),
        ("repetition_penalty", {"ngram": 0}, "ngram must be from 1 to 50; got 0"),
        ("repetition_penalty", {"ngram": 51}, "got 51"),
        ("repetition_penalty", {"penalty": 0.0}, "penalty must be above 0"),
        ("repetition_penalty", {"unit": "lines"}, "expected 'tokens'"),
    ],
)
def test_wrong_options_are_found_at_once(name, options, cause):
    with pytest.raises(OptionError, match=cause):
        rlsdk.load("reward", name, **options)


@pytest.mark.parametrize("text", ["ab " * 1_000_000, "x" * 5_000_000, "\u0301\U0001f600 " * 1_000_000])
def test_megabytes_take_little_time(text):
    began = time.process_time()
    for unit in ("words", "characters"):
        judge("length_penalty", text, limit=100, unit=unit)
        judge("repetition_penalty", text, unit=unit)
    assert time.process_time() - began < 5
