"""Environments of one turn and of several: as tasks, played by a scripted policy, scored by their own functions."""

from __future__ import annotations

import asyncio
import json
import pickle

import pytest

import rlsdk
from rlsdk.contracts import RewardSpec
from rlsdk.errors import DataError, EngineError, OptionError
from rlsdk.testing import RewardTerm, Scorer, run_workflow
from rlsdk.types import Message, Rollout, Task


def load(**options):
    from rlsdk_verifiers.tasks import tasks

    return rlsdk.load("tasks", tasks, **options)()


def scored(rollout):
    from rlsdk_verifiers.rubric import rubric

    return rlsdk.load("reward", rubric)(rollout)


def play(task, chat):
    from rlsdk_verifiers.workflow import workflow

    return asyncio.run(rlsdk.load("workflow", workflow)(task, chat))


# --- tasks


def test_tasks_hold_what_the_environment_gives():
    tasks = load(environment="vf-sums", config={"taskset": {"largest": 3}})
    assert len(tasks) == 9
    task = tasks[5]
    assert (task.id, task.answer, task.source) == ("vf-sums/5", "5", "vf-sums")
    assert task.prompt == (Message("system", "Add."), Message("user", "2+3?"))
    assert json.loads(json.dumps(dict(task.metadata))) == dict(task.metadata)
    assert list(pickle.loads(pickle.dumps(tasks))) == list(tasks)
    assert load(environment="vf-guess", chat=False)[0].prompt == "Guess a number from 1 to 9."


def test_which_tasks_is_an_option():
    few = load(environment="vf-sums", select={"include": {"idx": ["2:7"]}, "limit": 3})
    assert [task.id for task in few] == ["vf-sums/2", "vf-sums/3", "vf-sums/4"]
    train, test = ({t.id for t in load(environment="vf-sums", split=split)} for split in ("train", "test"))
    assert not train & test
    assert len(train | test) == 81
    assert 2 <= len(test) <= 20


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"environment": "nowhere"}, "environment: nowhere: ModuleNotFoundError: taskset 'nowhere' not found"),
        (
            {"environment": "vf-sums", "config": {"taskset": {"largest": "x", "larges": 2}}},
            r"config: vf-sums: taskset\.largest: Input should be .*, got 'x'; taskset\.larges: Extra inputs .*, got 2$",
        ),
        ({"environment": "vf-sums", "select": {"limit": 0}}, "select: limit: Input should be .*, got 0$"),
        ({"environment": "vf-sums", "select": {"include": {"ids": ["?"]}}}, "select: selects no task of vf-sums"),
        ({"environment": "vf-boxed"}, "environment: vf-boxed needs a runtime, for tests_pass"),
        ({"environment": "vf-sums", "config": {"id": "user-sim"}}, "needs several agents .assistant, user."),
        ({"environment": "vf-sums", "config": {"agent": {"harness": {"id": "codex"}}}}, "needs the harness codex"),
        ({"environment": "vf-guess", "select": {"limit": 1}, "split": "test"}, "split: none of 1 tasks"),
    ],
)
def test_wrong_options_and_what_cannot_be_served_are_faults(options, cause):
    with pytest.raises(OptionError, match=cause):
        load(**options)


# --- one turn


@pytest.fixture
def sum_task():
    return load(environment="vf-sums")[1]  # 1+2?


def test_one_turn_is_sampled_and_scored_by_the_environment(sum_task, codec):
    from rlsdk_verifiers.rubric import rubric
    from rlsdk_verifiers.workflow import workflow

    ready = Scorer([RewardTerm(RewardSpec("rubric"), rlsdk.load("reward", rubric))])
    ((right,), (wrong,)) = (
        run_workflow(rlsdk.load("workflow", workflow), [sum_task], codec, lambda _, a=a: a, scorer=ready)
        for a in ("3", "none")
    )
    (rollout,), (score,) = right.rollouts, right.scores
    assert codec.decode([rollout.token_ids[rollout.loss_mask]]) == ["3"]
    assert score.value == 1.5
    assert {name: score.metrics[name] for name in ("exact", "brief", "turns", "cut")} == {
        "exact": 1.0,
        "brief": 1.0,
        "turns": 1.0,
        "cut": 0.0,
    }
    assert (wrong.scores[0].value, wrong.scores[0].metrics["exact"]) == (0.0, 0.0)


def test_text_alone_is_scored_too(sum_task):
    assert scored(Rollout.from_text(sum_task, "3")).value == 1.5
    assert scored(Rollout.from_text(sum_task, "3", "truncated")).metrics["cut"] == 1.0

    async def within_a_loop():
        return scored(Rollout.from_text(sum_task, "3"))

    assert asyncio.run(within_a_loop()).value == 1.5


