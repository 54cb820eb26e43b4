"""Seconds, tokens and memory of training steps, measured and as metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Self

import numpy as np

from rlsdk.cluster.placement import sections_apart
from rlsdk.config.schema import PlacementSection
from rlsdk.engines.actor import STEP
from rlsdk.isolation.vitals import peak_memory
from rlsdk.isolation.watching import stage

if TYPE_CHECKING:
    from rlsdk.config import Plan
    from rlsdk.contracts.rollouts import RolloutCounters, Rollouts
    from rlsdk.contracts.training import LearnerHandle


class Timer:
    """Seconds per named phase.

    Attributes:
        seconds: Phase name -> seconds so far.
        started: Time at which the timer was created.
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase."""
        start = time.perf_counter()
        try:
            with stage(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def wall(self) -> float:
        """Seconds since the timer was created."""
        return time.perf_counter() - self.started


class RunTimes(Timer):
    """Seconds and tokens of a run in this process, for the run summary.

    Attributes:
        seconds: Seconds outside steps: `start`, `evaluation`, `checkpoints` and, at the end, `whole`.
        phases: Seconds of each step phase.
        tokens: Number of sampled tokens.
        generating: Seconds during which engines sampled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phases: dict[str, float] = {}
        self.tokens, self.generating = 0, 0.0


class StepTimer(Timer):
    """Times a training step, and reads what engines and learner have counted by its start and by its end."""

    def __init__(self, plan: Plan, learner: LearnerHandle, rollouts: Rollouts, *, ahead: bool) -> None:
        """Prepare the timer; `ahead` is True if rollouts run ahead of training."""
        super().__init__()
        self._plan, self._learner, self._rollouts, self._ahead = plan, learner, rollouts, ahead
        self._generated = 0.0  # seconds inside the engines while the learner worked

    async def start(self) -> Self:
        """Read the counters, and start the time of the step."""
        self._before = await self._counters()
        self.started = time.perf_counter()
        return self

    @asynccontextmanager
    async def learning(self) -> AsyncIterator[None]:
        """Time the learner and, if rollouts run ahead of training, the engines in the meantime."""
        began = await self._generating()
        with self("learn"):
            yield
        self._generated = await self._generating() - began

    async def stop(self, taken: Mapping[str, float], run: RunTimes) -> dict[str, float]:
        """Return the metrics of the step's time, memory and devices, and add its times to those of the run."""
        wall = self.wall
        (learner_before, rollouts_before), (learner, rollouts) = self._before, await self._counters()
        before, now = _inside(learner_before, rollouts_before), _inside(learner, rollouts)
        spent = {name: now[name] - before[name] for name in before}
        phases = {**self.seconds, "produce": self.seconds["take"]}
        found = memory_metrics(driver=peak_memory(), engine=rollouts.clock, learner=learner)
        if self._plan.sampled:
            found["rollouts/tokens_wasted"] = float(rollouts.wasted - rollouts_before.wasted)
        found |= device_metrics(
            self._plan.config.placement,
            learner_before,
            learner,
            apart=sum(section.ranks for section in sections_apart(self._plan).values()),
            tokens=taken["rollouts/tokens_total"],
            wall=wall,
            update=phases.get("update", 0.0),
        )
        found |= time_metrics(phases, wall, spent, generated=self._generated, ahead=self._ahead)
        tokens = spent["tokens"] or taken["rollouts/tokens"]  # some engines do not count their tokens
        generating = wall if self._ahead else phases["produce"]  # when running ahead, engines generate all the time
        for name, seconds in phases.items():
            if f"time/{name}" in found:
                run.phases[name] = run.phases.get(name, 0.0) + seconds
        run.tokens += int(tokens)
        run.generating += generating
        return {**found, "time/tokens_per_second": tokens / max(generating, 1e-9)}

    async def _generating(self) -> float:
        return (await self._rollouts.counters()).clock["engines"] if self._ahead else 0.0

    async def _counters(self) -> tuple[Mapping[str, float], RolloutCounters]:
        """Return the counters of learner and rollouts so far; of several actors, those of the slowest."""
        return await asyncio.gather(asyncio.to_thread(self._learner.clock), self._rollouts.counters())


def _inside(learner: Mapping[str, float], rollouts: RolloutCounters) -> dict[str, float]:
    """Return the seconds and tokens that the actors have counted so far."""
    return {**rollouts.clock, "learner": sum(v for k, v in learner.items() if k.endswith("_seconds"))}


