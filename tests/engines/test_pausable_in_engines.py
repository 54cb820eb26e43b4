"""Answers interrupted during a weight change and continued afterwards, on real engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tiny

from rlsdk.contracts import ActorSpec, Completion, Model, Request, Sampling
from rlsdk.engines.actor import EngineActor
from rlsdk.engines.client import EngineClient, GenerateRequest
from rlsdk.engines.pausable import PausableClient, joined
from rlsdk.plugins import Plugins
from rlsdk.rollout.codec import ChatTokenizer

PROMPT = np.array([17, 3, 18, 11])
LONG = Sampling(max_tokens=200, ignore_eos=True)
Body = Callable[[EngineClient, ChatTokenizer, Any], Awaitable[Any]]


class Remote:
    """A method of an actor in this process, called as Ray calls it."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.remote = method

    def options(self, **_: Any) -> Remote:
        return self


class Local:
    """The actor around an engine, in this process."""

    def __init__(self, actor: EngineActor) -> None:
        self.owner = actor
        self.generate = Remote(self._generate)
        self.abort, self.load_weights = (
            Remote(lambda *a, call=call: asyncio.ensure_future(call(*a))) for call in (actor.abort, actor.load_weights)
        )

    async def _generate(self, requests: list[Request]) -> AsyncIterator[Awaitable[Any]]:
        async for part in self.owner.generate(requests):
            done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            done.set_result(part)
            yield done


@pytest.fixture(params=["transformers", pytest.param("vllm", marks=pytest.mark.stack)])
def play(request: pytest.FixtureRequest, model: Model) -> Iterator[Callable[[Body], Any]]:
    """Runs a test on an engine that holds the folder's weights as version 0."""
    codec = ChatTokenizer(tiny.make_tokenizer())
    vllm = request.getfixturevalue("vllm_engine").actor if request.param == "vllm" else None

    async def main(body: Body) -> Any:
        actor: Any = vllm
        if actor is None:
            actor = Local(EngineActor(Plugins().reference("engine", "transformers", {"max_num_seqs": 24})))
            await actor.owner.start(model, ActorSpec(role="engine"))
        await actor.load_weights.remote(tiny.original(model))
        try:
            return await asyncio.wait_for(body(EngineClient([actor], codec.decode), codec, actor), 60)
        finally:
            if vllm is None:
                await actor.owner.stop()

    yield lambda body: asyncio.run(main(body))


async def interrupted(
    pausable: PausableClient, actor: Any, model: Model, *, members: int, seed: int | None
) -> list[Completion]:
    """A group whose weights change while it is sampled."""
    asked = [
        asyncio.ensure_future(pausable.sample(GenerateRequest("g", PROMPT, LONG, seed=seed))) for _ in range(members)
    ]
    await asyncio.sleep(0.1)
    assert not any(one.done() for one in asked)
    async with pausable.held(again=0.2):
        await actor.load_weights.remote(tiny.changed(model, 1))
    return [answer.completion for answer in await asyncio.gather(*asked)]


@pytest.mark.parametrize("seed", [None, 7])
def test_answers_go_on_with_new_weights_token_for_token(
    play: Callable[[Body], Any], model: Model, seed: int | None
) -> None:
    async def body(client: EngineClient, codec: ChatTokenizer, actor: Any) -> list[Completion]:
        pausable = PausableClient(client, codec.decode)
        done = await interrupted(pausable, actor, model, members=3, seed=seed)
        assert pausable.resumed == 3
        assert pausable.dropped == 0
        return done

    done = play(body)
    reference = {0: tiny.original(model), 1: tiny.changed(model, 1)}
    for completion in done:
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions) == 200
        assert set(completion.versions.tolist()) == {0, 1}
        assert (np.diff(completion.versions) >= 0).all()
        whole = np.concatenate([PROMPT, completion.token_ids])
        for version, weights in reference.items():
            own = completion.versions == version
            expected = tiny.reference_logprobs(model, whole, weights)[len(PROMPT) - 1 :]
            np.testing.assert_allclose(completion.logprobs[own], expected[own], atol=2e-4)
    assert len({completion.token_ids.tobytes() for completion in done}) == 3


