"""Calls between the two programs of a run, and a trainer's state about an explorer that may disappear."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ray import cloudpickle
from ray.exceptions import RayActorError, TaskCancelledError

from rlsdk.cluster.actors import cause_of, died, kill
from rlsdk.cluster.portable import Surroundings
from rlsdk.config import Plan
from rlsdk.contracts.rollouts import (
    NoRolloutsError,
    RolloutCounters,
    RolloutSnapshot,
    RolloutSummary,
    TakenBatch,
    TaskCounts,
    TaskStatus,
)
from rlsdk.errors import ConfigError, EngineError, RunError
from rlsdk.rollout.scheduler import RolloutScheduler
from rlsdk.rollout.staleness import StalenessPolicy
from rlsdk.two_process.actor import ExplorerActor, ExplorerSetup
from rlsdk.two_process.agreement import (
    PeerInfo,
    TrainerPresence,
    differences,
    disagreement,
    named,
    spawn_named,
)
from rlsdk.two_process.remote import ExplorerRegistry, RemoteExplorer, added, joined
from tests.rollout.bench import Bench
from tests.trainer.fakes import make_plan


def card(tree: Mapping[str, Any], **code: str) -> PeerInfo:
    marks = {name: {"version": version} for name, version in code.items()}
    return PeerInfo("here", tree, marks)


def test_every_difference_is_named_with_both_values() -> None:
    common = {"name": "run", "reward": [{"use": "countdown"}], "eval": {}}
    ours = card({**common, "seed": 1, "log_level": "debug", "placement": {"engines": 2}}, core="1", lab="2")
    theirs = card({**common, "log_level": "info", "placement": {"engines": 3}}, core="1", lab="3")
    assert differences(theirs, ours) == [
        "placement.engines: the explorer has 3, the trainer 2",
        "seed: the explorer has no value, the trainer 1",
        "plugin lab: the explorer and the trainer have different code",
    ]
    wrong = disagreement(theirs, ours)
    assert isinstance(wrong, ConfigError) and "the trainer 2; both programs need the same" in str(wrong)
    assert disagreement(ours, attrs.evolve(ours, where="elsewhere")) is None


def test_a_list_of_another_length_is_a_difference() -> None:
    one, two = card({"trackers": [{"use": "csv"}]}), card({"trackers": []})
    assert differences(one, two) == [
        "trackers: the explorer has no value, the trainer []",
        "trackers[0].use: the explorer has 'csv', the trainer no value",
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
            records = await bench.scheduler.take(step)
            remembered = json.loads(json.dumps(bench.scheduler.state()))
            bench.scheduler.settle(records, ends)
            found = RolloutScheduler.settled(remembered, records, ends)
            assert found == json.loads(json.dumps(bench.scheduler.state()))
        await bench.scheduler.pause()
        other = Bench(StalenessPolicy(ahead=ahead, limit=9, oversample=0.5))
        other.scheduler.restore(found, {})
        counts = [other.ledger.counts(name) for name in other.names]
        assert sum(c.trained + c.filtered + c.failed for c in counts) == 4 * steps == sum(c.consumed for c in counts)

    asyncio.run(go())


def test_what_explorers_count_one_after_the_other_never_falls() -> None:
    past = added(RolloutCounters({}, 0), RolloutCounters({"engine": 2.0, "tokens": 10.0}, 3))
    assert added(past, RolloutCounters({}, 0)) == past
    assert added(past, RolloutCounters({"engine": 0.5, "tokens": 1.0}, 1)) == RolloutCounters(
        {"engine": 2.5, "tokens": 11.0}, 4
    )


def test_losses_under_consecutive_explorers_are_added_up_and_tasks_are_not() -> None:
    counts = [TaskCounts(trained=4), TaskCounts(trained=6)]
    engines = [{"lost": 2, "reasons": ["a", "b"]}, {"lost": 1, "reasons": ["c"]}]
    first, second = (RolloutSummary({"sums": c}, {}, e) for c, e in zip(counts, engines, strict=True))
    assert joined(first, second) == RolloutSummary({"sums": counts[1]}, {}, {"lost": 3, "reasons": ["a", "b", "c"]})
    assert joined(RolloutSummary({}, {}, {}), second) == second


class Stuck:
    """An explorer whose batch never comes, and whose evaluation fails in a way that cannot be pickled."""

    eval_tasks, canary_ids = 7, np.arange(3)

    def __init__(self) -> None:
        self.said: list[str] = []
        self.taking = asyncio.Event()

    def summary(self) -> RolloutSummary:
        return RolloutSummary({}, {}, {"lost": 1, "reasons": ["engine 0 died"]})

    async def take(self, version: int) -> None:
        self.taking.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.said.append("take is cancelled")

    async def evaluate(self) -> None:
        raise Untold("odd", lambda: None)

    async def scale(self, engines: int) -> None:
        raise EngineError(f"engine {engines} is on fire")

    async def snapshot(self) -> RolloutSnapshot:
        return RolloutSnapshot({"tasks": {}, "production": {}}, ())

    async def restore(self, *_: Any) -> tuple[int, int]:
        return 0, 0

    async def pause(self) -> RolloutSummary:
        self.said.append("pause")
        return self.summary()

    async def close(self) -> None:
        logging.getLogger("rlsdk.test").info("said: %s", ", ".join([*self.said, "close"]))


class Untold(Exception):
    """It does not travel."""

    def __init__(self, what: str, hook: Callable[[], None]) -> None:
        super().__init__(what)
        self.hook = hook


class StuckActor(ExplorerActor):
    """An actor with such an explorer."""

    async def _start(self, plan: Plan, *_: Any) -> Any:
        return Stuck()

    async def takes(self) -> None:
        """Wait until the explorer works on a batch."""
        await self._ready.wait()
        assert isinstance(self._explorer, Stuck)
        await self._explorer.taking.wait()


@pytest.fixture
def lab(tmp_path: Path, cluster: None) -> Iterator[tuple[Plan, PeerInfo, ExplorerSetup]]:
    """A plan, its program's description, and the inputs of its explorer."""
    plan = make_plan(tmp_path)
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)  # an actor's process does not find it
    yield plan, PeerInfo.of(plan), ExplorerSetup(plan.tree, (), (), 0)
    cloudpickle.unregister_pickle_by_value(module)
    for actor in [*named(plan, "explorer").values(), *named(plan, "trainer").values()]:
        kill(actor)


