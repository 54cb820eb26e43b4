"""How two programs of a run ask each other, and what a trainer remembers of an explorer that may be gone tomorrow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsdk.contracts.rollouts import RolloutCounters, TakenBatch, TaskStatus
from rlsdk.errors import ConfigError, EngineError, RunError
from rlsdk.rollout.production import StalenessPolicy
from rlsdk.trainer.two_process.messages import (
    GoneError,
    Mailbox,
    PeerInfo,
    ask,
    differences,
    disagreement,
    opened,
    reply,
    tell,
    until_gone,
)
from rlsdk.trainer.two_process.remote import added, settled
from rlsdk.trainer.two_process.server import ExplorerServer
from tests.rollout.bench import Bench


def test_letters_are_read_in_their_order_and_each_gets_its_own_answer() -> None:
    async def go() -> None:
        mailbox = Mailbox()
        calls = [asyncio.create_task(mailbox.call("double", n)) for n in range(3)]
        await asyncio.sleep(0)
        await mailbox.notify("hello", None)
        letters = [await mailbox.next() for _ in range(4)]
        assert [(name, content) for _, name, content in letters] == [
            ("double", 0), ("double", 1), ("double", 2), ("hello", None),
        ]  # fmt: skip
        for number, _, content in reversed(letters[:3]):
            assert number is not None
            await mailbox.answer(number, 2 * content)
        assert letters[3][0] is None
        assert await asyncio.gather(*calls) == [0, 2, 4]

    asyncio.run(go())


def test_who_reads_waits_for_a_letter_and_an_answer_to_somebody_who_went_harms_nobody() -> None:
    async def go() -> None:
        mailbox = Mailbox()
        reader = asyncio.create_task(mailbox.next())
        await asyncio.sleep(0.01)
        assert not reader.done()
        caller = asyncio.create_task(mailbox.call("slow", None))
        number, *_ = await reader
        assert number is not None
        caller.cancel()
        await asyncio.wait([caller])
        await mailbox.answer(number, "too late")
        await mailbox.answer(99, "nobody asked")
        stays = asyncio.create_task(mailbox.stay())
        assert not (await asyncio.wait([stays], timeout=0.05))[0]
        stays.cancel()

    asyncio.run(go())


def card(tree: Mapping[str, Any], **code: str) -> PeerInfo:
    marks = {name: {"version": version} for name, version in code.items()}
    return PeerInfo(name="explorer-1", mailbox=None, where="here", tree=tree, code=marks)


def test_every_difference_is_named_with_both_values() -> None:
    common = {"name": "run", "reward": [{"use": "countdown"}], "eval": {}}
    ours = card({**common, "seed": 1, "log_level": "debug", "placement": {"engines": 2}}, core="1", lab="2")
    theirs = card({**common, "log_level": "info", "placement": {"engines": 3}}, core="1", lab="3")
    assert differences(theirs, ours) == [
        "placement.engines: the explorer has 3, the trainer 2",
        "seed: the explorer has nothing there, the trainer 1",
        "plugin lab: the explorer has other code of it than the trainer",
    ]
    wrong = disagreement(theirs, ours)
    assert isinstance(wrong, ConfigError) and "the trainer 2; both take the same" in str(wrong)
    assert disagreement(ours, attrs.evolve(ours, where="elsewhere")) is None


def test_a_list_of_another_length_is_a_difference() -> None:
    one, two = card({"trackers": [{"use": "csv"}]}), card({"trackers": []})
    assert differences(one, two) == [
        "trackers: the explorer has nothing there, the trainer []",
        "trackers[0].use: the explorer has 'csv', the trainer nothing there",
    ]


@given(
    st.lists(st.sampled_from([TaskStatus.TRAINED, TaskStatus.FILTERED, TaskStatus.FAILED]), min_size=4, max_size=4),
    st.integers(0, 2),
    st.integers(1, 3),
)
def test_what_is_remembered_of_a_batch_that_was_settled_is_what_the_explorer_itself_would_say(
    ends: list[TaskStatus], ahead: int, steps: int
) -> None:
    async def go() -> None:
        bench = Bench(StalenessPolicy(ahead=ahead, limit=9, oversample=0.5), lambda number: 0.0)
        for step in range(steps):
            tickets = await bench.production.take(step)
            remembered = json.loads(json.dumps({"production": bench.production.state()}))
            bench.production.settle(tickets, ends)
            found = settled(remembered, TakenBatch(tickets=tuple(tickets)), ends)
            assert found["production"] == json.loads(json.dumps(bench.production.state()))
        await bench.production.pause()
        other = Bench(StalenessPolicy(ahead=ahead, limit=9, oversample=0.5))
        other.production.restore(found["production"])
        counts = [other.book.counts(name) for name in other.names]
        assert sum(c.trained + c.filtered + c.failed for c in counts) == 4 * steps == sum(c.consumed for c in counts)

    asyncio.run(go())


def test_what_explorers_count_one_after_the_other_never_falls() -> None:
    past = added(RolloutCounters({}, 0), RolloutCounters({"engine": 2.0, "tokens": 10.0}, 3))
    assert added(past, RolloutCounters({}, 0)) == past
    assert added(past, RolloutCounters({"engine": 0.5, "tokens": 1.0}, 1)) == RolloutCounters(
        {"engine": 2.5, "tokens": 11.0}, 4
    )


class Stuck:
    """An explorer whose batch never comes."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def sources(self) -> dict[str, Any]:
        return {}

    async def take(self, step: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.said.append("take is cancelled")

    async def counters(self) -> int:
        return 7

    async def pause(self) -> str:
        self.said.append("pause")
        return "summary"

    async def close(self) -> None:
        self.said.append("close")


@pytest.mark.stack
def test_what_the_trainer_waits_for_no_longer_holds_up_nothing_and_the_explorer_ends_as_the_run(cluster: None) -> None:
    import ray

    async def go() -> None:
        own, trainer = (
            attrs.evolve(card({}), mailbox=ray.remote(Mailbox).options(num_cpus=0).remote()) for _ in range(2)
        )
        desk, explorer = ExplorerServer(None, own), Stuck()  # type: ignore[arg-type]
        desk.trainer = trainer
        serving = asyncio.create_task(desk.serve(explorer))  # type: ignore[arg-type]
        assert (await ask(own.mailbox, "counters", [])).value == 7
        taking = asyncio.create_task(ask(own.mailbox, "take", [], 0))
        await asyncio.sleep(0.5)
        taking.cancel()
        async with asyncio.timeout(20):
            assert (await ask(own.mailbox, "pause", [])).value == "summary"
            await tell(own.mailbox, "shutdown", "interrupted")
            assert await serving == "interrupted"
        assert explorer.said == ["take is cancelled", "pause", "close"]
        for each in (own, trainer):
            ray.kill(each.mailbox)

    asyncio.run(go())


class Untold(Exception):
    """It does not travel."""

    def __init__(self, what: str, hook: Callable[[], None]) -> None:
        super().__init__(what)
        self.hook = hook


@pytest.mark.stack
def test_values_and_errors_travel_and_the_end_of_a_program_is_heard_at_once(cluster: None) -> None:
    import ray

    mailbox = ray.remote(Mailbox).options(num_cpus=0).remote()

    async def owner() -> None:
        while True:
            number, name, content = await mailbox.next.remote()
            arguments = await opened(content)
            errors = {"engine": EngineError("engine 3 is on fire"), "odd": Untold("odd", lambda: None)}
            await mailbox.answer.remote(number, reply(arguments, errors.get(name), "beside"))

    async def go() -> None:
        serving = asyncio.create_task(owner())
        found = await ask(mailbox, "sum", 1, [2])
        assert (found.value, found.beside) == ((1, [2]), "beside")
        with pytest.raises(EngineError, match="engine 3 is on fire"):
            await ask(mailbox, "engine")
        with pytest.raises(RunError, match="Untold: odd"):
            await ask(mailbox, "odd")
        serving.cancel()
        await asyncio.wait([serving])
        waiting: list[Awaitable[Any]] = [asyncio.create_task(ask(mailbox, "never")), asyncio.create_task(gone())]
        await asyncio.sleep(0.2)
        ray.kill(mailbox)
        async with asyncio.timeout(20):
            with pytest.raises(GoneError):
                await waiting[0]
            assert await waiting[1]
            with pytest.raises(GoneError):
                await ask(mailbox, "after the end")

    async def gone() -> str:
        return await until_gone(mailbox)

    asyncio.run(go())
