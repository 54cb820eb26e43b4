"""Multi-turn demonstrations give exactly the tokens that the workflow would give with an expert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk import nano
from rlsdk.contracts import RewardSpec
from rlsdk.errors import DataError, OptionError
from rlsdk.plugins.discovery import find
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.sources.countdown import countdown
from rlsdk.testing import run_workflow
from rlsdk.types import Message, Rollout, Task, ToolCall
from rlsdk.workflows import conversations
from tests.rollout.codecs import chatml, plain, recorded

CALCULATOR = Path(__file__).resolve().parents[2] / "examples" / "calculator.py"
SMALL = {"numbers": 3, "number_range": (1, 20), "target_range": (1, 100), "operators": "+-", "template": "compact"}


def shown(task: Task, codec: ChatTokenizer, **options: object) -> Rollout:
    [group] = run_workflow(rlsdk.load("workflow", "demonstration", **options), [task], codec, lambda _: "")
    return group.rollouts[0]


def acted(task: Task, codec: ChatTokenizer, name: str, reward: str, **options: object) -> Rollout:
    """The rollout of a workflow whose policy gives the demonstration's answers."""
    said = iter([m["content"] for m in task.metadata["demonstration"] if m["role"] == "assistant"])
    scorer = Scorer([RewardTerm(RewardSpec(reward), rlsdk.load("reward", reward))])
    workflow = rlsdk.load("workflow", name, **options)
    [group] = run_workflow(workflow, [task], codec, lambda _: next(said), scorer=scorer)
    assert next(said, None) is None
    return group.rollouts[0]


def the_same(one: Rollout, other: Rollout) -> bool:
    return (one.token_ids.tolist(), one.loss_mask.tolist()) == (other.token_ids.tolist(), other.loss_mask.tolist())


