"""The format reward: tags, patterns, time limits."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlsdk
from rlsdk.contracts import RewardSpec
from rlsdk.errors import OptionError
from rlsdk.scoring.scorer import RewardTerm, Scorer
from tests.examples import many


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
    began = time.process_time()
    score = judge("a" * 5_000 + "b", pattern=r"(a|a)+c|(a+)+$", timeout=0.2)
    assert not score.valid
    assert "0.2 s" in score.reason
    assert time.process_time() - began < 5


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


@settings(max_examples=many(500), deadline=5_000)
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


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}, "pattern": {"type": "null"}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("text", ['{"name": "Ada"}', ' {"name":\n"Ada", "age": 36}\n', '{"name": "", "pattern": null}'])
def test_json_of_a_schema(text):
    assert judge(text, json_schema=PERSON).value == 1.0


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("Ada", "not JSON"),
        ("{'name': 'Ada'}", "not JSON"),
        ('{"name": "Ada"} so', "not JSON"),
        ('```json\n{"name": "Ada"}\n```', "not JSON"),
        ('{"name": "Ada",}', "not JSON"),
        ("{}", "required"),
        ("[]", "object"),
        ('{"name": 1}', "name"),
        ('{"name": "Ada", "age": -1}', "age"),
        ('{"name": "Ada", "age": true}', "age"),
        ('{"name": "Ada", "height": 1}', "height"),
        ('{"name": "Ada", "name": "Bob"}', "twice"),
        ('{"name": "Ada", "age": NaN}', "NaN"),
        ('{"name": "Ada", "age": -Infinity}', "Infinity"),
        ('{"name": "Ada", "age": 1e999}', "too large"),
        ('{"name": "Ada", "age": ' + "9" * 50_000 + "}", "not JSON"),
        ('{"name": "' + "x" * 1_000_000 + '"}', "characters"),
        ("[" * 90_000, "nested"),
        ('{"name":' * 9_000 + "1" + "}" * 9_000, "nested" if sys.version_info < (3, 12) else "$.name"),
    ],
)
def test_other_json_earns_nothing(text, reason):
    began = time.process_time()
    score = judge(text, json_schema=PERSON)
    assert (score.value, score.valid, score.metrics["format"]) == (0.0, True, 0.0)
    assert reason in score.reason
    assert len(score.reason) < 600
    assert time.process_time() - began < 2


def test_json_within_a_tag():
    options = {"json_schema": PERSON, "within": "answer"}
    assert judge('<think>a</think><answer>{"name": "Ada"}</answer>', **options).value == 1.0
    assert "name" in judge('<think>a</think><answer>{"name": 1}</answer>', **options).reason
    assert judge('{"name": "Ada"}', **options).value == 0.0
    assert judge('<think>a</think> {"name": "Ada"} <answer>1</answer>', **options).value == 0.0


def test_a_schema_in_a_file(tmp_path):
    path = tmp_path / "person.json"
    path.write_text(json.dumps(PERSON), encoding="utf-8")
    reward = rlsdk.load("reward", "format", json_schema=str(path))
    rollout = rlsdk.Rollout.from_text(rlsdk.Task(id="t", prompt="?"), '{"name": "Ada"}')
    assert reward(rollout).value == pickle.loads(pickle.dumps(reward))(rollout).value == 1.0


TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {"tree": {"type": "object", "properties": {"in": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}},
}


def test_references_within_a_schema():
    assert judge('{"in": [{"in": []}, {}]}', json_schema=TREE).value == 1.0
    assert judge('{"in": [{"in": [1]}, {}]}', json_schema=TREE).value == 0.0
    deep = judge('{"in":[' * 900 + "]}" * 900, json_schema=TREE)
    assert (deep.value, deep.valid) == (0.0, True)


def test_a_schema_that_takes_exponential_time_gives_an_invalid_score():
    either = {"anyOf": [{"type": "array", "items": {"$ref": "#"}}] * 2 + [{"type": "null"}]}
    began = time.process_time()
    score = judge("[" * 30 + "1" + "]" * 30, json_schema=either, timeout=0.2)
    assert not score.valid
    assert "0.2 s" in score.reason
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "text"}, "text"),
        ({"minimum": "1"}, "minimum"),
        ("no_such_file.json", "no_such_file"),
        ({"properties": {"a": {"pattern": "(a+)+$"}}}, "pattern"),
        ({"items": {"patternProperties": {"(a+)+$": {}}}}, "pattern"),
        ({"anyOf": [{"format": "email"}]}, "format"),
        ({"uniqueItems": True}, "quadratic"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"$ref": "http://127.0.0.1:9/schema.json"}, "elsewhere"),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "elsewhere"),
        ({"type": "object", "requierd": ["a"]}, "unknown keyword 'requierd', did you mean 'required'"),
        ({"properties": {"a": {"items": {"Enum": [1]}}}}, "items: unknown keyword 'Enum', did you mean 'enum'"),
        ({"name": {"type": "string"}}, "no JSON schema keyword"),
        ({"x-parts": {"a": {"pattern": "(a+)+$"}}, "$ref": "#/x-parts/a"}, "pattern"),
    ],
)
def test_wrong_schemas_are_found_at_once(schema, reason):
    with pytest.raises(OptionError, match=reason):
        rlsdk.load("reward", "format", json_schema=schema)


def test_annotations_and_names_are_not_misspelt_keywords():
    names = {"requierd": {"const": {"tpye": 1}}}
    schema = {
        "discriminator": {"propertyName": "kind"},
        "x-requierd": 1,
        "properties": names,
        "examples": [{"tpye": 1}],
    }
    assert judge('{"requierd": {"tpye": 1}}', json_schema=schema).value == 1.0


@pytest.mark.parametrize(
    "options",
    [
        {"json_schema": PERSON, "pattern": "a"},
        {"json_schema": PERSON, "within": "reply"},
        {"within": "answer"},
        {"json_schema": 3},
    ],
)
def test_options_that_do_not_go_together_are_found_at_once(options):
    with pytest.raises(OptionError, match="format"):
        rlsdk.load("reward", "format", **options)


def test_nothing_is_fetched(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    schema = {"$id": "http://127.0.0.1:9/person.json", "$defs": {"a": {"type": "null"}}, "items": {"$ref": "#/$defs/a"}}
    assert judge("[null]", json_schema=schema).value == 1.0
    assert judge("[1]", json_schema=schema).value == 0.0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=many(300), deadline=None)
@given(JSON)
def test_any_json_satisfies_the_empty_schema_and_the_one_that_is_it(value):
    text = json.dumps(value)
    assert judge(text, json_schema={}).value == 1.0
    assert judge(text, json_schema={"const": value}).value == 1.0
    assert judge(text, json_schema={"not": {}}).value == 0.0


@settings(max_examples=many(1_000), deadline=None)
@given(st.lists(st.sampled_from([*'{}[]",:19eE.-+', "null", "true", "NaN", '"a"', "\\u0000", "\x00"]), max_size=30))
def test_any_text_gets_a_valid_score(parts):
    text = "".join(parts)
    assert judge(text, json_schema=PERSON).valid


@pytest.mark.parametrize(
    ("options", "where"),
    [({}, "driver"), ({"tags": ["a"]}, "driver"), ({"pattern": "a*"}, "pool"), ({"json_schema": PERSON}, "pool")],
)
def test_what_may_take_its_whole_time_runs_in_the_pool(options, where):
    plugins = rlsdk.Plugins()
    reference = plugins.reference("reward", "format", options)
    assert RewardTerm(RewardSpec("format"), plugins.resolve(reference), reference).where == where


def test_a_hostile_response_does_not_hold_up_the_event_loop():
    plugins = rlsdk.Plugins()
    reference = plugins.reference("reward", "format", {"pattern": "(a|b|ab)*(c|d)", "timeout": 0.5})
    scorer = Scorer([RewardTerm(RewardSpec("format"), plugins.resolve(reference), reference)])
    rollout = rlsdk.Rollout.from_text(rlsdk.Task("t", "?"), "ab" * 5_000)

    async def scored():
        scoring, turns = asyncio.ensure_future(scorer.score(rollout)), 0
        while not scoring.done():
            await asyncio.sleep(0.005)
            turns += 1
        return scoring.result(), turns

    try:
        score, turns = asyncio.run(scored())
    finally:
        scorer.close()
    assert scorer.counts["calls"] == 1
    assert (score.valid, score.value) != (True, 1.0)
    assert turns > 5  # of the loop while the search took its half second
