"""The explorer of a two-process run: an async Ray actor that the trainer calls."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlsdk import weights as transport
from rlsdk.cluster.actors import RunActor, kill
from rlsdk.cluster.placement import layout
from rlsdk.cluster.portable import Surroundings, portable
from rlsdk.cluster.watched import watching
from rlsdk.config import Plan, Source, check
from rlsdk.contracts.rollouts import RolloutSummary, TakenBatch, TaskStatus
from rlsdk.engines.starting import exchanged_adapter, start_engines, started_engines
from rlsdk.errors import RunError
from rlsdk.isolation.process import redirect
from rlsdk.isolation.reaper import reaped
from rlsdk.isolation.watching import main_loop
from rlsdk.rollout.generator import first_error
from rlsdk.runlog.logs import log_to
from rlsdk.runlog.observers import Observers
from rlsdk.trainer.assembly import explorer_on, train_tasks
from rlsdk.trainer.explorer import Explorer
from rlsdk.two_process.agreement import PeerInfo, disagreement, living_trainers, until_gone

log = logging.getLogger(__name__)
Settled = Sequence[tuple[Sequence[int], Sequence[TaskStatus]]]
"""Batches that the trainer has settled since its last call: numbers and final statuses of their records."""


@attrs.frozen(eq=False)
class WeightUpdate:
    """Weights in transit; implements `WeightSender` in the explorer in place of the learner.

    Attributes:
        version: Number of completed training steps.
        shared: `ObjectRef` of the weights.
        logprobs: The learner's logprobs of the canary, float32 `[k - 1]`.
    """

    version: int
    shared: Any
    logprobs: np.ndarray

    def weights(self, version: int) -> Any:
        """Return an `ObjectRef` of the weights."""
        return self.shared

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the learner's logprobs of the canary, float32 `[k - 1]`."""
        return self.logprobs

    def checksums(self) -> dict[str, str]:
        """Return the CRC-32 of each tensor at the sender."""
        import ray

        return transport.checksums(ray.get(self.shared))


@attrs.frozen
class ExplorerAnswer:
    """Answer to a call of the trainer.

    Attributes:
        value: Result of the method.
        summary: Counts of tasks, and what was lost so far.
        interrupted: True if the user asked this program to end.
    """

    value: Any
    summary: RolloutSummary
    interrupted: bool


@attrs.frozen
class ExplorerSetup:
    """Configuration, working folder and environment that a program passes to the explorer actor it starts.

    Attributes:
        config: A YAML file, an `rlsdk.Config` or a mapping.
        overrides: Settings as `key=value` strings.
        plugins: Plugin files.
        gpus: Number of GPUs in the Ray cluster.
        surroundings: Working folder and environment variables.
    """

    config: Source
    overrides: Sequence[str]
    plugins: Sequence[str | Path]
    gpus: int
    surroundings: Surroundings = attrs.field(factory=Surroundings)

    def plan(self) -> Plan:
        """Adopt the working folder and environment, and check the configuration."""
        self.surroundings.take_over()
        return check(self.config, self.overrides, self.plugins)


class _LogRelay(QueueHandler):
    """Log handler that puts records from any thread into a queue of the running event loop."""

    def __init__(self, records: asyncio.Queue[logging.LogRecord | None]) -> None:
        super().__init__(records)
        self._loop = asyncio.get_running_loop()

    def enqueue(self, record: logging.LogRecord | None) -> None:
        self._loop.call_soon_threadsafe(self.queue.put_nowait, record)


