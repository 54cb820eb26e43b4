"""Scorer of a run's rollouts; rewards that hold a model each run in their own Ray actor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rlsdk.cluster.actors import RunActor, cause_of, kill, spawn
from rlsdk.cluster.placement import ray_cluster
from rlsdk.config import Plan
from rlsdk.contracts import UsesGPUs
from rlsdk.errors import ScoringError
from rlsdk.isolation.reaper import reaped
from rlsdk.loops import UserLoop
from rlsdk.plugins import ComponentRef, Plugins
from rlsdk.scoring.scorer import RewardTerm, Scorer
from rlsdk.types import Rollout, Score


class RewardActor(RunActor):
    """A reward, ready to run, in a process of its own."""

    def __init__(self, reference: ComponentRef, log_path: str) -> None:
        super().__init__(log_path)
        self._reward = Plugins().resolve(reference)

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Scores of rollouts."""
        return list(self._reward(rollouts))

    def ready(self) -> None:
        """Return when the reward is ready."""


@contextmanager
def reward_actors(plan: Plan) -> Iterator[Callable[[RewardTerm], Callable[[Sequence[Rollout]], Any]]]:
    """Start actors for the terms of a reward; they end with the block."""
    import ray

    started: list[Any] = []

    def start(part: RewardTerm) -> Callable[[Sequence[Rollout]], Any]:
        name = part.rule.name.replace("/", "-")
        log_path = plan.folder.resolve() / "logs" / f"reward-{name}.log"
        gpus = float(part.reward.gpus) if isinstance(part.reward, UsesGPUs) else 0.0
        actor = spawn(RewardActor, part.reference, str(log_path), gpus=gpus)
        started.append(actor)
        try:
            ray.get(actor.ready.remote())
        except ray.exceptions.RayError as error:
            raise ScoringError(
                f"the actor of reward {part.rule.name!r} did not start: {cause_of(error)}; see {log_path}"
            ) from error
        call: Callable[[Sequence[Rollout]], Any] = actor.score.remote
        return call

    try:
        yield start
    finally:
        for actor in started:
            kill(actor)


@contextmanager
def scoring(plan: Plan, *, log_to: Path | None = None, user_loop: UserLoop | None = None) -> Iterator[Scorer | None]:
    """Provide the scorer of a plan, None if it has no reward; its processes and actors end with the block.

    Starts Ray if a reward term needs an actor and Ray is not running.

    Args:
        plan: Plan of the run.
        log_to: File for the output of rewards; by default, it is discarded.
        user_loop: Event loop for users' rewards that run in this process; by default, the running one.
    """
    if not plan.rewards:
        yield None
        return
    parts = [RewardTerm(each.rule, plan.plugins.resolve(each.reference), each.reference) for each in plan.rewards]
    with ExitStack() as stack:
        actor = None
        if any(part.where == "actor" for part in parts):
            import ray

            if not ray.is_initialized():
                stack.enter_context(reaped())
                stack.enter_context(ray_cluster(plan))
            actor = stack.enter_context(reward_actors(plan))
        scorer = Scorer(parts, plan.config.scoring, log_to=log_to, actor=actor, user_loop=user_loop)
        stack.callback(scorer.close)
        yield scorer