def test_an_explorers_actor_works_in_the_folder_and_with_the_variables_of_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lab.py").write_text(
        "import os\n\nimport rlsdk\n\nKEY = os.environ['LAB_KEY']\n\n"
        "@rlsdk.reward('keyed', batch=True)\ndef keyed(rollouts):\n    return [1.0] * len(rollouts)\n"
    )
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**make_plan(tmp_path).tree, "reward": "lab/keyed"}))
    monkeypatch.chdir("/")
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": ""})
    environment = {"LAB_KEY": "secret", "CUDA_VISIBLE_DEVICES": "0,1", "RAY_ADDRESS": "elsewhere"}
    setup = ExplorerSetup("config.yaml", ("seed=5",), ("lab.py",), 0, Surroundings(str(tmp_path), environment))
    plan = setup.plan()
    assert plan.config.seed == 5 and [each.reference.name for each in plan.rewards] == ["lab/keyed"]
    assert os.environ == {"LAB_KEY": "secret", "CUDA_VISIBLE_DEVICES": ""}


async def ask(explorer: Any, method: str, *content: Any) -> Any:
    """Call a method as the trainer does."""
    try:
        return (await explorer.answer.remote([], method, *content)).value
    except Exception as error:
        raise cause_of(error) from None


async def test_what_a_call_settles_is_settled_although_the_next_call_comes_before_it_begins(tmp_path: Path) -> None:
    class Settling:
        settled = 0

        def settle(self, taken: TakenBatch, states: Sequence[TaskStatus]) -> None:
            self.settled += 1

        async def evaluate(self) -> None:
            await asyncio.sleep(60)

        async def pause(self) -> None: ...

        def summary(self) -> RolloutSummary:
            return RolloutSummary({}, {}, {})

    plan = make_plan(tmp_path)
    actor, explorer = ExplorerActor(PeerInfo.of(plan), ExplorerSetup(plan.tree, (), (), 0)), Settling()
    actor._explorer, actor._taken = explorer, [TakenBatch(records=())]
    actor._ready.set()
    await asyncio.gather(actor.answer([([], [])], "evaluate"), actor.answer([], "pause"), return_exceptions=True)
    assert explorer.settled == 1


