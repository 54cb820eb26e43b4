"""What scores a run's rollouts; rewards that hold a model are each in a Ray actor of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rlsdk.config import Plan
from rlsdk.errors import ScoringError
from rlsdk.plugins import Plugins, Reference
from rlsdk.process import redirect
from rlsdk.scoring.scorer import Part, Scorer
from rlsdk.trainer.cluster import ray_cluster
from rlsdk.trainer.reaper import reaped
from rlsdk.types import Rollout, Score


class RewardActor:
    """A reward, ready to run, in a process of its own."""

    def __init__(self, reference: Reference, log_path: str) -> None:
        redirect(log_path)
        self._reward = Plugins().resolve(reference)

    def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Scores of rollouts."""
        return list(self._reward(rollouts))

    def ready(self) -> None:
        """Returns when the reward is."""


@contextmanager
def reward_actors(plan: Plan) -> Iterator[Callable[[Part], Callable[[Sequence[Rollout]], Any]]]:
    """Starts actors for parts of a reward; they end with the block."""
    import ray

    started: list[Any] = []

    def start(part: Part) -> Callable[[Sequence[Rollout]], Any]:
        name = part.rule.name.replace("/", "-")
        log_path = plan.folder.resolve() / "logs" / f"reward-{name}.log"
        gpus = float(getattr(part.reward, "gpus", 0.0))
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": gpus, "max_concurrency": 1}
        actor = ray.remote(RewardActor).options(**options).remote(part.reference, str(log_path))
        started.append(actor)
        try:
            ray.get(actor.ready.remote())
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            raise ScoringError(
                f"the actor of reward {part.rule.name!r} did not start: {cause}; see {log_path}"
            ) from error
        call: Callable[[Sequence[Rollout]], Any] = actor.score.remote
        return call

    try:
        yield start
    finally:
        for actor in started:
            ray.kill(actor)


@contextmanager
def scoring(plan: Plan, *, log_to: Path | None = None) -> Iterator[Scorer | None]:
    """What scores a plan's rollouts, None if it has no reward; its processes and actors end with the block.

    Ray is started here if a part asks for an actor and nobody has started it.

    Args:
        plan: The plan.
        log_to: File that takes what rewards print; left out, it is dropped.
    """
    if not plan.rewards:
        yield None
        return
    parts = [Part(each.rule, plan.plugins.resolve(each.reference), each.reference) for each in plan.rewards]
    with ExitStack() as stack:
        actor = None
        if any(part.where == "actor" for part in parts):
            import ray

            if not ray.is_initialized():
                stack.enter_context(reaped())
                stack.enter_context(ray_cluster(plan))
            actor = stack.enter_context(reward_actors(plan))
        scorer = Scorer(parts, plan.config.scoring, log_to=log_to, actor=actor)
        stack.callback(scorer.close)
        yield scorer
