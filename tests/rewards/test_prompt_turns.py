"""Rewards and few-shot prompts: answers in the prompt are never counted as the policy's."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlsdk
from rlsdk.contracts import RewardSpec
from rlsdk.rewards.conventions import CONVENTIONS
from rlsdk.runlog.serialization import transcript
from rlsdk.runlog.tables import Entry, rollout_rows
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.testing import run_workflow
from rlsdk.types import Group, Message, Rollout, Score, Task
from tests.rollout.codecs import chatml

SUM = {"target": 24, "numbers": [3, 8]}
SCHEMA = {"type": "object"}
TEXTS = (
    "I do not know.",
    "<answer>3*8</answer>",
    "<think>a</think><answer>3*8</answer>",
    "\\boxed{42}",
    "the answer is 42",
    "42",
    '{"a": 1}',
    '<think>a</think><answer>{"a": 1}</answer>',
    "one two three one two three",
)
REWARDS = [
    ("countdown", {}, SUM),
    ("math", {}, "42"),
    ("math", {"strict": False}, "42"),
    ("exact_match", {"where": "message"}, "42"),
    ("exact_match", {"where": "response"}, "42"),
    ("exact_match", {"where": "answer"}, "3*8"),
    ("regex", {"pattern": "42"}, None),
    ("regex", {"pattern": "42", "where": "message"}, None),
    ("regex", {"pattern": "(\\d+)", "group": 1}, "42"),
    ("format", {}, None),
    ("format", {"tags": ["answer"]}, None),
    ("format", {"pattern": "\\d+"}, None),
    ("format", {"json_schema": SCHEMA}, None),
    ("format", {"json_schema": SCHEMA, "within": "answer"}, None),
    ("length_penalty", {"limit": 60, "unit": "characters"}, None),
    ("length_penalty", {"limit": 10, "unit": "words"}, None),
    ("repetition_penalty", {"ngram": 2}, None),
    ("repetition_penalty", {"ngram": 2, "unit": "characters"}, None),
]
FOREIGN = """
def told(text):
    return float(sum(map(ord, text)))

def trl(completions, **kwargs):
    return [told(repr(c)) for c in completions]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    return told(solution_str)

def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [told(text) for text in solution_strs]

def openrlhf(queries, prompts, labels):
    return told(queries[0].removeprefix(prompts[0]))

def verifiers(completion, state, parser):
    return told(repr(completion)) + state["turn"] + told(parser.parse_answer(completion) or "")

def reasoning_gym(answer, entry):
    return told(answer or "")

def trinity(response, truth):
    return {"told": told(response)}

def xtuner(response, label, extra_info):
    return told(response)
