"""Optimiser steps of a rank: what its micro-batches add to the gradient, and the metrics of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import attrs
import numpy as np
import torch
from torch import Tensor

from rlsdk.batch import Totals
from rlsdk.contracts import TrainBatch
from rlsdk.learners.metrics import MetricAccumulator
from rlsdk.learners.objective import Objective, UpdateContext, critic_loss
from rlsdk.learners.passes import MicroBatchRunner
from rlsdk.learners.zero import Trained
from rlsdk.schedules import at


@attrs.frozen(kw_only=True, eq=False)
class Updates:
    """Optimiser steps of the actor, and of the critic if there is one.

    Attributes:
        objective: Objective of the actor.
        passes: Runner of micro-batches.
        actor: Trained module of the actor.
        critic: Trained module of the critic, if any.
        seed: Seed of random choices, equal on all ranks.
        device: Device of the models.
    """

    objective: Objective
    passes: MicroBatchRunner
    actor: Trained
    critic: Trained | None
    seed: int
    device: str

    def run(self, minibatches: Sequence[tuple[TrainBatch, int, int]], step: int) -> dict[str, float]:
        """Take one optimiser step for each minibatch; see `Learner.update`.

        Raises:
            LearnerError: Too many gradients in a row were not finite.
        """
        tally, ranks = MetricAccumulator(), self.passes.ranks
        if ranks.rank == 0:
            for role in ("actor",) if self.critic is None else ("actor", "critic"):
                tally.add(f"{role}/skipped_updates", 0.0, 1.0)  # a count: steps add to the sum, not to the weight
        plans = [self.passes.plan(batch) for batch, _, _ in minibatches]
        counts = ranks.all_reduce_max([max(len(parts), 1) for parts in plans])
        for i, ((batch, tokens, rollouts), parts, count) in enumerate(zip(minibatches, plans, counts, strict=True)):
            seed = int(np.random.SeedSequence([self.seed, step, i]).generate_state(1)[0])
            moment = UpdateContext(
                update=i,
                updates=len(minibatches),
                train_step=step,
                updates_done=self.actor.updates,
                totals=Totals(tokens, rollouts),
                seed=seed,
            )
            if self.objective.whole_batch:
                moment = self._with_whole(batch, parts, count, moment)
            losses = partial(self._actor_losses, batch, parts, count, moment)
            taken = self._step(self.actor, "actor", losses, count, tally)
            self.objective.advance(ranks.gather, taken=taken)
            if self.critic is not None:
                losses = partial(self._critic_losses, self.critic, batch, parts, count, moment)
                self._step(self.critic, "critic", losses, count, tally)
        merged = MetricAccumulator()
        for pairs in ranks.gather(tally.pairs):
            merged.merge(pairs)
        return merged.means()

    def _step(
        self,
        trained: Trained,
        role: str,
        losses: Callable[[MetricAccumulator], Iterator[Tensor]],
        count: int,
        tally: MetricAccumulator,
    ) -> bool:
        """Take one optimiser step; return False if it was skipped."""
        found, lr = MetricAccumulator(), trained.lr
        norm = trained.step(losses(found), count * self.passes.shared_by, self.passes.clock)
        first = self.passes.ranks.rank == 0
        if norm is None:  # and so on every rank
            if first:
                tally.add(f"{role}/skipped_updates", 1.0, 0.0)
            return False
        tally.merge(found.pairs)
        if first:
            for name in ("actor/loss", "actor/policy_loss") if role == "actor" else ("critic/loss",):
                tally.add(name, 0.0, 1.0)
            tally.add(f"{role}/grad_norm", norm)
            tally.add(f"{role}/lr", lr)
        return True

    def _actor_losses(
        self,
        batch: TrainBatch,
        parts: Sequence[np.ndarray],
        count: int,
        moment: UpdateContext,
        tally: MetricAccumulator,
    ) -> Iterator[Tensor]:
        objective = self.objective
        for part, rows in self.passes.micro_batches(batch, parts, count):
            logprobs, entropy, _ = self.passes.run(self.actor, rows, objective.spec.temperature, objective.entropy)
            if part is None:
                yield _nothing(logprobs) + (_nothing(entropy) if objective.entropy == "gradient" else 0)
                continue
            yield objective(objective.inputs(part, logprobs, entropy, moment), moment.totals, tally)
            moment = attrs.evolve(moment, offset=moment.offset + len(logprobs))

    def _critic_losses(
        self,
        critic: Trained,
        batch: TrainBatch,
        parts: Sequence[np.ndarray],
        count: int,
        moment: UpdateContext,
        tally: MetricAccumulator,
    ) -> Iterator[Tensor]:
        for part, rows in self.passes.micro_batches(batch, parts, count):
            values = self.passes.run(critic, rows)
            clip = at(self.objective.spec.value_clip, moment.train_step)
            yield _nothing(values) if part is None else critic_loss(part, values, clip, moment.totals, tally)

    def _with_whole(
        self, batch: TrainBatch, parts: Sequence[np.ndarray], count: int, moment: UpdateContext
    ) -> UpdateContext:
        """Add the inputs of the optimiser batch, from a pass without gradients, gathered from all ranks."""
        ranks = self.passes.ranks
        columns: list[tuple[Tensor, Tensor]] = []
        with self.passes.clock("forward_seconds"), torch.no_grad():
            for part, rows in self.passes.micro_batches(batch, parts, count):
                logprobs, entropy, _ = self.passes.run(self.actor, rows, self.objective.spec.temperature, "value")
                if part is not None:
                    columns.append((logprobs.cpu(), entropy.cpu()))
        empty = torch.zeros(0)
        local = [torch.cat([empty, *(column[i] for column in columns)]) for i in (0, 1)]
        order = np.concatenate([np.zeros(0, np.int64), *parts])
        shares = ranks.gather((batch.select(order), *local))
        whole = TrainBatch.concatenate([share[0] for share in shares])
        logprobs, entropy = (torch.cat([share[i] for share in shares]).to(self.device) for i in (1, 2))
        offset = sum(len(share[1]) for share in shares[: ranks.rank])
        return attrs.evolve(moment, whole=self.objective.inputs(whole, logprobs, entropy, moment), offset=offset)


def _nothing(values: Tensor) -> Tensor:
    """Zero with a graph, so that gradients of all parameters exist and collectives stay in step."""
    return values.sum() * 0.0
