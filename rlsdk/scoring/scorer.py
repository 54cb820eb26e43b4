"""Scores rollouts as they finish, by several rewards; one that fails makes the score invalid, never zero."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlsdk.components import Where, component_of
from rlsdk.contracts import Rule, ScoringLimits
from rlsdk.errors import DataError, ScoringError
from rlsdk.plugins import Reference
from rlsdk.rewards.combine import Scored, combine, rewards_tokens
from rlsdk.scoring.batching import Batcher
from rlsdk.scoring.cache import Cache
from rlsdk.scoring.pool import FailedError, Pool
from rlsdk.types import Rollout, Score

Run = Callable[[Rollout], Any]
"""Scores one rollout; what it returns may have to be awaited."""

_GRACE = 1.0
"""Seconds beyond the limit that a reward keeps by itself."""


@attrs.frozen
class Part:
    """One part of a reward.

    Attributes:
        rule: The name it is logged under, and how it joins the others.
        reward: Ready to run.
        reference: How another process finds it; left out, it runs in this one.
    """

    rule: Rule
    reward: Callable[..., Any]
    reference: Reference | None = None

    @property
    def batch(self) -> bool:
        """Whether it takes and returns lists."""
        component = component_of(self.reward)
        return component is not None and component.batch

    @property
    def where(self) -> Where:
        """Where it runs: what is async, or has a memory, or cannot be found by another process, in this one."""
        component = component_of(self.reward)
        if component is None:
            return "driver"
        has_memory = hasattr(self.reward, "state") and hasattr(self.reward, "restore")
        call = component.obj.__call__ if inspect.isclass(component.obj) else component.obj
        here = self.reference is None or has_memory or inspect.iscoroutinefunction(call) or not hasattr(os, "fork")
        return "driver" if component.runs == "pool" and here else component.runs

    @property
    def keeps(self) -> bool:
        """Whether its scores are kept: it allows that, and costs more than looking them up."""
        component = component_of(self.reward)
        return component is not None and component.cache and self.where != "driver"


class Scorer:
    """Runs the parts of a reward on each rollout, in their order.

    A part may be a function or an async function, and take one rollout or, marked `batch`, all that finish together. It
    runs where its mark says: in a pool of processes, in this one, or where `actor` puts it.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        limits: ScoringLimits | None = None,
        *,
        log_to: Path | None = None,
        actor: Callable[[Part], Callable[[Sequence[Rollout]], Any]] | None = None,
    ) -> None:
        """Make one; processes start when they are first needed.

        Args:
            parts: Of the reward.
            limits: Of calls.
            log_to: File that takes what rewards in the pool print; left out, standard error does.
            actor: Makes what calls a part that is marked to run in an actor, with a batch; left out, it runs here.
        """
        self._limits = limits = limits or ScoringLimits()
        self._actor = actor
        pooled = [part.reference for part in parts if part.where == "pool" and part.reference is not None]
        self._pool = Pool(pooled, workers=limits.workers, memory=limits.memory, log_to=log_to)
        self._parts: list[tuple[Rule, Run]] = []
        indices = iter(range(len(pooled)))
        for part in parts:
            run = self._in_pool(part, next(indices)) if part.where == "pool" else self._elsewhere(part)
            self._parts.append((part.rule, Cache(run) if part.keeps else run))

    @property
    def counts(self) -> Counter[str]:
        """Calls of the pool: `calls`, those that were `killed` over their time, and whose process `died`."""
        return self._pool.counts

    async def score(self, rollout: Rollout) -> Score:
        """The score of one rollout.

        Raises:
            DataError: The task cannot be scored at all (it has no answer, or no part is for its source); it is the
                task's fault, not the answer's.
        """
        scored: list[Scored] = []
        shut = False
        for rule, run in self._parts:
            if not rule.applies(rollout.task):
                continue
            score = None if shut else await _score(rule.name, run, rollout)
            shut = shut or (score is not None and rule.shuts(score))
            scored.append((rule, score))
        if not scored:
            task = rollout.task
            parts = "; ".join(f"{rule.name}: {', '.join(rule.sources)}" for rule, _ in self._parts)
            raise DataError(f"task {task.id!r}: no part of the reward is for its source {task.source!r} ({parts})")
        return combine(scored, last_token=_last_token(rollout) if rewards_tokens(scored) else None)

    def close(self) -> None:
        """End the processes of the pool; they start again when they are needed again."""
        self._pool.close()

    def _in_pool(self, part: Part, index: int) -> Run:
        timeout = self._timeout(part)

        async def call(rollouts: Sequence[Rollout]) -> list[Score]:
            try:
                return await self._pool.call(index, rollouts, timeout)
            except FailedError as error:
                if len(rollouts) == 1:
                    return [Score.invalid(str(error))]
            # One of them raises, hangs or kills: the others are not to go with it.
            alone = await asyncio.gather(*(call([rollout]) for rollout in rollouts))
            return [score for scores in alone for score in scores]

        return Batcher(call, lambda: self._pool.most(index))

    def _elsewhere(self, part: Part) -> Run:
        """In this process or an actor; what is awaited has a limit."""
        timeout = self._timeout(part)
        run: Run = part.reward
        if part.where == "actor" and self._actor is not None:
            run = Batcher(self._actor(part))
        elif part.batch:
            run = Batcher(part.reward)

        async def limited(result: Awaitable[Any]) -> Any:
            try:
                async with asyncio.timeout(timeout):
                    return await result
            except TimeoutError:
                return Score.invalid(f"it took longer than {timeout:g} s")

        def begin(rollout: Rollout) -> Any:
            result = run(rollout)
            return limited(result) if inspect.isawaitable(result) else result

        return begin

    def _timeout(self, part: Part) -> float:
        own = getattr(part.reward, "timeout", None)
        return max(self._limits.timeout, own + _GRACE) if isinstance(own, int | float) else self._limits.timeout


def _last_token(rollout: Rollout) -> int | None:
    return rollout.span[1] - 1 if rollout.loss_mask.any() else None


async def _score(name: str, run: Run, rollout: Rollout) -> Score:
    try:
        result = run(rollout)
        result = await result if inspect.isawaitable(result) else result
        score = result if isinstance(result, Score) else Score(result)
    except (DataError, ScoringError):
        raise
    except Exception as error:  # noqa: BLE001 - the user's code: what it raises is reported
        score = Score.invalid(f"{name}: {type(error).__name__}: {error}")
    return score


def check_budget(rollouts: Sequence[Rollout], scores: Sequence[Score], limit: float, step: int) -> int:
    """Count invalid scores; above the share `limit` the run stops.

    Returns:
        How many are invalid.

    Raises:
        ScoringError: More than the share `limit` is invalid; names the step, the tasks and the causes.
    """
    invalid = [(r, s) for r, s in zip(rollouts, scores, strict=True) if not s.valid]
    if len(invalid) > limit * len(scores):
        first = "; ".join(f"task {r.task.id!r}: {s.reason}" for r, s in invalid[:3])
        share = f"{len(invalid)} of {len(scores)} rollouts could not be scored"
        raise ScoringError(f"step {step}: {share}, more than max_invalid={limit:g} allows. {first}")
    return len(invalid)
