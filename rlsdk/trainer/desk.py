"""The explorer's side of the exchange: waits for a trainer, and does what its letters ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from rlsdk import weights as transport
from rlsdk.config import Plan
from rlsdk.errors import RunError
from rlsdk.rollout.deaths import died, reason
from rlsdk.rollout.lifecycle import State
from rlsdk.rollout.producer import first_error
from rlsdk.trainer.exchange import Card, disagreement, mailboxes, opened, reply, tell, until_gone
from rlsdk.trainer.explorer import Batch, Explorer
from rlsdk.trainer.far import About, Sent

log = logging.getLogger(__name__)


class Sender:
    """A learner in another program, of which there is what it sent."""

    def __init__(self, sent: Sent) -> None:
        """Make one."""
        self._sent = sent

    def weights(self, version: int) -> Any:
        """An `ObjectRef` of the weights that were sent."""
        return self._sent.weights

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """float32 `[k - 1]`: the learner's logprobs of the canary."""
        return self._sent.logprobs

    def checksums(self) -> dict[str, str]:
        """CRC-32 of each tensor as it was sent."""
        import ray

        return transport.checksums(ray.get(self._sent.weights))


class Desk:
    """Of one explorer, for one trainer.

    Attributes:
        trainer: The trainer's card, once it has come.
    """

    def __init__(self, plan: Plan, own: Card) -> None:
        """Make one.

        Args:
            plan: Of the run.
            own: The explorer's.
        """
        self._plan, self._own = plan, own
        self._taken: list[Batch] = []
        self.trainer: Card | None = None

    async def meet(self) -> Card:
        """The trainer's card, as soon as one has come.

        Raises:
            ConfigError: Its configuration, or its code, is another.
            RunError: None came in time, or it ended meanwhile.
        """
        limit, plan = self._plan.config.placement.partner_timeout, self._plan
        there = mailboxes(plan, "trainer")
        if not there:
            log.info("waiting for the trainer: rlsdk train CONFIG --mode train, for at most %g s", limit)
        for mailbox in there.values():
            await tell(mailbox, "explorer", self._own.name, self._own.mailbox)
        try:
            async with asyncio.timeout(limit):
                number, name, content = await self._letter()
        except TimeoutError as error:
            raise RunError(
                f"no trainer wanted this explorer within placement.partner_timeout={limit:g} s; start one by "
                "rlsdk train CONFIG --mode train, on the same Ray, with the same settings, for the same folder "
                f"{plan.folder.resolve()}"
            ) from error
        assert name == "meet" and number is not None
        trainer: Card
        (trainer,) = await opened(content)
        wrong = disagreement(self._own, trainer)
        await self._own.mailbox.answer.remote(number, reply(self._own.where, wrong))
        if wrong is not None:
            raise wrong
        log.info("the trainer is %s", trainer.where)
        self.trainer = trainer
        return trainer

    async def serve(self, explorer: Explorer) -> str:
        """Do what the trainer asks until it says how the run ended.

        Args:
            explorer: That works for it.

        Returns:
            "finished", "interrupted" or "failed".

        Raises:
            RunError: The trainer has ended and said nothing.
        """
        assert self.trainer is not None
        gone = asyncio.ensure_future(until_gone(self.trainer.mailbox))
        work = asyncio.ensure_future(self._work(explorer))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():  # its last letter may still be on the way
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
        """Answer letters until one says how the run ended.

        The trainer asks one thing at a time: a letter behind one that has no answer yet means that it waits for that
        answer no longer, as after a second Ctrl-C.
        """
        answering: asyncio.Task[None] | None = None
        ended = False
        try:
            while True:
                number, name, content = await self._next(answering)
                if answering is not None:
                    await _ended(answering)
                arguments = await opened(content)
                if name != "part":
                    ended = ended or name == "end"
                    answering = asyncio.create_task(self._answer(explorer, number, name, *arguments))
                    continue
                if not ended:
                    await explorer.end()
                return str(*arguments)
        finally:
            if answering is not None:
                await _ended(answering)

    async def _answer(
        self,
        explorer: Explorer,
        number: int | None,
        name: str,
        behind: Sequence[tuple[Sequence[int], Sequence[State]]],
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
        """The next letter, while another is being answered.

        Raises:
            Exception: What the other one's answer met, if it could not be given.
        """
        letter = asyncio.ensure_future(self._letter())
        try:
            if answering is not None:
                await asyncio.wait({letter, answering}, return_when=asyncio.FIRST_COMPLETED)
                if answering.done():
                    answering.result()
            return await letter
        finally:
            letter.cancel()

    def _settle(self, explorer: Explorer, numbers: Sequence[int], states: Sequence[State]) -> None:
        batch = self._taken.pop(0)
        there = [ticket.number for ticket in batch.tickets]
        if there != list(numbers):
            raise RunError(f"the trainer settles the tickets {list(numbers)}; those that it was given are {there}")
        explorer.settle(batch, states)

    async def fail(self, error: BaseException) -> None:
        """Answer what the trainer asks first with an error: here is no explorer, and there will be none."""
        if self.trainer is None:
            return
        gone = asyncio.ensure_future(until_gone(self.trainer.mailbox))
        letter = asyncio.ensure_future(self._letter())
        limit = self._plan.config.placement.partner_timeout
        await asyncio.wait({gone, letter}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if letter.done() and letter.result()[0] is not None:
            await self._own.mailbox.answer.remote(letter.result()[0], reply(None, error, {}))
        await _ended(gone, letter)

    async def _letter(self) -> tuple[int | None, str, Any]:
        """The next one.

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
        """Ask the trainer to end the run behind its step."""
        if self.trainer is not None:
            await tell(self.trainer.mailbox, "interrupt")


async def _ended(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def _of(explorer: Explorer, name: str) -> Callable[..., Awaitable[Any]]:
    """What a letter asks for."""

    async def about() -> About:
        return About(explorer.eval_tasks, explorer.canary_ids)

    async def sync(sent: Sent, updated: bool) -> float:
        return await explorer.sync(Sender(sent), sent.version, updated=updated)

    here: dict[str, Callable[..., Awaitable[Any]]] = {"about": about, "sync": sync}
    return here.get(name) or getattr(explorer, name)