@pytest.mark.stack
def test_what_the_trainer_waits_for_no_longer_holds_up_nothing_and_the_explorer_ends_as_the_run(lab: Any) -> None:
    plan, own, setup = lab

    async def go() -> None:
        presence = spawn_named(plan, "trainer", TrainerPresence, own)
        explorer = spawn_named(plan, "explorer", StuckActor, own, setup)
        working = asyncio.ensure_future(explorer.run.remote())
        assert await explorer.meet.remote(own, presence) == own.where
        with pytest.raises(RunError, match="it already works for the trainer"):
            await explorer.meet.remote(own, presence)
        assert (await ask(explorer, "about"))[0] == 7
        taking = asyncio.ensure_future(ask(explorer, "take", 0))
        await explorer.takes.remote()  # otherwise the next call may come first
        with pytest.raises(EngineError, match=r"^engine 3 is on fire$"):
            await ask(explorer, "scale", 3)
        with pytest.raises(TaskCancelledError):
            await taking
        with pytest.raises(RunError, match="Untold: odd"):
            await ask(explorer, "evaluate")
        assert (await ask(explorer, "pause")).engines["lost"] == 1
        await explorer.interrupt.remote()
        assert (await explorer.answer.remote([], "about")).interrupted
        await explorer.shutdown.remote("interrupted")
        assert await working == "interrupted"
        records: list[Any] = []
        while not records or records[-1] is not None:
            records += await explorer.next_records.remote()
        assert "said: take is cancelled, pause, close" in [each.getMessage() for each in records if each is not None]
        assert "EngineError: engine 3 is on fire" in (plan.folder / "logs" / "explorer.log").read_text()

    asyncio.run(asyncio.wait_for(go(), 120))


class BrokenActor(ExplorerActor):
    """An actor that cannot be created."""

    def __init__(self, *_: Any) -> None:
        raise ImportError("rlsdk of last year")


