"""The explorer's side of the exchange: waits for a trainer, and serves its requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from rlsdk import weights as transport
from rlsdk.cluster.actor_failures import died, reason
from rlsdk.config import Plan
from rlsdk.contracts.rollouts import TakenBatch, TaskStatus
from rlsdk.errors import RunError
from rlsdk.rollout.producer import first_error
from rlsdk.trainer.explorer import Explorer
from rlsdk.trainer.two_process.messages import PeerInfo, disagreement, mailboxes, opened, reply, tell, until_gone
from rlsdk.trainer.two_process.remote import ExplorerInfo, WeightUpdate

log = logging.getLogger(__name__)


class ReceivedWeights:
    """Stands for the learner, with weights that a learner in another program sent."""

    def __init__(self, sent: WeightUpdate) -> None:
        """Wrap an update."""
        self._sent = sent

    def weights(self, version: int) -> Any:
        """Return an `ObjectRef` of the weights that were sent."""
        return self._sent.weights

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the learner's logprobs of the canary, float32 `[k - 1]`."""
        return self._sent.logprobs

    def checksums(self) -> dict[str, str]:
        """Return the CRC-32 of each tensor as it was sent."""
        import ray

        return transport.checksums(ray.get(self._sent.weights))


class ExplorerServer:
    """Serves one explorer to one trainer.

    Attributes:
        trainer: Description of the trainer's program, once it has come.
    """

    def __init__(self, plan: Plan, own: PeerInfo) -> None:
        """Create a server.

        Args:
            plan: Plan of the run.
            own: Description of the explorer's program.
        """
        self._plan, self._own = plan, own
        self._taken: list[TakenBatch] = []
        self.trainer: PeerInfo | None = None

    async def meet(self) -> PeerInfo:
        """Wait for a trainer, and return its description.

        Raises:
            ConfigError: Its configuration or its code differs.
            RunError: No trainer came in time, or it ended meanwhile.
        """
        limit, plan = self._plan.config.placement.partner_timeout, self._plan
        there = mailboxes(plan, "trainer")
        if not there:
            log.info("waiting for the trainer: rlsdk train CONFIG --mode train, for at most %g s", limit)
        for mailbox in there.values():
            await tell(mailbox, "explorer", self._own.name, self._own.mailbox)
        try:
            async with asyncio.timeout(limit):
                number, name, content = await self._message()
        except TimeoutError as error:
            raise RunError(
                f"no trainer wanted this explorer within placement.partner_timeout={limit:g} s; start one by "
                "rlsdk train CONFIG --mode train, on the same Ray, with the same settings, for the same folder "
                f"{plan.folder.resolve()}"
            ) from error
        assert name == "meet" and number is not None
        trainer: PeerInfo
        (trainer,) = await opened(content)
        wrong = disagreement(self._own, trainer)
        await self._own.mailbox.answer.remote(number, reply(self._own.where, wrong))
        if wrong is not None:
            raise wrong
        log.info("the trainer is %s", trainer.where)
        self.trainer = trainer
        return trainer

    async def serve(self, explorer: Explorer) -> str:
        """Serve the trainer's requests until it says how the run ended.

        Args:
            explorer: Explorer that does the work.

        Returns:
            "finished", "interrupted" or "failed".

        Raises:
            RunError: The trainer ended without a word.
        """
        assert self.trainer is not None
        gone = asyncio.ensure_future(until_gone(self.trainer.mailbox))
        work = asyncio.ensure_future(self._work(explorer))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():  # its last message may still be on the way
                await asyncio.wait({work}, timeout=1.0)
            if work.done():
                return work.result()
            raise RunError(
                f"the trainer, {self.trainer.where}, is gone: {gone.result()}. Its log is logs/driver.log in the run's "
                "folder; go on with both halves, the trainer with --resume"
            )
        finally:
            await _ended(gone, work)

    async def _work(self, explorer: Explorer) -> str:
        """Answer messages until one says how the run ended.

        The trainer requests one thing at a time: a message that arrives before the last one is answered means that it
        no longer waits for that answer, as after a second Ctrl-C.
        """
        answering: asyncio.Task[None] | None = None
        try:
            while True:
                number, name, content = await self._next(answering)
                if answering is not None:
                    await _ended(answering)
                arguments = await opened(content)
                if name != "shutdown":
                    answering = asyncio.create_task(self._answer(explorer, number, name, *arguments))
                    continue
                await explorer.close()
                return str(*arguments)
        finally:
            if answering is not None:
                await _ended(answering)

    async def _answer(
        self,
        explorer: Explorer,
        number: int | None,
        name: str,
        behind: Sequence[tuple[Sequence[int], Sequence[TaskStatus]]],
        *arguments: Any,
    ) -> None:
        try:
            for numbers, states in behind:
                self._settle(explorer, numbers, states)
            value = await _of(explorer, name)(*arguments)
            if name == "take":
                self._taken.append(value)
                value = value, explorer.state()
            content = reply(value, None, explorer.sources())
        except Exception as error:  # the trainer gets it
            wrong = first_error(error)
            log.error("%s failed: %s: %s", name, type(wrong).__name__, wrong, exc_info=error)
            content = reply(None, wrong, explorer.sources())
        await self._own.mailbox.answer.remote(number, content)

    async def _next(self, answering: asyncio.Task[None] | None) -> tuple[int | None, str, Any]:
        """Wait for the next message, while another is being answered.

        Raises:
            Exception: The other answer failed, and the error could not be sent.
        """
        message = asyncio.ensure_future(self._message())
        try:
            if answering is not None:
                await asyncio.wait({message, answering}, return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    answering.result()
            return await message
        finally:
            message.cancel()

    def _settle(self, explorer: Explorer, numbers: Sequence[int], states: Sequence[TaskStatus]) -> None:
        batch = self._taken.pop(0)
        there = [ticket.number for ticket in batch.tickets]
        if there != list(numbers):
            raise RunError(f"the trainer settles the tickets {list(numbers)}; those that it was given are {there}")
        explorer.settle(batch, states)

    async def fail(self, error: BaseException) -> None:
        """Answer the trainer's first request with an error: this explorer did not start, and will not."""
        if self.trainer is None:
            return
        gone = asyncio.ensure_future(until_gone(self.trainer.mailbox))
        message = asyncio.ensure_future(self._message())
        limit = self._plan.config.placement.partner_timeout
        await asyncio.wait({gone, message}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if message.done() and message.result()[0] is not None:
            await self._own.mailbox.answer.remote(message.result()[0], reply(None, error, {}))
        await _ended(gone, message)

    async def _message(self) -> tuple[int | None, str, Any]:
        """Wait for the next message.

        Raises:
            RunError: The trainer has ended this mailbox.
        """
        try:
            number, name, content = await self._own.mailbox.next.remote()
        except Exception as error:
            if died(error):
                raise RunError(f"the trainer has given this explorer up: {reason(error)}") from error
            raise
        return number, name, content

    async def interrupt(self) -> None:
        """Ask the trainer to end the run after its step."""
        if self.trainer is not None:
            await tell(self.trainer.mailbox, "interrupt")


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def _of(explorer: Explorer, name: str) -> Callable[..., Awaitable[Any]]:
    """Look up the function that a message requests."""

    async def about() -> ExplorerInfo:
        return ExplorerInfo(explorer.eval_tasks, explorer.canary_ids)

    async def publish(sent: WeightUpdate, updated: bool) -> float:
        return await explorer.publish(ReceivedWeights(sent), sent.version, updated=updated)

    here: dict[str, Callable[..., Awaitable[Any]]] = {"about": about, "publish": publish}
    return here.get(name) or getattr(explorer, name)
