"""The engine group of a run: calls, seeds, weight syncs, the canary, scaling and restarts.

If an engine's process or node dies, it is replaced while the run continues; an exception in its code fails the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlsdk.cluster.actors import ActorFailures, cause_of, described, died, kill, never_ran
from rlsdk.cluster.nodes import HAND_BACK_SECONDS, DrainingNode, node_of, on_draining
from rlsdk.contracts.rollouts import WeightSender
from rlsdk.engines.actor import STEP
from rlsdk.engines.canary import Canary, describe_checksums
from rlsdk.engines.client import EngineRoutes
from rlsdk.engines.weight_sync import LoadedWeights, deliver, deliver_late, received_checksums
from rlsdk.errors import CanaryError, EngineError, LearnerError, TransferError
from rlsdk.plurals import counted

log = logging.getLogger(__name__)
SHOWN = 20
"""Maximum number of reasons in the summary."""
COUNTED = (*STEP, "tokens")
"""Actor counters that are read after each step."""

Start = Callable[[int, int], Awaitable[tuple[Any, Any]]]
"""Start the engine of a rank, given its number of earlier starts; return its handle and an awaitable for readiness."""


@attrs.define(kw_only=True)
class RestartPolicy:
    """Policy for restarting dead engines.

    Attributes:
        client: Routes requests to the running engines.
        start: Starts a replacement for a dead engine.
        most: Maximum number of deaths per rank.
        logs: Folder of the engine logs, `engine-RANK.log`; None if there are none.
        missing: Returns the resources that a different number of engines would lack; empty if there are none.
    """

    client: EngineRoutes
    start: Start
    most: int
    logs: Path | None = None
    missing: Callable[[int, int], str] = lambda now, wanted: ""


@attrs.define
class _EngineCounters:
    """Counters of one engine, summed over all incarnations of its actor."""

    past: np.ndarray = attrs.field(factory=lambda: np.zeros(len(COUNTED)))
    now: np.ndarray = attrs.field(factory=lambda: np.zeros(len(COUNTED)))


class EngineGroup:
    """All engine actors, called together; dead engines are replaced.

    Attributes:
        step: Current step, for messages.
        lost: A sentence for each death: which engine, when and why.
    """

    def __init__(self, actors: Sequence[Any], *, shared: bool, restarts: RestartPolicy | None = None) -> None:
        """Create a group of started engines.

        Args:
            actors: Actor handles, by rank.
            shared: True if engines share devices with the learner and sleep while it works.
            restarts: Restart policy; if None, the death of an engine is an error.
        """
        self._actors = dict(enumerate(actors))
        self.shared = shared
        self.step = 0
        self._restarts = restarts
        self._failures = ActorFailures("engine", 0)
        if restarts is not None:
            restarts.client.lost = self._lose
            self._failures = ActorFailures("engine", restarts.most, restarts.logs)
        self.lost = self._failures.sentences
        self._counters = {rank: _EngineCounters() for rank in self._actors}
        self._host_bytes = 0.0
        self._starts = dict.fromkeys(self._actors, 1)
        self._started: list[Any] = []
        self._starting: dict[int, tuple[Any, asyncio.Task[str]]] = {}  # actor, and the id of its node
        self._wanted = len(self._actors)
        self._leaving: set[int] = set()
        self._changes: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None
        self._awake, self._syncing = asyncio.Event(), asyncio.Lock()
        self._awake.set()
        self._seeding: tuple[int, int] | None = None
        self._loaded: LoadedWeights | None = None

    def __len__(self) -> int:
        """Return the target number of engines, including dead ones."""
        return self._wanted

    @property
    def alive(self) -> tuple[int, ...]:
        """Ranks of the engines that get requests."""
        return tuple(sorted(self._actors.keys() - self._leaving))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the live engines, including those that are being drained."""
        return tuple(self._actors)

    def resize(self, count: int) -> str:
        """Start changing the number of engines without waiting: new ones start, or the last ones are drained.

        Returns:
            Reason why the number cannot change now; empty if it will.
        """
        restarts = self._restarts
        if restarts is None or count == self._wanted:
            return ""
        if self._leaving or self._changes:
            return f"{counted(count, 'engine')}: other engines are still starting or being drained"
        if count < self._wanted:
            self._leaving = set(range(count, self._wanted))
            for rank in sorted(self._leaving):
                self._background(self._drain(restarts, rank))
        elif lacking := restarts.missing(self._wanted, count):
            return f"{count} engines: there is no room for {count - self._wanted} more: {lacking}"
        for rank in range(self._wanted, count):
            self._counters.setdefault(rank, _EngineCounters())
            self._failures.forget(rank)
            self._starts.setdefault(rank, 0)
            self._background(self._restart(restarts, rank))
        log.info("%s from now on, instead of %d", counted(count, "engine"), self._wanted)
        self._wanted = count
        return ""

    async def leave(self, nodes: Sequence[DrainingNode]) -> None:
        """Start moving engines off draining nodes, without waiting.

        Such an engine gets no more requests, finishes its current ones or hands them back at the deadline, and restarts
        on another node; if it is still starting, at once. It does not count as dead. Engines that share GPUs with the
        learner stay, since the run ends with the learner's node.

        Args:
            nodes: Draining nodes; engines that are already leaving them are skipped.
        """
        restarts = self._restarts
        if restarts is None or self.shared:
            return
        by_id = {node.id: node for node in nodes}
        for rank, (actor, node_task) in list(self._starting.items()):
            if node_task.done() and (node := by_id.get(node_task.result())):
                log.warning("engine %d starts on %s: it is started elsewhere", rank, node)
                del self._starting[rank]
                kill(actor)
        staying = {rank: self._actors[rank] for rank in self.alive}
        for rank, node in (await on_draining(nodes, staying)).items():
            if self._actors.get(rank) is staying[rank] and rank not in self._leaving:
                self._leaving.add(rank)
                log.warning("engine %d is on %s: it gets no more requests and is restarted elsewhere", rank, node)
                self._background(self._move(restarts, rank, node))

    async def all(self, method: str, *arguments: Any) -> dict[int, Any]:
        """Call all live engines; return their answers by rank.

        Raises:
            EngineError: An engine failed or died too often; the message names it and the step.
        """
        self._check()
        ranks = list(self._actors)
        found = await asyncio.gather(*(self.call(rank, method, *arguments) for rank in ranks))
        self._check()
        return {rank: answers[0] for rank, answers in zip(ranks, found, strict=True) if answers}

    async def sleep(self) -> None:
        """Free the device that engines share with the learner, once all starting engines have started."""
        while self._changes and self._awake.is_set():
            await asyncio.wait(self._changes)
        self._awake.clear()  # a replacement for an engine that dies now needs the device, too
        await self.all("sleep")

    async def reseed(self, seed: int, step: int) -> None:
        """Reseed the engines' generators, so that a step's samples depend only on the seed and the step.

        Args:
            seed: Random seed of the run.
            step: Number of the training step; 0 for evaluations.
        """
        self._check()
        self._seeding = seed, step
        seeds = _seeds([seed, step], len(self._counters))
        await asyncio.gather(*(self.call(rank, "reseed", seeds[rank]) for rank in list(self._actors)))

    async def publish(self, learner: WeightSender, version: int, canary: Canary, *, updated: bool) -> float:
        """Send the learner's weights to the engines and compare; return the canary's gap in nats (0 without engines).

        Args:
            learner: Source of the weights.
            version: Number of completed steps.
            canary: Check on fixed tokens, with their earlier logprobs.
            updated: True if the weights are expected to differ from those sent last.

        Raises:
            CanaryError: Engine and learner disagree.
            EngineError: An engine failed.
        """
        if not len(self):
            return 0.0
        async with self._syncing:
            self._loaded = None  # so that Ray's store does not hold two versions at once
            ids = canary.token_ids
            result = await deliver(self, learner, version, ids, wake=self.shared)
            self._awake.set()
            try:
                gap = canary.check(version, result.expected, result.seen, updated=updated)
            except CanaryError as error:
                received = await received_checksums(self, learner, result.weights, ids)
                sent = await asyncio.to_thread(learner.checksums)
                raise CanaryError(f"{error}\n{describe_checksums(sent, received)}") from error
            self._loaded = LoadedWeights(learner, canary, version, result.weights)  # for engines that start later
            return gap

    async def clock(self) -> dict[str, float]:
        """Return counters since the start; they never decrease, even if engines die.

        Returns:
            `engine`: generation seconds of the slowest rank, and `engines`: their mean; `tokens`: sum over ranks;
            `steps`: decode steps of the rank with the most, with sums of the actors' step counters over all ranks;
            `host_bytes`: peak host memory of any rank.
        """
        for rank, counts in (await self.all("clock")).items():
            self._count(rank, counts)
        sums = np.array([each.past + each.now for each in self._counters.values()]).reshape(-1, len(COUNTED))
        by_rank = dict(zip(COUNTED, sums.T, strict=True))
        return {
            "engine": float(by_rank["step_seconds"].max(initial=0.0)),
            "engines": float(by_rank["step_seconds"].sum() / max(len(sums), 1)),
            "steps": float(by_rank["steps"].max(initial=0.0)),
            **{f"all_{name}": float(by_rank[name].sum()) for name in STEP},
            "tokens": float(by_rank["tokens"].sum()),
            "host_bytes": self._host_bytes,
        }

    def metrics(self) -> dict[str, float]:
        """Return metrics: live and wanted engines, deaths so far, and continuations that were sampled again."""
        if self._restarts is None:
            return {}
        again = self._restarts.client.sampled_again
        return {
            "engines/alive": float(len(self.alive)),
            "engines/wanted": float(self._wanted),
            "engines/lost": float(len(self.lost)),
            "engines/sampled_again": float(again),
        }

    def report(self) -> dict[str, Any]:
        """Return engine deaths, their causes and resampled requests for the run summary."""
        again = self._restarts.client.sampled_again if self._restarts is not None else 0
        return {"lost": len(self.lost), "reasons": self.lost[:SHOWN], "sampled_again": again}

    def close(self) -> None:
        """Stop the engines that this group started."""
        for change in self._changes:
            change.cancel()
        for actor in self._started:
            kill(actor)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def call(self, rank: int, method: str, *arguments: Any, **options: Any) -> tuple[Any, ...]:
        """Call an engine; return its answer in a tuple, which is empty if it has died or a transfer failed."""
        actor = self._actors.get(rank)
        if actor is None:
            return ()
        try:
            return (await getattr(actor, method).remote(*arguments, **options),)
        except Exception as error:
            if isinstance(cause_of(error), TransferError):
                log.warning("step %d: engine %d: %s", self.step, rank, cause_of(error))
                return ()
            if self._restarts is not None and died(error):
                self._lose(rank, actor, error)
                return ()
            raise self._named(rank, method, error) from error

    def _named(self, rank: int, method: str, error: Exception) -> EngineError:
        return EngineError(f"step {self.step}: engine {rank} failed in {method}: {described(error)}")

    def _lose(self, rank: int, actor: Any, error: Exception) -> None:
        """Handle the death of an actor once, even if several calls to it failed."""
        if self._actors.get(rank) is not actor or self._restarts is None:
            return
        self._restarts.client.dismiss(rank)
        self._forget(rank)
        self._handle_death(self._restarts, rank, actor, error)

    def _count(self, rank: int, counts: Mapping[str, float]) -> None:
        if rank in self._actors:  # a dead engine's counters are already in `past`
            self._counters[rank].now = np.array([counts[name] for name in COUNTED])
        self._host_bytes = max(self._host_bytes, counts.get("host_bytes", 0.0))

    def _forget(self, rank: int) -> None:
        """Stop calling an engine, and keep its counters."""
        del self._actors[rank]
        clock = self._counters[rank]
        clock.past, clock.now = clock.past + clock.now, np.zeros(len(COUNTED))

    def _handle_death(self, restarts: RestartPolicy, rank: int, actor: Any, error: Exception) -> None:
        if actor is not None:
            kill(actor)  # it may be alive but unreachable
        if never_ran(error):  # no fault of the engine, whose own death was counted
            log.warning("engine %d was placed on a node that no longer exists, and is placed again", rank)
            self._background(self._restart(restarts, rank))
            return
        sentence = self._failures.add(rank, self.step, error)
        if fault := self._failures.too_many(rank):
            self._fail(EngineError(fault))
            return
        if rank in self._leaving:
            log.warning("engine died while being drained; its requests are sampled again: %s", sentence)
            return
        log.warning("engine died and will be replaced: %s", sentence)
        self._background(self._restart(restarts, rank))

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    async def _drain(self, restarts: RestartPolicy, rank: int) -> None:
        """Let an engine finish its requests, then stop it."""
        await restarts.client.drain(rank)
        await self._remove(rank)
        log.info("engine %d was removed", rank)

    async def _move(self, restarts: RestartPolicy, rank: int, node: DrainingNode) -> None:
        """Let an engine finish its requests or hand them back before its node leaves, then start it elsewhere."""
        draining = asyncio.ensure_future(restarts.client.drain(rank))
        done, _ = await asyncio.wait({draining}, timeout=node.seconds_to_finish)
        if not done:
            log.warning("engine %d is on %s: it hands back its requests, and other engines continue them", rank, node)
            handed = asyncio.ensure_future(self.call(rank, "abort"))
            await asyncio.wait({draining, handed}, timeout=HAND_BACK_SECONDS)
        await self._remove(rank)
        await draining  # requests that it did not hand back are sampled again
        await self._restart(restarts, rank)

    async def _remove(self, rank: int) -> None:
        """Stop a drained engine, unless it died in the meantime."""
        async with self._syncing:
            for counts in await self.call(rank, "clock"):
                self._count(rank, counts)
            actor = self._actors.get(rank)
            if actor is not None:
                self._forget(rank)
                kill(actor)
        self._leaving.discard(rank)

    async def _restart(self, restarts: RestartPolicy, rank: int) -> None:
        """Restart an engine, send it the current weights, compare, and only then route requests to it."""
        await self._awake.wait()
        incarnation = self._starts[rank]
        self._starts[rank] += 1
        actor = None
        try:
            actor, ready = await restarts.start(rank, incarnation)
            self._started.append(actor)
            self._starting[rank] = actor, asyncio.ensure_future(node_of(actor))  # it answers before it loads the model
            await ready
            async with self._syncing:
                if self._loaded is not None:
                    await deliver_late(self._loaded, rank, actor, self)
                if self._seeding is not None:
                    await actor.reseed.remote(_seeds([*self._seeding, rank, incarnation], 1)[0])
                self._actors[rank] = actor
                restarts.client.admit(rank, actor)
        except Exception as error:  # noqa: BLE001 - raised by the next call of the engines
            if actor is not None and rank not in self._starting:  # `leave` has stopped it
                self._background(self._restart(restarts, rank))
            elif died(error) or isinstance(cause_of(error), TransferError):
                self._handle_death(restarts, rank, actor, error)
            else:
                named = isinstance(error, CanaryError | LearnerError)
                self._fail(error if named else self._named(rank, "start", error))
            return
        finally:
            self._starting.pop(rank, None)
        log.info("engine %d is ready", rank)

    def _fail(self, error: Exception) -> None:
        """Fail the run: the next request or call of engines gets the error."""
        self._failure = self._failure or error
        log.error("%s", error)
        if self._restarts is not None:
            self._restarts.client.fail(self._failure)


def _seeds(entropy: Sequence[int], count: int) -> list[int]:
    """Derive the seeds of the engines' generators for one step."""
    root = np.random.SeedSequence(list(entropy))
    return [int(s.generate_state(1)[0] >> 1) for s in root.spawn(count)]
