"""Function calling: parsed calls, descriptions of tools, and whole conversations."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import rlsdk
from rlsdk.errors import OptionError, ValueFault
from rlsdk.plugins import load, names
from rlsdk.testing import run_workflow, scripted_chat
from rlsdk.tool_calls import MAX_CHARACTERS, Call, Malformed
from rlsdk.types import Message, Rollout, Task, ToolCall
from rlsdk.workflows.functions import Tool, as_text
from tests.rollout.codecs import chatml, like, plain

PARSERS = hermes, as_json, pythonic = [load("tool_parser", name).parse for name in ("hermes", "json", "pythonic")]
SOURCE = '''
import asyncio, time
from typing import Literal

def add(a: float, b: float = 1.0) -> float:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b

async def look(
    where: Literal["left", "right"], deep: bool | None = None, marks: list[int] = [], more: dict[str, int] = {}
):
    """Look somewhere."""
    if where == "right":
        await asyncio.sleep(9)
    return {"seen": where, "marks": marks}

def breaks() -> str:
    """Break."""
    raise KeyError("gone")

def hangs() -> str:
    """Hang."""
    time.sleep(1.5)

def untyped(a, *b): ...
def strange(a: set): ...
def read(text): return [("add", {"a": float(text), "b": 2.0})] if len(text) == 1 else []
CONSTANT = 1
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("lab") / "tools_lab.py"
    path.write_text(SOURCE)
    return str(path)


def talk(
    file: str, *answers: str, codec: Any = None, task: Task | None = None, **options: Any
) -> tuple[Rollout, list[str]]:
    said, read = iter(answers), []

    def script(text: str) -> str:
        read.append(text)
        return next(said)

    names = [f"{file}:{name}" for name in ("add", "look", "breaks", "hangs")]
    workflow = rlsdk.load("workflow", "tools", **{"tools": names, "call_timeout": 0.2, **options})
    task = task or Task(id="t", prompt=[Message("user", "What is 1 + 2?")])
    [group] = run_workflow(workflow, [task], codec or chatml(), script, max_tokens=500, max_length=9000)
    return group.rollouts[0], read


def hermes_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_call_its_result_and_the_answer(file: str) -> None:
    call = hermes_call("add", a=1, b=2)
    rollout, read = talk(file, f"Let me see. {call}", "It is 3.")
    assert rollout.messages[1:] == (
        Message("assistant", f"Let me see. {call}", tool_calls=[ToolCall("add", {"a": 1, "b": 2}, "call01000")]),
        Message("tool", "3.0", "add", tool_call_id="call01000"),
        Message("assistant", "It is 3."),
    )
    assert rollout.status == "finished"
    assert rollout.metrics["calls"] == 1 and rollout.metrics["failed_calls"] == 0
    codec = chatml()
    own = codec.tokenizer.decode(rollout.token_ids[rollout.loss_mask].tolist())
    assert own == f"Let me see. {call}<|im_end|>It is 3.<|im_end|>"
    assert read[0].startswith("system\nadd look breaks hangs")  # by the template


def test_tools_whose_description_leaves_no_room_for_an_answer_fail_the_rollout_as_a_long_prompt_does(file: str) -> None:
    """A truncated rollout would be scored: 0 for an answer that the policy could not give."""
    workflow = rlsdk.load("workflow", "tools", tools=[f"{file}:add"])
    task = Task(id="t", prompt="What is 1 + 2?")
    for max_length in (10, 50):  # shorter than the prompt, and than the prompt with the tools
        [group] = run_workflow(workflow, [task], plain(), lambda _: "3", max_length=max_length)
        assert group.rollouts[0].status == "failed" and not group.scores[0].valid
        assert "leave no room in model.max_length" in group.scores[0].reason


def test_all_failures_are_reported_and_nothing_raises(file: str) -> None:
    wrong = {
        "<tool_call>{]</tool_call>": "error: it is not JSON",
        "<tool_call>{}</tool_call>": 'error: expected {"name": NAME',
        "<tool_call>": "error: <tool_call> is not closed",
        hermes_call("ad"): "error: there is no tool 'ad', did you mean 'add'?; there are: add, look, breaks, hangs",
        hermes_call("add", b="x", c=1): "error: add: b: expected float, got 'x'; c: unknown argument 'c'",
        hermes_call("breaks"): "error: KeyError: 'gone'",
        hermes_call("hangs"): "error: TimeoutError: it took longer than 0.2 s",
        hermes_call("look", where="right"): "error: TimeoutError: it took longer than 0.2 s",
        hermes_call("look", where="up"): "error: look: where: expected 'left' | 'right', got 'up'",
    }
    rollout, _ = talk(file, *wrong, "done", max_turns=20)
    told = [m.content for m in rollout.messages if m.role == "tool"]
    assert len(told) == len(wrong)
    for text, words in zip(told, wrong.values(), strict=True):
        assert text.startswith(words), text
    assert rollout.metrics["failed_calls"] == len(wrong)
    assert (rollout.text, rollout.status) == ("done", "finished")


@pytest.mark.parametrize(
    ("parser", "said", "why"),
    [
        ("pythonic", "[add(a={1: 2})]", "add: a key is 1; expected text"),
        ("pythonic", "[add(a={1, 2})]", "add: {1, 2} is not a JSON value"),
        ("pythonic", "[add(b'1')]", "add: b'1' is not a JSON value"),
        ("pythonic", f"[add(0x{'f' * 4000})]", "add: an integer has 16000 bits; at most 4096 are read"),
        ("pythonic", f"[add(a={{0x{'f' * 4000}: 1}})]", "add: a key is a value of type int; expected text"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "add: nan is not a JSON value"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": [-1e999]}}</tool_call>', "add: -inf is not a JSON"),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": ' + '{"a":' * 600 + "1" + "}" * 600 + "}</tool_call>",
            "add: its arguments are nested deeper than 100",
        ),
    ],
    ids=["keys", "set", "bytes", "integer", "key", "nan", "infinity", "nested"],
)
def test_arguments_that_are_not_json_are_reported_without_ending_the_run(
    file: str, parser: str, said: str, why: str
) -> None:
    answers = iter([said, "I give up."])
    workflow = rlsdk.load("workflow", "tools", tools=[f"{file}:add"], parser=parser)
    task = Task(id="t", prompt=(Message("user", "1+2"),))
    [group] = run_workflow(workflow, [task], chatml(), lambda _: next(answers), max_tokens=10_000, max_length=20_000)
    rollout = group.rollouts[0]
    assert rollout.status == "finished" and rollout.metrics["failed_calls"] == 1
    assert any(why in message.text for message in rollout.messages if message.role != "assistant")


def test_several_calls_of_one_answer_up_to_a_limit(file: str) -> None:
    rollout, _ = talk(file, hermes_call("add", a=1) * 5, "ok", max_calls=2)
    told = [m.content for m in rollout.messages if m.role == "tool"]
    assert told == ["2.0", "2.0", "error: at most 2 calls per answer; the others were not made"]
    assert talk(file, *[hermes_call("add", a=1)] * 3, max_turns=3)[0].status == "truncated"


def test_other_ways_to_write_a_call(file: str) -> None:
    by_json, _ = talk(file, '```json\n{"name": "look", "parameters": {"where": "left"}}\n```', "ok", parser="json")
    assert by_json.messages[2].content == '{"seen": "left", "marks": []}'
    by_python, _ = talk(file, "<think>hm</think>[add(1, b=2), look('left', marks=[1])]", "ok", parser="pythonic")
    assert [m.content for m in by_python.messages[2:4]] == ["3.0", '{"seen": "left", "marks": [1]}']


def test_a_model_without_a_template_and_a_parser_of_ones_own(file: str) -> None:
    task = Task(id="t", prompt="1+2:")
    rollout, read = talk(file, "1", "+", "33", codec=plain(), task=task, parser=f"{file}:read", describe=False)
    assert [m.content for m in rollout.messages] == [
        "1+2:",
        "1",
        "3.0",
        "+",
        "error: could not convert string to float: '+'",
        "33",
    ]
    assert read[0] == "1+2:"
    described, _ = talk(file, "ok", codec=plain(), task=task)
    assert described.messages[0].content.startswith('1+2:\nYou may call these tools:\n{"name": "add"')
    assert "<tool_call>" in described.messages[0].content


def test_the_schema_comes_from_the_signature(file: str) -> None:
    from rlsdk.plugins.discovery import find

    add = Tool.of(find(f"{file}:add")).schema["function"]
    assert add == {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "number", "description": "The first."},
                "b": {"type": "number", "description": "The second.", "default": 1.0},
            },
            "required": ["a"],
        },
    }
    look = Tool.of(find(f"{file}:look")).schema["function"]["parameters"]["properties"]
    assert look["where"] == {"enum": ["left", "right"]}
    assert look["deep"] == {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": None}
    assert look["marks"] == {"type": "array", "items": {"type": "integer"}, "default": []}
    assert look["more"] == {"type": "object", "additionalProperties": {"type": "integer"}, "default": {}}
    for name, words in (("untyped", "must be named and typed"), ("strange", "JSON cannot express")):
        with pytest.raises(ValueFault, match=words):
            Tool.of(find(f"{file}:{name}"))


def test_options_are_checked(file: str) -> None:
    for options, words in (
        ({"tools": []}, "tools: expected functions with different names"),
        ({"tools": [f"{file}:ad"]}, r"tools\[0\]: .* has no 'ad', did you mean 'add'"),
        ({"tools": [f"{file}:CONSTANT"]}, r"tools\[0\]: .* is of type int; expected a function"),
        ({"tools": [f"{file}:add"] * 2}, "different names"),
        (
            {"tools": [f"{file}:add"], "parser": "xml"},
            "parser: expected deepseek, gemma, glm, .* or FILE.py:FUNCTION",
        ),
        ({"tools": [f"{file}:add"], "max_turns": 0}, "max_turns: expected int >= 1"),
        ({"tools": [f"{file}:add"], "max_tokens": 0}, "max_tokens: expected int >= 1"),
        ({"tools": [f"{file}:add"], "timeout": 0.0}, "timeout: expected float > 0"),
    ):
        with pytest.raises(OptionError, match=words):
            rlsdk.load("workflow", "tools", **options)


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize("text", ["", "It is 3.", "f (x)", "<think>add(1)</think> 3", "3 [1]", "```\n3\n```"])
def test_an_answer_is_no_call(parser: Any, text: str) -> None:
    assert parser(text) == []


def test_what_is_read_as_a_call() -> None:
    assert hermes('<think><tool_call></think><tool_call>{"name": "f"}</tool_call>') == [Call("f")]
    assert as_json('[{"name": "f", "arguments": {"x": [1]}}, {"name": "g"}]') == [Call("f", {"x": [1]}), Call("g")]
    assert pythonic("f(-1, 'a', x={'k': [None, True]})") == [Call("f", {"x": {"k": [None, True]}}, (-1, "a"))]
    for text in ("f(g(1))", "f(x).y", "[f(1), 2]", "f(**{})", "f(", "f(10**9)", "f(__import__('os'))"):
        assert any(isinstance(call, Malformed) for call in pythonic(text)), text


WANTS: list[tuple[dict[str, Any], str, Any]] = [
    ({"type": "string"}, "2", "2"),
    ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
    ({"type": ["string", "null"]}, "true", "true"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "2", 2),
    ({"enum": ["1", "2"]}, "2", "2"),
    ({"enum": [1, 2]}, "2", 2),
    ({"type": "number"}, "2", 2),
    ({"type": "number"}, "Infinity", "Infinity"),
    ({}, "2", 2),
]


@pytest.mark.parametrize(("schema", "text", "value"), WANTS)
@pytest.mark.parametrize("parser", ["qwen3_coder", "glm"])
def test_an_argument_that_is_to_be_text_stays_as_it_was_written(
    parser: str, schema: dict[str, Any], text: str, value: Any
) -> None:
    made = rlsdk.load("tool_parser", parser)
    [call] = made.parse(made.write([("write", {"x": text})]))
    assert call.as_wanted({"type": "object", "properties": {"x": schema}}).arguments == {"x": value}


def test_a_message_keeps_an_argument_that_is_to_be_text_as_it_was_written() -> None:
    parser = rlsdk.load("tool_parser", "qwen3_coder")
    task = Task(id="t", prompt=[Message("user", "Write.")])
    chat = scripted_chat(task, like("qwen"), lambda _: parser.write([("write", {"text": "[1,  2]", "times": "2"})]))
    properties = {"text": {"type": "string"}, "times": {"type": "integer"}}
    function = {"name": "write", "parameters": {"type": "object", "properties": properties}}
    chat.offer([{"type": "function", "function": function}])
    asyncio.run(chat.sample(max_tokens=400))
    [call] = chat.calls(parser)
    assert isinstance(call, Call)
    assert call.arguments == {"text": [1, 2], "times": 2}
    [told] = chat.finish().messages[-1].tool_calls
    assert told.arguments == {"text": "[1,  2]", "times": 2}


def test_a_function_that_takes_text_gets_what_was_written() -> None:
    def note(text: str, count: int, mode: Literal["1", "2"], title: str | None = None) -> str:
        """Note."""
        return text

    made = rlsdk.load("tool_parser", "qwen3_coder")
    [call] = made.parse(made.write([("note", {"text": "[1, 2]", "count": "3", "mode": "1", "title": "null"})]))
    given = {"text": "[1, 2]", "count": 3, "mode": "1", "title": None}
    assert Tool.of(note).arguments(call) == given


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
def test_a_call_that_writes_a_file_is_read(parser: str) -> None:
    made = rlsdk.load("tool_parser", parser)
    call = Call("write", {"text": "a line of a program\n" * 2000})
    assert made.parse(made.write([(call.name, call.arguments)])) == [call]


@settings(deadline=None, max_examples=200)
@given(st.text('[]{}()<>tool_call/"\\:,-=f1 \n', max_size=60))
@example("<tool_call>" + "[" * 9000 + "</tool_call>")
@example('[{"name":' + "[" * 9000)
@example("f(" + "[" * 9000)
@example("f(" + "-" * 9000 + "1)")
@example("f(" + "1" * 9000 + ")")
@example("[{" * (MAX_CHARACTERS + 1))
@example("f(x=" + "a" * MAX_CHARACTERS)
def test_whatever_is_written_is_read_in_limited_time(text: str) -> None:
    for parser in (load("tool_parser", name).parse for name in names("tool_parser")):
        assert all(isinstance(call, Call | Malformed) for call in parser(text))


def test_results_as_text() -> None:
    assert as_text("a b", 9) == "a b"
    assert as_text({"x": "é"}, 99) == '{"x": "é"}'
    assert as_text({1, 2} - {2}, 99) == "{1}"
    assert as_text("x" * 20, 5) == "xxxxx… (15 characters left out)"
    assert as_text("<b> at 0x1f>", 99) == "<b> at 0x1f>"
    with pytest.raises(TypeError, match=r"the tool returned a builtins\.object, which has no text"):
        as_text(object(), 99)
