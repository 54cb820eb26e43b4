"""Optimiser steps of a rank: what its micro-batches add to the gradient, and the metrics of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from rlsdk.batch import Totals
from rlsdk.contracts import TrainBatch
from rlsdk.learners.metrics import Tally
from rlsdk.learners.objective import Moment, Objective, critic_loss
from rlsdk.learners.passes import Passes
from rlsdk.learners.zero import Trained


@attrs.frozen(kw_only=True, eq=False)
class Updates:
    """Steps the actor, and the critic where there is one.

    Attributes:
        objective: The actor's.
        passes: How rollouts go through a model.
        actor: The actor.
        critic: The critic, if any.
        seed: Of random choices; equal on all ranks.
        device: Of the models.
    """

    objective: Objective
    passes: Passes
    actor: Trained
    critic: Trained | None
    seed: int
    device: str

    def run(self, minibatches: Sequence[tuple[TrainBatch, int, int]], step: int) -> dict[str, float]:
        """One optimiser step for each minibatch; see `Learner.update`.

        Raises:
            LearnerError: A gradient is not finite.
        """
        tally, ranks = Tally(), self.passes.ranks
        plans = [self.passes.plan(batch) for batch, _, _ in minibatches]
        counts = ranks.most([max(len(parts), 1) for parts in plans])
        for i, ((batch, tokens, rollouts), parts, count) in enumerate(zip(minibatches, plans, counts, strict=True)):
            seed = int(np.random.SeedSequence([self.seed, step, i]).generate_state(1)[0])
            moment = Moment(update=i, updates=len(minibatches), totals=Totals(tokens, rollouts), seed=seed)
            if self.objective.whole_batch:
                moment = self._with_whole(batch, parts, count, moment)
            self._step(self.actor, "actor", self._actor_losses(batch, parts, count, moment, tally), count, tally)
            if self.critic is not None:
                losses = self._critic_losses(self.critic, batch, parts, count, moment, tally)
                self._step(self.critic, "critic", losses, count, tally)
        merged = Tally()
        for pairs in ranks.gather(tally.pairs):
            merged.merge(pairs)
        return merged.means()

    def _step(self, trained: Trained, role: str, losses: Iterator[Tensor], count: int, tally: Tally) -> None:
        lr, norm = trained.lr, trained.step(losses, count * self.passes.shared_by, self.passes.clock)
        if self.passes.ranks.rank == 0:
            for name in ("actor/loss", "actor/policy_loss") if role == "actor" else ("critic/loss",):
                tally.add(name, 0.0, 1.0)
            tally.add(f"{role}/grad_norm", norm)
            tally.add(f"{role}/lr", lr)

    def _actor_losses(
        self, batch: TrainBatch, parts: Sequence[np.ndarray], count: int, moment: Moment, tally: Tally
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
        self, critic: Trained, batch: TrainBatch, parts: Sequence[np.ndarray], count: int, moment: Moment, tally: Tally
    ) -> Iterator[Tensor]:
        for part, rows in self.passes.micro_batches(batch, parts, count):
            values = self.passes.run(critic, rows)
            clip = self.objective.spec.value_clip
            yield _nothing(values) if part is None else critic_loss(part, values, clip, moment.totals, tally)

    def _with_whole(self, batch: TrainBatch, parts: Sequence[np.ndarray], count: int, moment: Moment) -> Moment:
        """One pass without a graph over the optimiser batch, gathered from all ranks in the order of micro-batches."""
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
