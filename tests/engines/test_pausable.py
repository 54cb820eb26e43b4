"""The pausable client of the engines: waiting, interrupted and continued requests, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import numpy as np
import pytest

import rlsdk
from rlsdk.contracts import Completion, RewardSpec, Sampled, Sampling
from rlsdk.engines.client import Answer, GenerateRequest
from rlsdk.engines.pausable import PausableClient, beginning
from rlsdk.rollout.chat import RolloutContext
from rlsdk.rollout.generator import RolloutGenerator
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.types import Group, Rollout, Score, Task
from tests.rollout.codecs import plain

PROMPT = np.array([5, 6])
TASK = Task(id="t", prompt="3,5>8:")


class Engines:
    """Writes 10, 11, 12, … one token a millisecond, of its present version; deaf to the first words to end."""

    def __init__(self, *, deaf: int = 0) -> None:
        self.version = self.aborts = 0
        self.deaf = deaf
        self.asked: list[tuple[list[int], Sampling, int | None, int]] = []
        self._ends: list[asyncio.Event] = []

    async def sample(self, request: GenerateRequest) -> Answer:
        serial, begun, sampling = str(len(self.asked)), request.begun, request.sampling
        self.asked.append((request.prompt.tolist(), sampling, request.seed, begun))
        end = asyncio.Event()
        self._ends.append(end)
        versions: list[int] = []
        while len(versions) < sampling.max_tokens and not end.is_set():
            await asyncio.sleep(0.001)
            versions.append(self.version)
        count = len(versions)
        done = Completion(
            request=serial,
            index=0,
            token_ids=np.arange(10 + begun, 10 + begun + count),
            logprobs=np.full(count, -0.5, np.float32),
            versions=np.array(versions, np.int64),
            finish="abort" if end.is_set() else "length",
        )
        return Answer(done, "", 0)

    def abort(self) -> None:
        self.aborts += 1
        if self.aborts > self.deaf:
            for end in self._ends:
                end.set()


def decode(ids: Any) -> list[str]:
    return [" ".join(map(str, each.tolist())) for each in ids]


def part(tokens: list[int], version: int = 0) -> Completion:
    count = len(tokens)
    arrays = {"token_ids": np.array(tokens), "logprobs": np.full(count, -0.5, np.float32)}
    return Completion(request="b", index=0, versions=np.full(count, version), finish="abort", **arrays)


async def test_interrupted_requests_continue_and_new_ones_wait() -> None:
    engines = Engines()
    pausable = PausableClient(engines, decode)
    first = asyncio.ensure_future(pausable.sample(GenerateRequest("g", PROMPT, Sampling(max_tokens=60), seed=3)))
    await asyncio.sleep(0.02)
    async with pausable.held():
        second = asyncio.ensure_future(pausable.sample(GenerateRequest("g", PROMPT, Sampling(max_tokens=2))))
        await asyncio.sleep(0.01)
        assert len(engines.asked) == 1
        engines.version = 1
    one, two = (answer.completion for answer in await asyncio.gather(first, second))
    assert one.token_ids.tolist() == list(range(10, 70))
    assert sorted(set(one.versions.tolist())) == [0, 1]
    assert (one.finish, two.finish) == ("length", "length")
    count = int((one.versions == 0).sum())
    prompt, sampling, seed, begun = engines.asked[1]
    assert (prompt, begun) == ([5, 6, *range(10, 10 + count)], count)
    assert sampling.max_tokens == 60 - count
    assert seed not in (None, 3)
    assert pausable.resumed == 1


async def test_requests_wait_until_the_last_of_several_holds_has_ended() -> None:
    engines = Engines()
    pausable = PausableClient(engines, decode)
    async with pausable.held():
        async with pausable.held():
            waiting = asyncio.ensure_future(pausable.sample(GenerateRequest("g", PROMPT, Sampling(max_tokens=2))))
        await asyncio.sleep(0.01)
        assert engines.asked == []
    assert (await waiting).completion.finish == "length"


@pytest.mark.parametrize("partial", [True, False])
async def test_a_watched_answer_that_is_ended_is_shown_as_one_or_not_at_all(partial: bool) -> None:
    class Shown(Engines):
        async def sample(self, request: GenerateRequest) -> Answer:
            if request.watch is not None:
                one = np.array([10 + request.begun])
                arrays = {"token_ids": one, "logprobs": one - 10.5, "versions": one}
                request.watch(Sampled(request="r", index=0, start=0, **arrays))
            return await super().sample(request)

    seen: list[Sampled] = []
    pausable = PausableClient(Shown(), decode, partial=partial)
    first = asyncio.ensure_future(
        pausable.sample(GenerateRequest("g", PROMPT, Sampling(max_tokens=60), watch=seen.append))
    )
    await asyncio.sleep(0.02)
    async with pausable.held():
        pass
    done = (await first).completion
    assert [done.token_ids[s.start] for s in seen] == [s.token_ids[0] for s in seen]
    assert [s.start for s in seen] == ([0, 0, len(seen[1].token_ids)] if partial else [])


async def test_a_restarted_answer_has_its_whole_token_budget() -> None:
    engines = Engines()
    pausable = PausableClient(engines, decode, partial=False)
    first = asyncio.ensure_future(pausable.sample(GenerateRequest("g", PROMPT, Sampling(max_tokens=60))))
    await asyncio.sleep(0.02)
    async with pausable.held():
        engines.version = 1
    done = (await first).completion
    assert done.versions.tolist() == [1] * 60
    assert engines.asked[1][:2] == engines.asked[0][:2]
    assert pausable.dropped > 0
    assert pausable.resumed == 0


async def test_the_request_to_end_is_repeated_until_it_arrives() -> None:
    engines = Engines(deaf=3)
    pausable = PausableClient(engines, decode)
    first = asyncio.ensure_future(pausable.sample(GenerateRequest("g", PROMPT, Sampling(max_tokens=10_000))))
    await asyncio.sleep(0.01)
    async with pausable.held(again=0.01):
        assert engines.aborts == 4
    first.cancel()


async def test_engines_that_hear_nothing_do_not_hold_the_weights_up_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    engines = Engines(deaf=1000)
    pausable = PausableClient(engines, decode)
    first = asyncio.ensure_future(pausable.sample(GenerateRequest("g", PROMPT, Sampling(max_tokens=60))))
    await asyncio.sleep(0.01)
    async with pausable.held(again=0.01, patience=0.03):
        engines.version = 1
    assert set((await first).completion.versions.tolist()) == {0, 1}  # it went on where it was
    assert "1 requests did not end" in caplog.text


@pytest.mark.parametrize(
    ("begun", "finish"),
    [
        (part([10, 7]), "stop"),  # the text's own end
        (part([10, 9]), "stop"),  # a token that ends it, by the request
        (part([10, 55, 44, 12]), "stop"),  # a string that ends it
        (part([10, 11, 12, 13, 14]), "length"),
    ],
)
async def test_a_complete_answer_is_not_sampled_again(begun: Completion, finish: str) -> None:
    engines = Engines()
    sampling = Sampling(max_tokens=5, stop=("5 4",), stop_token_ids=(9,))
    answer = await PausableClient(engines, decode, ends=[7]).sample(GenerateRequest("g", PROMPT, sampling), begun=begun)
    assert answer.completion.finish == finish
    assert answer.completion.token_ids.tolist() == begun.token_ids.tolist()
    assert engines.asked == []


async def test_requests_wait_for_a_hold_that_outlasts_an_interruption() -> None:
    engines = Engines()
    pausable = PausableClient(engines, decode)
    async with pausable.held():
        pausable.interrupt()
        pausable.release()
        waiting = asyncio.ensure_future(pausable.sample(GenerateRequest("g", PROMPT, Sampling(max_tokens=2))))
        await asyncio.sleep(1)
        assert not engines.asked
        engines.version = 1
    assert (await waiting).completion.versions.tolist() == [1, 1]


async def test_interrupted_answers_are_handed_out_as_they_are_and_none_begins() -> None:
    engines = Engines()
    pausable = PausableClient(engines, decode)
    first = asyncio.ensure_future(pausable.sample(GenerateRequest("g", PROMPT, Sampling(max_tokens=500))))
    await asyncio.sleep(0.02)
    pausable.interrupt()
    done = (await first).completion
    assert done.finish == "abort"
    assert 0 < len(done.token_ids) < 500
    late = (await pausable.sample(GenerateRequest("g", PROMPT, Sampling()))).completion
    assert (late.finish, len(late.token_ids)) == ("abort", 0)
    assert len(engines.asked) == 1
    pausable.release()
    assert (await pausable.sample(GenerateRequest("g", PROMPT, Sampling(max_tokens=3)))).completion.finish == "length"


def test_of_one_answer_at_the_end_the_beginning_is_kept_of_several_turns_nothing() -> None:
    def rollout(mask: list[bool]) -> Rollout:
        count = len(mask)
        return Rollout(TASK, (), range(count), mask, [-0.5] * count, [4 if m else -1 for m in mask], "aborted")

    prompt, kept = beginning(rollout([False, False, True, True])) or (None, None)
    assert prompt is not None and kept is not None
    assert prompt.tolist() == [0, 1]
    assert (kept.token_ids.tolist(), kept.versions.tolist()) == ([2, 3], [4, 4])
    assert beginning(rollout([False, True, False, True])) is None
    assert beginning(rollout([False, True, False])) is None
    assert beginning(rollout([False, False])) is None


@rlsdk.reward("counted")
class Counted:
    """Counts the rollouts that it scores."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, rollout: Rollout) -> float:
        self.asked += 1
        return 1.0