def decode_rates(
    seconds: float, steps: float, running: float, running_squared: float, running_seconds: float
) -> dict[str, float]:
    """Fit the seconds of a decode step, fixed and per running sequence, by least squares; empty if all loads are equal.

    Args:
        seconds: Total seconds of all decode steps.
        steps: Number of decode steps.
        running: Running sequences, summed over the steps.
        running_squared: Squared number of running sequences, summed over the steps.
        running_seconds: Running sequences times seconds, summed over the steps.
    """
    spread = running_squared - running**2 / max(steps, 1)
    if steps < 2 or spread <= 1e-6 * running_squared:
        return {}
    each = max(0.0, (running_seconds - running * seconds / steps) / spread)
    fixed = (seconds - each * running) / steps
    if fixed < 0:
        each, fixed = running_seconds / running_squared, 0.0
    return {"engine/step_seconds": fixed, "engine/sequence_seconds": each}


def time_metrics(
    phases: Mapping[str, float], wall: float, spent: Mapping[str, float], *, generated: float, ahead: bool
) -> dict[str, float]:
    """Return the time metrics of a step, from what `StepTimer` and the actors have measured in it.

    Of its phases, `take` is part of `produce`, and `learn` overlaps others. While the learner worked, engines spent
    `generated` seconds.
    """
    shown = {name: seconds for name, seconds in phases.items() if name not in ("take", "learn")}
    metrics = {
        "time/step": wall,
        **{f"time/{name}": seconds for name, seconds in shown.items()},
        **{f"time/{name}_share": seconds / wall for name, seconds in shown.items()},
        "time/engine_inside": spent["engine"],
        "time/learner_inside": spent["learner"],
        "time/outside_share": max(0.0, 1 - (spent["engine"] + spent["learner"] - generated) / wall),
    }
    if spent["steps"] > 0:
        metrics |= {
            "time/engines_idle": float(np.clip(1 - spent["engines"] / wall, 0, 1)),
            "engine/steps": spent["steps"],
            **decode_rates(*(spent[f"all_{name}"] for name in STEP)),
        }
    if ahead:
        metrics["time/wait_for_rollouts"] = phases["take"]
        if "learn" in phases:
            metrics["time/overlap"] = min(1.0, generated / max(phases["learn"], 1e-9))
    return metrics


def device_metrics(
    placement: PlacementSection,
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    apart: int,
    tokens: float,
    wall: float,
    update: float,
) -> dict[str, float]:
    """Return how well a step used the devices: tokens per second and GPU, and the update's model FLOPs utilisation.

    Empty on a CPU, unless `peak_tflops` is set.

    Args:
        placement: Numbers of actors, and the peak of a learner rank's device, if set.
        before: Learner counters at the start of the step.
        after: Learner counters at its end; on GPUs, they have `gpu_bytes`.
        apart: Ranks of models with dedicated processes.
        tokens: Tokens of the step's rollouts, prompts included.
        wall: Seconds of the step.
        update: Seconds of the phase `update`.
    """
    found = {}
    if "gpu_bytes" in after:
        engines = placement.engines * placement.gpus_per_engine
        shared = max(engines, placement.learners) if placement.colocate else engines + placement.learners
        found["time/tokens_per_second_per_gpu"] = tokens / wall / (shared + apart)
    peak = placement.peak_tflops or after.get("peak_tflops")
    flop = after.get("update_flop", 0.0) - before.get("update_flop", 0.0)
    if peak and flop > 0 and update > 0:
        found["time/update_mfu"] = flop / (update * peak * 1e12)
    return found


def memory_metrics(*, driver: int, engine: Mapping[str, float], learner: Mapping[str, float]) -> dict[str, float]:
    """Return the peak memory of each kind of process since its start, in GiB.

    Args:
        driver: Peak host memory of this process, in bytes.
        engine: Engine counters, with `host_bytes` of the largest engine.
        learner: Rank counters, with `host_bytes` and, on GPUs, `gpu_bytes` and `gpu_held_bytes` of the largest rank.
    """
    found = {
        "memory/driver": driver,
        "memory/engine": engine.get("host_bytes"),
        "memory/learner": learner.get("host_bytes"),
        "memory/learner_gpu": learner.get("gpu_bytes"),
        "memory/learner_gpu_held": learner.get("gpu_held_bytes"),
    }
    return {name: size / 2**30 for name, size in found.items() if size}
