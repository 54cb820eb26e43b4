"""The explorer with scripted groups: no engine, no Ray."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import ray

from rlsdk.contracts import Sampling
from rlsdk.contracts.rollouts import TaskStatus, UnscoredEvaluationError
from rlsdk.errors import ScoringError
from rlsdk.rollout.mixture import Source, TaskStreams
from rlsdk.rollout.stream import TaskStream
from rlsdk.trainer.explorer import Explorer
from rlsdk.types import Group, Score, Task
from rlsdk.workers.orders import GroupOrder, MadeGroup
from tests.trainer.fakes import SOURCE, make_plan
from tests.trainer.test_batch import rollout


class Engines:
    """Engines that are not asked for anything but to seed their generators.

    Attributes:
        seeded: Steps for which they did.
    """

    step = 0

    def __init__(self) -> None:
        self.seeded: list[int] = []

    async def reseed(self, seed: int, step: int) -> None:
        self.seeded.append(step)

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None: ...


class Maker:
    """Makes groups whose rewards all agree, except for every fourth task; the baseline is the number of the task.

    Attributes:
        rewards: State of the rewards.
    """

    pausable = None

    def __init__(self, unscored: Callable[[int], bool] = lambda number: False) -> None:
        self.unscored = unscored
        self.rewards: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        return self.rewards

    def restore(self, state: dict[str, Any]) -> None:
        self.rewards = state

    async def make(self, order: GroupOrder) -> MadeGroup:
        number = int(order.task.id.rpartition("/")[2])
        await asyncio.sleep(number % 7)
        sampled = attrs.evolve(rollout(1, [True]), task=order.task, policy_versions=[-1, order.step - 1])
        made = [sampled] * order.size
        scores = [Score(float(i and number % 4 == 0)) for i in range(order.size)]
        if self.unscored(number):
            scores = [Score.invalid("the judge is down")] * order.size
        return MadeGroup(Group(order.task, made, scores, uid=order.key), float(number))


def explorer(folder: Path, **parts: Any) -> Explorer:
    plan = make_plan(
        folder,
        algorithm={"use": "remax", "filters": ["nonzero_variance"]},
        rollout={"dynamic_sampling": True, "max_staleness": 1},
    )
    tasks = [Task(id=str(i), prompt=f"{i}=", source=SOURCE) for i in range(1000)]
    streams = TaskStreams([Source(SOURCE, 1.0, TaskStream(tasks, 0, lambda task: 1, 9, "drop"))])
    parts = {"engines": Engines(), "maker": Maker(), "canary": None, **parts}
    return Explorer(plan, **parts, sampling=Sampling(max_tokens=9), streams=streams)


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test may have left a Ray, whose nodes would be watched by a thread: none can be in virtual time."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("unscored", [lambda number: True, lambda number: number % 4])
async def test_groups_that_could_not_be_scored_end_the_run_though_others_replace_them(
    tmp_path: Path, unscored: Callable[[int], bool]
) -> None:
    with pytest.raises(ScoringError, match=r"more than max_invalid=0\.2 allows.* the judge is down"):
        await explorer(tmp_path, maker=Maker(unscored)).take(0)


@pytest.mark.usefixtures("no_ray")
async def test_a_batch_of_which_too_few_groups_could_be_scored_is_refused_again_when_the_step_is_repeated(
    tmp_path: Path,
) -> None:
    rollouts = explorer(tmp_path, maker=Maker(lambda number: bool(number % 4)))
    for _ in range(2):
        with pytest.raises(ScoringError, match="the judge is down"):
            await rollouts.take(0)


@pytest.mark.usefixtures("no_ray")
async def test_an_evaluation_that_cannot_be_scored_keeps_its_answers_for_a_trainer_in_another_process(
    tmp_path: Path,
) -> None:
    with pytest.raises(UnscoredEvaluationError, match=r"evaluation at step 0: 16 of 16.* the judge is down") as failed:
        await explorer(tmp_path, maker=Maker(lambda number: True)).evaluate()
    sent = pickle.loads(pickle.dumps(failed.value))
    assert str(sent) == str(failed.value)
    assert len(sent.evaluation.greedy) == len(sent.evaluation.sampled) == 8


@pytest.mark.usefixtures("no_ray")
async def test_a_step_that_is_repeated_has_the_metrics_of_its_batch(tmp_path: Path) -> None:
    rollouts = explorer(tmp_path)
    first, again = await rollouts.take(0), await rollouts.take(0)
    assert "raw/reward" in first.metrics and again == first
    rollouts.settle(again, [TaskStatus.TRAINED] * 2)
    assert (await rollouts.take(1)).records != first.records


@pytest.mark.usefixtures("no_ray")
async def test_random_numbers_are_new_after_an_evaluation_and_in_a_resumed_run_that_is_ahead(tmp_path: Path) -> None:
    engines = Engines()
    first = explorer(tmp_path, engines=engines)
    for step in range(4):
        first.settle(taken := await first.take(step), [TaskStatus.TRAINED] * 2)
        if step == 1:
            await first.evaluate()
    assert engines.seeded == [1, 0, 0, 3]
    state = json.loads(json.dumps(first.state()))
    await first.close()
    assert len(taken.records) == 2
    again = explorer(tmp_path, engines=engines)
    await again.restore(4, state, {})
    await again.take(4)
    assert engines.seeded == [1, 0, 0, 3, 5]
    await again.close()


async def test_the_state_of_rewards_is_restored(tmp_path: Path) -> None:
    first, then, older = Maker(), Maker(), Maker()
    first.rewards = {"novel": ["1+2"]}
    state = json.loads(json.dumps(explorer(tmp_path, maker=first).state()))
    await explorer(tmp_path, maker=then).restore(0, state, {})
    assert then.rewards == first.rewards
    del state["rewards"]  # a checkpoint of an earlier version
    await explorer(tmp_path, maker=older).restore(0, state, {})
    assert older.rewards == {}


@pytest.mark.usefixtures("no_ray")
async def test_baselines_of_tasks_that_were_filtered_are_forgotten_and_those_of_waiting_groups_restored(
    tmp_path: Path,
) -> None:
    first = explorer(tmp_path)
    for step in range(8):
        taken = await first.take(step)
        assert taken.greedy == {record.number: float(record.task.id) for record in taken.records}
        first.settle(taken, [TaskStatus.TRAINED] * len(taken.records))
    assert first.sources()[SOURCE].filtered > 20
    await asyncio.sleep(100)
    state, waiting = json.loads(json.dumps(first.state())), (await first.snapshot()).waiting
    await first.close()
    assert state["baselines"] == {str(record.number): float(record.task.id) for record in waiting}
    assert waiting
    again = explorer(tmp_path)
    await again.restore(8, state, {record.number: record.group for record in waiting if record.group is not None})
    taken = await again.take(8)
    assert {t.number: float(t.task.id) for t in waiting}.items() >= taken.greedy.items()
    assert len(taken.greedy) == 2
    await again.close()