def talk(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


def test_turns_are_trained_on_and_tokens_between_them_are_not() -> None:
    codec = plain()
    answers = talk(("assistant", "1+2"), ("user", ":"), ("assistant", "2+1"))
    rollout = shown(Task(id="d", prompt="3:", metadata={"demonstration": answers}), codec)
    assert codec.decode([rollout.token_ids]) == ["3:1+2\n:2+1"]
    # prompt 2, answer and end 4, line break and colon 2, answer and end 4
    assert rollout.loss_mask.tolist() == [False] * 2 + [True] * 4 + [False] * 2 + [True] * 4
    assert [m.role for m in rollout.messages] == ["user", "assistant", "user", "assistant"]


CALL = talk(("assistant", '<tool_call>{"name": "f", "arguments": {"x": "1"}}</tool_call>'))
RESULT = {"role": "tool", "content": "3", "name": "f"}


@pytest.mark.parametrize(
    ("codec", "prompt", "calls"),
    [(chatml(), [Message("user", "1+2?")], [*CALL, RESULT]), (plain(), "1+2?", [])],
    ids=["by the template", "by a message"],
)
def test_a_prompt_offers_the_tools_as_the_workflow_tools_does(
    codec: ChatTokenizer, prompt: Any, calls: list[dict[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "lab.py").write_text('def f(x: str) -> int:\n    """Three."""\n    return 3\n')
    tools: dict[str, object] = {"tools": [f"{tmp_path / 'lab.py'}:f"], "parser": "hermes"}
    answers = [*calls, *talk(("assistant", "3"))]
    task = Task(id="d", prompt=prompt, answer="3", metadata={"demonstration": answers})
    rollout = shown(task, codec, **tools)
    assert the_same(rollout, acted(task, codec, "tools", "exact_match", **tools))
    assert rollout.loss_mask.argmax() > shown(task, codec).loss_mask.argmax()  # a longer prompt


def test_tools_of_a_demonstration_that_do_not_exist_are_a_fault_of_it() -> None:
    with pytest.raises(OptionError, match=r"^workflow 'demonstration': tools\[0\]: nowhere.py"):
        rlsdk.load("workflow", "demonstration", tools=["nowhere.py:f"])


@pytest.mark.parametrize("name", ["demonstration", "chosen_rejected"])
def test_long_demonstrations_are_tokenized_in_a_thread_into_the_same_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "12345, " * 4000
    answers = talk(("assistant", "1"), ("user", long), ("assistant", f"{long}2"))
    task = Task(id="d", prompt="3:", metadata=dict.fromkeys(("demonstration", "chosen", "rejected"), answers))

    def run() -> tuple[list[Rollout], set[int], set[int]]:
        codec = recorded(plain())
        [group] = run_workflow(rlsdk.load("workflow", name), [task], codec, lambda _: "", max_length=100_000)
        prompt = {thread for length, thread in codec.seen if length == len("3:")}
        return list(group.rollouts), prompt, {thread for length, thread in codec.seen if length >= len(long)}

    found, loop, threads = run()
    assert loop and threads and threads.isdisjoint(loop)
    monkeypatch.setattr(conversations, "QUICK_CHARACTERS", 10**9)
    alone, loop, threads = run()
    assert threads == loop
    assert len(found) == len(alone) and all(map(the_same, found, alone))


def test_an_answer_ends_as_the_template_ends_a_turn() -> None:
    """As Gemma's, whose end of text is another token."""
    codec = chatml(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<|im_start|>\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    answers = talk(("assistant", "A"), ("user", "and?"), ("assistant", "B"))
    prompt = [Message("user", "Q")]
    rollout = shown(Task(id="d", prompt=prompt, metadata={"demonstration": answers}), codec)
    assert codec.shown(rollout.token_ids[rollout.loss_mask]) == "A<|im_start|>B<|im_start|>"
    assert codec.shown(rollout.token_ids) == (
        "user:Q<|im_start|>\nassistant:A<|im_start|>\nuser:and?<|im_start|>\nassistant:B<|im_start|>"
    )


def test_what_does_not_fit_into_the_models_length_is_cut_off() -> None:
    answers = talk(("assistant", "1+2"), ("user", ":"), ("assistant", "2+1+0"), ("user", ":"), ("assistant", "3"))
    task = Task(id="d", prompt="3:", metadata={"demonstration": answers})
    # prompt 2, answer and end 4, line break and colon 2; then 6 tokens, of which three have room
    for length, tokens, sampled in ((11, 11, 7), (8, 6, 4), (100, 18, 12)):
        [group] = run_workflow(
            rlsdk.load("workflow", "demonstration"), [task], plain(), lambda _: "", max_length=length
        )
        rollout = group.rollouts[0]
        assert len(rollout.token_ids) == tokens and rollout.loss_mask.sum() == sampled
        assert rollout.status == ("finished" if length == 100 else "truncated")
    assert group.rollouts[0].text == "3"


@pytest.mark.parametrize("prompt", ["1:", (Message("user", "1:"),)])
def test_they_are_what_a_dialogue_would_have_been(prompt: object) -> None:
    answers = talk(("assistant", "no"), ("user", "Again."), ("assistant", "yes"))
    task = Task(id="d", prompt=prompt, answer="yes", metadata={"demonstration": answers})
    codec = plain() if isinstance(prompt, str) else chatml()
    assert the_same(shown(task, codec), acted(task, codec, "dialogue", "exact_match", feedback="Again."))


def test_countdown_shows_dialogues_that_end_at_the_first_right_answer() -> None:
    for task in countdown(size=60, demonstrations=0.3, turns=3, feedback=":", **SMALL):
        assert the_same(shown(task, plain()), acted(task, plain(), "dialogue", "countdown", turns=3, feedback=":"))
    lengths = {len(t.metadata["demonstration"]) for t in countdown(size=60, demonstrations=0.3, turns=3, **SMALL)}
    assert lengths == {1, 3, 5}
    singles = countdown(size=60, demonstrations=0.3, **SMALL)
    doubles = countdown(size=60, demonstrations=0.3, turns=2, **SMALL)
    firsts = [task.metadata["demonstration"][0]["content"] for task in doubles]
    assert firsts == [task.metadata["demonstration"] for task in singles]


def test_the_calculators_examples_are_what_the_workflow_tools_would_have_been() -> None:
    tools = {"tools": [f"{CALCULATOR}:calculate"], "parser": f"{CALCULATOR}:read_call", "describe": False}
    codec = ChatTokenizer(nano.make_tokenizer(500))
    for task in find(f"{CALCULATOR}:problems")(size=20, demonstrations=1.0):
        rollout = acted(task, codec, "tools", "exact_match", **tools)
        assert the_same(shown(task, codec), rollout)
        assert rollout.text == f"<answer>{task.answer}</answer>"
        assert rollout.metrics["calls"] == 1 and rollout.metrics["failed_calls"] == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no message of its demonstration has the role assistant"),
        (talk(("user", "and?")), "no message of its demonstration has the role assistant"),
        (["1+2"], r"demonstration\[0\] is '1\+2'; expected a message with content and a role"),
        (talk(("assistant", "1"), ("expert", "2")), r"demonstration\[1\] is .*expert"),
        ({"role": "assistant", "content": "1"}, "task 'd' has no demonstration.*algorithm that needs none"),
        (
            [Message("assistant", "1", tool_calls=[ToolCall("add")])],
            r"demonstration\[0\] holds tool_calls besides its content",
        ),
        ([{"role": "assistant", "content": "", "tool_calls": [{}], "thinking": "hm"}], "holds thinking and tool_calls"),
    ],
)
def test_invalid_conversations_are_named(given: object, message: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        shown(Task(id="d", prompt="3:", metadata={"demonstration": given}), plain())
    assert caught.group_contains(DataError, match=message)


def test_a_pair_is_two_rollouts_with_the_chosen_one_better() -> None:
    codec = plain()
    task = Task(
        id="d",
        prompt="3:",
        metadata={"chosen": "1+2", "rejected": talk(("assistant", "9"), ("user", ":"), ("assistant", "8"))},
    )
    [group] = run_workflow(rlsdk.load("workflow", "chosen_rejected"), [task], codec, lambda _: "")
    assert [rollout.response for rollout in group.rollouts] == ["1+2", "9\n8"]
    assert [score.value for score in group.scores] == [1.0, 0.0]
    assert len(group.trajectories) == 2
    kept = rlsdk.load("filter", "best_worst")(group)
    assert [score.value for score in kept.scores] == [1.0, 0.0]  # type: ignore[union-attr]
    with pytest.raises(ExceptionGroup) as caught:
        run_workflow(
            rlsdk.load("workflow", "chosen_rejected"),
            [Task(id="e", prompt="3:", metadata={"chosen": "1"})],
            codec,
            lambda _: "",
        )
    assert caught.group_contains(DataError, match="task 'e' has no rejected; its metadata holds: chosen")
