"""From packed rollouts to an update: shaping and advantage, minibatches, the critic's warm-up."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
from torch import Tensor

from rlsdk.batch import Credit, CreditInputs
from rlsdk.batch.arithmetic import adjusted, of_top_entropy
from rlsdk.components import calling, component_of, needs_of, see_definition, title_of
from rlsdk.config import Plan
from rlsdk.contracts import memory_of
from rlsdk.contracts.optional import restore_state, state_of
from rlsdk.errors import RunError
from rlsdk.fields import FORWARD
from rlsdk.isolation.threads import awaited, run_to_end
from rlsdk.learners.metrics import MetricAccumulator
from rlsdk.rollout.step_batch import StepBatch
from rlsdk.schedules import Schedule, at
from rlsdk.trainer.metrics import as_numbers

if TYPE_CHECKING:
    from rlsdk.contracts.training import LearnerHandle, TrainBatch

log = logging.getLogger(__name__)


class CreditAssigner:
    """Apply the shapings, then the advantage; each may be `async` and sees only the fields that it declared."""

    def __init__(
        self,
        shaping: Sequence[Any],
        advantage: Any,
        *,
        whiten: bool = False,
        clip: float | Schedule | None = None,
        top_entropy: float | Schedule | None = None,
        reward_weights: Mapping[str, float] | None = None,
    ) -> None:
        """Create the assigner.

        Args:
            shaping: Resolved shapings, in order of application.
            advantage: Resolved advantage.
            whiten: Normalise to mean 0 and variance 1 over the sampled tokens, after the advantage.
            clip: Maximum absolute advantage, after whitening.
            top_entropy: Share of the sampled tokens that keep their advantage: those of highest entropy.
            reward_weights: Name of a part of the reward -> its weight.
        """
        self._shaping = list(shaping)
        self._advantage = advantage
        self._whiten, self._clip, self._top_entropy = whiten, clip, top_entropy
        self._reward_weights = reward_weights or {}
        needs = {n for part in self._parts() for n in needs_of(part)}
        self.needs = frozenset(needs if top_entropy is None else {*needs, "entropy"})

    @classmethod
    def of(cls, plan: Plan) -> CreditAssigner:
        """Create the assigner of a plan."""
        resolve, algorithm = plan.plugins.resolve, plan.algorithm
        return cls(
            [resolve(reference) for reference in plan.shaping],
            resolve(plan.advantage),
            whiten=algorithm.whiten_advantages,
            clip=plan.schedules.get("clip_advantages", algorithm.clip_advantages),
            top_entropy=plan.schedules.get("top_entropy_quantile", algorithm.top_entropy_quantile),
            reward_weights={part.rule.name: part.rule.weight for part in plan.rewards},
        )

    async def assign_aside(self, batch: StepBatch, **clock: int) -> StepBatch:
        """Run `assign` in a thread, so that slow components do not block the event loop.

        `async` components are awaited on the running event loop, since whatever they keep open between steps, such as a
        client's connections, belongs to one loop.
        """
        loop = asyncio.get_running_loop()

        def settle(awaitable: Awaitable[Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(awaited(awaitable), loop).result()

        return await asyncio.to_thread(self.assign, batch, **clock, settle=settle)

    def assign(
        self,
        batch: StepBatch,
        *,
        train_step: int = 0,
        train_steps: int = 1,
        settle: Callable[[Awaitable[Any]], Any] = run_to_end,
    ) -> StepBatch:
        """Add `advantages` and, with a critic, `returns` to the arrays.

        Expert rollouts have no rewards: their advantages are 0, and their returns the critic's own values, from which
        it learns nothing.

        Args:
            batch: Rollouts of a step, with the fields that the components read.
            train_step: Number of completed training steps.
            train_steps: Number of training steps of the run.
            settle: Returns the result of an awaitable from an `async` component.
        """
        x = credit_inputs(
            batch.without_experts(),
            self.needs,
            train_step=train_step,
            train_steps=train_steps,
            reward_weights=self._reward_weights,
        )
        for part in self._shaping:
            x = x.shaped(_checked(_call(part, x, settle), x, part))
        result = _call(self._advantage, x, settle)
        fields: dict[str, np.ndarray] = {}
        if isinstance(result, Credit):
            fields["returns"] = _numpy(_checked(result.returns, x, self._advantage))
            result = result.advantages
        advantages = _checked(result, x, self._advantage)
        if len(advantages) == len(x.rewards):
            advantages = x.per_token(advantages)
        clip, top = at(self._clip, train_step), at(self._top_entropy, train_step)
        advantages = adjusted(advantages, x.loss_mask, whitened=self._whiten, clip=clip)
        if top is not None:
            advantages = torch.where(of_top_entropy(x.entropy, x.loss_mask, top), advantages, 0)
        fields["advantages"] = _numpy(advantages)
        experts = len(batch.arrays.loss_mask) - batch.sampled_tokens
        padded = {name: np.pad(values, (0, experts)) for name, values in fields.items()}
        if "returns" in padded and "values" in batch.fields:
            padded["returns"][batch.sampled_tokens :] = batch.fields["values"][batch.sampled_tokens :]
        return attrs.evolve(batch, arrays=batch.arrays.with_tokens(**padded))

    def metrics(self) -> dict[str, float]:
        """Return what shapings and advantage report of the last batch, as `KIND/NAME/…`.

        Raises:
            RunError: A component reports something other than numbers.
        """
        found: dict[str, float] = {}
        for part in self._parts():
            component, report = component_of(part), getattr(part, "metrics", None)
            if component is None or not callable(report):
                continue
            with calling(part):
                numbers = as_numbers(dict(report()), title_of(part))
            found |= {f"{component.kind}/{component.name}/{k}": v for k, v in numbers.items() if v is not None}
        return found

    def state(self) -> dict[str, Any]:
        """Return the state of stateful components as plain JSON, by position in the chain and name.

        Raises:
            RunError: JSON cannot hold a component's state.
        """
        parts = ((i, part) for i, part in enumerate(self._parts()) if memory_of(part) is not None)
        return {f"{i} {title_of(part)}": state_of(part) for i, part in parts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the components; if the chain has changed, they are matched by name."""
        left = dict(state)
        for i, part in enumerate(self._parts()):
            name = title_of(part)
            if memory_of(part) is None:
                continue
            moved = [key for key in left if key.partition(" ")[2] == name]
            # Earlier versions wrote only the position.
            key = next((key for key in (f"{i} {name}", *moved, str(i)) if key in left), None)
            if key is None:
                log.warning("%s is not in the checkpoint; it starts without state", name)
            else:
                restore_state(part, left.pop(key))

    def _parts(self) -> list[Any]:
        return [*self._shaping, self._advantage]


