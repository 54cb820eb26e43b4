"""A restored group equals the stored one in every array and field, whatever its content."""

from __future__ import annotations

import json
import zlib
from fractions import Fraction
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsdk.errors import ValueFault
from rlsdk.runlog.serialization import ARRAYS, OpaqueFault, decode, encode, exchange
from rlsdk.types import Group, Message, Rollout, Score, Task, ToolCall
from tests.examples import many

HOSTILE = st.sampled_from(
    ["", "\x00", "\ud800", "\udfff\ud800", "\ud800\udc00", "🙂", "\r\n\x1b[31m", "$int", "a" * 5000]
)
TEXTS = st.text(st.characters(codec=None), max_size=20) | HOSTILE
FLOATS = st.floats(width=64)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**100) | FLOATS | TEXTS | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(TEXTS | st.integers() | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=6,
)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
MESSAGES = st.builds(Message, ROLES, TEXTS, TEXTS, prompt=st.sampled_from([None, True, False]))
TASKS = st.builds(
    Task, TEXTS, TEXTS | st.lists(MESSAGES, max_size=2), PLAIN, st.dictionaries(TEXTS, PLAIN, max_size=2), TEXTS
)
METRICS = st.dictionaries(TEXTS, FLOATS, max_size=2)
REWARDS = st.floats(-1e18, 1e18)
SCORES = st.builds(
    Score,
    REWARDS,
    metrics=METRICS,
    reason=TEXTS,
    token_rewards=st.none() | st.lists(st.tuples(st.integers(0, 9), REWARDS), max_size=2),
    answer=TEXTS,
) | st.builds(Score, FLOATS, valid=st.just(False), reason=TEXTS)