def test_without_partial_rollouts_they_start_again_with_all_their_tokens(
    play: Callable[[Body], Any], model: Model
) -> None:
    async def body(client: EngineClient, codec: ChatTokenizer, actor: Any) -> tuple[PausableClient, list[Completion]]:
        pausable = PausableClient(client, codec.decode, partial=False)
        return pausable, await interrupted(pausable, actor, model, members=2, seed=3)

    pausable, done = play(body)
    assert all(set(c.versions.tolist()) == {1} and len(c.token_ids) == 200 for c in done)
    assert pausable.dropped > 0
    assert not np.array_equal(done[0].token_ids, done[1].token_ids)


def test_a_stop_string_is_found_where_it_begins_before_the_interruption(play: Callable[[Body], Any]) -> None:
    async def body(client: EngineClient, codec: ChatTokenizer, actor: Any) -> None:
        pausable = PausableClient(client, codec.decode)
        whole = (
            await pausable.sample(GenerateRequest("g", PROMPT, Sampling(temperature=0, max_tokens=40, ignore_eos=True)))
        ).completion
        texts = codec.decode([whole.token_ids[i : i + 1] for i in range(40)])
        cut = next(
            i for i in range(1, 40) if "".join(texts).find(texts[i - 1] + texts[i]) == len("".join(texts[: i - 1]))
        )
        stops = Sampling(temperature=0, max_tokens=40, stop=(texts[cut - 1] + texts[cut],))
        before = {name: getattr(whole, name)[:cut] for name in ("token_ids", "logprobs", "versions")}
        begun = Completion(request="b", index=0, finish="abort", **before)
        answer = await pausable.sample(GenerateRequest("g", PROMPT, stops), begun=begun)
        assert answer.completion.finish == "stop"
        assert answer.completion.token_ids.tolist() == whole.token_ids[: cut + 1].tolist()
        assert answer.text.endswith(stops.stop[0])

    play(body)


def test_members_that_hold_the_same_beginning_and_seed_go_on_differently(play: Callable[[Body], Any]) -> None:
    async def body(client: EngineClient, codec: ChatTokenizer, actor: Any) -> None:
        pausable = PausableClient(client, codec.decode)
        first = (
            await pausable.sample(GenerateRequest("g", PROMPT, Sampling(max_tokens=3, ignore_eos=True), seed=5))
        ).completion
        short = Sampling(max_tokens=12, ignore_eos=True)
        same = [Completion(request="b", index=i, **_arrays(first), finish="abort") for i in range(3)]
        done = await asyncio.gather(
            *(pausable.sample(GenerateRequest("g", PROMPT, short, seed=5), begun=one) for one in same)
        )
        rests = [answer.completion.token_ids[3:] for answer in done]
        assert [len(rest) for rest in rests] == [9, 9, 9]
        assert len({rest.tobytes() for rest in rests}) == 3
        again = (await pausable.sample(GenerateRequest("g", PROMPT, short, seed=5))).completion
        assert all(not np.array_equal(rest, again.token_ids[:9]) for rest in rests)  # nor is the stream begun again

    play(body)


def _arrays(completion: Completion) -> dict[str, np.ndarray]:
    return {name: getattr(completion, name) for name in ("token_ids", "logprobs", "versions")}


def test_two_parts_are_one_answer() -> None:
    def part(tokens: list[int], version: int, finish: Any) -> Completion:
        arrays = {"token_ids": np.array(tokens), "logprobs": -np.ones(len(tokens), np.float32)}
        return Completion(request="r", index=1, versions=np.full(len(tokens), version), finish=finish, **arrays)

    both = joined(part([1, 2], 3, "abort"), part([4], 5, "length"))
    assert both.token_ids.tolist() == [1, 2, 4]
    assert both.versions.tolist() == [3, 3, 5]
    assert both.logprobs.dtype == np.float32
    assert both.finish == "length"