def _checked(result: Any, x: CreditInputs, part: Any) -> Tensor:
    """Validate and return a component's result: a finite tensor with one value per rollout or per token."""
    name = title_of(part)
    if not isinstance(result, Tensor) or result.dim() != 1 or len(result) not in (len(x.rewards), len(x.loss_mask)):
        given = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise RunError(
            f"{name} returned {given}; expected a tensor [{len(x.rewards)}] (rollouts) or [{len(x.loss_mask)}] (tokens)"
            f"{see_definition(part)}"
        )
    finite = result.float().isfinite()  # as the learner reads it
    if not bool(finite.all()):
        raise RunError(
            f"{name} returned {int((~finite).sum())} values that are not finite in float32{see_definition(part)}"
        )
    # Later steps divide, discount and average, which would round integers.
    return result if result.is_floating_point() else result.float()


def _numpy(values: Tensor) -> np.ndarray:
    return values.detach().float().numpy()


def _call(part: Any, x: CreditInputs, settle: Callable[[Awaitable[Any]], Any]) -> Any:
    """Call a shaping or an advantage with the fields that it reads, and return its result.

    Raises:
        RunError: It changed one of them in place.
    """
    given = x.only(needs_of(part))
    edits = given.edits
    with calling(part):
        result = part(given)
        result = settle(result) if inspect.isawaitable(result) else result
    if changed := [field for field, count in given.edits.items() if count != edits[field]]:
        raise RunError(
            f"{title_of(part)} changed x.{changed[0]} in place, but the rest of the step reads it too: avoid "
            f"methods that end in '_', += and x.{changed[0]}[…] = … on it, or change a copy, "
            f"x.{changed[0]}.clone(){see_definition(part)}"
        )
    return result


