"""One side of a what-if: a plan's filters and credit, applied to the stored groups of a run, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import sqlalchemy as sa

from rlsdk.components import component_of
from rlsdk.config import Plan
from rlsdk.errors import RunError, ValueFault
from rlsdk.fields import FORWARD
from rlsdk.plurals import counted
from rlsdk.rollout.step_batch import StepBatch, apply_filters, pack, produce
from rlsdk.runlog.query import reader
from rlsdk.runlog.serialization import decode, decode_learned
from rlsdk.runlog.store import Address
from rlsdk.runlog.tables import GROUPS
from rlsdk.trainer.credit import CreditAssigner
from rlsdk.types import Group

ENDED = ("trained", "filtered", "failed")
"""States of groups settled by a step."""


@attrs.frozen(eq=False)
class StoredGroup:
    """A stored group.

    Attributes:
        number: Number of its task record.
        state: `trained`, `filtered` or `failed`.
        uses: Number of times it was trained.
        group: The group, with the scores of the run.
        learned: Name -> values per rollout, `[T]`; None for a rollout that was not trained.
    """

    number: int
    state: str
    uses: int
    group: Group
    learned: Mapping[str, Sequence[np.ndarray | None]]


@attrs.frozen(eq=False)
class StoredStep:
    """The groups settled by one step, in the order in which their tasks were issued, and why others cannot be read."""

    step: int
    groups: tuple[StoredGroup, ...]
    unreadable: tuple[str, ...] = ()


class Store:
    """Reader of a run's store; only one step is in memory at a time."""

    def __init__(self, run: Path) -> None:
        """Open the store.

        Raises:
            ValueFault: The run keeps no rollouts.
        """
        address = Address.of(run)
        if address is None:
            raise ValueFault(f"{run} has no stored rollouts: saving is off (save_rollouts: 0), or none were saved yet")
        self._address = address

    def steps(self, first: int | None = None, last: int | None = None) -> list[int]:
        """Return the steps with stored groups, within bounds."""
        own = (GROUPS.c.run == self._address.run) & (GROUPS.c.number >= 0) & GROUPS.c.state.in_(ENDED)
        bounds = [] if first is None else [GROUPS.c.step >= first]
        bounds += [] if last is None else [GROUPS.c.step <= last]
        wanted = sa.select(GROUPS.c.step).where(own, GROUPS.c.step.is_not(None), *bounds).distinct()
        return sorted(int(row[0]) for row in self._rows(wanted))

    def read(self, step: int) -> StoredStep:
        """Return the groups of a step."""
        own = (GROUPS.c.run == self._address.run) & (GROUPS.c.step == step) & (GROUPS.c.number >= 0)
        columns = (GROUPS.c.number, GROUPS.c.state, GROUPS.c.uses, GROUPS.c.payload)
        wanted = sa.select(*columns).where(own, GROUPS.c.state.in_(ENDED)).order_by(GROUPS.c.number)
        groups, unreadable = [], []
        for number, state, uses, payload in self._rows(wanted):
            try:
                groups.append(StoredGroup(number, state, uses, decode(payload), decode_learned(payload)))
            except ValueFault as error:
                unreadable.append(f"group {number}: {error}")
        return StoredStep(step, tuple(groups), tuple(unreadable))

    def _rows(self, statement: sa.Select[Any]) -> Iterator[Any]:
        engine = reader(self._address)
        try:
            with engine.connect() as connection:
                yield from connection.execute(statement)
        except sa.exc.DBAPIError as error:
            raise self._address.unreadable(error) from error
        finally:
            engine.dispose()


TRAINED = "trained"
Forward = Callable[[StepBatch, Plan, Sequence[str]], Mapping[str, np.ndarray]]
"""Function that computes fields of a batch with the weights of a checkpoint."""


@attrs.frozen(eq=False)
class GroupVerdict:
    """Verdict on a group: trained or not, and why.

    Attributes:
        group: The part of the group that is trained; None if nothing is.
        reason: Why nothing is trained, or why there is no learning signal; empty for a group with a signal.
    """

    group: Group | None
    reason: str = ""


@attrs.frozen(eq=False)
class Credited:
    """The rollouts of a step that reach the learner, with credit.

    Attributes:
        batch: Packed rollouts with their advantages; None if there are none.
        verdicts: Verdict on each group of the step.
        advantages: `id` of a rollout -> advantages of its tokens, `[T]`.
        deviation: Maximum difference between stored and recomputed advantages; 0 if none were stored.
    """

    batch: StepBatch | None
    verdicts: tuple[GroupVerdict, ...]
    advantages: Mapping[int, np.ndarray]
    deviation: float = 0.0