def group_of(pausable: PausableClient, scored: Counted, before: Group | None, key: str) -> Awaitable[Group]:
    context = RolloutContext(codec=plain(), client=pausable, sampling=Sampling(max_tokens=40), max_length=200)
    generator = RolloutGenerator(
        rlsdk.load("workflow", "single_turn"), Scorer([RewardTerm(RewardSpec("counted", 1.0), scored)]), seed=0
    )
    return generator.group(TASK, context, 2, key, before=before)


@pytest.mark.parametrize("partial", [True, False])
async def test_a_group_continues_from_an_aborted_attempts_tokens(partial: bool) -> None:
    engines, scored = Engines(), Counted()
    pausable = PausableClient(engines, decode, partial=partial)
    running = asyncio.ensure_future(group_of(pausable, scored, None, "a"))
    await asyncio.sleep(0.02)
    pausable.interrupt()
    left = await running
    assert [r.status for r in left.rollouts] == ["aborted", "aborted"]
    assert not any(score.valid for score in left.scores)
    assert scored.asked == 0  # nobody judges half an answer
    whole = Rollout(TASK, (), [1, 2], [False, True], [0.0, -1.0], [-1, 0])
    left = Group(TASK, (whole, left.rollouts[1]), (Score(0.5), left.scores[1]))
    pausable.release()
    engines.version = 1
    done = await group_of(pausable, scored, left, "b")
    assert done.rollouts[0] is whole
    assert done.scores[0].value == 0.5
    assert scored.asked == 1
    versions = done.rollouts[1].policy_versions[done.rollouts[1].loss_mask]
    assert len(versions) == 40
    assert set(versions.tolist()) == ({0, 1} if partial else {1})