class ExplorerActor(RunActor):
    """Sample rollouts for one trainer, which calls the methods of `Rollouts` through `answer`.

    The trainer calls one method at a time. A call that arrives before the previous one is answered cancels it, since
    the trainer no longer waits for that answer, as after a second Ctrl-C.
    """

    def __init__(self, own: PeerInfo, setup: ExplorerSetup) -> None:
        """Prepare the actor; `run` does the work."""
        super().__init__()
        self._own, self._setup = own, setup
        self._trainer: tuple[PeerInfo, Any] | None = None
        self._explorer: Explorer | None = None
        self._failure: BaseException | None = None
        self._explain: Callable[[BaseException], BaseException] = portable
        self._status = ""
        self._met, self._ready, self._asked, self._over = (asyncio.Event() for _ in range(4))
        self._context = contextvars.copy_context()
        self._records: asyncio.Queue[logging.LogRecord | None] = asyncio.Queue()
        self._taken: list[TakenBatch] = []
        self._running: asyncio.Task[Any] | None = None
        self._interrupted = False

    # For the program that started this actor

    async def run(self) -> str:
        """Wait for a trainer, start the explorer, and serve the trainer until its run ends.

        Returns:
            How the run ended: "finished" or "interrupted".

        Raises:
            ConfigError: The configuration or the code of the trainer differs.
            RlsdkError: The run failed, the trainer died, or none connected in time.
        """
        relay = _LogRelay(self._records)
        try:
            plan = await asyncio.to_thread(self._setup.plan)
            abandon = partial(log.error, "the explorer did not end when asked to: %s")
            with watching(plan.config.watchdog, abandon) as watchdog:
                self._context = contextvars.copy_context()
                self._explain = lambda error: portable(
                    watchdog.explain(first_error(error), "the trainer keeps the checkpoints")
                )
                try:
                    return await self._explore(plan, relay)
                except BaseException as error:
                    raise self._explain(error) from error
        finally:
            relay.enqueue(None)

    async def next_records(self) -> list[logging.LogRecord | None]:
        """Wait for log records and return all that are queued; None marks the end."""
        found = [await self._records.get()]
        while not self._records.empty():
            found.append(self._records.get_nowait())
        return found

    def interrupt(self) -> None:
        """Ask the trainer, with the next answer, to end the run after its step."""
        self._interrupted = True
        self._met.set()

    # For the trainer

    async def meet(self, trainer: PeerInfo, presence: Any) -> str:
        """Bind this explorer to a trainer, and return where the explorer runs.

        Raises:
            ConfigError: Its configuration or its code differs.
            RunError: The explorer already works for another trainer.
        """
        if self._trainer is not None:
            raise RunError(f"it already works for the trainer {self._trainer[0].where}")
        self._trainer = trainer, presence
        self._met.set()
        if wrong := disagreement(self._own, trainer):
            raise wrong
        return self._own.where

    async def answer(self, settled: Settled, method: str, *arguments: Any) -> ExplorerAnswer:
        """Apply what the trainer has settled since its last call, then call a method of the explorer for it.

        Raises:
            Exception: The method failed, or the explorer did not start.
        """
        await self._ready.wait()
        self._asked.set()
        if self._failure is not None or self._explorer is None:
            raise self._failure or RunError("the explorer did not start")
        explorer = self._explorer
        for numbers, states in settled:  # at once: the next call may cancel this one before it begins
            batch = self._taken.pop(0)
            known = [record.number for record in batch.records]
            if known != list(numbers):
                raise RunError(f"the trainer settled the records {list(numbers)}, but was given {known}")
            explorer.settle(batch, states)
        if self._running is not None:
            await _cancelled(self._running)

        own: dict[str, Callable[..., Any]] = {"about": self._about, "take": self._take, "publish": self._publish}
        work = partial(own[method], explorer) if method in own else getattr(explorer, method)
        self._running = asyncio.get_running_loop().create_task(work(*arguments), context=self._context)
        try:
            value = await self._running
        except asyncio.CancelledError as error:
            if self._failure is None:  # another call has come
                raise
            raise self._failure from error
        except Exception as error:  # the trainer gets it
            wrong = first_error(error)
            log.error("the explorer failed: %s: %s", type(wrong).__name__, wrong, exc_info=error)
            raise portable(wrong) from error
        return ExplorerAnswer(value, explorer.summary(), self._interrupted)

    async def shutdown(self, status: str) -> None:
        """End with the status of the run: "finished", "interrupted" or "failed"."""
        self._status = status
        self._over.set()

    async def _about(self, explorer: Explorer) -> tuple[int, np.ndarray]:
        """Return the number of held-out tasks and the token ids of the canary, int64 `[k]`."""
        return explorer.eval_tasks, explorer.canary_ids

    async def _take(self, explorer: Explorer, version: int) -> tuple[TakenBatch, dict[str, Any]]:
        """Take a batch; return it with the explorer's state right afterwards."""
        taken = await explorer.take(version)
        numbers = [record.number for record in taken.records]
        if self._taken and [record.number for record in self._taken[-1].records] == numbers:
            self._taken.pop()  # a retried step gets the same batch, which is settled once
        self._taken.append(taken)
        return taken, explorer.state()

    async def _publish(self, explorer: Explorer, sent: WeightUpdate, updated: bool) -> float:
        """Publish weights that are in transit; return the canary's gap."""
        return await explorer.publish(sent, sent.version, updated=updated)

    # The work

    async def _explore(self, plan: Plan, relay: _LogRelay) -> str:
        log_to(plan, relay)
        await self._meet_trainer(plan)  # before writing to the folder: the trainer may overwrite it first
        if self._trainer is None:
            return "interrupted"
        (plan.folder / "logs").mkdir(parents=True, exist_ok=True)
        redirect(plan.folder / "logs" / "explorer.log")
        log_to(plan, relay, "explorer.log")
        observers = Observers(plan.plugins)
        with ExitStack() as stack:
            stack.enter_context(reaped())
            try:
                self._explorer = await self._start(plan, stack, observers)
            except Exception as error:
                self._failure = self._explain(error)
                self._ready.set()
                await self._until_asked(plan.config.placement.partner_timeout)
                raise
            self._ready.set()
            status = await self._serve(plan, self._explorer, observers)
        if status == "failed":
            raise RunError("the trainer has failed; its log is logs/driver.log in the run's folder")
        log.info("the run has ended: %s", status)
        return status

    async def _meet_trainer(self, plan: Plan) -> None:
        """Wait until a trainer has connected or the user has interrupted.

        Raises:
            ConfigError: The configuration or the code of a trainer differs, even if it works with another explorer.
        """
        limit = plan.config.placement.partner_timeout
        try:
            async with asyncio.timeout(limit):
                trainers = await living_trainers(plan)
                for trainer in trainers:
                    if wrong := disagreement(self._own, trainer):
                        raise wrong
                    log.info("waiting until the trainer, %s, needs an explorer, for at most %g s", trainer.where, limit)
                if not trainers:
                    log.info("waiting for the trainer: rlsdk train CONFIG --mode train, for at most %g s", limit)
                await self._met.wait()
        except TimeoutError as error:
            raise RunError(
                f"no trainer used this explorer within placement.partner_timeout={limit:g} s; start one with "
                "rlsdk train CONFIG --mode train, on the same Ray, with the same settings, with the same folder "
                f"{plan.folder.resolve()}"
            ) from error
        if self._trainer is not None:
            if wrong := disagreement(self._own, self._trainer[0]):
                raise wrong
            log.info("the trainer is %s", self._trainer[0].where)

    async def _start(self, plan: Plan, stack: ExitStack, observers: Observers) -> Explorer:
        """Start engines, scorer and environments; they end with the stack."""
        found = layout(plan, os.cpu_count() or 1, self._setup.gpus, roles=["engine"], apart=True)

        def engines() -> list[Any]:
            return started_engines(plan, start_engines(plan, found, exchanged_adapter(plan)))

        ready = await asyncio.to_thread(engines) if plan.needs_engine else []
        for engine in ready:
            stack.callback(kill, engine)
        explorer = explorer_on(plan, ready, found, train_tasks(plan), observers)
        return await asyncio.to_thread(stack.enter_context, explorer)  # waits for rollout workers

    async def _serve(self, plan: Plan, explorer: Explorer, observers: Observers) -> str:
        """Answer the trainer until it reports how the run ended, and return that status.

        Raises:
            RunError: The trainer died.
        """
        assert self._trainer is not None
        trainer, presence = self._trainer
        gone, over = asyncio.ensure_future(until_gone(presence)), asyncio.ensure_future(self._over.wait())
        status = "failed"
        # Plugins that observe rollouts are notified here, too.
        observers.tell("rlsdk_run_start", config=plan.tree, folder=plan.folder)
        try:
            with main_loop(self.interrupt):
                await asyncio.wait({gone, over}, return_when=asyncio.FIRST_COMPLETED)
            if not self._status:
                why = gone.result().rstrip(".")
                raise RunError(
                    f"the trainer, {trainer.where}, is gone: {why}. Its log is logs/driver.log in the run's folder; "
                    "start both programs again, the trainer with --resume"
                )
            status = self._status
            await explorer.close()
        except BaseException as error:
            self._failure = RunError(f"the explorer has ended: {self._explain(error)}")  # for a call of the trainer
            raise
        finally:
            await _cancelled(gone, over, *filter(None, [self._running]))
            observers.tell("rlsdk_run_end", status=status, summary={})
            await asyncio.to_thread(observers.close)
        return status

    async def _until_asked(self, limit: float) -> None:
        """Wait until the trainer has learned why this explorer did not start, or has ended."""
        assert self._trainer is not None
        waiting = [asyncio.ensure_future(each) for each in (until_gone(self._trainer[1]), self._asked.wait())]
        await asyncio.wait(waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        await _cancelled(*waiting)


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
