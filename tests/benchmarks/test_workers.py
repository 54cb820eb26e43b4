"""CPU seconds of the driver and of the rollout workers per turn of a conversation.

The engine answers at once, and the environment steps at once; conversations, tokenizing, requests, answers, rewards and
the ways between the processes are those of a training. Wall times say nothing here, since all processes share the
machine's cores; CPU seconds of each do.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import psutil
import pytest

from rlsdk.cluster.actors import kill
from rlsdk.cluster.placement import layout
from rlsdk.config import Plan, check
from rlsdk.engines.starting import start_engine, started_engines
from rlsdk.isolation.process import settle
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.types import Task
from rlsdk.workers.orders import GroupMaker, GroupOrder, made_in_order
from rlsdk.workers.starting import group_maker

BENCHMARK = "Rollout workers"
pytestmark = pytest.mark.usefixtures("cluster")
HERE = Path(__file__).parent
LABS = [HERE / "instant_lab.py", HERE.parent / "environments" / "worlds_lab.py"]
TURNS, SIZE, GROUPS = 8, 8, 128
FEW, MANY = 50, 400
"""Tokens of an answer."""
IDLE_SECONDS = 3.0
ENGINES = itertools.count()
KINDS = {"workers": "RolloutWorkerActor", "environments": "EnvWorkerActor", "engine": "EngineActor"}


@attrs.frozen
class Costs:
    """Microseconds of CPU for a turn.

    Attributes:
        driver: Of this process, beyond what it uses while it waits: Ray's threads look for messages all the time.
        waiting: Cores that it uses while it waits.
        others: Of the processes of each kind of actor.
    """

    driver: float
    waiting: float
    others: dict[str, float]


def planned(folder: Path, model: Path, workers: int, tokens: int) -> Plan:
    """A run in an environment of eight turns."""
    return check(
        {
            "name": f"run-{workers}-{tokens}",
            "out": str(folder),
            "model": {"path": str(model), "max_length": 8192},
            "tasks": {"train": "countdown"},
            "workflow": {"use": "environment", "step_timeout": 120.0},
            "engine": "instant_lab/instant",
            "sampling": {"max_tokens": tokens},
            "steps": 1,
            "rollout": {"workers": workers},
            "environments": {"workers": 1},
        },
        plugins=LABS,
    )


async def measured(maker: GroupMaker, tokens: int) -> Costs:
    """Make groups once to warm up, and again with a look at the processes before and after."""
    environment = {"use": "worlds_lab/waits", "median": 0.0, "turns": TURNS}
    task = Task(id="t", prompt="", metadata={"seed": 0, "environment": environment})

    async def make(name: str) -> None:
        orders = [GroupOrder(task=task, key=f"{name} {i}", size=SIZE, step=1) for i in range(GROUPS)]
        groups = await made_in_order(maker, orders)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        assert len(rollouts) == GROUPS * SIZE
        assert all(rollout.loss_mask.sum() == TURNS * tokens for rollout in rollouts)

    await make("warm")
    settle(rollouts=True)  # as a run does before its first step
    idle = used()
    await asyncio.sleep(IDLE_SECONDS)
    before, began = used(), time.perf_counter()
    waiting = (before["driver"] - idle["driver"]) / IDLE_SECONDS
    await make("measured")
    seconds, after = time.perf_counter() - began, used()
    after["driver"] -= waiting * seconds
    spent = {kind: (after[kind] - before[kind]) / (GROUPS * SIZE * TURNS) * 1e6 for kind in after}
    return Costs(spent.pop("driver"), waiting, spent)


def used() -> dict[str, float]:
    """CPU seconds so far of this process, and of the actors of each kind."""
    found = dict.fromkeys(KINDS, 0.0)
    for process in psutil.Process().children(recursive=True):
        title = " ".join(process.cmdline())
        for kind, name in KINDS.items():
            if name in title:
                times = process.cpu_times()
                found[kind] += times.user + times.system
    own = psutil.Process().cpu_times()
    return {"driver": own.user + own.system, **found}


def costs(folder: Path, model: Path, workers: int, tokens: int = FEW) -> Costs:
    """Costs of a turn with so many workers."""
    plan = planned(folder, model, workers, tokens)
    (plan.folder / "logs").mkdir(parents=True)
    found = layout(plan, 1, 0)
    [engine] = started_engines(plan, [start_engine(plan, found, None, 0, incarnation=next(ENGINES))])

    async def go(maker: Any) -> Costs:
        return await measured(maker, tokens)

    try:
        with group_maker(plan, ChatTokenizer.of(plan), [engine], None) as maker:
            return asyncio.run(go(maker))
    finally:
        kill(engine)


def test_a_turn_costs_the_driver_little_once_there_are_workers(
    tmp_path: Path, model: Path, show: Callable[..., None], check: Callable[..., None]
) -> None:
    alone, apart, longer = (costs(tmp_path, model, *how) for how in [(0,), (2,), (2, MANY)])
    more = {"driver": longer.driver - apart.driver, "workers": longer.others["workers"] - apart.others["workers"]}
    show(
        [apart.driver / 1e6],
        driver_alone=round(alone.driver, 1),
        driver=round(apart.driver, 1),
        waiting=round(apart.waiting, 3),
        **{kind: round(cost, 1) for kind, cost in apart.others.items()},
        **{f"{kind}_for_a_token": round(cost / (MANY - FEW), 3) for kind, cost in more.items()},
        share=round(apart.driver / apart.others["workers"], 3),
        turns_of_four_workers=round(4e6 / apart.others["workers"]),
        driver_cores_at_20000_turns=round(20_000 * apart.driver / 1e6, 2),
    )
    case = "CPU of a turn, two workers"
    check("driver's, over the workers'", apart.driver / apart.others["workers"], case=case, at_most=0.1)
