"""Scores rollouts as they finish: a weighted sum of parts; a part that fails makes the score invalid, never zero."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs

from rlsdk.components import component_of
from rlsdk.errors import DataError, ScoringError
from rlsdk.rewards.combine import combine
from rlsdk.types import Rollout, Score


@attrs.frozen
class Part:
    """One part of a reward: the name it is logged under, its weight, and what is ready to run."""

    name: str
    weight: float
    reward: Callable[..., Any]


class Scorer:
    """Runs the parts of a reward on each rollout.

    A part may be a function or an async function, and take one rollout or, marked `batch`, all that finish together.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = [(part, _runner(part)) for part in parts]

    async def score(self, rollout: Rollout) -> Score:
        """The score of one rollout.

        Raises:
            DataError: The task cannot be scored at all (it has no answer); it is the task's fault, not the answer's.
        """
        scored: list[tuple[str, float, Score]] = []
        for part, run in self._parts:
            try:
                result = run(rollout)
                result = await result if isinstance(result, Awaitable) else result
                score = result if isinstance(result, Score) else Score(result)
            except (DataError, asyncio.CancelledError):
                raise
            except Exception as error:  # noqa: BLE001 - the user's code: what it raises is reported
                score = Score.invalid(f"{part.name}: {type(error).__name__}: {error}")
            scored.append((part.name, part.weight, score))
        return combine(scored, last_token=rollout.span[1] - 1 if rollout.loss_mask.any() else None)


def _runner(part: Part) -> Callable[[Rollout], Any]:
    component = component_of(part.reward)
    return _Batcher(part) if component is not None and component.batch else part.reward


class _Batcher:
    """Gathers the rollouts that finish in one turn of the event loop into one call."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._waiting: list[tuple[Rollout, asyncio.Future[Any]]] = []

    def __call__(self, rollout: Rollout) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if not self._waiting:
            loop.call_soon(lambda: loop.create_task(self._flush()))
        self._waiting.append((rollout, future))
        return future

    async def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            results = self._part.reward([rollout for rollout, _ in waiting])
            results = await results if inspect.isawaitable(results) else results
            if len(results) != len(waiting):
                raise ValueError(f"returned {len(results)} scores for {len(waiting)} rollouts")
        except Exception as error:  # noqa: BLE001 - handed to each caller, which reports it
            for _, future in waiting:
                future.set_exception(error)
            return
        for (_, future), result in zip(waiting, results, strict=True):
            future.set_result(result)


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