def test_a_reward_that_raises_is_invalid(sum_task):
    found = scored(Rollout.from_text(sum_task, "boom"))
    assert not found.valid
    assert found.reason == "TaskError: task SumTask scoring: RuntimeError: the grader is down"


def test_tasks_of_other_sources_are_faults_of_the_data():
    with pytest.raises(DataError, match=r"task 'x' did not come from verifiers/tasks: .*it has: level"):
        scored(Rollout.from_text(Task("x", "?", metadata={"level": 1}), "3"))
    held = {"environment": "nowhere", "config": {}, "data": {}}
    with pytest.raises(DataError, match="task 'x': nowhere: ModuleNotFoundError"):
        scored(Rollout.from_text(Task("x", "?", metadata=held), "3"))


# --- several turns


@pytest.fixture
def guess():
    return load(environment="vf-guess")[0]  # 3


def test_several_turns_are_one_rollout_of_sampled_and_sent_tokens(guess, chat, codec):
    rollout = play(guess, chat(guess, "7", "2", "3"))
    roles = [(m.role, m.content) for m in rollout.messages]
    assert roles == [
        ("user", "Guess a number from 1 to 9."),
        ("assistant", "7"),
        ("user", "lower"),
        ("assistant", "2"),
        ("user", "higher"),
        ("assistant", "3"),
    ]
    assert codec.decode([rollout.token_ids[rollout.loss_mask]]) == ["723"]
    assert "lower" in codec.decode([rollout.token_ids[~rollout.loss_mask]])[0]
    score = scored(rollout)
    assert score.value == pytest.approx(1.0 + 0.5 / 3)
    assert rollout.metrics["found"] == 1.0
    assert rollout.metrics["early"] == pytest.approx(1 / 3)
    assert (rollout.metrics["guesses"], rollout.metrics["verifiers/turns"]) == (3.0, 3.0)


@pytest.mark.parametrize(
    ("answers", "turns", "left"),
    [
        (("3", "never"), 1, 1),  # the environment ends it
        (("9", "I give up", "never"), 2, 1),  # a stop of the task does
        (("9", "9", "9", "9", "never"), 4, 1),  # max_turns of the agent
    ],
)
def test_an_episode_ends_where_verifiers_would_end_it(guess, chat, answers, turns, left):
    spoken = chat(guess, *answers)
    rollout = play(guess, spoken)
    assert rollout.metrics["verifiers/turns"] == turns
    assert len(spoken.left) == left
    assert scored(rollout).value == pytest.approx((answers[0] == "3") + 0.5 / turns)


def test_an_episode_that_fills_the_model_is_truncated_and_scored(guess, chat):
    rollout = play(guess, chat(guess, "9", "8", "7", "never", max_length=110))
    assert rollout.status == "truncated"
    assert 1 <= rollout.metrics["verifiers/turns"] <= 3
    assert scored(rollout).value == pytest.approx(0.5 / rollout.metrics["verifiers/turns"])


def test_a_limit_is_an_option_of_the_environment(chat):
    task = load(environment="vf-guess", config={"player": {"max_turns": 2}})[0]
    assert play(task, chat(task, "9", "9", "never")).metrics["verifiers/turns"] == 2


def test_what_the_environment_raises_fails_the_rollout(guess, chat):
    with pytest.raises(RuntimeError, match="the game crashed"):
        play(guess, chat(guess, "crash"))


def test_an_engine_that_fails_is_not_swallowed(guess, codec):
    from rlsdk_verifiers.workflow import workflow

    def broken(_):
        raise EngineError("no engine")

    with pytest.raises(ExceptionGroup) as caught:
        run_workflow(rlsdk.load("workflow", workflow), [guess], codec, broken)
    assert caught.group_contains(EngineError, match="no engine")


def test_an_episode_is_not_scored_without_being_played(guess):
    with pytest.raises(DataError, match="GuessEnv scores an episode while it runs; use workflow"):
        scored(Rollout.from_text(guess, "3"))


def test_no_client_of_a_model_server_is_made(guess, sum_task, chat, monkeypatch):
    import openai

    def refuse(*_, **__):
        raise AssertionError("a client was made")

    monkeypatch.setattr(openai.AsyncOpenAI, "__init__", refuse)
    monkeypatch.setattr(openai.OpenAI, "__init__", refuse)
    assert scored(play(guess, chat(guess, "3"))).value == 1.5
    assert scored(play(sum_task, chat(sum_task, "3"))).value == 1.5
