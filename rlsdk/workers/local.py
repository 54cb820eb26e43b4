"""Make groups in this process, which is the driver or a rollout worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any

import attrs

from rlsdk.cluster.nodes import DrainingNode
from rlsdk.config import Plan, defaults
from rlsdk.contracts import DescribesTools
from rlsdk.engines.client import EngineClient
from rlsdk.engines.pausable import PausableClient
from rlsdk.environments.pool import EnvWorkerPool, env_worker_pools
from rlsdk.evaluation.evaluation import evaluator_of
from rlsdk.loops import UserLoop
from rlsdk.plugins import load
from rlsdk.rollout.chat import RolloutContext
from rlsdk.rollout.codec import ChatTokenizer
from rlsdk.rollout.generator import Observer, RolloutGenerator
from rlsdk.rollout.scheduler import UnfinishedError
from rlsdk.scoring.actors import scoring
from rlsdk.scoring.scorer import Scorer
from rlsdk.serving.context import context_of
from rlsdk.types import Group
from rlsdk.workers.orders import MOST_REASONS, GroupOrder, MadeGroup, MakerCounters


@attrs.frozen
class RolloutShare:
    """One process's share of a run's rollouts.

    Attributes:
        rank: Number of the process.
        of: Number of processes.
        name: Name of this process, used in names of its requests, logs and environment workers; empty if it is alone.
        reward_actors: Name of a reward term -> shared actor; None to start one for this process.
    """

    rank: int = 0
    of: int = 1
    name: str = ""
    reward_actors: Mapping[str, Any] | None = None


@attrs.define(kw_only=True, eq=False)
class LocalMaker:
    """Make groups on the event loop of this process.

    Attributes:
        client: Engine client; None if nothing is sampled.
        pausable: Pauses sampling; None if nothing is sampled.
        context: Tokenizer, sampling and environments of rollouts.
        eval_environments: Environments of evaluations; None to use those of training.
        generators: Use of a group (see `GroupOrder.role`) -> what makes it.
        scorer: Scorer of training and evaluation; None without a reward.
        user_loop: Event loop of user code.
        sampled: False if the algorithm trains only on demonstrations.
        failures: Always empty, since the run does not survive the death of this process.
    """

    client: EngineClient | None
    pausable: PausableClient | None
    context: RolloutContext
    eval_environments: EnvWorkerPool | None
    generators: Mapping[str, RolloutGenerator]
    scorer: Scorer | None
    user_loop: UserLoop
    sampled: bool
    failures: list[str] = attrs.field(factory=list, init=False)

    async def make(self, order: GroupOrder) -> MadeGroup:
        """See `GroupMaker.make`."""
        async with asyncio.TaskGroup() as running:
            task = running.create_task(self._group(order))
            greedy = None
            if order.baseline:  # the greedy answer, whose reward is the baseline
                sampling = attrs.evolve(self.context.sampling, temperature=0.0)
                context = attrs.evolve(self.context, sampling=sampling)
                answering = self.generators["evaluation"].group(order.task, context, 1, f"{order.key} greedy")
                greedy = running.create_task(answering)
        group = task.result()
        if greedy is None:
            return MadeGroup(group)
        if greedy.result().rollouts[0].status == "aborted":
            raise UnfinishedError(group)
        score = greedy.result().scores[0]
        return MadeGroup(group, score.value if score.valid else None)

    async def _group(self, order: GroupOrder) -> Group:
        context = self.context
        if order.role == "evaluation" and self.eval_environments is not None:
            context = attrs.evolve(context, environments=self.eval_environments)
        if order.role == "train" and not self.sampled:  # the engines only serve evaluations
            context = attrs.evolve(context, client=None)
        if order.sampling is not None:
            context = attrs.evolve(context, sampling=order.sampling)
        generator = self.generators[order.role]
        return await generator.group(order.task, context, order.size, order.key, order.step, order.before)

    def held(self) -> AbstractAsyncContextManager[None]:
        """See `GroupMaker.held`."""
        return nullcontext() if self.pausable is None else self.pausable.held()

    def counters(self) -> MakerCounters:
        """See `GroupMaker.counters`."""
        pools = [self.context.environments, self.eval_environments]
        lost = [event for pool in pools if isinstance(pool, EnvWorkerPool) for event in pool.lost]
        client, pausable = self.client, self.pausable
        return MakerCounters(
            wasted=(0 if client is None else client.unheard) + (0 if pausable is None else pausable.dropped),
            sampled_again=0 if client is None else client.sampled_again,
            run_again=sum(each.run_again for each in self.generators.values()),
            environments_lost=len(lost),
            reasons=tuple(lost[:MOST_REASONS]),
        )

    def state(self) -> dict[str, Any]:
        """See `GroupMaker.state`."""
        return {} if self.scorer is None else self.scorer.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """See `GroupMaker.restore`."""
        if self.scorer is not None:
            self.scorer.restore(state)

    async def leave(self, nodes: Sequence[DrainingNode]) -> None:
        """Do nothing: this process cannot move to another node."""


def expert_of(plan: Plan) -> Any:
    """Return the workflow of demonstrations that are mixed with rollouts: their prompts offer the same tools."""
    options = plan.workflow.options
    describes = isinstance(plan.plugins.resolve(plan.workflow), DescribesTools)
    shown = {name: options[name] for name in ("tools", "parser", "describe") if describes and name in options}
    return load("workflow", defaults.DEMONSTRATION.name, **shown)


@contextmanager
def local_maker(
    plan: Plan,
    codec: ChatTokenizer,
    engines: Sequence[Any],
    observer: Observer | None,
    share: RolloutShare | None = None,
) -> Iterator[LocalMaker]:
    """Context manager: create the group maker of a plan in this process, with scorer and environments.

    Without `engines`, one of several processes gets a client to which they are added later.
    """
    share = share or RolloutShare()
    logs, config = plan.folder / "logs", plan.config
    with (
        UserLoop() as user_loop,
        scoring(
            plan,
            log_to=logs / (f"scoring-{share.name}.log" if share.name else "scoring.log"),
            user_loop=user_loop,
            actors=share.reward_actors,
            sharing=share.of,
        ) as scorer,
        env_worker_pools(plan, sharing=share.of, of=f"-{share.name}" if share.name else "") as environments,
    ):
        client = pausable = None
        if plan.needs_engine:
            prefix = f"{share.name}-" if share.name else ""
            client = EngineClient(engines, codec.decode, name=prefix, first=share.rank % config.placement.engines)
            ends = () if codec.end is None else (codec.end,)
            pausable = PausableClient(client, codec.decode, partial=config.rollout.partial_rollouts, ends=ends)
        seed = config.seed if config.sampling.seeds == "request" else None
        generators = {
            "train": RolloutGenerator(plan.plugins.resolve(plan.workflow), scorer, seed, observer),
            "expert": RolloutGenerator(expert_of(plan), None, None),
            "evaluation": evaluator_of(plan, scorer),
        }
        yield LocalMaker(
            client=client,
            pausable=pausable,
            context=context_of(plan, codec, pausable, environments.train, user_loop),
            eval_environments=environments.eval,
            generators=generators,
            scorer=scorer,
            user_loop=user_loop,
            sampled=plan.sampled,
        )
