"""An explorer in another program, as the trainer sees it; where that program dies, another takes its place."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlsdk.config import Plan
from rlsdk.errors import ConfigError, RunError
from rlsdk.rollout.lifecycle import Counts, State
from rlsdk.trainer.engines import Sender
from rlsdk.trainer.evaluation import Evaluation
from rlsdk.trainer.exchange import Card, GoneError, ask, mailboxes, opened, tell
from rlsdk.trainer.explorer import Account, Batch, Crew, Meter, Snapshot
from rlsdk.types import Group, Task

log = logging.getLogger(__name__)
_SHOWN = 20
"""Deaths in the summary."""


@attrs.frozen
class About:
    """What an explorer says of itself when it is ready.

    Attributes:
        eval_tasks: Held-out tasks.
        canary_ids: int64 `[k]`.
    """

    eval_tasks: int
    canary_ids: np.ndarray


@attrs.frozen(eq=False)
class Sent:
    """Weights that were sent: their version, an `ObjectRef` of them, and the learner's logprobs of the canary."""

    version: int
    weights: Any
    logprobs: np.ndarray


class Explorers:
    """Those that come to a trainer, one of which it works with; others wait in line.

    Attributes:
        interrupt: Called when an explorer was interrupted.
    """

    def __init__(self, plan: Plan, own: Card) -> None:
        """Make one.

        Args:
            plan: Of the run.
            own: The trainer's.
        """
        self._plan, self._own = plan, own
        self._tried: set[str] = set()
        self._came: asyncio.Queue[tuple[str, Any] | Exception] = asyncio.Queue()
        self._listening: asyncio.Task[None] | None = None
        self.interrupt: Callable[[], None] = lambda: None

    def listen(self) -> None:
        """Read the trainer's own letters from now on."""
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        try:
            while True:
                _, name, content = await self._own.mailbox.next.remote()
                if name == "interrupt":
                    self.interrupt()
                else:
                    self._came.put_nowait(await opened(content))
        except Exception as error:  # noqa: BLE001 - who waits for an explorer gets it: none can come any more
            self._came.put_nowait(error)

    async def close(self) -> None:
        """Listen no more."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.wait([self._listening])

    async def meet(self) -> Any:
        """The mailbox of an explorer that has not been met, and can work for this trainer, as soon as there is one.

        Raises:
            RunError: None came in time.
        """
        limit = self._plan.config.placement.partner_timeout
        for each in mailboxes(self._plan, "explorer").items():
            self._came.put_nowait(each)
        if self._came.empty():
            log.info("waiting for an explorer: rlsdk train CONFIG --mode explore, for at most %g s", limit)
        try:
            async with asyncio.timeout(limit):
                while True:
                    came = await self._came.get()
                    if isinstance(came, Exception):
                        raise RunError(f"the trainer's mailbox is gone: {came}; go on with --resume") from came
                    name, mailbox = came
                    if name not in self._tried and await self._agrees(name, mailbox):
                        return mailbox
        except TimeoutError as error:
            raise RunError(
                f"no explorer came to the run {self._plan.folder.resolve()} within placement.partner_timeout={limit:g} "
                "s; start one by rlsdk train CONFIG --mode explore, on the same Ray and with the same settings, and go "
                "on with --resume"
            ) from error

    async def _agrees(self, name: str, mailbox: Any) -> bool:
        self._tried.add(name)
        try:
            where = (await ask(mailbox, "meet", self._own)).value
        except GoneError:  # its name outlived it
            return False
        except ConfigError as error:
            log.warning("an explorer came that cannot work for this run: %s", error)
            return False
        log.info("the explorer is %s", where)
        return True


class FarExplorer:
    """What `Explorer` is, by letters.

    What an explorer had when it last gave a batch is remembered here. One that comes in the place of another goes on
    from there: tasks that were on their way are made again, and what was taken is not. Between `take` and `settle`
    nobody is replaced, so that each batch is settled where it was taken, or in what is remembered.
    """

    def __init__(self, plan: Plan, explorers: Explorers, mailbox: Any) -> None:
        """Make one.

        Args:
            plan: Of the run.
            explorers: Those that come.
            mailbox: Of the one that was met.
        """
        self._plan, self._explorers, self._mailbox = plan, explorers, mailbox
        self._about: About | None = None
        self._state: dict[str, Any] | None = None
        self._done = 0
        self._settled: list[tuple[list[int], list[State]]] = []
        self._sent: Sent | None = None
        self._gap = 0.0
        self._past = self._now = Meter({}, 0)
        self._sources: Mapping[str, Counts] = {}
        self._lost: list[str] = []
        self.failure: BaseException | None = None

    async def start(self) -> None:
        """Wait until the explorer is ready."""
        self._about = await self._call("about")

    @property
    def eval_tasks(self) -> int:
        """Held-out tasks."""
        return 0 if self._about is None else self._about.eval_tasks

    async def tasks(self, places: Mapping[int, tuple[str, int]]) -> dict[int, Task]:
        """See `Explorer.tasks`."""
        found: dict[int, Task] = await self._call("tasks", places)
        return found

    async def restore(self, step: int, state: Mapping[str, Any], groups: Mapping[int, Group]) -> tuple[int, int]:
        """See `Explorer.restore`."""
        kept = {name: state[name] for name in ("tasks", "production", "baselines") if name in state}
        found: tuple[int, int] = await self._call("restore", step, kept, groups)
        self._state, self._done = kept, step
        return found

    async def take(self, step: int) -> Batch:
        """See `Explorer.take`."""
        batch: Batch
        batch, self._state = await self._call("take", step)
        self._done = step
        return batch

    def settle(self, batch: Batch, states: Sequence[State]) -> None:
        """See `Explorer.settle`; it travels with what is asked next."""
        if self._state is not None:
            self._state = settled(self._state, batch, states)
        self._done += 1
        self._settled.append(([ticket.number for ticket in batch.tickets], list(states)))

    async def sync(self, learner: Sender, version: int, *, updated: bool) -> float:
        """See `Explorer.sync`."""
        if not self._plan.needs_engine:
            return 0.0
        assert self._about is not None
        self._sent = None  # the last ones need not be kept beside these
        weights = await asyncio.to_thread(learner.weights, version)
        own = await asyncio.to_thread(learner.canary, self._about.canary_ids)
        sent = Sent(version, weights, own)
        try:
            self._gap = await self._ask("sync", sent, updated)
            self._sent = sent
        except GoneError as gone:
            self._sent = sent
            await self._replace(gone)
        return self._gap

    async def sleep(self) -> None:
        """Nothing: the learner's device is its own."""

    async def evaluate(self) -> Evaluation:
        """See `Explorer.evaluate`."""
        found: Evaluation = await self._call("evaluate")
        return found

    async def snapshot(self) -> Snapshot:
        """See `Explorer.snapshot`."""
        found: Snapshot = await self._call("snapshot")
        self._state = dict(found.state)
        return found

    async def meter(self) -> Meter:
        """See `Explorer.meter`; while none is there, what was counted last."""
        try:
            self._now = await self._ask("meter")
        except GoneError as gone:
            log.debug("nobody to ask how much was sampled: %s", gone)
        return added(self._past, self._now)

    async def attend(self, wish: int | None) -> Crew:
        """See `Explorer.attend`."""
        found: Crew = await self._call("attend", wish)
        return found

    def sources(self) -> Mapping[str, Counts]:
        """Where each source of tasks stood when the explorer last said something."""
        return self._sources

    async def end(self) -> Account:
        """See `Explorer.end`; none is waited for that is not there."""
        account = Account(self._sources, {}, {"lost": 0, "reasons": [], "sampled_again": 0})
        try:
            account = await self._ask("end")
        except GoneError as gone:
            log.warning("the explorer is gone: %s", gone)
            self._lost.append(str(gone))
        return attrs.evolve(account, explorers_lost=tuple(self._lost[:_SHOWN]))

    async def part(self, status: str) -> None:
        """Tell the explorer how the run ended: it ends likewise."""
        if self._mailbox is not None:
            await tell(self._mailbox, "part", status)

    async def _call(self, name: str, *content: Any) -> Any:
        """The answer of the explorer, or of the one that takes its place."""
        while True:
            try:
                return await self._ask(name, *content)
            except GoneError as gone:
                await self._replace(gone)

    async def _ask(self, name: str, *content: Any) -> Any:
        if self._mailbox is None:
            raise GoneError("it has ended, and no other has come")
        behind, self._settled = self._settled, []  # should it be lost on the way, what is remembered has it
        answer = await ask(self._mailbox, name, behind, *content)
        self._sources = answer.beside
        return answer.value

    async def _replace(self, gone: GoneError) -> None:
        """Wait for another explorer, and bring it to where the last one was.

        Raises:
            RunError: None came in time.
        """
        import ray

        while True:
            log.warning("the explorer is gone: %s", gone)
            if self._mailbox is not None:
                ray.kill(self._mailbox)  # what cannot be reached may live; it ends by this
            self._lost.append(str(gone))
            self._past, self._now = added(self._past, self._now), Meter({}, 0)
            self._mailbox = None
            self._settled.clear()
            self._mailbox = await self._explorers.meet()
            try:
                self._about = await self._ask("about")
                again = 0
                if self._state is not None:
                    _, again = await self._ask("restore", self._done, self._state, {})
                if self._sent is not None:
                    self._gap = await self._ask("sync", self._sent, False)
            except GoneError as other:
                gone = other
                continue
            log.info("another explorer goes on at step %d; %d tasks are made again", self._done + 1, again)
            return


def settled(state: Mapping[str, Any], batch: Batch, states: Sequence[State]) -> dict[str, Any]:
    """What an explorer's state is once a batch that it had given is settled.

    Args:
        state: From behind the `take` of the batch.
        batch: What was taken.
        states: What became of its tickets.
    """
    after = copy.deepcopy(dict(state))
    production = after["production"]
    for ticket, end in zip(batch.tickets, states, strict=True):
        production["on_the_way"][ticket.source].remove(ticket.position)
        production["ended"]["sources"][ticket.source][end.value] += 1
    return after


def added(past: Meter, now: Meter) -> Meter:
    """What explorers have counted, one after the other."""
    names = {**past.clock, **now.clock}
    clock = {name: past.clock.get(name, 0.0) + now.clock.get(name, 0.0) for name in names}
    return Meter(clock, past.wasted + now.wasted)
