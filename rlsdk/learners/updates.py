"""Optimiser steps of a rank: gradient accumulation over micro-batches, and metrics over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import attrs
import numpy as np
import torch
from torch import Tensor

from rlsdk.batch import Totals
from rlsdk.contracts import TrainBatch, TrainedRole
from rlsdk.errors import LearnerError
from rlsdk.learners.flops import ModelFlops
from rlsdk.learners.metrics import MetricAccumulator
from rlsdk.learners.micro_batches import MicroBatch, MicroBatchRunner, with_less
from rlsdk.learners.objective import Objective, UpdateContext, critic_loss
from rlsdk.learners.router import ExpertTotals, ExpertUse, RouterLoss
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
        flops: FLOPs of each trained module.
        update_flop: FLOPs of this rank's share of all updates so far.
    """

    objective: Objective
    passes: MicroBatchRunner
    trained: Mapping[TrainedRole, TrainedModule]
    seed: int
    device: str
    flops: Mapping[TrainedRole, ModelFlops] = attrs.field(factory=dict)
    update_flop: float = 0.0
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
        if role in self.flops:
            self.update_flop += self.flops[role].of_update(batch.lengths)

    def _add(self, batch: TrainBatch, context: UpdateContext, role: TrainedRole, *, last: bool) -> None:
        trained, parts = self._trained(role), self.passes.plan(batch)
        count = self.passes.ranks.all_reduce_max([max(len(parts), 1)])[0]
        if role == "actor":
            context = self._look_ahead(batch, parts, count, context)
        losses = self._actor_losses if role == "actor" else self._critic_losses
        metrics = self._metrics.setdefault(role, MetricAccumulator())
        trained.backward(
            losses(trained, batch, parts, count, context, metrics),
            count * self.passes.shared_by,
            self.passes.clock,
            last=last,
        )

    def optimizer_step(self, role: TrainedRole) -> MetricAccumulator:
        """Take one optimiser step along the gradient, and return this rank's part of the metrics.

        Raises:
            LearnerError: Too many gradients in a row were not finite.
        """
        trained, metrics = self._trained(role), self._metrics.pop(role, MetricAccumulator())
        self._added.pop(role, None)
        ranks, lr = self.passes.ranks, trained.lr
        with self.passes.clock("update_seconds"):
            norm = trained.step()
        if role == "actor":
            self.objective.advance(ranks.gather, taken=norm is not None)
        if norm is None:  # the same on every rank
            metrics = MetricAccumulator()
        if ranks.rank == 0 and norm is None:
            metrics.add(f"{role}/skipped_updates", 1.0, 0.0)
        elif ranks.rank == 0 and norm is not None:
            for name in ("actor/loss", "actor/policy_loss") if role == "actor" else ("critic/loss",):
                metrics.add(name, 0.0, 1.0)
            metrics.add(f"{role}/grad_norm", norm)
            metrics.add(f"{role}/lr", lr)
        return metrics

    def means(self, accumulator: MetricAccumulator, roles: Iterable[TrainedRole]) -> dict[str, float]:
        """Return the metrics of optimiser steps over all ranks; a collective."""
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
        objective, policy = self.objective, actor.module
        for part, rows in self.passes.micro_batches(batch, parts, count):
            logprobs, entropy, _ = self.passes.run(actor, rows, objective.spec.temperature, objective.entropy)
            use = policy.take_use()
            # Backward passes must be alike on all ranks, also for what this rank's loss leaves out.
            extra = _nothing(entropy) if objective.entropy == "gradient" else 0
            if use is not None:
                extra = extra + _nothing(use.probabilities)
            if part is None:
                yield _nothing(logprobs) + extra
                continue
            loss = extra + objective(objective.inputs(part, logprobs, entropy, context), context.totals, accumulator)
            if use is not None:
                loss = loss + self._balance(policy.router_loss, use, part, context, accumulator)
            yield _skippable(loss)
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
            if part is None:
                yield _nothing(values)
            else:
                yield _skippable(critic_loss(part, values, clip, context.totals, accumulator))

    def _balance(
        self,
        penalty: RouterLoss,
        use: ExpertUse,
        part: TrainBatch,
        context: UpdateContext,
        accumulator: MetricAccumulator,
    ) -> Tensor:
        """Return the load-balancing loss of a micro-batch, with its weight."""
        totals = context.experts
        if totals is None:  # the micro-batch is the whole batch
            share = int(part.loss_mask.sum()) / max(1, context.totals.tokens)
            totals = ExpertTotals(use.counts, use.tokens, share)
        if not totals.share:  # nothing is trained
            return torch.zeros(())
        loss = totals.share * penalty(use, totals)
        accumulator.add("actor/router_loss", float(loss.detach()), totals.share * use.tokens / totals.tokens)
        weighted = penalty.coefficient * loss
        accumulator.add("actor/loss", float(weighted.detach()), 0.0)
        return weighted

    def _look_ahead(
        self, batch: TrainBatch, parts: Sequence[MicroBatch], count: int, context: UpdateContext
    ) -> UpdateContext:
        """Add what losses read of all rollouts of the call, over all ranks, from a pass without gradients."""
        ranks, actor, whole = self.passes.ranks, self.trained["actor"], self.objective.whole_batch
        balanced = actor.module.router_loss is not None and (count > 1 or ranks.world > 1)
        if not (whole or balanced):
            return context
        columns: list[tuple[Tensor, Tensor]] = []
        uses: list[ExpertUse] = []
        with self.passes.clock("forward_seconds"), torch.no_grad():
            for part, rows in self.passes.micro_batches(batch, parts, count):
                logprobs, entropy, _ = self.passes.run(
                    actor, rows, self.objective.spec.temperature, "value" if whole else "none"
                )
                use = actor.module.take_use()
                if part is not None:
                    columns += [(logprobs.cpu(), entropy.cpu())] if whole else []
                    uses += [] if use is None else [use]
        if balanced:
            counts = sum(use.counts.cpu().double() for use in uses) if uses else 0.0
            local = (counts, sum(use.tokens for use in uses), int(batch.loss_mask.sum()))
            counts, tokens, trained = (sum(each) for each in zip(*ranks.gather(local), strict=True))
            if tokens:  # otherwise nothing is trained
                totals = torch.as_tensor(counts, dtype=torch.float32, device=self.device)
                share = trained / max(1, context.totals.tokens)
                context = attrs.evolve(context, experts=ExpertTotals(totals, int(tokens), share))
        return self._with_whole(batch, parts, columns, context) if whole else context

    def _with_whole(
        self,
        batch: TrainBatch,
        parts: Sequence[MicroBatch],
        columns: Sequence[tuple[Tensor, Tensor]],
        context: UpdateContext,
    ) -> UpdateContext:
        """Add the inputs of the optimiser batch, gathered over all ranks."""
        ranks, empty = self.passes.ranks, torch.zeros(0)
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


def _skippable(loss: Tensor) -> Tensor:
    """Make the gradient of a loss that is not finite not finite either, so that all ranks skip the update.

    A loss such as `log_ratio * advantages + nan` has a finite gradient, of a function that nobody meant.
    """
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, math.nan)  # without waiting for a GPU
