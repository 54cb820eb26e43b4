"""Score rollouts as they finish; a failing reward gives an invalid score, never zero."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import attrs

from rlsdk.components import Batch, Bound, Where, component_of
from rlsdk.contracts import (
    HasTimeout,
    LimitsCalls,
    RewardSpec,
    ScoringLimits,
    batch_of,
    memory_of,
    runs_user_code,
)
from rlsdk.contracts.optional import restore_state, state_of
from rlsdk.contracts.tasks import failed_together
from rlsdk.errors import DataError, ScoringError, described
from rlsdk.loops import UserLoop, contained, is_cancelled
from rlsdk.plugins import ComponentRef
from rlsdk.scoring.batching import Batcher, Cache, Take
from rlsdk.scoring.outcome import Scored, as_score, as_scores, combine, imported_within, rewards_tokens
from rlsdk.scoring.pool import FailedError, Pool, TooLongError
from rlsdk.types import Rollout, Score

log = logging.getLogger(__name__)
_GRACE = 1.0
"""Extra seconds for a reward with its own time limit."""


@attrs.frozen
class RewardTerm:
    """A term of the reward.

    Attributes:
        rule: Its name in metrics, and how it is combined with the other terms.
        reward: Reward, ready to run.
        reference: Reference for finding it in another process; without one, it runs in this process.
    """

    rule: RewardSpec
    reward: Callable[..., Any]
    reference: ComponentRef | None = None

    @property
    def batch(self) -> Batch:
        """Unit of a call: one rollout, any list of rollouts, or a whole group."""
        return batch_of(self.reward)

    @property
    def where(self) -> Where:
        """Process that runs the reward: this one if it is async, has state, or another process cannot import it."""
        component = component_of(self.reward)
        if component is None:
            return "driver"
        has_memory = memory_of(self.reward) is not None
        here = self.reference is None or has_memory or component.is_async or not hasattr(os, "fork")
        runs = component.runs(self.reward) if callable(component.runs) else component.runs
        return "driver" if runs == "pool" and here else runs

    @property
    def max_concurrency(self) -> int | None:
        """Maximum number of concurrent calls of an async reward; None if it does not limit them."""
        component = component_of(self.reward)
        limit = _option(self.reward, "max_concurrency", LimitsCalls)
        limits = component is not None and component.is_async and isinstance(limit, int) and limit > 0
        return limit if limits else None

    @property
    def keeps(self) -> bool:
        """True if its scores are cached: caching is allowed, and scoring costs more than a lookup."""
        component = component_of(self.reward)
        return component is not None and component.cache and self.where != "driver"


@attrs.frozen(eq=False)
class _Ready:
    """A reward term that is ready to run.

    Attributes:
        rule: Its name, and how it is combined with the other terms.
        run: Scores one rollout or, if it `compares`, a whole group; the result may be awaitable.
        compares: True if it takes a whole group.
        late: True if it waits for the group: it compares, or a comparing term may exclude it from scoring.
    """

    rule: RewardSpec
    run: Callable[[Any], Any]
    compares: bool = False
    late: bool = False


@attrs.frozen(eq=False)
class ScoringCounters:
    """The scores of a rollout so far.

    Attributes:
        rollout: The rollout.
        scores: Index of a part -> its score; None if a gate excluded it from scoring.
        gate: Index of the first part whose gate excludes those after it.
    """

    rollout: Rollout
    scores: Mapping[int, Score | None] = attrs.field(factory=dict)
    gate: float = math.inf

    def with_score(self, index: int, rule: RewardSpec, score: Score | None) -> ScoringCounters:
        """Return counters with the score of one more part."""
        shuts = score is not None and rule.shuts(score)
        gate = min(self.gate, index) if shuts else self.gate
        return ScoringCounters(self.rollout, {**self.scores, index: score}, gate)


class Scorer:
    """Runs the parts of a reward on each rollout, in order.

    A part may be a sync or async function of one rollout, any list of rollouts (`batch=True`), or all rollouts of one
    task (`batch="group"`). Its mark determines where it runs: in a pool of processes, in this process, or through
    `actor`.

    If no part compares the rollouts of a group, `score` returns a rollout's score as soon as the rollout is available.
    Otherwise `begin` runs the parts that need only the rollout, and `finish` the others once its group is complete.
    """

    def __init__(
        self,
        parts: Sequence[RewardTerm],
        limits: ScoringLimits | None = None,
        *,
        log_to: Path | None = None,
        actor: Callable[[RewardTerm], Callable[[Sequence[Rollout]], Any]] | None = None,
        user_loop: UserLoop | None = None,
    ) -> None:
        """Create a scorer; processes start when they are first needed.

        Args:
            parts: Terms of the reward.
            limits: Limits of calls.
            log_to: File for the output of rewards in the pool; by default, standard error.
            actor: Builds the batch call of a term marked to run in an actor; by default, it runs in this process.
            user_loop: Event loop for users' rewards in this process; by default, they are called on the running one,
                which they may block.
        """
        marks = (component_of(part.reward) for part in parts)
        counts_given = any(mark is not None and mark.reads_given for mark in marks)
        self._ignoring = () if counts_given else tuple(part.rule.name for part in parts)
        self._limits = limits = limits or ScoringLimits()
        self._actor, self._user_loop = actor, user_loop
        pooled = [part.reference for part in parts if part.where == "pool" and part.reference is not None]
        self._pool = Pool(pooled, workers=limits.workers, memory=limits.memory, log_to=log_to)
        self._parts: list[_Ready] = []
        memories = {part.rule.name: memory_of(part.reward) for part in parts}
        self._memories = {name: memory for name, memory in memories.items() if memory is not None}
        indices = iter(range(len(pooled)))
        late = False
        for part in parts:
            run = self._in_pool(part, next(indices)) if part.where == "pool" else self._elsewhere(part)
            compares = part.batch == "group"
            run = Cache(run) if part.keeps else run
            self._parts.append(_Ready(part.rule, run, compares, compares or late))
            late = late or (compares and part.rule.gate is not None)

    @property
    def counts(self) -> Counter[str]:
        """Calls of the pool: `calls`, those `killed` for exceeding their time limit, and those whose process `died`."""
        return self._pool.counts

    @property
    def comparing(self) -> tuple[str, ...]:
        """Names of the parts that compare the rollouts of a group."""
        return tuple(part.rule.name for part in self._parts if part.compares)

    def warn_of_ignored(self, rollouts: Sequence[Rollout]) -> None:
        """Warn, once, if a workflow gave rewards that no part of the reward uses."""
        if self._ignoring and any(rollout.rewards for rollout in rollouts):
            log.warning(
                "the workflow gave a reward, which only the reward 'environment' uses, but this run's reward is %s: "
                "add 'environment' to it, or replace it, if the workflow's own reward should count",
                ", ".join(map(repr, self._ignoring)),
            )
            self._ignoring = ()

    async def score(self, rollout: Rollout) -> Score:
        """Return the score of one rollout; for parts that compare, it is a group of one.

        Raises:
            DataError: The task itself cannot be scored, whatever the answer: it has no reference answer, or no part
                applies to its source.
        """
        return (await self.finish([await self.begin(rollout)]))[0]

    async def score_group(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Score all rollouts of one task."""
        return await self.finish(await asyncio.gather(*(self.begin(rollout) for rollout in rollouts)))

    async def begin(self, rollout: Rollout) -> ScoringCounters:
        """Run the parts that need not wait for the rollout's group."""
        counters = ScoringCounters(rollout)
        for index, part in enumerate(self._parts):
            if not part.late and part.rule.applies(rollout.task):
                score = as_score(await _guarded(part.run, rollout)) if index < counters.gate else None
                counters = counters.with_score(index, part.rule, score)
        return counters

    async def finish(self, counted: Sequence[ScoringCounters]) -> list[Score]:
        """Run the parts that waited for the group, and combine the scores.

        Args:
            counted: Counters of the scorable rollouts of one task, in order.
        """
        for index, part in enumerate(self._parts):
            if part.late:
                counted = await self._add(index, counted)
        return [self._combined(counters) for counters in counted]

    async def _add(self, index: int, counted: Sequence[ScoringCounters]) -> list[ScoringCounters]:
        """Return counters with the scores of one more part, which skips rollouts excluded by a gate."""
        part = self._parts[index]
        due = [part.rule.applies(counters.rollout.task) for counters in counted]
        rollouts = [t.rollout for t, is_due in zip(counted, due, strict=True) if is_due and index < t.gate]
        if part.compares:  # one call for all
            result = await _guarded(part.run, rollouts) if rollouts else []
            if isinstance(result, Score):  # of the call, which failed
                found = failed_together(result.reason, len(rollouts))
            else:
                found = as_scores(result, len(rollouts))
        else:
            found = [as_score(each) for each in await asyncio.gather(*(_guarded(part.run, r) for r in rollouts))]
        scores = iter(found)
        return [
            counters
            if not is_due
            else counters.with_score(index, part.rule, next(scores) if index < counters.gate else None)
            for counters, is_due in zip(counted, due, strict=True)
        ]

    def _combined(self, counters: ScoringCounters) -> Score:
        scored: list[Scored] = [(self._parts[index].rule, score) for index, score in sorted(counters.scores.items())]
        if not scored:
            task = counters.rollout.task
            parts = "; ".join(f"{part.rule.name}: {', '.join(part.rule.sources)}" for part in self._parts)
            raise DataError(f"task {task.id!r}: no part of the reward scores its source {task.source!r} ({parts})")
        # If nothing was sampled, no token is trained on, so any position works.
        last_token = max(counters.rollout.span[1] - 1, 0) if rewards_tokens(scored) else None
        return combine(scored, last_token=last_token)

    def state(self) -> dict[str, Any]:
        """Return the state of the rewards that keep one, by name, as plain JSON.

        Raises:
            RunError: JSON cannot hold a reward's state.
        """
        return {name: state_of(memory) for name, memory in self._memories.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of rewards from `state()`; a reward that it lacks starts without state."""
        for name, memory in self._memories.items():
            if name in state:
                restore_state(memory, state[name])
            else:
                log.warning("the checkpoint holds no state of the reward %s: it starts without state", name)

    def close(self) -> None:
        """End the processes of the pool; they restart when needed."""
        self._pool.close()

    def _in_pool(self, part: RewardTerm, index: int) -> Callable[[Any], Any]:
        timeout, together = self._timeout(part), part.batch is True

        async def together_or_alone(take: Take) -> list[Score]:
            try:
                return await self._pool.call(index, take, timeout)
            except FailedError as error:
                rollouts = take()
                if len(rollouts) == 1:
                    return [Score.invalid(_cause(error, part))]
            # One of them raised, hung or ended the process: score each separately, so that the others get their scores.
            alone = await asyncio.gather(*(together_or_alone(partial(list, [rollout])) for rollout in rollouts))
            return [score for scores in alone for score in scores]

        async def compared(rollouts: Sequence[Rollout]) -> list[Score]:
            try:
                return await self._pool.call(index, lambda: rollouts, timeout)
            except FailedError as error:
                return failed_together(_cause(error, part), len(rollouts))

        if part.batch == "group":
            return compared
        return Batcher(together_or_alone, lambda: self._pool.most(index, timeout, together=together))

    def _elsewhere(self, part: RewardTerm) -> Callable[[Any], Any]:
        """Build the call of a part in this process or an actor; awaited results have a time limit."""
        timeout, mark = self._timeout(part), component_of(part.reward)
        call = self._actor(part) if part.where == "actor" and self._actor is not None else part.reward
        takes_lists = part.batch or call is not part.reward
        if call is part.reward and self._user_loop is not None and runs_user_code(part.reward):
            if not part.batch and mark is not None and not mark.is_async:
                # Crossing to the other loop takes longer than most rewards: rollouts that end together cross together.
                call, takes_lists = partial(_each, part.reward), True
            call = partial(_called_in, self._user_loop, call)

        async def limited(result: Awaitable[Any]) -> Any:
            try:
                async with asyncio.timeout(timeout) as clock:
                    return await result
            except TimeoutError:
                if not clock.expired():  # the reward's own
                    raise
                raise FailedError(f"it took longer than {timeout:g} s") from None

        def begin(argument: Any) -> Any:
            result = call(argument)
            return limited(result) if inspect.isawaitable(result) else result

        async def scored(rollouts: Sequence[Rollout]) -> list[Score]:
            result = begin(rollouts)
            return as_scores(await result if inspect.isawaitable(result) else result, len(rollouts))

        async def together_or_alone(take: Take) -> list[Score]:
            rollouts = take()
            if part.batch is not True or len(rollouts) == 1:
                return await scored(rollouts)
            found: Score | list[Score] = await _guarded(scored, rollouts)
            if not isinstance(found, Score):
                return found
            # One of them made the call fail: score each separately, so that the others get their scores.
            alone = await asyncio.gather(*(_guarded(scored, [rollout]) for rollout in rollouts))
            return [each if isinstance(each, Score) else each[0] for each in alone]

        if takes_lists and part.batch != "group":
            return Batcher(together_or_alone)
        if (most := part.max_concurrency) is None:
            return begin
        places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

        async def in_turn(argument: Any) -> Any:
            loop = asyncio.get_running_loop()
            async with places.setdefault(loop, asyncio.Semaphore(most)):
                return await begin(argument)  # so that waiting for a place takes nothing of the time limit

        return in_turn

    def _timeout(self, part: RewardTerm) -> float:
        limit = _option(part.reward, "timeout", HasTimeout)
        return max(self._limits.timeout, limit + _GRACE) if isinstance(limit, int | float) else self._limits.timeout


def _option(reward: Callable[..., Any], name: str, interface: type) -> Any:
    """Return an option of a reward function, or the property of an object that offers the interface; else None."""
    if isinstance(reward, Bound):
        return {**{option.name: option.default for option in reward.component.options}, **reward.options}.get(name)
    return getattr(reward, name) if isinstance(reward, interface) else None


def _cause(error: FailedError, part: RewardTerm) -> str:
    """Return why a call failed, with advice if imports may have used up its time."""
    modules = imported_within(part.reward) if isinstance(error, TooLongError) and error.first else []
    if not modules:
        return str(error)
    return (
        f"{error}; this was the first call in its process, which first imported {', '.join(modules)}: declare "
        f"@rlsdk.reward(…, imports={tuple(modules)!r}) to import them once, before any call"
    )


async def _called_in(user_loop: UserLoop, reward: Callable[[Any], Any], argument: Any) -> Any:
    """Call a reward on the event loop for user code."""
    return await user_loop.run(partial(_result, reward, argument))


async def _each(reward: Callable[[Rollout], Any], rollouts: Sequence[Rollout]) -> list[Any]:
    """Call a reward on each of several rollouts."""
    return await asyncio.gather(*(_guarded(contained, partial(_result, reward, rollout)) for rollout in rollouts))


async def _result(reward: Callable[[Any], Any], argument: Any) -> Any:
    result = reward(argument)
    return await result if inspect.isawaitable(result) else result


async def _guarded(run: Callable[[Any], Any], argument: Any) -> Any:
    """Return the result of a call or, if it fails, an invalid score with the reason."""
    try:
        return await _result(run, argument)
    except (DataError, ScoringError):
        raise
    except FailedError as error:
        return Score.invalid(str(error))
    except asyncio.CancelledError as error:
        if is_cancelled():
            raise
        return Score.invalid(described(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code: what it raises is reported
        return Score.invalid(described(error))
