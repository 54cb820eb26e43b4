"""The learner of a plan, whose critic or reference model may run in dedicated processes, beside the policy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np

from rlsdk.cluster.placement import Layout, placed_everywhere, sections_apart
from rlsdk.config import Plan
from rlsdk.contracts import ActorSpec, Adapter, ApartRole, Roles, TrainBatch, TrainedRole
from rlsdk.fields import FORWARD
from rlsdk.learners.group import LearnerGroup

if TYPE_CHECKING:
    from rlsdk.batch import Totals


@attrs.define(eq=False)
class DividedLearnerGroup(LearnerGroup):
    """Ranks of the policy and dedicated ranks of other models, which compute concurrently.

    Results equal those of a single group with all models, except for rounding if the numbers of ranks differ.
    """

    apart: dict[ApartRole, LearnerGroup] = attrs.field(factory=dict)

    @property
    def training_calls(self) -> int:
        """Number of calls that have changed the gradient or the weights of any group."""
        return super().training_calls + sum(group.training_calls for group in self.apart.values())

    def named_actors(self) -> dict[str, Any]:
        """Return the actors of all ranks by their name in messages, such as `critic rank 0`."""
        groups = (self, *self.apart.values())
        return {f"{group.name} rank {rank}": actor for group in groups for rank, actor in enumerate(group.actors)}

    def forward(self, batch: TrainBatch, fields: Sequence[str]) -> dict[str, np.ndarray]:
        """Return fields computed by passes without gradient, each from the group that holds its model."""
        inside = super().forward
        calls: dict[str, Callable[[], Any]] = {}
        for role, group in self.apart.items():
            calls[role] = partial(group.forward, batch, [name for name in fields if FORWARD[name].model == role])
        inner = [name for name in fields if FORWARD[name].model not in self.apart]
        by_role = self._together({"actor": partial(inside, batch, inner), **calls})
        return {name: values for passed in by_role.values() for name, values in passed.items()}

    def logprobs(
        self, batch: TrainBatch, role: Literal["actor", "reference"] = "actor", fields: Sequence[str] = ("logprobs",)
    ) -> dict[str, np.ndarray]:
        """float32 `[t]` each, in the batch's order; see `Learner.logprobs`."""
        if role == "reference" and "reference" in self.apart:
            return self.apart["reference"].logprobs(batch, role, fields)
        return super().logprobs(batch, role, fields)

    def values(self, batch: TrainBatch) -> np.ndarray:
        """float32 `[t]`, in the batch's order; see `Learner.values`."""
        return self.apart["critic"].values(batch) if "critic" in self.apart else super().values(batch)

    def update(self, batch: TrainBatch, minibatches: Sequence[np.ndarray], step: int) -> dict[str, float]:
        """Take one optimiser step per minibatch, for policy and critic concurrently."""
        calls: dict[str, Callable[[], dict[str, float]]] = {"actor": partial(super().update, batch, minibatches, step)}
        if "critic" in self.apart:
            calls["critic"] = partial(self.apart["critic"].update, batch, minibatches, step)
        by_role = self._together(calls)
        return {name: value for metrics in by_role.values() for name, value in metrics.items()}

    def forward_backward(
        self, batch: TrainBatch, totals: Totals | None = None, *, role: TrainedRole = "actor", **context: Any
    ) -> None:
        """Add a batch's gradient to the current optimiser step, in the group that holds the model."""
        apart = role == "critic" and "critic" in self.apart
        add = self.apart["critic"].forward_backward if apart else super().forward_backward
        add(batch, totals, role=role, **context)

    def optimizer_step(self, role: TrainedRole = "actor") -> dict[str, float]:
        """Take one optimiser step with the gradient that `forward_backward` accumulated."""
        apart = role == "critic" and "critic" in self.apart
        return self.apart["critic"].optimizer_step(role) if apart else super().optimizer_step(role)

    def set_learning_rate(self, lr: float, role: TrainedRole = "actor") -> None:
        """Set the peak learning rate from the next optimiser step on."""
        if role == "critic" and "critic" in self.apart:
            self.apart["critic"].set_learning_rate(lr, role)
        else:
            super().set_learning_rate(lr, role)

    def save(self, folder: Path) -> None:
        """Write the state that `load` needs; a critic with dedicated ranks uses a subfolder, also hashed."""
        if "critic" in self.apart:
            self.apart["critic"].save(folder / "apart")
        super().save(folder)

    def load(self, folder: Path) -> None:
        """Load the state that `save` wrote.

        Raises:
            CheckpointError: It is damaged, or belongs to a learner with a different setup.
        """
        super().load(folder)
        if "critic" in self.apart:
            self.apart["critic"].load(folder / "apart")

    def clock(self) -> dict[str, float]:
        """Return seconds and peak memory in bytes so far by name, each the maximum over ranks.

        `update_flop` is that of the policy's ranks.
        """
        own = super().clock()
        clocks = [own, *(group.clock() for group in self.apart.values())]
        found = {name: max(clock.get(name, 0.0) for clock in clocks) for name in own}
        if "update_flop" in own:
            found["update_flop"] = own["update_flop"]
        return found

    def stop(self) -> None:
        """End all ranks."""
        for group in self.apart.values():
            group.stop()
        super().stop()

    def _together(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Call groups concurrently; if one fails, stop all and raise its error."""
        with ThreadPoolExecutor(len(calls)) as threads:
            begun = {name: threads.submit(call) for name, call in calls.items()}
            try:
                return {name: future.result() for name, future in begun.items()}
            except BaseException:
                self.stop()
                raise


def start_learner(plan: Plan, found: Layout, adapter: Adapter | None, steps: int) -> DividedLearnerGroup:
    """Start the learner and wait until it is ready.

    Args:
        plan: Plan of the run.
        found: Threads and resources of each actor.
        adapter: Shape of the adapter that engines receive instead of whole models; None for whole models.
        steps: Number of training steps of the run.
    """
    placement, folder = plan.config.placement, plan.folder.resolve()
    every: dict[str, Any] = {
        "loss": attrs.evolve(plan.loss, train_steps=steps, critic_warmup=plan.config.critic.warmup_steps),
        "total_updates": steps * plan.config.updates,
        "log_dir": folder / "logs",
        "cache": folder / "cache",
    }
    learner = DividedLearnerGroup.launch(
        plan.learner,
        roles(plan),
        place=ActorSpec(
            role="learner",
            world_size=placement.learners,
            threads=found.learner_threads,
            **placed_everywhere(plan, found),
        ),
        seats=found.learners,
        resources=placement.learner_resources,
        python=found.python.get("learner", ""),
        transfer=plan.weight_transfer,
        **every,
    )
    learner.adapter_only = adapter is not None
    try:
        for role, section in sections_apart(plan).items():
            learner.apart[role] = LearnerGroup.launch(
                plan.apart[role],
                roles_apart(plan)[role],
                place=ActorSpec(
                    role="learner",
                    world_size=section.ranks,
                    threads=section.threads or max(1, (os.cpu_count() or 1) // section.ranks),
                    **placed_everywhere(plan, found),
                ),
                seats=found.apart.get(role, ()),
                resources=section.resources,
                name=role,
                **every,
            )
    except BaseException:
        learner.stop()
        raise
    return learner


def roles(plan: Plan) -> Roles:
    """Return the models that run in the learner's main processes."""
    critic = plan.algorithm.critic and "critic" not in plan.apart
    reference = plan.needs_reference and "reference" not in plan.apart
    return Roles(
        actor=plan.model,
        critic=plan.critic if critic else None,
        reference=plan.reference if reference else None,
        reference_mix=plan.config.reference.mix if plan.config.reference.update_every else None,
    )


def roles_apart(plan: Plan) -> dict[ApartRole, Roles]:
    """Return the models that run in separate processes."""
    models: dict[ApartRole, Roles] = {"critic": Roles(critic=plan.critic), "reference": Roles(reference=plan.reference)}
    return {role: models[role] for role in plan.apart}
