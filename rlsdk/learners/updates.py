"""Optimiser steps of a rank: gradient accumulation over micro-batches, and metrics over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import attrs
import numpy as np
import torch
from torch import Tensor

from rlsdk.batch import Totals
from rlsdk.contracts import TrainBatch, TrainedRole
from rlsdk.errors import LearnerError
from rlsdk.learners.metrics import MetricAccumulator
from rlsdk.learners.objective import Objective, UpdateContext, critic_loss
from rlsdk.learners.passes import MicroBatch, MicroBatchRunner, with_less
from rlsdk.learners.trained import TrainedModule
from rlsdk.schedules import at


@attrs.define(kw_only=True, eq=False)
class Updates:
    """Optimiser steps of the actor and, if there is one, the critic.

    `forward_backward` accumulates the gradient of a batch and `optimizer_step` applies it; `update` does both for each
    minibatch.

    Attributes:
        objective: Objective of the actor.
        passes: Runner of micro-batches.
        trained: Trained modules by role, the actor first; an update trains them in this order.
        seed: Seed of random choices, equal on all ranks.
        device: Device of the models.
    """

    objective: Objective
    passes: MicroBatchRunner
    trained: Mapping[TrainedRole, TrainedModule]
    seed: int
    device: str
    _metrics: dict[str, MetricAccumulator] = attrs.field(init=False, factory=dict)
    _added: dict[str, list[Callable[[], None]]] = attrs.field(init=False, factory=dict)

    def update(self, minibatches: Sequence[tuple[TrainBatch, int, int]], step: int) -> dict[str, float]:
        """Take one optimiser step of each role for each minibatch; see `Learner.update`.

        Raises:
            LearnerError: Too many gradients in a row were not finite.
        """
        accumulator, updates = MetricAccumulator(), len(minibatches)
        for i, (batch, tokens, rollouts) in enumerate(minibatches):
            for role in self.trained:
                totals = Totals(tokens, rollouts)
                self.forward_backward(batch, totals, role=role, step=step, update=i, updates=updates, last=True)
                accumulator.merge(self.optimizer_step(role).pairs)
        return self.means(accumulator, self.trained)

    def forward_backward(
        self,
        batch: TrainBatch,
        totals: Totals,
        *,
        role: TrainedRole,
        step: int,
        update: int,
        updates: int,
        last: bool,
    ) -> None:
        """Accumulate the gradient of this rank's rollouts for the optimiser step; see `GivesPrimitives`.

        Raises:
            LearnerError: The learner does not train that role.
        """
        trained = self._trained(role)
        context = UpdateContext(
            update=update,
            updates=updates,
            train_step=step,
            updates_done=next(iter(self.trained.values())).updates,
            totals=totals,
            seed=int(np.random.SeedSequence([self.seed, step, update]).generate_state(1)[0]),
        )
        add = partial(self._add, batch, context, role, last=last)
        added = self._added.setdefault(role, [])
        added.append(add)

        def again() -> None:
            trained.drop_gradients()
            self._metrics.pop(role, None)
            if role == "actor":
                self.objective.forget()
            for each in added:
                each()

        what = f"the update of the {role} in step {step + 1}"
        with_less(self.passes, what, add, again=again, why_not=trained.repeat_fault)

    def _add(self, batch: TrainBatch, context: UpdateContext, role: TrainedRole, *, last: bool) -> None:
        trained, parts = self._trained(role), self.passes.plan(batch)
        count = self.passes.ranks.all_reduce_max([max(len(parts), 1)])[0]
        if role == "actor" and self.objective.whole_batch:
            context = self._with_whole(batch, parts, count, context)
        losses = self._actor_losses if role == "actor" else self._critic_losses
        found = self._metrics.setdefault(role, MetricAccumulator())
        trained.backward(
            losses(trained, batch, parts, count, context, found),
            count * self.passes.shared_by,
            self.passes.clock,
            last=last,
        )

    def optimizer_step(self, role: TrainedRole) -> MetricAccumulator:
        """Take one optimiser step along the gradient, and return this rank's part of the metrics.

        Raises:
            LearnerError: Too many gradients in a row were not finite.
        """
        trained, found = self._trained(role), self._metrics.pop(role, MetricAccumulator())
        self._added.pop(role, None)
        ranks, lr = self.passes.ranks, trained.lr
        with self.passes.clock("update_seconds"):
            norm = trained.step()
        if role == "actor":
            self.objective.advance(ranks.gather, taken=norm is not None)
        if norm is None:  # the same on every rank
            found = MetricAccumulator()
        if ranks.rank == 0 and norm is None:
            found.add(f"{role}/skipped_updates", 1.0, 0.0)
        elif ranks.rank == 0 and norm is not None:
            for name in ("actor/loss", "actor/policy_loss") if role == "actor" else ("critic/loss",):
                found.add(name, 0.0, 1.0)
            found.add(f"{role}/grad_norm", norm)
            found.add(f"{role}/lr", lr)
        return found

    def means(self, accumulator: MetricAccumulator, roles: Iterable[TrainedRole]) -> dict[str, float]:
        """Return the metrics of optimiser steps over all ranks; a collective.

        Args:
            accumulator: Merged results of the optimiser steps on this rank.
            roles: Roles that took optimiser steps.
        """
        merged = MetricAccumulator()
        for role in roles:
            merged.add(f"{role}/skipped_updates", 0.0, 1.0)  # a count: steps add to the sum, not to the weight
        for pairs in self.passes.ranks.gather(accumulator.pairs):
            merged.merge(pairs)
        return merged.means()

    def _trained(self, role: TrainedRole) -> TrainedModule:
        if role not in self.trained:
            raise LearnerError(f"this learner trains no {role}; it trains {' and '.join(self.trained)}")
        return self.trained[role]

    def _actor_losses(
        self,
        actor: TrainedModule,
        batch: TrainBatch,
        parts: Sequence[MicroBatch],
        count: int,
        context: UpdateContext,
        accumulator: MetricAccumulator,
    ) -> Iterator[Tensor]:
        objective = self.objective
        for part, rows in self.passes.micro_batches(batch, parts, count):
            logprobs, entropy, _ = self.passes.run(actor, rows, objective.spec.temperature, objective.entropy)
            if part is None:
                yield _nothing(logprobs) + (_nothing(entropy) if objective.entropy == "gradient" else 0)
                continue
            loss = objective(objective.inputs(part, logprobs, entropy, context), context.totals, accumulator)
            policy = actor.module
            balance, trained = policy.take_balance(), int(part.loss_mask.sum())
            if balance is not None and trained:
                share = trained / context.totals.tokens
                weighted = policy.router_loss.coefficient * share * balance
                accumulator.add("actor/router_loss", share * float(balance.detach()), share)
                accumulator.add("actor/loss", float(weighted.detach()), 0.0)
                loss = loss + weighted
            yield loss
            context = attrs.evolve(context, offset=context.offset + len(logprobs))

    def _critic_losses(
        self,
        critic: TrainedModule,
        batch: TrainBatch,
        parts: Sequence[MicroBatch],
        count: int,
        context: UpdateContext,
        accumulator: MetricAccumulator,
    ) -> Iterator[Tensor]:
        for part, rows in self.passes.micro_batches(batch, parts, count):
            values = self.passes.run(critic, rows)
            clip = at(self.objective.spec.value_clip, context.train_step)
            yield _nothing(values) if part is None else critic_loss(part, values, clip, context.totals, accumulator)

    def _with_whole(
        self, batch: TrainBatch, parts: Sequence[MicroBatch], count: int, context: UpdateContext
    ) -> UpdateContext:
        """Add the inputs of the optimiser batch from a pass without gradients, gathered over all ranks."""
        ranks, actor = self.passes.ranks, self.trained["actor"]
        columns: list[tuple[Tensor, Tensor]] = []
        with self.passes.clock("forward_seconds"), torch.no_grad():
            for part, rows in self.passes.micro_batches(batch, parts, count):
                logprobs, entropy, _ = self.passes.run(actor, rows, self.objective.spec.temperature, "value")
                if part is not None:
                    columns.append((logprobs.cpu(), entropy.cpu()))
        empty = torch.zeros(0)
        local = [torch.cat([empty, *(column[i] for column in columns)]) for i in (0, 1)]
        order = np.concatenate([np.zeros(0, np.int64), *(part.rollouts for part in parts)])
        shares = ranks.gather((batch.select(order), *local))
        whole = TrainBatch.concatenate([share[0] for share in shares])
        logprobs, entropy = (torch.cat([share[i] for share in shares]).to(self.device) for i in (1, 2))
        offset = sum(len(share[1]) for share in shares[: ranks.rank])
        return attrs.evolve(context, whole=self.objective.inputs(whole, logprobs, entropy, context), offset=offset)


def _nothing(values: Tensor) -> Tensor:
    """Return a zero loss with a graph, so that all parameters get gradients and collectives stay in step."""
    return values.sum() * 0.0
