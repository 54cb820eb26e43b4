"""The workflow `agent`: functions that call the policy over HTTP, their results and their failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rlsdk
from rlsdk.contracts import RewardSpec
from rlsdk.errors import OptionError
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.testing import run_workflow
from rlsdk.types import Group, Message, Task
from tests.rollout.codecs import chatml

pytest.importorskip("aiohttp")
SOURCE = '''
import time
import httpx

def ask(base_url, *texts, **fields):
    """One answer."""
    messages = [{"role": "user", "content": text} for text in texts]
    # verify=False: there is no TLS, and reading certificates takes a while
    response = httpx.post(base_url + "/chat/completions", json={"messages": messages, **fields}, verify=False)
    response.raise_for_status()
    return response.json()["choices"][0]["message"]["content"]

def solve(task, base_url, api_key):
    ask(base_url, task.prompt[0].content)

async def solve_async(task, base_url, api_key):
    async with httpx.AsyncClient(verify=False) as client:
        body = {"messages": [{"role": "user", "content": "Hello."}]}
        (await client.post(base_url + "/chat/completions", json=body)).raise_for_status()

def rewards(task, base_url, api_key):
    return 0.25 * len(ask(base_url, "x"))

def answers(task, base_url, api_key):
    ask(base_url, "x")
    return {"answer": "forty-two", "reward": 0.5, "tools_used": 3}

def summarises(task, base_url, api_key):
    ask(base_url, "long story")
    ask(base_url, "summary")
    return "right"

def raises(task, base_url, api_key):
    ask(base_url, "x")
    raise KeyError("no such tool")

def never_asks(task, base_url, api_key):
    return None

def never_asks_but_rewards(task, base_url, api_key):
    return 1.0

def late(task, base_url, api_key):
    time.sleep(1.0)

def numpy_reward(task, base_url, api_key):
    import numpy as np
    ask(base_url, "x")
    return {"reward": np.float32(0.5), "found": np.bool_(True), "size": np.array(3)}

def refused(task, base_url, api_key):
    ask(base_url, "x")
    ask(base_url, "x", n=2)

def never_answered(task, base_url, api_key):
    try:
        ask(base_url, "x", n=2)
    except httpx.HTTPStatusError:
        pass

def wordy(task, base_url, api_key):
    ask(base_url, "very long " * 300)

def recovers(task, base_url, api_key):
    never_answered(task, base_url, api_key)
    ask(base_url, "x")
    raise KeyError("no such tool")

def not_unicode(task, base_url, api_key):
    content = b'{"messages": [{"role": "user", "content": "\\\\ud800"}]}'
    httpx.post(base_url + "/chat/completions", content=content, verify=False).raise_for_status()

def odd(task, base_url, api_key):
    ask(base_url, "x")
    return object()

def endless(task, base_url, api_key):
    while True:
        ask(base_url, "x")

def slow(task, base_url, api_key):
    ask(base_url, "x")
    time.sleep(1.5)
    ask(base_url, "y")

def own_timeout(task, base_url, api_key):
    ask(base_url, "x")
    raise TimeoutError("a tool of the agent's")

def wrong(task): ...
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("lab") / "agent_lab.py"
    path.write_text(SOURCE)
    return str(path)


def exact(rollout: Any) -> float:
    return float(rollout.text == rollout.task.answer)


def play(file: str, name: str, *answers: str, reward: Any = exact, size: int = 1, **options: Any) -> Group:
    said = iter(answers)
    workflow = rlsdk.load("workflow", "agent", agent=f"{file}:{name}", **options)
    task = Task(id="t", prompt=[Message("user", "What is 1 + 2?")], answer="right")
    scorer = Scorer([RewardTerm(RewardSpec("exact"), reward)])
    [group] = run_workflow(
        workflow, [task], chatml(), lambda _: next(said, "x"), scorer=scorer, max_tokens=50, group_size=size
    )
    return group


@pytest.mark.parametrize("name", ["solve", "solve_async"])
def test_an_agent_is_scored_by_what_the_policy_answered(file, name):
    group = play(file, name, "right", "wrong", "wrong", size=3)
    assert sorted(s.value for s in group.scores) == [0.0, 0.0, 1.0]
    assert {r.status for r in group.rollouts} == {"finished"}
    assert {r.trajectory for r in group.rollouts} == {f"test/0/{i}" for i in range(3)}


def test_a_number_is_the_reward(file):
    group = play(file, "rewards", "four", reward=rlsdk.load("reward", "environment"))
    assert group.scores[0].value == 1.0
    ((position, _),) = group.rollouts[0].rewards
    assert position == group.rollouts[0].span[1] - 1


def test_a_mapping_holds_answer_reward_and_metrics(file):
    (rollout,) = play(file, "answers", "Let me think.").rollouts
    assert (rollout.text, rollout.metrics["tools_used"]) == ("forty-two", 3.0)
    assert [value for _, value in rollout.rewards] == [0.5]
    assert rollout.span[1] == len(rollout.token_ids)  # the agent's own word has no tokens


def test_a_number_of_numpy_is_a_number(file):
    (rollout,) = play(file, "numpy_reward").rollouts
    assert [value for _, value in rollout.rewards] == [0.5]
    assert (rollout.metrics["found"], rollout.metrics["size"]) == (1.0, 3.0)


def test_a_number_that_does_not_count_is_warned_about_once(file, caplog):
    assert {s.value for s in play(file, "answers", size=3).scores} == {0.0}
    (said,) = [r.getMessage() for r in caplog.records if "gave a reward" in r.getMessage()]
    assert "this run's reward is 'exact'" in said
    caplog.clear()
    play(file, "answers", reward=rlsdk.load("reward", "environment"))
    play(file, "solve")
    assert not [r for r in caplog.records if "gave a reward" in r.getMessage()]


def test_the_score_of_the_last_conversation_applies_to_all(file):
    seen = []

    def reward(rollout: Any) -> float:
        seen.append(rollout.text)
        return exact(rollout)

    group = play(file, "summarises", "far off", "right", reward=reward)
    assert seen == ["right"]
    assert [r.text for r in group.rollouts] == ["far off", "right"]
    assert [(s.value, s.shared) for s in group.scores] == [(1.0, True), (1.0, False)]
    assert [r.step for r in group.rollouts] == [0, 1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "workflow failed: KeyError: 'no such tool'"),
        ("never_asks", "pass it `base_url`"),
        ("never_asks_but_rewards", "no answer from the policy; it sent no request; pass it `base_url`"),
        ("odd", "expected None, a number"),
        (
            "refused",
            "workflow failed: RefusedError: the agent's last request was refused: n: this server returns one",
        ),
        ("refused", "agent_lab.py, line 10)"),
        (
            "never_answered",
            "no answer from the policy; its last request was refused: n: this server returns one answer per request",
        ),
        ("wordy", "no answer from the policy; its last request was refused: task 't': "),
        ("wordy", "leave no room in model.max_length"),
        ("recovers", "workflow failed: KeyError: 'no such tool'"),
        ("not_unicode", "last request was refused: the body contains text that is not Unicode"),
        ("own_timeout", "TimeoutError: a tool of the agent's"),
    ],
)
def test_what_an_agent_does_wrong_fails_its_rollout_alone(file, name, reason):
    group = play(file, name)
    assert [r.status for r in group.rollouts] == ["failed"]
    assert not group.scores[0].valid
    assert reason in group.scores[0].reason
    unanswered = name in ("never_asks", "never_asks_but_rewards", "never_answered", "wordy", "not_unicode")
    assert group.rollouts[0].text == ("" if unanswered else "x")  # what it came to is kept


def test_limits_truncate(file):
    by_turns = play(file, "endless", max_turns=3)
    assert [r.status for r in by_turns.rollouts] == ["finished", "finished", "truncated"]
    assert {r.metrics["calls"] for r in by_turns.rollouts} == {3.0}
    by_time = play(file, "slow", "right", timeout=0.5)
    assert [(r.status, r.text) for r in by_time.rollouts] == [("truncated", "right")]
    assert by_time.scores[0].value == 1.0


def test_an_agent_that_is_late_before_its_first_request_fails_for_that_reason(file):
    [score] = play(file, "late", timeout=0.1).scores
    assert not score.valid and "the agent reached its time limit before its first request" in score.reason


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"agent": "{}:solv"}, "agent: .*did you mean 'solve'"),
        ({"agent": "{}:wrong"}, r"does not take \(task, base_url, api_key\)"),
        ({"agent": "{}:solve", "parser": "xml"}, "parser: expected deepseek, gemma, glm, harmony"),
        ({"agent": "{}:solve", "timeout": 0.0}, "timeout: expected float > 0"),
    ],
)
def test_options_are_checked(file, options, said):
    with pytest.raises(OptionError, match=said):
        rlsdk.load("workflow", "agent", **{**options, "agent": options["agent"].format(file)})
