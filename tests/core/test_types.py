"""Values are frozen, checked on creation, and unchanged by pickling."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re

import attrs
import numpy as np
import pytest
import torch

from rlsdk import Group, Message, Observation, Rollout, Score, Step, Task
from rlsdk.errors import ConfigError, FingerprintError, OptionError, ValueFault
from rlsdk.messages import Image, content_of

TASK = Task(id="7", prompt="3,5>8:", answer={"target": 8}, metadata={"level": 1}, source="countdown")


def rollout(**changes):
    given = {
        "task": TASK,
        "messages": [Message("user", "3,5>8:"), Message("assistant", "3+5")],
        "token_ids": [1, 2, 3, 4],
        "loss_mask": [False, True, True, False],
        "logprobs": [0.0, -0.5, -0.25, 0.0],
        "policy_versions": [-1, 2, 2, -1],
    }
    return Rollout(**{**given, **changes})


VALUES = [
    TASK,
    rollout(metrics={"turns": 1.0}, rewards=[(2, 0.5)]),
    Score(0.5, metrics={"format": 1.0}, token_rewards=[(2, 0.5)]),
    Group(TASK, [rollout()], [Score(1.0)]),
    Step(Observation("a wall", state="k"), 1.0, metrics={"depth": 2.0}),
    Message("user", "hello"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_values_are_frozen(value):
    name = attrs.fields(type(value))[0].name
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        setattr(value, name, None)


@pytest.mark.parametrize("again", [lambda v: pickle.loads(pickle.dumps(v)), copy.deepcopy], ids=["pickle", "copy"])
@pytest.mark.parametrize("value", VALUES, ids=lambda v: type(v).__name__)
def test_values_come_back_from_a_pickle(value, again):
    back = again(value)
    for field in attrs.fields(type(value)):
        old, new = getattr(value, field.name), getattr(back, field.name)
        assert type(new) is type(old), field.name
        if isinstance(old, np.ndarray):
            assert new.dtype == old.dtype
            assert not new.flags.writeable
            np.testing.assert_array_equal(new, old)
        elif field.name not in ("rollouts",):  # whose arrays have no truth value
            assert new == old, field.name


def test_a_rollout_that_is_passed_on_unread_keeps_its_messages():
    made = rollout()
    passed = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(made))))
    assert passed.messages == made.messages and passed.answers == made.answers
    assert [m.prompt for m in passed.messages] == [m.prompt for m in made.messages]
    assert pickle.loads(pickle.dumps(passed)).messages == made.messages  # and one that was read
    with pytest.raises(AttributeError, match="a rollout has no attribute 'message'"):
        _ = passed.message


def test_arrays_are_read_only_and_of_fixed_types():
    made = rollout()
    dtypes = {
        name: getattr(made, name).dtype.name for name in ("token_ids", "loss_mask", "logprobs", "policy_versions")
    }
    assert dtypes == {"token_ids": "int64", "loss_mask": "bool", "logprobs": "float32", "policy_versions": "int64"}
    with pytest.raises(ValueError, match="read-only"):
        made.logprobs[0] = 1.0


def test_a_rollout_does_not_change_with_the_array_it_was_made_from():
    ids = np.array([1, 2, 3, 4])
    made = rollout(token_ids=ids)
    ids[0] = 99
    assert made.token_ids.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Observation({"a": 1}), "the text of an observation is {'a': 1}; expected text"),
        (lambda: Observation(None), "the text of an observation is None; expected text"),
        (lambda: Step(Observation("x"), math.nan), "the reward of a step must be finite and within ±1e+18; got nan"),
        (lambda: Step(Observation("x"), -2e18), "the reward of a step must be finite and within ±1e+18; got -2e+18"),
        (lambda: Step("a wall"), "the observation of a step is 'a wall'; expected an rlsdk.Observation"),
        (lambda: Step(Observation("x"), "1"), "the reward of a step is '1'; expected a number"),
        (lambda: Step(Observation("x"), np.ones(2)), "the reward of a step is array"),
        (lambda: Step(Observation("x"), terminated="no"), "`terminated` of a step is 'no'; expected True or False"),
        (lambda: Step(Observation("x"), truncated=None), "`truncated` of a step is None; expected True or False"),
        (lambda: Step(Observation("x"), terminated=2), "`terminated` of a step is 2; expected True or False"),
        (lambda: Score(1.0, valid="false"), "`valid` of a score is 'false'; expected True or False"),
        (lambda: Score(1.0, reason=7), "the reason of a score is 7; expected text"),
        (lambda: Score(1.0, answer=7), "the answer of a score is 7; expected text"),
        (lambda: Score(1.0, metrics={1: 2.0}), "the name of a metric is 1; expected text"),
        (lambda: content_of({"a": 1}), "a message's content is {'a': 1}; expected text, or a list of texts and images"),
        (lambda: Task(1, ["Hi"]), "a message is 'Hi'; expected a mapping with role and content"),
        (lambda: Task(1, [{"content": "Hi"}]), "a message is {'content': 'Hi'}; expected a mapping with role"),
        (
            lambda: Message("assistant", "", tool_calls=[{"arguments": {}}]),
            "a tool call is {'arguments': {}}; ",
        ),
        (lambda: Message("assistant", "", tool_calls=["f"]), "a tool call is 'f'; expected a ToolCall, or a mapping"),
        (
            lambda: Message("assistant", "", tool_calls=[{"name": "f", "arguments": "[" * 10**5}]),
            "tool call 'f': arguments are '[[[",
        ),
        (lambda: Image("data:image/png;base64,é"), "image: the base64 of 'data:image/png;base64,é'… cannot be read"),
    ],
)
def test_what_environments_and_workflows_give_is_checked_where_it_is_made(make, words):
    with pytest.raises(ValueFault, match=re.escape(words)):
        make()


@pytest.mark.parametrize("flag", [True, 1, np.bool_(True), torch.tensor(True)], ids=["bool", "int", "numpy", "tensor"])
def test_flags_of_a_step_are_bools(flag):
    assert Step(Observation("x"), terminated=flag).terminated is True


@pytest.mark.parametrize(
    "number", [np.float32(0.5), np.array(0.5), torch.tensor(0.5)], ids=["scalar", "array", "tensor"]
)
def test_metrics_are_numbers_that_json_holds(number):
    for made in (
        rollout(metrics={"a": number}),
        Score(1.0, metrics={"a": number}),
        Step(Observation("x"), metrics={"a": number}),
    ):
        assert json.loads(json.dumps(dict(made.metrics))) == {"a": 0.5}
    for wrong in ("0.5", None, np.zeros(2), torch.zeros(2)):
        with pytest.raises(ValueFault, match=r"the metric 'a' is .*; expected a number"):
            Score(1.0, metrics={"a": wrong})


def test_mappings_are_read_only():
    with pytest.raises(TypeError):
        TASK.metadata["level"] = 2
    with pytest.raises(TypeError):
        Step(Observation("x"), metrics={"a": 1.0}).metrics["a"] = 2.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": [True]}, r"task '7': loss_mask has shape \(1,\); expected \(4,\), as token_ids"),
        ({"token_ids": [[1, 2, 3, 4]]}, r"token_ids has shape \(1, 4\); expected one axis"),
        ({"status": "done"}, "status 'done' given; expected one of finished, truncated, aborted, failed"),
        ({"rewards": [(4, 1.0)]}, "a reward at token 4 of 4"),
        ({"rewards": [(-1, 1.0)]}, "a reward at token -1 of 4"),
    ],
)
def test_a_rollout_is_checked_where_it_is_made(changes, message):
    with pytest.raises(ValueFault, match=message):
        rollout(**changes)


def test_what_the_policy_wrote():
    turns = [
        Message("user", "go"),
        Message("assistant", "left"),
        Message("tool", "wall"),
        Message("assistant", "right"),
    ]
    made = rollout(messages=turns)
    assert (made.text, made.response, made.span) == ("right", "left\nright", (1, 3))
    nothing = rollout(messages=[Message("user", "go")], loss_mask=[False] * 4)
    assert (nothing.text, nothing.response, nothing.span) == ("", "", (4, 4))


SHOTS = [Message("system", "s"), Message("user", "1?"), Message("assistant", "one"), Message("user", "2?")]


@pytest.mark.parametrize(
    "messages",
    [
        [*SHOTS, Message("assistant", "one")],
        [*SHOTS[1:], Message("assistant", "one")],  # a history that was trimmed
        [SHOTS[0], SHOTS[3], Message("assistant", "one")],
        [Message("system", "tools"), *SHOTS[1:], Message("assistant", "one")],
        [Message("user", "a later state"), Message("assistant", "one")],  # a step of a trajectory
        [Message("assistant", "one")],
    ],
)
def test_the_prompts_assistant_messages_are_found_in_a_rollout_that_does_not_mark_them(messages):
    made = rollout(task=attrs.evolve(TASK, prompt=SHOTS), messages=messages)
    assert (made.response, made.answers) == ("one", (Message("assistant", "one"),))
    assert attrs.evolve(made, messages=made.messages[-2:]).response == "one"


def test_a_message_that_says_who_wrote_it_is_believed():
    turns = [Message("user", "go"), Message("assistant", "a", prompt=True), Message("assistant", "b")]
    assert rollout(messages=turns).response == "b"
    same = [*SHOTS[:2], attrs.evolve(SHOTS[2], prompt=False), Message("user", "2?"), Message("assistant", "two")]
    assert rollout(task=attrs.evolve(TASK, prompt=SHOTS), messages=same).response == "one\ntwo"
    assert Message("assistant", "a", prompt=True) == Message("assistant", "a", prompt=False)


def test_a_prompt_that_is_neither_text_nor_messages_is_refused():
    with pytest.raises(ValueFault, match=r"the prompt of a task is None; expected text or a list of messages"):
        Task(id="1", prompt=None)


def test_a_prompt_that_nothing_follows_has_no_response():
    task = attrs.evolve(TASK, prompt=[*SHOTS, Message("assistant", "<think>")])
    assert rollout(task=task, messages=task.prompt).response == ""
    continued = [*SHOTS, Message("assistant", "<think>hm")]
    assert rollout(task=task, messages=continued).response == "<think>hm"
    apart = [*task.prompt, Message("assistant", "hm")]
    assert rollout(task=task, messages=apart).response == "hm"


def test_a_rollout_from_text_continues_the_prefill():
    task = attrs.evolve(TASK, prompt=[*SHOTS, Message("assistant", "<think>")])
    made = Rollout.from_text(task, "hm")
    assert [m.content for m in made.messages[-2:]] == ["2?", "<think>hm"]
    assert Rollout.from_text(task, made.response).messages == made.messages
    assert Rollout.from_text(task, "").response == "<think>"


def test_a_rollout_from_text_needs_no_model():
    made = Rollout.from_text(TASK, "3+5")
    assert [m.role for m in made.messages] == ["user", "assistant"]
    assert (made.text, len(made.token_ids), made.span) == ("3+5", 0, (0, 0))
    chat = Task(id=8, prompt=[{"role": "system", "content": "be brief"}, Message("user", "hi")])
    assert chat.id == "8"
    assert [m.role for m in Rollout.from_text(chat, "hi").messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_valid_score_is_finite(value):
    with pytest.raises(ValueFault, match="must be finite"):
        Score(value)
    assert not Score(value, valid=False).valid


@pytest.mark.parametrize("given", [{"value": 1.1e18}, {"value": 0.0, "token_rewards": [(3, 1e30), (4, -1e30)]}])
def test_a_valid_score_is_within_what_float32_can_square(given):
    with pytest.raises(ValueFault, match=r"finite and within ±1e\+18, got 1"):
        Score(**given)
    assert not Score(**given, valid=False).valid
    assert Score(-1e18).value == -1e18


def test_a_score_must_not_be_text():
    with pytest.raises(ValueFault, match=r"'1\.0' is text; expected a number"):
        Score("1.0")
    with pytest.raises(ValueFault, match=r"score value None; expected a number, or Score\.invalid"):
        Score(None)


def test_an_invalid_score_says_why():
    score = Score.invalid("the judge is down")
    assert (score.valid, score.reason) == (False, "the judge is down")


def test_a_group_has_a_score_for_each_rollout():
    with pytest.raises(ValueFault, match="group of task '7': 1 rollout, 2 scores"):
        Group(TASK, [rollout()], [Score(1.0), Score(0.0)])
    assert len(Group(TASK, [rollout()] * 3, [Score(1.0)] * 3)) == 3


def test_a_groups_uid_is_equal_on_every_copy_and_differs_between_groups():
    group = Group(TASK, [rollout()], [Score(1.0)])
    copies = [pickle.loads(pickle.dumps(group)), copy.deepcopy(group), attrs.evolve(group, rollouts=(), scores=())]
    assert {each.uid for each in copies} == {group.uid}
    assert Group(TASK, group.rollouts, group.scores).uid != group.uid
    assert Group(TASK, (), (), uid="task 3.0").uid == "task 3.0"


@pytest.mark.parametrize(
    "error",
    [ConfigError(["a: b", "c: d"]), OptionError("reward 'x'", [("scale", "is required")]), FingerprintError("differs")],
    ids=lambda e: type(e).__name__,
)
def test_errors_come_back_from_a_pickle(error):
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), vars(back)) == (type(error), str(error), vars(error))


def test_a_config_error_counts_its_faults():
    assert str(ConfigError(["steps: 1"])) == "the configuration has a fault:\n  - steps: 1"
    assert str(ConfigError(["a", "b"])).startswith("the configuration has 2 faults:\n")


def test_a_group_knows_its_oldest_trained_token_also_after_a_journey():
    task = Task("t", "p")
    tokens = ([1] * 4, [False, True, True, False], [0.0] * 4)
    group = Group(task, [Rollout(task, (), *tokens, [-1, 5, 4, 0]), Rollout.from_text(task, "a")], [Score(0)] * 2)
    assert group.oldest_version == 4
    assert pickle.loads(pickle.dumps(group)).oldest_version == 4
    assert attrs.evolve(group, rollouts=(), scores=()).oldest_version is None