@pytest.mark.stack
def test_an_explorer_that_does_not_start_is_passed_over_and_a_call_of_one_that_ends_fails_with_the_reason(
    lab: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plan, own, setup = lab

    async def go() -> None:
        explorers = ExplorerRegistry(plan)
        broken = spawn_named(plan, "explorer", BrokenActor, own, setup)  # keep the handle: it ends with it
        meeting = asyncio.ensure_future(explorers.meet())
        while "an explorer did not start: ImportError: rlsdk of last year" not in caplog.text:
            assert not meeting.done(), meeting
            await asyncio.sleep(0.05)
        explorer = spawn_named(plan, "explorer", StuckActor, own, setup)
        working = asyncio.ensure_future(explorer.run.remote())
        assert await meeting == explorer != broken
        taking = asyncio.ensure_future(ask(explorer, "take", 0))
        await explorer.takes.remote()
        kill(explorers._presence)
        for call in (taking, ask(explorer, "about")):
            with pytest.raises(RunError, match=r"the explorer has ended: the trainer, .* is gone"):
                await call
        with pytest.raises(RunError, match=r"the trainer, .* is gone: .*[^.]\. Its log"):
            await working
        kill(explorer)
        with pytest.raises(RayActorError):  # it may still answer for a moment
            while True:
                with suppress(RunError):
                    await ask(explorer, "about")
                await asyncio.sleep(0.05)
        rollouts = RemoteExplorer(plan, explorers, explorer)
        rollouts._state, rollouts.ending = {"production": {}}, lambda: True
        with pytest.raises(NoRolloutsError, match="the run was asked to end"):
            await rollouts.take(1)
        assert (await rollouts.snapshot()).state == {"production": {}}  # what the trainer has done can be saved
        assert len((await rollouts.pause()).explorers_lost) == 1
        placement = attrs.evolve(plan.config.placement, partner_timeout=0.1)
        explorers._plan = attrs.evolve(plan, config=attrs.evolve(plan.config, placement=placement))
        in_vain = RemoteExplorer(plan, explorers, explorer)
        with pytest.raises(NoRolloutsError, match=r"no explorer connected .* placement.partner_timeout=0.1 s"):
            await in_vain.take(1)
        explorers._plan = plan  # a second wait would be long
        with pytest.raises(NoRolloutsError, match=r"partner_timeout=0.1 s"):
            await in_vain.evaluate()

    asyncio.run(asyncio.wait_for(go(), 120))


@pytest.mark.slow
@pytest.mark.stack
def test_an_explorer_of_other_settings_is_refused_at_once_while_the_trainer_works_with_another(lab: Any) -> None:
    plan, own, setup = lab

    async def go() -> None:
        busy = ExplorerRegistry(plan)  # it looks for no explorer
        other = attrs.evolve(own, tree={**own.tree, "seed": 99})
        stand_by, refused = (spawn_named(plan, "explorer", StuckActor, each, setup) for each in (own, other))
        waiting = asyncio.ensure_future(stand_by.run.remote())
        with pytest.raises(ConfigError, match="seed: the explorer has 99"):
            await refused.run.remote()
        assert not waiting.done()
        await stand_by.interrupt.remote()
        assert await waiting == "interrupted"
        kill(busy._presence)

    asyncio.run(asyncio.wait_for(go(), 120))


@pytest.mark.slow
@pytest.mark.stack
def test_an_explorer_of_other_settings_is_refused_and_one_that_dies_is_replaced(lab: Any) -> None:
    plan, own, setup = lab

    async def go() -> None:
        explorers = ExplorerRegistry(plan)
        other = spawn_named(plan, "explorer", StuckActor, attrs.evolve(own, tree={**own.tree, "seed": 99}), setup)
        refused = asyncio.ensure_future(other.run.remote())
        meeting = asyncio.ensure_future(explorers.meet())
        with pytest.raises(ConfigError, match="seed: the explorer has 99"):
            await refused
        first, second = (spawn_named(plan, "explorer", StuckActor, own, setup) for _ in range(2))
        working = [asyncio.ensure_future(each.run.remote()) for each in (first, second)]
        rollouts = RemoteExplorer(plan, explorers, await meeting)
        await rollouts.start()
        assert rollouts.eval_tasks == 7
        met, left = (first, second) if rollouts._explorer == first else (second, first)
        kill(met)
        with pytest.raises(EngineError, match="engine 3 is on fire"):
            await rollouts.scale(3)
        assert rollouts._explorer == left
        summary = await rollouts.pause()
        assert len(summary.explorers_lost) == 1
        assert summary.engines == {"lost": 2, "reasons": ["engine 0 died"] * 2, "sampled_again": 0}
        resumed = RemoteExplorer(plan, explorers, left)
        await resumed.restore(0, json.loads(json.dumps((await rollouts.snapshot()).state)), {})
        assert len((await resumed.pause()).explorers_lost) == 1
        await rollouts.shutdown("finished")
        ends = await asyncio.gather(*working, return_exceptions=True)
        assert "finished" in ends and any(died(each) for each in ends if isinstance(each, BaseException))

    asyncio.run(asyncio.wait_for(go(), 120))