"""


def prompt(shots=(), prefill=None):
    """A question after answered questions; without shots, only the question."""
    answered = [turn for text in shots for turn in (Message("user", "Another one?"), Message("assistant", text))]
    begun = [] if prefill is None else [Message("assistant", prefill)]
    return (Message("system", "Be brief."), *answered, Message("user", "How?"), *begun)


def by_hand(task, text):
    begun = task.prompt[-1].content if task.prompt[-1].role == "assistant" else ""
    before = task.prompt[:-1] if begun else task.prompt
    again = [Message(m.role, m.content) for m in before]  # equal, not the same objects
    return Rollout(task, (*again, Message("assistant", begun + text)), (), (), (), ())


def by_chat(task, text):
    workflow = rlsdk.load("workflow", "single_turn")
    (group,) = run_workflow(workflow, [task], chatml(), lambda _: text, max_tokens=4000, max_length=9000)
    return attrs.evolve(group.rollouts[0], token_ids=(), loss_mask=(), logprobs=(), policy_versions=())


WAYS = [Rollout.from_text, by_hand, by_chat]
SHOTS = st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3)
PREFILLS = st.sampled_from([None, "<think>", "<answer>3", "4"])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(("name", "options", "answer"), REWARDS)
@settings(max_examples=8, deadline=None)
@given(shots=SHOTS, text=st.sampled_from(TEXTS), prefill=PREFILLS)
def test_a_prompt_with_assistant_turns_scores_as_one_without(way, name, options, answer, shots, text, prefill):
    reward = rlsdk.load("reward", name, **options)
    plain, shown = (way(Task("t", prompt(given, prefill), answer), text) for given in ((), shots))
    assert reward(shown) == reward(plain)
    assert shown.answers == plain.answers


@pytest.mark.parametrize("style", CONVENTIONS)
@settings(max_examples=8, deadline=None)
@given(shots=SHOTS, text=st.sampled_from(TEXTS), prefill=PREFILLS, way=st.sampled_from(WAYS))
def test_foreign_rewards_get_the_policys_words_alone(tmp_path_factory, style, way, shots, text, prefill):
    path = tmp_path_factory.getbasetemp() / "foreign_prompt_turns.py"
    path.write_text(FOREIGN)
    reward = rlsdk.load("reward", "foreign", path=f"{path}:{style}")
    plain, shown = (way(Task("t", prompt(given, prefill), "42"), text) for given in ((), shots))
    (found,), (expected,) = reward([shown]), reward([plain])
    assert found == expected
    assert found.valid


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    ("name", "options", "answer", "shot"),
    [
        ("countdown", {}, SUM, "<answer>3*8</answer>"),
        ("math", {}, "42", "\\boxed{42}"),
        ("regex", {"pattern": "42"}, None, "42"),
        ("exact_match", {"where": "answer"}, "Paris", "<answer>Paris</answer>"),
        ("code_tests", {}, ["assert f() == 1"], "```python\ndef f(): return 1\n```"),
    ],
)
def test_an_answer_of_a_few_shot_earns_the_policy_nothing(way, name, options, answer, shot):
    reward = rlsdk.load("reward", name, **options)
    assert reward(way(Task("t", prompt([shot]), answer), "I do not know.")).value == 0.0


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_perfect_form_after_few_shots_has_full_marks(way):
    reward = rlsdk.load("reward", "format", tags=["answer"])
    shots = ["<answer>1</answer>", "no form"]
    assert reward(way(Task("t", prompt(shots)), "<answer>2</answer>")).value == 1.0
    assert reward(way(Task("t", prompt(shots, "<answer>")), "2</answer>")).value == 1.0


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_an_answer_like_a_few_shot_is_the_policys_all_the_same(way):
    rollout = way(Task("t", prompt(["42", "42"])), "42")
    assert (rollout.text, rollout.response) == ("42", "42")


@pytest.mark.parametrize(
    ("workflow", "options", "metrics"),
    [
        ("dialogue", {"turns": 2}, {"right_at_first": 0.0, "right": 0.0}),
        ("best_of", {"samples": 2}, {"best": 0.0, "first": 0.0}),
        ("self_refine", {}, {}),
    ],
)
def test_workflows_that_score_their_answers_do_not_score_those_of_the_prompt(workflow, options, metrics):
    scorer = Scorer([RewardTerm(RewardSpec("countdown"), rlsdk.load("reward", "countdown"))])
    task = Task("t", prompt(["<answer>3*8</answer>"]), SUM)
    made = rlsdk.load("workflow", workflow, **options)
    (group,) = run_workflow(made, [task], chatml(), lambda _: "I do not know.", scorer=scorer, max_length=9000)
    assert group.scores[0].value == 0.0
    assert metrics.items() <= dict(group.rollouts[0].metrics).items()
    assert "3*8" not in group.rollouts[0].response


def test_what_is_stored_and_shown_tells_the_prompt_from_the_answer():
    task = Task("t", prompt(["<answer>1</answer>"], "<answer>"))
    rollout = by_chat(task, "2</answer>")
    told = transcript(rollout, Score(1.0))
    assert [m["prompt"] for m in told["messages"] if m["role"] == "assistant"] == [True, False]
    assert told["response"] == "<answer>2</answer>"
    entry = Entry(number=0, source="", state="trained", step=1, uses=1, group=Group(task, [rollout], [Score(1.0)]))
    (row,) = rollout_rows("run", entry)
    assert row["response"] == "<answer>2</answer>"
