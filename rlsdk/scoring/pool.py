"""A pool of killable scoring processes, so that no call exceeds its time limit, whatever it does.

The processes are forks of one that has imported the rewards, so that a killed one is replaced in milliseconds. A call
that takes much longer than others no longer occupies one of the pool's workers: another process takes its place until
the call's limit. While others wait, such a call continues at the lowest priority, so that a hanging one costs little.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import pickle
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlsdk.components import component_of
from rlsdk.errors import LONGEST, DataError, ScoringError, described
from rlsdk.isolation.fork_server import Fork, ForkServer, ForkServerError
from rlsdk.isolation.framing import receive, send
from rlsdk.isolation.threads import run_to_end
from rlsdk.plugins import ComponentRef, Plugins
from rlsdk.scoring.batching import pickled
from rlsdk.scoring.outcome import as_score, as_scores
from rlsdk.types import Rollout, Score, Task

MAX_SLOW = 64
"""Maximum number of concurrent slow calls; further ones continue to occupy their worker."""
_PATIENCE = 4.0
"""Multiple of the usual duration after which another process takes a call's place."""
_LEAST_PATIENCE = 0.02
_LEARNING = 0.1
_FIRST_PATIENCE = 1.0
_MOST = 64
"""Maximum rollouts per call."""
_WORTH = 0.01
"""Seconds of work that justify the cost of one message, about a millisecond."""
_TOGETHER = 1.0
"""Maximum seconds per call of a reward that takes lists, so that other processes can share the work."""
_UNTRIED = 8
"""Rollouts in one call of a reward that takes lists, until its duration is known."""
_HEARING = 0.05
"""Seconds beyond a limit to read a reply that arrived while the event loop was busy."""


def prepare(references: Sequence[ComponentRef]) -> Callable[[socket.socket], None]:
    """Load the rewards, and return the main function of a fork, which scores until the driver closes the connection."""
    plugins = Plugins()
    rewards = [plugins.resolve(reference) for reference in references]
    for reward in rewards:
        component = component_of(reward)
        for module in component.imports if component else ():
            importlib.import_module(module)
    # Modules that every call needs are also imported here, such as numpy, which rollouts import when first created.
    pickle.loads(pickle.dumps(Rollout.from_text(Task(id="", prompt=""), "")))  # noqa: S301 - our own

    def work(connection: socket.socket) -> None:
        spent = False
        while not spent:
            index, rollouts = pickle.loads(receive(connection))  # noqa: S301 - from the driver, which is trusted
            reply = _call(rewards[index], rollouts)
            send(connection, json.dumps({**reply, "cpu": time.process_time()}, default=float).encode())
            spent = bool(reply.get("spent"))

    return work