def credit_inputs(
    batch: StepBatch,
    needs: frozenset[str],
    *,
    train_step: int = 0,
    train_steps: int = 1,
    reward_weights: Mapping[str, float] | None = None,
) -> CreditInputs:
    """Return the inputs of shaping and advantage: the required fields, and the optional ones in `needs`."""
    found = {k: torch.from_numpy(np.array(v)) for k, v in batch.fields.items() if k in needs}
    optional: dict[str, Any] = {name: value for name, value in found.items() if name in FORWARD}
    token_rewards = _token_rewards(batch)
    if token_rewards is not None:
        optional["token_rewards"] = token_rewards
    if "sources" in needs:
        optional["sources"] = _dense([r.task.source for r in batch.rollouts])
    if "trajectories" in needs:
        labels = _own(r.trajectory for r in batch.rollouts)
        optional["trajectories"] = _dense([f"{g}\0{label}" for g, label in zip(batch.groups, labels, strict=True)])
    if "steps" in needs:
        optional["steps"] = torch.tensor([r.step for r in batch.rollouts])
    if "states" in needs:
        optional["states"] = _dense(_own(r.state for r in batch.rollouts))
    if any(s.shared for s in batch.scores):
        optional["shared_scores"] = torch.tensor([s.shared for s in batch.scores])
    if batch.baselines is not None:
        optional["baseline_rewards"] = torch.from_numpy(batch.baselines)
    if "reward_parts" in needs:
        names = sorted({name for s in batch.scores for name in s.metrics if name.startswith("reward/")})
        optional["reward_parts"] = {
            name.removeprefix("reward/"): torch.tensor([float(s.metrics.get(name, 0.0)) for s in batch.scores])
            for name in names
        }
    if "reward_weights" in needs:
        optional["reward_weights"] = dict(reward_weights or {})
    return CreditInputs(
        torch.tensor([s.value for s in batch.scores], dtype=torch.float32),
        torch.from_numpy(batch.groups),
        torch.from_numpy(batch.arrays.responses),
        torch.from_numpy(batch.arrays.loss_mask),
        train_step=train_step,
        train_steps=train_steps,
        **optional,
    ).with_extra(**{name: value for name, value in found.items() if name not in FORWARD})


def _own(labels: Iterable[str]) -> list[str]:
    """Give each unlabelled rollout a unique label, so that it shares a trajectory or state with no other."""
    return [label or f"\0{i}" for i, label in enumerate(labels)]


def _dense(labels: Sequence[str]) -> torch.Tensor:
    return torch.from_numpy(np.unique(np.array(labels), return_inverse=True)[1].astype(np.int64))


def _token_rewards(batch: StepBatch) -> torch.Tensor | None:
    """Token rewards, float `[t]`, if any score has them; other scores are placed on the last sampled token."""
    if all(s.token_rewards is None for s in batch.scores):
        return None
    arrays = batch.arrays
    rewards = np.zeros(int(arrays.responses.sum()), np.float32)
    offsets = np.cumsum(arrays.responses) - arrays.responses
    for i, score in enumerate(batch.scores):
        pairs = (
            ((arrays.starts[i] + arrays.responses[i] - 1, score.value),)
            if score.token_rewards is None
            else score.token_rewards
        )
        mask = arrays.loss_mask[offsets[i] : offsets[i] + arrays.responses[i]]
        sampled = np.flatnonzero(mask)
        for position, value in pairs:  # a reward on a token that was not sampled belongs to the sampled one before it
            before = np.searchsorted(sampled, position - arrays.starts[i], side="right") - 1
            rewards[offsets[i] + sampled[max(before, 0)]] += value
    return torch.from_numpy(rewards)


def minibatches(
    batch: StepBatch, count: int, passes: int, seed: Sequence[int], *, whole_groups: bool = False
) -> list[np.ndarray]:
    """Return the rollout indices of each optimiser step; each pass shuffles the groups and splits them.

    Args:
        batch: Rollouts of a step.
        count: Number of parts of similar size in each pass; fewer if there are fewer rollouts, or whole groups.
        passes: Number of passes over the rollouts.
        seed: Seed of the order.
        whole_groups: True to keep each group in one part.
    """
    generator = np.random.default_rng(list(seed))
    found: list[np.ndarray] = []
    for _ in range(passes):
        order = generator.permutation(int(batch.groups.max()) + 1)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        rollouts = np.argsort(rank[batch.groups], kind="stable")
        if whole_groups:
            ends = np.cumsum(np.bincount(rank[batch.groups]))
            cuts = [int(part[-1]) for part in np.array_split(ends, count) if len(part)][:-1]
            found += np.split(rollouts, cuts)
        else:
            found += [part for part in np.array_split(rollouts, count) if len(part)]
    return found


_OF_STEPS = ("critic/loss", "critic/grad_norm", "critic/lr")
"""Metrics of the critic that are averaged over optimiser steps; the others over trained tokens."""
_SKIPPED = "critic/skipped_updates"


def train_critic(
    learner: LearnerHandle, batch: TrainBatch, minibatches: Sequence[np.ndarray], step: int
) -> dict[str, float]:
    """Take an optimiser step of the critic alone per minibatch; return its metrics as `LearnerHandle.update` does.

    This is the update of a step before the actor is trained.
    """
    found, trained, updates = MetricAccumulator(), batch.trained_tokens, len(minibatches)
    found.add(_SKIPPED, 0.0)  # a count: steps add to the sum, not to the weight
    for i, index in enumerate(minibatches):
        learner.forward_backward(batch.select(index), role="critic", step=step, update=i, updates=updates)
        for name, value in learner.optimizer_step("critic").items():
            weight = 1.0 if name in _OF_STEPS else float(trained[index].sum())
            found.add(name, value if name == _SKIPPED else value * weight, 0.0 if name == _SKIPPED else weight)
    return found.means()
