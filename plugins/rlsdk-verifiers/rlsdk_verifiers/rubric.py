"""Score an answer with the rewards and metrics of its environment."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import rlsdk
from rlsdk.errors import DataError
from rlsdk.types import Rollout, Score
from rlsdk_verifiers import environments, traces


@rlsdk.reward("rubric", imports=("verifiers.v1",))
def rubric(rollout: Rollout) -> Score:
    """The sum of the environment's weighted rewards for the answer.

    Each function marked `@reward` or `@metric` is also reported as an unweighted metric. If one raises, the score is
    invalid. `verifiers/workflow` scores an environment with its own `run` during the episode; this reward then returns
    that score.

    Args:
        rollout: Rollout of a task from `verifiers/tasks`.

    Raises:
        DataError: The task came from elsewhere, or can be scored only during its episode.
    """
    if environments.SCORED in rollout.metrics:
        value = rollout.metrics[environments.SCORED]
        return Score(value) if math.isfinite(value) else Score.invalid(f"the environment's reward is {value}")
    env, task = environments.of(rollout.task)
    if environments.is_played(env, task):
        raise DataError(
            f"task {rollout.task.id!r}: {type(env).__name__} scores an episode while it runs; use "
            "workflow: verifiers/workflow"
        )
    ((name, agent),) = environments.seats(env).items()
    trace = traces.of(rollout, task, agent, name)
    try:
        _finished(task.score(trace))
    except Exception as error:  # noqa: BLE001 - an exception of the environment's code becomes the score's reason
        return Score.invalid(f"{type(error).__name__}: {error}")
    return score_of(trace)


def score_of(trace: Any) -> Score:
    """Return the score of a trace, which is the sum of its rewards, with each reward and metric as a metric."""
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored:
        return Score.invalid(f"not scored: {', '.join(unscored)}")
    parts = {name: reward.score for name, reward in trace.rewards.items()}
    measured = {name: value for name, value in trace.metrics.items() if value is not None}
    wrong = [f"{name} is {value}" for name, value in parts.items() if not math.isfinite(value)]
    if wrong:
        return Score.invalid(", ".join(wrong))
    finite = {name: value for name, value in {**measured, **parts}.items() if math.isfinite(value)}
    return Score(trace.reward, metrics=finite)


def _finished(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to completion, inside or outside an event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    with ThreadPoolExecutor(1) as aside:  # this thread already runs a loop
        aside.submit(asyncio.run, work).result()
