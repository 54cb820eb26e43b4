"""The best of several answers counts."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs
import pytest

import rlsdk
from rlsdk.contracts import Finish, Sampling
from rlsdk.engines.client import GenerateRequest
from rlsdk.errors import OptionError
from rlsdk.rollout.chat import Prompt, RolloutContext, TokenChat
from rlsdk.rollout.generator import RolloutGenerator
from rlsdk.testing import ScriptedPolicy, run_workflow
from rlsdk.types import Rollout, Score, Task
from tests.rollout.codecs import chatml, plain

TASK = Task(id="t", prompt="1+1=")


class Length:
    """Longer is better; an answer with a 9 cannot be scored."""

    async def score(self, rollout: Rollout) -> Score:
        return Score.invalid("nine") if "9" in rollout.text else Score(len(rollout.text))


def best(*answers: str) -> tuple[Rollout, Score]:
    said = iter(answers)
    workflow = rlsdk.load("workflow", "best_of", samples=len(answers))
    scorer: Any = Length()
    [group] = run_workflow(workflow, [TASK], chatml(), lambda _: next(said), scorer=scorer)
    return group.rollouts[0], group.scores[0]


def test_the_best_answer_is_the_rollout() -> None:
    rollout, score = best("12", "9999", "1234", "1")
    assert rollout.text == "1234"
    assert score.value == 4
    assert rollout.metrics["best"] == 4
    assert rollout.metrics["mean"] == pytest.approx(7 / 3)
    assert rollout.metrics["first"] == 2
    assert int(rollout.loss_mask.sum()) == 5  # one answer and its end, nothing of the others


def test_where_none_can_be_scored_the_rollout_cannot() -> None:
    rollout, score = best("9", "99")
    assert not score.valid
    assert rollout.text in ("9", "99")


def test_answers_that_were_stopped_from_outside_leave_the_best_to_be_found_again() -> None:
    class Policy(ScriptedPolicy):
        def sample(self, request: GenerateRequest) -> Any:
            done = super().sample(request).result()
            finish: Finish = "abort" if len(self.prompts) == 1 else "stop"
            future = asyncio.get_running_loop().create_future()
            future.set_result(attrs.evolve(done, completion=attrs.evolve(done.completion, finish=finish)))
            return future

    said = iter(["1", "1234"])
    policy: Any = Policy(plain(), lambda _: next(said))
    setting = RolloutContext(codec=plain(), client=policy, sampling=Sampling(max_tokens=9), max_length=99)
    scorer: Any = Length()
    generator = RolloutGenerator(rlsdk.load("workflow", "best_of", samples=2), scorer, 0)
    [group] = asyncio.run(generator.produce([TASK], setting, 1, "test"))
    assert group.rollouts[0].status == "aborted"
    assert not group.scores[0].valid


def test_at_least_one_answer() -> None:
    with pytest.raises(OptionError, match="samples"):
        rlsdk.load("workflow", "best_of", samples=0)
    with pytest.raises(OptionError, match="max_tokens: expected int >= 1 or null, got 0"):
        rlsdk.load("workflow", "best_of", max_tokens=0)


@pytest.mark.parametrize("seed", [None, 7])
def test_branches_continue_separately_with_their_own_seeds(seed: int | None) -> None:
    codec = plain()
    seeds: list[int | None] = []

    class Policy(ScriptedPolicy):
        def sample(self, request: GenerateRequest) -> Any:
            seeds.append(request.seed)
            return super().sample(request)

    async def talk() -> tuple[Rollout, Rollout, Rollout]:
        policy: Any = Policy(codec, lambda text: str(len(text)))
        setting = RolloutContext(codec=codec, client=policy, sampling=Sampling(max_tokens=9), max_length=99)
        chat = TokenChat(Prompt(TASK, *codec.prompt(TASK)), setting, "g", seed)
        await chat.sample()
        chat.reward(1.0)
        one, other = chat.branch(), chat.branch()
        one.say("1")
        other.say("22")
        await one.sample()
        await other.sample()
        one.reward(2.0)
        await one.branch().sample()
        return chat.finish(), one.finish(), other.finish()

    chat, one, other = asyncio.run(talk())
    assert [len(r.messages) for r in (chat, one, other)] == [2, 4, 4]
    assert [m.content for m in one.messages[2:]] != [m.content for m in other.messages[2:]]
    shared = len(chat.token_ids)
    for branch in (one, other):
        assert branch.token_ids[:shared].tolist() == chat.token_ids.tolist()
    assert [len(r.rewards) for r in (chat, one, other)] == [1, 2, 1]
    assert len(set(seeds)) == (1 if seed is None else 4)
