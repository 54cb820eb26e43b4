"""The scorer of a run; each reward that holds a model runs in its own Ray actor."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from rlsdk.cluster.actors import RunActor, cause_of, kill, spawn
from rlsdk.cluster.placement import ray_cluster
from rlsdk.config import Plan
from rlsdk.contracts import UsesGPUs
from rlsdk.errors import ScoringError
from rlsdk.isolation.reaper import reaped
from rlsdk.loops import UserLoop
from rlsdk.plugins import ComponentRef, Plugins
from rlsdk.scoring.outcome import scores_of
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.types import Rollout, Score

log = logging.getLogger(__name__)
START_SECONDS = 10.0
"""Seconds after which the log names a reward's actor that waits for GPUs."""


class RewardActor(RunActor):
    """Hosts a reward, ready to run, in a separate process."""

    def __init__(self, reference: ComponentRef, log_path: str) -> None:
        super().__init__(log_path)
        self._reward = Plugins().resolve(reference)

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Score rollouts; if the reward raises, the score is invalid, with the reason."""
        return scores_of(self._reward, rollouts)

    def ready(self) -> None:
        """Return when the reward is ready."""


def reward_terms(plan: Plan) -> list[RewardTerm]:
    """Return the terms of a plan's reward, ready to run."""
    return [RewardTerm(each.rule, plan.plugins.resolve(each.reference), each.reference) for each in plan.rewards]


@contextmanager
def reward_actors(plan: Plan, terms: Sequence[RewardTerm]) -> Iterator[dict[str, Any]]:
    """Start an actor for each reward term that runs in one; they end with the block.

    Starts Ray if any actor is needed and Ray is not running.

    Yields:
        Name of a term -> handle of its actor.

    Raises:
        ScoringError: An actor did not start.
    """
    apart = [term for term in terms if term.where == "actor"]
    if not apart:
        yield {}
        return
    import ray

    with ExitStack() as stack:
        if not ray.is_initialized():
            stack.enter_context(reaped())
            stack.enter_context(ray_cluster(plan))
        actors: dict[str, Any] = {}
        for term in apart:
            log_path = plan.folder.resolve() / "logs" / f"reward-{term.rule.name.replace('/', '-')}.log"
            gpus = float(term.reward.gpus) if isinstance(term.reward, UsesGPUs) else 0.0
            actors[term.rule.name] = actor = spawn(RewardActor, term.reference, str(log_path), gpus=gpus)
            stack.callback(kill, actor)
            try:
                ready = actor.ready.remote()
                if gpus and not ray.wait([ready], timeout=START_SECONDS)[0]:
                    log.info("waiting for the actor of reward %r: it reserves %g GPUs of its own", term.rule.name, gpus)
                ray.get(ready)
            except ray.exceptions.RayError as error:
                raise ScoringError(
                    f"the actor of reward {term.rule.name!r} did not start: {cause_of(error)}; see {log_path}"
                ) from error
        yield actors


@contextmanager
def scoring(
    plan: Plan,
    *,
    log_to: Path | None = None,
    user_loop: UserLoop | None = None,
    actors: Mapping[str, Any] | None = None,
    sharing: int = 1,
) -> Iterator[Scorer | None]:
    """Provide the scorer of a plan, None if it has no reward; its processes and actors end with the block.

    Args:
        plan: Plan of the run.
        log_to: File for the output of rewards; by default, it is discarded.
        user_loop: Event loop for users' rewards that run in this process; by default, the running one.
        actors: Handles that `reward_actors` returned in another process; by default, the actors are started.
        sharing: Number of processes that share `scoring.workers`, each with its own scorer.
    """
    if not plan.rewards:
        yield None
        return
    terms, limits = reward_terms(plan), plan.config.scoring
    with ExitStack() as stack:
        handles = stack.enter_context(reward_actors(plan, terms)) if actors is None else actors
        if sharing > 1:
            limits = attrs.evolve(limits, workers=max(1, (limits.workers or os.cpu_count() or 1) // sharing))

        def call(term: RewardTerm) -> Callable[[Sequence[Rollout]], Any]:
            return partial(score_in_actor, handles[term.rule.name])

        scorer = Scorer(terms, limits, log_to=log_to, actor=call, user_loop=user_loop)
        stack.callback(scorer.close)
        yield scorer


async def score_in_actor(actor: Any, rollouts: Sequence[Rollout]) -> Any:
    """Call the reward of an actor; raise what it raised, without Ray's traceback."""
    import ray

    try:
        return await actor.score.remote(rollouts)
    except ray.exceptions.RayError as error:
        raise cause_of(error) from None