@st.composite
def rollouts(draw: st.DrawFn, task: Task) -> Rollout:
    count = draw(st.integers(0, 6))
    column = lambda values: draw(st.lists(values, min_size=count, max_size=count))  # noqa: E731
    whole = st.integers(-(2**63), 2**63 - 1)
    return Rollout(
        draw(st.sampled_from([task, attrs.evolve(task, id=task.id + "'")])),
        draw(st.lists(MESSAGES, max_size=3)),
        column(whole),
        column(st.booleans()),
        column(st.floats(width=32)),
        column(whole),
        draw(st.sampled_from(["finished", "truncated", "aborted", "failed"])),
        draw(METRICS),
        draw(st.lists(st.tuples(st.integers(0, count - 1), FLOATS), max_size=2)) if count else (),
        draw(TEXTS),
        draw(st.integers()),
        draw(TEXTS),
        draw(st.none() | st.integers(-1, 300).map(lambda expert: np.full((count, 2, 3), expert, np.int16))),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    task = draw(TASKS)
    held = draw(st.lists(rollouts(task), max_size=3))
    return Group(task, held, [draw(SCORES) for _ in held])


def same(a: Any, b: Any) -> bool:
    """Equal in type and value; numbers that are none are equal to themselves."""
    return repr(a) == repr(b) and type(a) is type(b)


def told(value: Task | Score) -> list[tuple[str, Any]]:
    fields = [(f.name, getattr(value, f.name)) for f in attrs.fields(type(value))]
    return [(name, dict(v) if name in ("metadata", "metrics") else v) for name, v in fields]


@settings(max_examples=many(150))
@given(groups())
def test_what_comes_back_is_what_was_kept(group: Group) -> None:
    back = decode(encode(group))
    assert same(told(back.task), told(group.task))
    assert len(back) == len(group)
    assert back.uid == group.uid
    for now, then in zip(back.rollouts, group.rollouts, strict=True):
        for name in ARRAYS:
            was, is_ = getattr(then, name), getattr(now, name)
            assert (is_.dtype, is_.shape, is_.tobytes()) == (was.dtype, was.shape, was.tobytes())
            assert not is_.flags.writeable
        assert (now.routed_experts is None) == (then.routed_experts is None)
        if now.routed_experts is not None and then.routed_experts is not None:
            assert now.routed_experts.dtype == np.int16
            np.testing.assert_array_equal(now.routed_experts, then.routed_experts)
        assert same(told(now.task), told(then.task))
        assert same(now.messages, then.messages)
        assert same(dict(now.metrics), dict(then.metrics))
        for name in ("status", "rewards", "trajectory", "step", "state"):
            assert same(getattr(now, name), getattr(then, name)), name
    for now, then in zip(back.scores, group.scores, strict=True):
        assert same(told(now), told(then))


def sampled(task: Task) -> Group:
    return Group(task, [Rollout(task, (), [1, 2], [False, True], [0.0, -1.0], [-1, 3])], [Score(1.0)])


def test_the_current_task_is_in_the_group_itself() -> None:
    task = Task("t", "p", Fraction(1, 3), source="s")
    payload = encode(sampled(task))
    back = decode(payload, task)
    assert back.task is task
    assert back.rollouts[0].task is task
    with pytest.raises(OpaqueFault, match=r"holds a fractions\.Fraction"):
        decode(payload)
    with pytest.raises(ValueFault, match="belongs to task 't' of 's', not to 'other'"):
        decode(payload, Task("other", "p", source="s"))


def test_arrays_of_a_task_come_back() -> None:
    answer = {"grid": np.arange(6, dtype=np.int16).reshape(2, 3), "scale": np.float32(0.1)}
    back = decode(encode(sampled(Task("t", "p", answer)))).task.answer
    assert back["grid"].dtype == np.int16
    assert back["grid"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (type(back["scale"]), back["scale"]) == (np.float32, np.float32(0.1))


def test_what_is_very_large_comes_back() -> None:
    task = Task("t", "p" * 10**6, 10**5000)
    rollout = attrs.evolve(sampled(task).rollouts[0], messages=[Message("assistant", "\x00\ud800" * 500_000)])
    back = decode(encode(Group(task, [rollout], [Score(1.0)])))
    assert back.task.prompt == task.prompt
    assert back.task.answer == 10**5000
    assert back.rollouts[0].text == rollout.text


def test_bytes_that_are_not_a_group_are_refused() -> None:
    payload = encode(sampled(Task("t", "p")))
    for wrong in (b"", b"\x80\x04]\x94.", payload[:-5]):
        with pytest.raises(ValueFault, match="cannot be read"):
            decode(wrong)


def test_a_group_of_format_1_is_read() -> None:
    """Its messages do not say who wrote them: the task's prompt tells."""
    shots = [Message("user", "1?"), Message("assistant", "one"), Message("user", "2?")]
    task = Task("t", shots)
    group = Group(task, [Rollout(task, [*shots, Message("assistant", "two")], (), (), (), ())], [Score(1.0)])
    raw = zlib.decompress(encode(group))
    length = int.from_bytes(raw[:8], "little")
    told = json.loads(raw[8 : 8 + length])
    told["format"] = 1
    for each in (told["tasks"][0]["prompt"], told["rollouts"][0]["messages"]):
        each[:] = [[message["role"], message["content"], ""] for _, message in each]
    text = json.dumps(told).encode()
    back = decode(zlib.compress(len(text).to_bytes(8, "little") + text + raw[8 + length :]))
    assert back.rollouts[0].response == "two"
    told["format"] = 6
    text = json.dumps(told).encode()
    with pytest.raises(ValueFault, match="has format 6; this rlsdk reads 1 to 5"):
        decode(zlib.compress(len(text).to_bytes(8, "little") + text))


def test_calls_and_thoughts_of_messages_come_back() -> None:
    calls = [ToolCall("add", {"a": 1, "$b": [2**70, "ü"]}, "call_1")]
    said = [
        Message("assistant", "Let me see.", tool_calls=calls, reasoning="1 + 2", prompt=False),
        Message("tool", "3", "add", tool_call_id="call_1"),
    ]
    task = Task("t", [Message("user", "1+2?"), Message("assistant", "", tool_calls=calls)])
    group = Group(task, [Rollout(task, [*task.prompt, *said], (), (), (), ())], [Score(1.0)])
    back = decode(encode(group))
    assert back.rollouts[0].messages == group.rollouts[0].messages and back.task.prompt == task.prompt
    assert [m.prompt for m in back.rollouts[0].messages] == [None, True, False, None]


@pytest.mark.parametrize(
    ("prompt", "before", "shown"),
    [
        ("1+2=", [("user", "1+2=")], "1+2="),
        ("1+2=", [("user", "1+2="), ("tool", "3")], "1+2=\ntool: 3"),
        ("1+2=", [("system", "Use tools."), ("user", "1+2=")], "system: Use tools.\nuser: 1+2="),
        ("1+2=", [("user", "Is 3 right?")], "user: Is 3 right?"),  # a sub-agent's conversation
        ((Message("user", "1+2="),), [("user", "1+2="), ("user", "Be brief.")], "user: 1+2=\nuser: Be brief."),
    ],
)
def test_an_exchange_begins_with_what_the_policy_was_shown(prompt: Any, before: list[Any], shown: str) -> None:
    messages = (*(Message(role, text) for role, text in before), Message("assistant", "3"), Message("user", "Sure?"))
    rollout = Rollout(Task("t", prompt), messages, (), (), (), ())
    assert exchange(rollout) == (shown, "3\nuser: Sure?")
