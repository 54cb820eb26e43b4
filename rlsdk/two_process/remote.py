"""Proxy for an explorer in another program; if that program dies, another explorer replaces it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlsdk.cluster.actors import cause_of, died, kill, not_created, reason
from rlsdk.config import Plan
from rlsdk.contracts.rollouts import (
    EngineStatus,
    Evaluation,
    NoRolloutsError,
    RolloutCounters,
    RolloutSnapshot,
    RolloutSummary,
    TakenBatch,
    TaskCounts,
    TaskStatus,
    WeightSender,
)
from rlsdk.errors import RlsdkError, RunError
from rlsdk.plurals import counted
from rlsdk.rollout.scheduler import RolloutScheduler
from rlsdk.two_process.actor import ExplorerAnswer, WeightUpdate
from rlsdk.two_process.agreement import PeerInfo, TrainerPresence, named, spawn_named
from rlsdk.types import Group, Task
from rlsdk.workers.orders import MOST_REASONS

log = logging.getLogger(__name__)
_ENDING = "the explorer has ended, and the run was asked to end"
LOOK_SECONDS = 0.5
"""Interval in seconds at which the cluster is searched for an explorer."""


class GoneError(RunError):
    """Raised when the explorer that was called has ended."""


class ExplorerRegistry:
    """Find explorers on the cluster for a trainer, which works with one of them while the others wait."""

    def __init__(self, plan: Plan) -> None:
        """Create a registry, and the actor whose death tells explorers that this program has ended."""
        self._plan, self._own = plan, PeerInfo.of(plan)
        self._presence = spawn_named(plan, "trainer", TrainerPresence, self._own)
        self._tried: set[str] = set()

    async def meet(self, ending: Callable[[], bool] = lambda: False) -> Any:
        """Wait for a new explorer that can work for this trainer, unless the run is `ending`; return its actor.

        Raises:
            NoRolloutsError: The run was asked to end, or no explorer connected in time.
        """
        limit, waits = self._plan.config.placement.partner_timeout, False
        try:
            async with asyncio.timeout(limit):
                while True:
                    if (explorer := await self._find()) is not None:
                        return explorer
                    if ending():
                        raise NoRolloutsError(_ENDING)
                    if not waits:
                        log.info("waiting for an explorer: rlsdk train CONFIG --mode explore, for at most %g s", limit)
                    waits = True
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError as error:
            raise NoRolloutsError(
                f"no explorer connected to the run {self._plan.folder.resolve()} within "
                f"placement.partner_timeout={limit:g} s; start one with rlsdk train CONFIG --mode explore, on the same "
                "Ray and with the same settings, and continue with --resume"
            ) from error

    async def _find(self) -> Any:
        """Return an explorer that was not tried before and can work for this trainer; None if there is none."""
        for name, explorer in (await asyncio.to_thread(named, self._plan, "explorer")).items():
            if name not in self._tried and await self._agrees(name, explorer):
                return explorer
        return None

    async def _agrees(self, name: str, explorer: Any) -> bool:
        self._tried.add(name)
        try:
            where = await explorer.meet.remote(self._own, self._presence)
        except Exception as error:
            cause = cause_of(error)
            if not_created(error):  # such as with another version of rlsdk on its node
                log.warning("an explorer did not start: %s", reason(error))
            elif not died(error):  # an actor's name may outlive it
                if not isinstance(cause, RlsdkError):
                    raise
                log.warning("an explorer cannot work for this run: %s", cause)
            return False
        log.info("the explorer is %s", where)
        return True


class RemoteExplorer:
    """Proxy for an `Explorer` that runs in another program.

    The proxy keeps the state that the explorer had when it last gave a batch. A replacement continues from that state:
    unfinished tasks are sampled again, taken groups are not. No explorer is replaced between `take` and `settle`, so
    each batch is settled in the explorer that gave it or in the saved state.

    Attributes:
        eval_tasks: Number of held-out tasks, once the explorer is ready.
        failure: Always None; the call that waits for the explorer raises its errors.
        interrupt: Called when the user has interrupted the explorer's program.
        ending: Returns True once the run was asked to end, so that it waits for no other explorer.
    """

    def __init__(self, plan: Plan, explorers: ExplorerRegistry, explorer: Any) -> None:
        """Create a proxy."""
        self._plan, self._explorers, self._explorer = plan, explorers, explorer
        self.eval_tasks, self._canary_ids = 0, np.zeros(0, np.int64)
        self._state: dict[str, Any] | None = None
        self._done = 0
        self._settled: list[tuple[list[int], list[TaskStatus]]] = []
        self._sent: WeightUpdate | None = None
        self._gap = 0.0
        self._past = self._now = RolloutCounters({}, 0)
        self._before = self._summary = RolloutSummary({}, {}, {"lost": 0, "reasons": [], "sampled_again": 0})
        self._in_vain: NoRolloutsError | None = None
        self._lost: list[str] = []
        self.failure: BaseException | None = None
        self.interrupt: Callable[[], None] = lambda: None
        self.ending: Callable[[], bool] = lambda: False

    async def start(self) -> None:
        """Wait until the explorer is ready."""
        self.eval_tasks, self._canary_ids = await self._call("about")

    async def tasks(self, places: Mapping[int, tuple[str, int]]) -> dict[int, Task]:
        """See `Explorer.tasks`."""
        found: dict[int, Task] = await self._call("tasks", places)
        return found

    async def restore(self, version: int, state: Mapping[str, Any], groups: Mapping[int, Group]) -> tuple[int, int]:
        """See `Explorer.restore`."""
        kept = {name: state[name] for name in ("tasks", "production", "baselines", "rewards") if name in state}
        found: tuple[int, int] = await self._call("restore", version, kept, groups)
        self._state, self._done = kept, version
        self._lost = list(state.get("explorers_lost", ()))
        return found

    async def take(self, version: int) -> TakenBatch:
        """See `Explorer.take`."""
        taken: TakenBatch
        taken, self._state = await self._call("take", version)
        self._done = version
        return taken

    def settle(self, taken: TakenBatch, states: Sequence[TaskStatus]) -> None:
        """See `Explorer.settle`; sent with the next call."""
        if self._state is not None:
            scheduler = RolloutScheduler.settled(self._state["production"], taken.records, states)
            self._state = {**self._state, "production": scheduler}
        self._done += 1
        self._settled.append(([record.number for record in taken.records], list(states)))

    async def publish(self, learner: WeightSender, version: int, *, updated: bool) -> float:
        """See `Explorer.publish`."""
        if not self._plan.needs_engine:
            return 0.0
        self._sent = None  # free the previous weights before the new ones are sent
        weights = await asyncio.to_thread(learner.weights, version)
        logprobs = await asyncio.to_thread(learner.canary, self._canary_ids)
        sent = WeightUpdate(version, weights, logprobs)
        try:
            self._gap = await self._ask("publish", sent, updated)
            self._sent = sent
        except GoneError as gone:
            self._sent = sent
            try:
                await self._replace(gone)
            except NoRolloutsError as error:  # the trainer saves the step that it has done
                log.debug("weights of version %d are not published: %s", version, error)
        return self._gap

    async def sleep(self) -> None:
        """Do nothing, since the learner has its own device."""

    async def evaluate(self) -> Evaluation:
        """See `Explorer.evaluate`."""
        found: Evaluation = await self._call("evaluate")
        return found

    async def snapshot(self) -> RolloutSnapshot:
        """See `Explorer.snapshot`."""
        found: RolloutSnapshot
        try:
            found = await self._call("snapshot")
        except NoRolloutsError:
            if self._state is None:
                raise
            return RolloutSnapshot(self._state, ())  # groups that were waiting are sampled again
        self._state = dict(found.state)
        return attrs.evolve(found, state={**found.state, "explorers_lost": self._lost[:MOST_REASONS]})

    async def counters(self) -> RolloutCounters:
        """See `Explorer.counters`; without an explorer, returns the last known counters."""
        try:
            self._now = await self._ask("counters")
        except GoneError as gone:
            log.debug("cannot read the explorer's counters: %s", gone)
        return added(self._past, self._now)

    async def scale(self, engines: int | None) -> EngineStatus:
        """See `Explorer.scale`."""
        found: EngineStatus = await self._call("scale", engines)
        return found

    def sources(self) -> Mapping[str, TaskCounts]:
        """Return the task counts of each source, as the explorer last reported them."""
        return self._summary.sources

    async def pause(self) -> RolloutSummary:
        """See `Explorer.pause`; does not wait for a replacement if the explorer has ended."""
        try:
            await self._ask("pause")
        except GoneError as gone:
            if self._explorer is not None:  # otherwise another call has reported it
                log.warning("the explorer has ended: %s", gone)
                self._lost.append(str(gone))
        return attrs.evolve(joined(self._before, self._summary), explorers_lost=tuple(self._lost[:MOST_REASONS]))

    async def close(self) -> None:
        """Do nothing; `shutdown` tells the explorer how the run ended."""

    async def shutdown(self, status: str) -> None:
        """Tell the explorer how the run ended; it ends with the same status."""
        if self._explorer is None:
            return
        try:
            await self._explorer.shutdown.remote(status)
        except Exception as error:
            if not died(error):
                raise
            log.debug("cannot tell the explorer that the run has ended: %s", reason(error))

    async def _call(self, name: str, *content: Any) -> Any:
        """Return the answer of the explorer or its replacement."""
        while True:
            try:
                return await self._ask(name, *content)
            except GoneError as gone:
                await self._replace(gone)

    async def _ask(self, name: str, *content: Any) -> Any:
        if self._explorer is None:
            raise GoneError("it has ended, and no other has connected")
        settled, self._settled = self._settled, []  # if it gets lost, the saved state includes it
        try:
            answer: ExplorerAnswer = await self._explorer.answer.remote(settled, name, *content)
        except Exception as error:
            if died(error):
                raise GoneError(reason(error)) from error
            raise cause_of(error) from error
        self._summary = answer.summary
        if answer.interrupted:
            self.interrupt()
        return answer.value

    async def _replace(self, gone: GoneError) -> None:
        """Wait for another explorer, and restore the previous one's state in it.

        Raises:
            NoRolloutsError: The run was asked to end, or no explorer connected in time; also raised by later calls.
        """
        if self._in_vain is not None:
            raise self._in_vain
        while True:
            log.warning("the explorer has ended: %s", gone)
            if self._explorer is not None:
                kill(self._explorer)  # it may be alive but unreachable
            self._lost.append(str(gone))
            self._past, self._now = added(self._past, self._now), RolloutCounters({}, 0)
            self._before = joined(self._before, self._summary)
            self._summary = RolloutSummary(self._summary.sources, {}, {})
            self._explorer = None
            self._settled.clear()
            try:
                self._explorer = await self._explorers.meet(self.ending)
            except NoRolloutsError as error:
                self._in_vain = error
                raise
            try:
                self.eval_tasks, self._canary_ids = await self._ask("about")
                again = 0
                if self._state is not None:
                    _, again = await self._ask("restore", self._done, self._state, {})
                if self._sent is not None:
                    self._gap = await self._ask("publish", self._sent, False)
            except GoneError as other:
                gone = other
                continue
            log.info(
                "another explorer continues at step %d; sampled again: %s",
                self._done + 1,
                counted(again, "unfinished task"),
            )
            return


def joined(before: RolloutSummary, now: RolloutSummary) -> RolloutSummary:
    """Join the summaries of consecutive explorers; each counts the tasks of all explorers, but only its own losses."""

    def both(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
        sums = {name: one[name] + other[name] if name in one else other[name] for name in other}
        return {name: v[:MOST_REASONS] if isinstance(v, list) else v for name, v in {**one, **sums}.items()}

    return RolloutSummary(
        now.sources,
        both(before.environments, now.environments),
        both(before.engines, now.engines),
        rollout_workers=both(before.rollout_workers, now.rollout_workers),
    )


def added(past: RolloutCounters, now: RolloutCounters) -> RolloutCounters:
    """Add up the counters of consecutive explorers."""
    names = {**past.clock, **now.clock}
    clock = {name: past.clock.get(name, 0.0) + now.clock.get(name, 0.0) for name in names}
    return RolloutCounters(clock, past.wasted + now.wasted)
