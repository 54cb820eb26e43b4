"""Tool-call parsers: written calls are read back; hostile and truncated answers never raise."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.contracts import Call, Malformed, ToolParser
from rlsdk.plugins import load, names
from rlsdk.tool_calls import Dialect
from tests.rollout.codecs import chatml

NEW = ("qwen3_coder", "glm", "harmony", "deepseek", "mistral", "llama3", "gemma")
WORDS = st.text(st.characters(codec="utf-8", exclude_characters="<>[]{}\\\"'|｜"), min_size=1, max_size=12).map(
    lambda text: f"w {text} w"
)
VALUES = st.one_of(st.integers(), st.booleans(), WORDS, st.lists(st.integers(), max_size=3))
NAMES = st.from_regex(r"[a-z][a-z_]{0,8}[a-z]", fullmatch=True)
PAIRS = st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES, max_size=3)), min_size=1, max_size=3)
MARKS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "<parameter=",
        "<arg_key>",
        "<arg_value>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "to=functions.",
        "{",
        "}",
        '{"name"',
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<|tool_call>call:a",
        '<|"|>',
        "<tool_call|>",
        "[",
        ">",
        "9" * 5000,
        "[" * 5000,
    ]
)


@pytest.mark.parametrize("name", NEW)
@given(pairs=PAIRS)
def test_written_calls_are_read_back(name: str, pairs: Any) -> None:
    assert load("tool_parser", name).parse(load("tool_parser", name).write(pairs)) == [
        Call(called, arguments) for called, arguments in pairs
    ]


@pytest.mark.parametrize("name", NEW)
@given(pairs=PAIRS, data=st.data())
def test_cut_off_calls_never_raise(name: str, pairs: Any, data: st.DataObject) -> None:
    text = load("tool_parser", name).write(pairs)
    for found in load("tool_parser", name).parse(text[: data.draw(st.integers(0, len(text)))]):
        assert isinstance(found, Call | Malformed)


@pytest.mark.parametrize("name", names("tool_parser"))
@given(text=st.lists(st.one_of(MARKS, st.text(max_size=8)), max_size=12).map("".join))
def test_hostile_answers_never_raise(name: str, text: str) -> None:
    assert all(isinstance(found, Call | Malformed) for found in load("tool_parser", name).parse(text))


@pytest.mark.parametrize("name", NEW)
def test_an_answer_without_a_call_has_none(name: str) -> None:
    assert load("tool_parser", name).parse("The answer is 12.") == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deepseek", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}'),
        ("mistral", '[{"name": "add", "arguments": {"a": 1}}]'),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eom_id|>'),
        ("harmony", 'commentary to=functions.add json{"a": 1}'),
        ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'),
        ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"),
        ("gemma", "<|tool_call>call:add{a:1}<tool_call|><|tool_response>"),
        ("pythonic", "<|tool_call_start|>[add(a=1)]<|tool_call_end|>"),
    ],
)
def test_forms_that_models_write(name: str, text: str) -> None:
    assert load("tool_parser", name).parse(text) == [Call("add", {"a": 1})]


@pytest.mark.parametrize("value", ["1j", "{1, 2}", "{1: 2}", "b'1'", '{"a":' * 500 + "1" + "}" * 500])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n%s\n</parameter>\n</function>\n</tool_call>"),
    ],
)
def test_bare_text_that_is_not_a_json_value_stays_text(name: str, text: str, value: str) -> None:
    assert load("tool_parser", name).parse(text % value) == [Call("add", {"a": value})]


def test_nested_arguments_of_python_calls_may_be_json() -> None:
    text = '[find(by={"all": true, "or": [false, null]}), add(a=1)]'
    assert load("tool_parser", "pythonic").parse(text) == [
        Call("find", {"by": {"all": True, "or": [False, None]}}),
        Call("add", {"a": 1}),
    ]


def test_the_reason_of_a_malformed_python_call_is_the_same_in_each_run() -> None:
    (found,) = load("tool_parser", "pythonic").parse("add(a=[x, 1])")
    assert found == Malformed("it is not a Python call with literal arguments: ValueError: '[x, 1]' is not a literal")


def test_a_mapping_with_a_list_as_key_is_malformed() -> None:
    (found,) = load("tool_parser", "pythonic").parse("f(a={[1]: 2})")
    assert isinstance(found, Malformed)
    assert found.reason.startswith("it is not a Python call with literal arguments: TypeError: unhashable")


@pytest.mark.parametrize("name", ["json", "llama3"])
def test_lists_as_deep_as_python_can_read_are_malformed(name: str) -> None:
    for depth in range(1, 1000):  # how deep depends on the calls around
        (found,) = load("tool_parser", name).parse(f'{{"name": "f", "arguments": {"[" * depth}{"]" * depth}}}')
        assert isinstance(found, Malformed)


def test_gemma_reads_values_within_values() -> None:
    arguments = '{deep:{<|"|>k<|"|>:1.5},first:<|"|>a "b", {c}<|"|>,many:[1,<|"|>x<|"|>,[]],no:null,yes:true}'
    text = f"<|tool_call>call:find{arguments}<tool_call|>"
    assert load("tool_parser", "gemma").parse(text) == [
        Call("find", {"deep": {"k": 1.5}, "first": 'a "b", {c}', "many": [1, "x", []], "no": None, "yes": True})
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("call:add", "expected call:NAME"),
        ("call:add{a:1} b", "more follows"),
        ("call:add{a}", "expected KEY:VALUE"),
        ("call:add{a:}", "expected a value"),
        ('call:add{a:<|"|>b}', "not closed"),
        ("call:add{a:[1 {}]}", "expected , or ]"),
        ("call:add{a:" + "[" * 100 + "]" * 100 + "}", "nested more than 64 deep"),
    ],
)
def test_messages_that_gemma_refuses_are_reported(body: str, said: str) -> None:
    (found,) = load("tool_parser", "gemma").parse(f"<|tool_call>{body}<tool_call|>")
    assert isinstance(found, Malformed)
    assert said in found.reason


def test_a_beginning_may_be_written_as_a_plain_string() -> None:
    """Its letters are no beginnings: they would cut the text before a call."""

    class Lines:
        begins = "CALL "
        instructions = ""

        def parse(self, text: str) -> list[Call | Malformed]:
            return [Call("add", {}) for line in text.splitlines() if line == "CALL add"]

        def write(self, calls: object) -> str:
            return "CALL add"

    codec, parser = chatml(), cast(ToolParser, Lines())
    assert Dialect.of(parser).begins == ("CALL ",)
    parsed = codec.renderer.parse(codec.encode("LOOK, I ADD.\nCALL add"), parser=parser)
    assert parsed.content == "LOOK, I ADD." and len(parsed.calls) == 1