class Side:
    """Filters and credit of a plan, ready to run; components with state keep it between steps."""

    def __init__(
        self, plan: Plan, *, train_steps: int, forward: Forward | None = None, computable: bool = True
    ) -> None:
        """Resolve the parts.

        Args:
            plan: The plan.
            train_steps: Number of steps of the run.
            forward: Computes fields with the weights of a checkpoint; None to use the stored ones.
            computable: False if credit reads unavailable fields, so that only stored advantages can be used.
        """
        self._computable = computable
        self.plan, self.train_steps, self._forward = plan, train_steps, forward
        self.filters = [plan.plugins.resolve(each) for each in plan.filters]
        self.credit = CreditAssigner.of(plan)

    def verdict(self, group: Group) -> GroupVerdict:
        """Run the filters on a group, one after another, to find the one that drops it."""
        left = next(iter(apply_filters([group], ())), None)
        if left is None:
            reasons = Counter(score.reason for score in group.scores if not score.valid)
            reason = reasons.most_common(1)[0][0] if reasons else "it has no rollouts"
            return GroupVerdict(None, f"no valid score: {reason}")
        for each in self.filters:
            found = apply_filters([left], (each,))
            if not found:
                component = component_of(each)
                name = repr(component.name) if component else repr(each)
                return GroupVerdict(None, f"filter {name}: {_spread(left)}")
            left = found[0]
        if not any(rollout.loss_mask.any() for rollout in left.rollouts):
            return GroupVerdict(None, "no rollout sampled a token")
        return GroupVerdict(left)

    async def credited(
        self, step: int, verdicts: Sequence[GroupVerdict], stored: Sequence[StoredGroup], *, keep: bool
    ) -> Credited:
        """Assign credit to the groups that pass the filters.

        If `keep`, the stored advantages are used, provided that every rollout has them.
        """
        batch = pack([each.group for each in verdicts if each.group is not None])
        if batch is None:
            return Credited(None, tuple(verdicts), {})
        learned = _learned(stored)
        batch = await self._with_fields(batch, learned)
        held = _stored_values(batch, learned, "advantages") if keep else None
        if self._computable:
            batch = await self.credit.assign_aside(batch, train_step=step - 1, train_steps=self.train_steps)
        deviation = 0.0
        if held is not None:
            deviation = float(np.abs(held - batch.arrays.tokens.get("advantages", held)).max())
            batch = attrs.evolve(batch, arrays=batch.arrays.with_tokens(advantages=held))
        if "advantages" not in batch.arrays.tokens:
            raise RunError(
                f"step {step}: the run's advantages were not stored, and its algorithm reads unavailable fields"
            )
        advantages = {}
        parts = np.split(batch.arrays.tokens["advantages"], np.cumsum(batch.arrays.responses)[:-1])
        for rollout, start, part in zip(batch.rollouts, batch.arrays.starts, parts, strict=True):
            advantages[id(rollout)] = np.zeros(len(rollout.token_ids), np.float32)
            advantages[id(rollout)][start : start + len(part)] = part
        return Credited(batch, tuple(_taught(each, advantages) for each in verdicts), advantages, deviation)

    async def _with_fields(self, batch: StepBatch, learned: Mapping[int, Mapping[str, np.ndarray]]) -> StepBatch:
        """Add the fields read by credit and, if a checkpoint computes them, by the objective."""
        needs = self.credit.needs.union(*(field.needs for field in self.plan.fields))
        behaviour = batch.arrays.tokens["behaviour_logprobs"]
        if self._forward is None:
            found = {"logprobs": _stored_values(batch, learned, "learner_logprobs", behaviour)}
            entropy = _stored_values(batch, learned, "entropy")
            found |= {} if entropy is None else {"entropy": entropy}
            if "entropy" in needs and entropy is None:
                raise RunError(
                    "the run stored no entropies, which the algorithm reads; use --checkpoint to compute them"
                )
        else:
            recompute = self.plan.config.old_logprobs == "learner"
            wanted = {"logprobs": recompute, "ref_logprobs": self.plan.needs_reference, "values": False}
            names = [name for name in FORWARD if wanted.get(name, name in needs)]
            found = {"logprobs": behaviour, **self._forward(batch, self.plan, names)}
        return await produce(batch.with_fields(**{k: v for k, v in found.items() if v is not None}), self.plan.fields)


def _learned(stored: Sequence[StoredGroup]) -> dict[int, dict[str, np.ndarray]]:
    """Return the learner's stored results: `id` of a rollout -> name -> float32 `[T]`."""
    found: dict[int, dict[str, np.ndarray]] = {}
    for each in stored:
        for i, rollout in enumerate(each.group.rollouts):
            held = {name: values[i] for name, values in each.learned.items()}
            found[id(rollout)] = {name: value for name, value in held.items() if value is not None}
    return found


def _stored_values(
    batch: StepBatch, learned: Mapping[int, Mapping[str, np.ndarray]], name: str, otherwise: np.ndarray | None = None
) -> np.ndarray | None:
    """Return a stored field `[t]`, with `otherwise` for rollouts without it; None if `otherwise` is missing, too."""
    arrays, offset, parts = batch.arrays, 0, []
    for rollout, start, length in zip(batch.rollouts, arrays.starts, arrays.responses, strict=True):
        values = learned.get(id(rollout), {}).get(name)
        if values is not None:
            parts.append(values[start : start + length])
        elif otherwise is not None:
            parts.append(otherwise[offset : offset + length])
        else:
            return None
        offset += int(length)
    return np.concatenate(parts, dtype=np.float32)


def _taught(verdict: GroupVerdict, advantages: Mapping[int, np.ndarray]) -> GroupVerdict:
    if verdict.group is None:
        return verdict
    mine = [advantages[id(rollout)] for rollout in verdict.group.rollouts if id(rollout) in advantages]
    if any(part.any() for part in mine):
        return verdict
    return attrs.evolve(verdict, reason=f"every advantage is 0: {_spread(verdict.group)}")


def _spread(group: Group) -> str:
    values = sorted({score.value for score in group.scores})
    many = f"rewards from {values[0]:g} to {values[-1]:g}" if len(values) > 1 else f"every reward is {values[0]:g}"
    return f"{many} ({counted(len(group), 'rollout')})"
