"""All engines of a run: calls that name a failing engine, seeds, weight updates, comparison with the learner.

An engine whose process or node dies is replaced while the run continues; an exception in its code fails the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlsdk.cluster.actors import cause_of, described, died, kill
from rlsdk.cluster.draining import HAND_BACK_SECONDS, DrainingNode, on_draining
from rlsdk.cluster.failures import ActorFailures
from rlsdk.engines.actor import STEP
from rlsdk.engines.canary import Canary, describe_checksums
from rlsdk.engines.client import EngineRoutes
from rlsdk.engines.delivery import Delivered, WeightSource, deliver, deliver_late, received_checksums
from rlsdk.engines.starting import until_ready
from rlsdk.errors import CanaryError, EngineError, LearnerError, TransferError

log = logging.getLogger(__name__)
SHOWN = 20
"""Most reasons that the summary lists."""
COUNTED = (*STEP, "tokens")
"""Counters of an actor that are read after each step."""

Start = Callable[[int, int], Awaitable[tuple[Any, Any]]]
"""Starts the engine of a rank, given the number of earlier starts; returns its handle, and what to wait for."""


@attrs.define(kw_only=True)
class RestartPolicy:
    """Policy for restarting engines that died.

    Attributes:
        client: Routes requests to the running engines.
        start: Starts a replacement for a dead engine.
        most: Number of deaths per rank that a run survives.
        logs: Folder of the engines' logs, `engine-RANK.log`; None if they have none.
        missing: Returns what is lacking to scale from one number of engines to another; empty if there is room.
    """

    client: EngineRoutes
    start: Start
    most: int
    logs: Path | None = None
    missing: Callable[[int, int], str] = lambda now, wanted: ""


@attrs.define
class _Clock:
    """Counters of one engine, summed over all incarnations of its actor."""

    past: np.ndarray = attrs.field(factory=lambda: np.zeros(len(COUNTED)))
    now: np.ndarray = attrs.field(factory=lambda: np.zeros(len(COUNTED)))


class EngineGroup:
    """The actors of all engines, called together; engines that die are replaced.

    Attributes:
        step: Current step, for messages.
        lost: A sentence for each death: which engine, when and why.
    """

    def __init__(self, actors: Sequence[Any], *, shared: bool, restarts: RestartPolicy | None = None) -> None:
        """Create a group of started engines.

        Args:
            actors: Actor handles, by rank.
            shared: True if engines share devices with the learner and sleep while it works.
            restarts: Restart policy; with None, the death of an engine is an error.
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
        self._clocks = {rank: _Clock() for rank in self._actors}
        self._host_bytes = 0.0
        self._starts = dict.fromkeys(self._actors, 1)
        self._started: list[Any] = []
        self._wanted = len(self._actors)
        self._leaving: set[int] = set()
        self._changes: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None
        self._awake, self._syncing = asyncio.Event(), asyncio.Lock()
        self._awake.set()
        self._seeding: tuple[int, int] | None = None
        self._delivered: Delivered | None = None

    def __len__(self) -> int:
        """Return the target number of engines, including dead ones."""
        return self._wanted

    @property
    def alive(self) -> tuple[int, ...]:
        """Ranks of the engines that get requests."""
        return tuple(sorted(self._actors.keys() - self._leaving))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the engines that live, those that are being drained among them."""
        return tuple(self._actors)

    def resize(self, count: int) -> str:
        """Begin to change the number of engines, without waiting: some start, or the last ones are drained.

        Args:
            count: Number of engines, at least 1.

        Returns:
            A sentence that says why the number cannot change now; empty if it will.
        """
        restarts = self._restarts
        if restarts is None or count == self._wanted:
            return ""
        if self._leaving or self._changes:
            return f"{count} engines: other engines are still starting or being drained; try again after that"
        if count < self._wanted:
            self._leaving = set(range(count, self._wanted))
            for rank in sorted(self._leaving):
                self._background(self._drain(restarts, rank))
        elif lacking := restarts.missing(self._wanted, count):
            return f"{count} engines: there is no room for {count - self._wanted} more, {lacking}"
        for rank in range(self._wanted, count):
            self._clocks.setdefault(rank, _Clock())
            self._failures.forget(rank)
            self._starts.setdefault(rank, 0)
            self._background(self._restart(restarts, rank))
        log.info("%d engines from now on, instead of %d", count, self._wanted)
        self._wanted = count
        return ""

    async def leave(self, nodes: Sequence[DrainingNode]) -> None:
        """Begin to move engines away from nodes that are to leave the cluster, without waiting for it.

        Such an engine gets no more requests, finishes those that it has or, when the time is up, hands them back, and
        is started on another node. It does not count as dead. Engines that share GPUs with the learner stay: the run
        ends with the learner's node.

        Args:
            nodes: Draining nodes; engines that are leaving them already are left alone.
        """
        restarts = self._restarts
        if restarts is None or self.shared:
            return
        staying = {rank: self._actors[rank] for rank in self.alive}
        for rank, node in (await on_draining(nodes, staying)).items():
            if self._actors.get(rank) is staying[rank] and rank not in self._leaving:
                self._leaving.add(rank)
                log.warning("engine %d is on %s: it gets no more requests and is started elsewhere", rank, node)
                self._background(self._move(restarts, rank, node))

    async def all(self, method: str, *arguments: Any) -> dict[int, Any]:
        """Call all engines that live; their answers by rank.

        Raises:
            EngineError: One failed, or died once too often; the message names it and the step.
        """
        self._check()
        ranks = list(self._actors)
        found = await asyncio.gather(*(self.call(rank, method, *arguments) for rank in ranks))
        self._check()
        return {rank: answers[0] for rank, answers in zip(ranks, found, strict=True) if answers}

    async def sleep(self) -> None:
        """Free the device that engines share with the learner, after engines that are starting have started."""
        while self._changes:
            await asyncio.wait(self._changes)
        await self.all("sleep")
        self._awake.clear()

    async def reseed(self, seed: int, step: int) -> None:
        """Reseed the engines' generators, so that a step's samples depend on the seed and the step alone.

        Args:
            seed: Random seed of the run.
            step: Number of the training step; 0 for evaluations.
        """
        self._check()
        self._seeding = seed, step
        seeds = _seeds([seed, step], len(self._clocks))
        await asyncio.gather(*(self.call(rank, "reseed", seeds[rank]) for rank in list(self._actors)))

    async def publish(self, learner: WeightSource, version: int, canary: Canary, *, updated: bool) -> float:
        """Send the learner's weights to the engines and compare; return the canary's gap in nats, 0 without engines.

        Args:
            learner: Source of the weights.
            version: Number of completed steps.
            canary: Check on fixed tokens, with their earlier logprobs.
            updated: True if the weights must have changed since they were last sent.

        Raises:
            CanaryError: Engine and learner disagree.
            EngineError: An engine failed.
        """
        if not len(self):
            return 0.0
        async with self._syncing:
            self._delivered = None  # so that Ray's store need not hold two versions at once
            ids = canary.token_ids
            if self.shared:
                self._awake.set()
            found = await deliver(self, learner, version, ids, wake=self.shared)
            try:
                gap = canary.check(version, found.expected, found.seen, updated=updated)
            except CanaryError as error:
                received = await received_checksums(self, learner, found.weights, ids)
                sent = await asyncio.to_thread(learner.checksums)
                raise CanaryError(f"{error}\n{describe_checksums(sent, received)}") from error
            self._delivered = Delivered(learner, canary, found.weights)  # for engines that start later
            return gap

    async def clock(self) -> dict[str, float]:
        """Since the start; nothing of it ever falls, whichever engines die.

        Returns:
            `engine`: seconds of generation, of the slowest rank, and `engines` in the mean; `tokens` of all; `steps` of
            decoding, of the rank with most, and the sums over all ranks of what the actors count of their steps;
            `host_bytes`: greatest main memory that a rank has used.
        """
        for rank, counted in (await self.all("clock")).items():
            self._count(rank, counted)
        sums = np.array([clock.past + clock.now for clock in self._clocks.values()]).reshape(-1, len(COUNTED))
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
        """Metrics: engines that live, deaths so far, continuations that were sampled again for them."""
        if self._restarts is None:
            return {}
        again = self._restarts.client.sampled_again
        return {
            "engines/alive": float(len(self.alive)),
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
        """Call an engine; returns its answer in a tuple, which is empty if it has died or a transfer broke off."""
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
        """Handle the death of an actor once, however many calls to it failed."""
        if self._actors.get(rank) is not actor or self._restarts is None:
            return
        self._restarts.client.dismiss(rank)
        self._forget(rank)
        self._handle_death(self._restarts, rank, actor, error)

    def _count(self, rank: int, counted: Mapping[str, float]) -> None:
        if rank in self._actors:  # the counts of a dead engine are already in `past`
            self._clocks[rank].now = np.array([counted[name] for name in COUNTED])
        self._host_bytes = max(self._host_bytes, counted.get("host_bytes", 0.0))

    def _forget(self, rank: int) -> None:
        """Stop calling an engine, and keep its counts."""
        del self._actors[rank]
        clock = self._clocks[rank]
        clock.past, clock.now = clock.past + clock.now, np.zeros(len(COUNTED))

    def _handle_death(self, restarts: RestartPolicy, rank: int, actor: Any, error: Exception) -> None:
        if actor is not None:
            kill(actor)  # one that cannot be reached may still be running
        said = self._failures.add(rank, self.step, error)
        if fault := self._failures.too_many(rank):
            self._fail(EngineError(fault))
            return
        if rank in self._leaving:
            log.warning("engine died while being drained; its requests are sampled again: %s", said)
            return
        log.warning("engine died and will be replaced: %s", said)
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
        """Let an engine finish its requests, or hand them back while its node is still there; start it elsewhere."""
        draining = asyncio.ensure_future(restarts.client.drain(rank))
        done, _ = await asyncio.wait({draining}, timeout=node.seconds_to_finish)
        if not done:
            log.warning("engine %d is on %s: it hands back its requests, which others continue", rank, node)
            handed = asyncio.ensure_future(self.call(rank, "abort"))
            await asyncio.wait({draining, handed}, timeout=HAND_BACK_SECONDS)
        await self._remove(rank)
        await draining  # what it did not hand back is sampled again, now that it is dead
        await self._restart(restarts, rank)

    async def _remove(self, rank: int) -> None:
        """Stop an engine that is being drained, unless it died meanwhile."""
        async with self._syncing:
            for counted in await self.call(rank, "clock"):
                self._count(rank, counted)
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
            await until_ready(rank, ready)
            async with self._syncing:
                if self._delivered is not None:
                    await deliver_late(self._delivered, rank, actor)
                if self._seeding is not None:
                    await actor.reseed.remote(_seeds([*self._seeding, rank, incarnation], 1)[0])
                self._actors[rank] = actor
                restarts.client.admit(rank, actor)
        except Exception as error:  # noqa: BLE001 - kept for whoever calls engines next
            if died(error) or isinstance(cause_of(error), TransferError):
                self._handle_death(restarts, rank, actor, error)
            else:
                named = isinstance(error, CanaryError | LearnerError)
                self._fail(error if named else self._named(rank, "start", error))
            return
        log.info("engine %d is ready", rank)

    def _fail(self, error: Exception) -> None:
        """Fail the run: whoever samples or calls engines next gets the error."""
        self._failure = self._failure or error
        log.error("%s", error)
        if self._restarts is not None:
            self._restarts.client.fail(self._failure)


def _seeds(entropy: Sequence[int], count: int) -> list[int]:
    """Derive the seeds of the engines' generators for one step."""
    root = np.random.SeedSequence(list(entropy))
    return [int(s.generate_state(1)[0] >> 1) for s in root.spawn(count)]