def _call(reward: Callable[..., Any], rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Call a reward and build the reply; `spent` means that the process must end: out of memory, or told to exit."""
    component = component_of(reward)
    try:
        if component is not None and component.batch:
            return {"scores": [_plain(score) for score in as_scores(_result(reward, rollouts), len(rollouts))]}
        scores = [_one(reward, rollout) for rollout in rollouts]
        spent = [score.pop("spent", False) for score in scores]
        return {"scores": scores, "spent": any(spent)}
    except DataError as error:
        return {"data_error": str(error)}
    except BaseException as error:  # noqa: BLE001 - the user's code: what it raises is the score's reason
        return _failure(error)


def _one(reward: Callable[..., Any], rollout: Rollout) -> dict[str, Any]:
    """Score one rollout of several; its failure does not affect the others."""
    try:
        return _plain(as_score(_result(reward, rollout)))
    except DataError:
        raise
    except BaseException as error:  # noqa: BLE001 - as above
        failure = _failure(error)
        return {**_plain(Score.invalid(failure["error"])), "spent": failure["spent"]}


def _result(reward: Callable[..., Any], argument: Any) -> Any:
    result = reward(argument)
    return run_to_end(result) if inspect.isawaitable(result) else result


def _failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, MemoryError):
        return {"error": "MemoryError: it needs more than scoring.memory allows", "spent": True}
    return {"error": described(error), "spent": isinstance(error, SystemExit | KeyboardInterrupt)}


def _plain(score: Score) -> dict[str, Any]:
    return {
        "value": score.value,
        "valid": score.valid,
        "metrics": {name: float(value) for name, value in score.metrics.items()},
        "reason": score.reason[: 2 * LONGEST],
        "token_rewards": score.token_rewards,
        "answer": score.answer[: 2 * LONGEST],
    }


class FailedError(Exception):
    """A call raised, was killed, or its process ended; the message says which."""


class TooLongError(FailedError):
    """A call was killed for exceeding its time limit.

    Attributes:
        first: True if it was the process's first call of the reward, whose time includes imports.
    """

    def __init__(self, limit: float, *, first: bool) -> None:
        super().__init__(f"it took longer than {limit:g} s and was killed")
        self.first = first


@attrs.define(eq=False)
class _ScoringWorker:
    """The driver's side of a process; not bound to an event loop."""

    fork: Fork
    cpu: float = 0.0  # CPU seconds used at the end of its last call
    called: set[int] = attrs.field(factory=set)  # rewards

    def lives(self) -> bool:
        """Return True if an idle process is alive: it sends nothing, so a readable connection means it has ended."""
        try:
            self.fork.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except ConnectionError:
            pass
        return False

    def used(self) -> float | None:
        """CPU seconds used by this call; None if the system does not report them."""
        try:
            total = int(Path(f"/proc/{self.fork.pid}/schedstat").read_text(encoding="ascii").split()[0])
        except (OSError, ValueError, IndexError):
            return None
        return total / 1e9 - self.cpu

    def starves(self) -> bool:
        """Return True if the process is waiting for a free core; False if the system does not report it."""
        try:
            return Path(f"/proc/{self.fork.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] == "R"
        except (OSError, IndexError):
            return False


class Pool:
    """Runs calls of several rewards in worker processes, which start on first use."""

    def __init__(
        self, rewards: Sequence[ComponentRef], *, workers: int = 0, memory: int = 2048, log_to: Path | None = None
    ) -> None:
        """Create a pool for the given rewards.

        Args:
            rewards: Rewards; calls refer to them by index.
            workers: Number of concurrently scoring processes; 0 for one per core.
            memory: MiB of private memory that a process may use beyond its initial size (Linux).
            log_to: File for the output of rewards; by default, standard error.
        """
        self._rewards = list(rewards)
        self._workers = workers or os.cpu_count() or 1
        self._forks = ForkServer("scoring processes", prepare, self._rewards, memory=memory << 20, log_to=log_to)
        self._idle: list[_ScoringWorker] = []
        self._busy: set[_ScoringWorker] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._usual = [_FIRST_PATIENCE / _PATIENCE] * len(self._rewards)  # seconds for one rollout
        self._heard = [0] * len(self._rewards)  # completed calls
        self.counts: Counter[str] = Counter()
        """`calls`, `killed` (for exceeding their time limit), `died`."""

    def most(self, index: int, limit: float, *, together: bool = False) -> int:
        """Return how many rollouts one call of a reward should take.

        Args:
            index: Index of the reward.
            limit: Time limit of a call, in wall-clock seconds.
            together: True if the reward is faster on lists; otherwise a call takes only as many as justify a message.
        """
        if together and not self._heard[index]:
            return _UNTRIED
        seconds = min(_TOGETHER, limit / _PATIENCE) if together else _WORTH
        return max(1, min(_MOST, int(seconds / self._usual[index])))

    async def call(self, index: int, take: Callable[[], Sequence[Rollout]], limit: float = 10.0) -> list[Score]:
        """Score rollouts in one call of a reward.

        Args:
            index: Index of the reward.
            take: Returns the rollouts, called when a process is free for them.
            limit: Wall-clock seconds after which the process is killed.

        Raises:
            FailedError: The call raised, took too long, or its process ended.
            DataError: A task cannot be scored at all.
            ScoringError: The processes cannot be started.
        """
        self._enter_loop()
        async with _Slot(self._slots) as slot:
            rollouts = take()
            if not rollouts:
                return []
            # Only once there is a slot: otherwise the event loop would do this for all waiters before it reads
            # another reply.
            message = pickled((index, list(rollouts)), rollouts)
            worker = self._taken() or _ScoringWorker(await self._fork())
            self._busy.add(worker)
            reply = asyncio.ensure_future(worker.fork.ask(message))
            again = False
            try:
                again = await self._wait(reply, index, len(rollouts), worker, slot, limit)
                found = json.loads(reply.result())
                worker.cpu = found["cpu"]
                worker.called.add(index)
                again = again and not found.get("spent")
            except TimeoutError:
                self.counts["killed"] += 1
                raise TooLongError(limit, first=index not in worker.called) from None
            except EOFError:
                self.counts["died"] += 1
                raise FailedError(f"its process ended: {await self._forks.ending(worker.fork)}") from None
            finally:
                self.counts["calls"] += 1
                self._busy.discard(worker)
                reply.cancel()
                await asyncio.wait({reply})  # until the connection is no longer read
                if again and reply.exception() is None:
                    self._idle.append(worker)
                else:
                    worker.fork.kill()
        return _scores(found)

    def _taken(self) -> _ScoringWorker | None:
        """Take an idle process, if there is one."""
        while self._idle:
            worker = self._idle.pop()
            if worker.lives():
                return worker
            worker.fork.kill()
        return None

    async def _wait(
        self, reply: asyncio.Future[bytes], index: int, count: int, worker: _ScoringWorker, slot: _Slot, limit: float
    ) -> bool:
        """Wait for a reply, and return whether the process may be reused: not if its priority was lowered.

        Raises:
            TimeoutError: There is no reply within the limit.
        """
        started, usual = time.perf_counter(), self._usual[index] * count
        interval = patience = max(_PATIENCE * usual, _LEAST_PATIENCE)
        needed = 0.8 * patience
        aside = lowered = False
        try:
            while (left := limit - (time.perf_counter() - started)) > 0:
                await asyncio.wait({reply}, timeout=min(interval, left))
                if reply.done():
                    break
                interval *= 1.5
                used = worker.used() or 0.0
                if aside or self._slow >= MAX_SLOW or (used < needed and worker.starves()):
                    # If an engine starves a process, it would starve another one as well. It is looked at again when
                    # it will have used enough at its rate so far.
                    if 0 < used < needed:
                        waited = time.perf_counter() - started
                        interval = min(interval, max(_LEAST_PATIENCE / 4, waited * (needed / used - 1)))
                    continue
                aside = True
                self._slow += 1
                lowered = used >= needed and self._slots.locked()
                if lowered:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.setpriority(os.PRIO_PROCESS, worker.fork.pid, 19)
                slot.release()
            await asyncio.wait({reply}, timeout=_HEARING)
        finally:
            self._slow -= aside
        if not reply.done():
            raise TimeoutError
        self._heard[index] += 1
        rate = max(_LEARNING, 1 / self._heard[index])  # the mean of the first calls, then of the last ones
        self._usual[index] += rate * (time.perf_counter() - started - usual) / count
        return not lowered

    def _enter_loop(self) -> None:
        """Bind the waiters to the running event loop; idle processes are reused by the next loop."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        self._loop = loop
        self._slots = asyncio.Semaphore(self._workers)
        self._slow = 0
        for worker in self._busy:
            worker.fork.kill()
        self._busy.clear()
        self._forks.enter_loop()

    async def _fork(self) -> Fork:
        try:
            return await self._forks.fork()
        except ForkServerError as error:
            raise ScoringError(f"the scoring processes did not start: {error}") from error

    def close(self) -> None:
        """End all processes; they restart when needed."""
        for worker in [*self._idle, *self._busy]:
            worker.fork.kill()
        self._idle.clear()
        self._busy.clear()
        self._forks.close()


class _Slot:
    """A reserved slot among the workers; it is released exactly once."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._held = False

    async def __aenter__(self) -> _Slot:
        await self._slots.acquire()
        self._held = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        if self._held:
            self._held = False
            self._slots.release()


def _scores(found: dict[str, Any]) -> list[Score]:
    """Read the scores from a worker's reply."""
    if "data_error" in found:
        raise DataError(found["data_error"])
    if "error" in found:
        raise FailedError(found["error"])
    return [Score(**each) for each in found["scores"]]
