"""Shaping and advantage: from packed rollouts to the fields that a loss reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from rlsdk.algorithms.packed import adjusted
from rlsdk.batch import Credit, CreditInputs
from rlsdk.components import component_of
from rlsdk.contracts import TrainBatch
from rlsdk.errors import RunError
from rlsdk.trainer.pack import Packed, credit_inputs
from rlsdk.types import Group


class CreditAssigner:
    """Applies the chain of shapings, then the advantage, each seeing only what it declared."""

    def __init__(
        self, shaping: Sequence[Any], advantage: Any, *, whiten: bool = False, clip: float | None = None
    ) -> None:
        """Make one.

        Args:
            shaping: Ready to run, in the order of application.
            advantage: Ready to run.
            whiten: Mean 0 and variance 1 over the sampled tokens, after the advantage.
            clip: Greatest absolute advantage, after whitening.
        """
        self._shaping = list(shaping)
        self._advantage = advantage
        self._adjusted = partial(adjusted, whitened=whiten, clip=clip)
        self.needs = frozenset(n for part in self._parts() for n in _needs(part))

    def assign(self, packed: Packed, computed: dict[str, np.ndarray]) -> TrainBatch:
        """The batch with `advantages` and, where a critic learns, `returns`; both are 0 for what experts wrote.

        Args:
            packed: The rollouts of a step.
            computed: Per-token fields that the learner computed.
        """
        own = packed.without_experts()
        count = packed.sampled_tokens
        x = credit_inputs(own, {name: values[:count] for name, values in computed.items()}, self.needs)
        for part in self._shaping:
            x = x.shaped(_checked(part(x.only(_needs(part))), x, part))
        result = self._advantage(x.only(_needs(self._advantage)))
        fields: dict[str, np.ndarray] = {}
        if isinstance(result, Credit):
            fields["returns"] = _numpy(_checked(result.returns, x, self._advantage))
            result = result.advantages
        advantages = _per_token(x, _checked(result, x, self._advantage))
        fields["advantages"] = _numpy(self._adjusted(advantages, x.loss_mask))
        experts = len(packed.batch.loss_mask) - count
        return packed.batch.with_tokens(**{name: np.pad(values, (0, experts)) for name, values in fields.items()})

    def state(self) -> dict[str, Any]:
        """Plain JSON of the components that have memory, by position in the chain."""
        return {str(i): part.state() for i, part in enumerate(self._parts()) if hasattr(part, "state")}

    def restore(self, state: dict[str, Any]) -> None:
        """Give the components their memory back."""
        for i, part in enumerate(self._parts()):
            if str(i) in state:
                part.restore(state[str(i)])

    def _parts(self) -> list[Any]:
        return [*self._shaping, self._advantage]


def _needs(part: Any) -> tuple[str, ...]:
    component = component_of(part)
    return component.needs if component else ()


def _per_token(x: CreditInputs, values: Tensor) -> Tensor:
    return x.per_token(values) if len(values) == len(x.rewards) else values


def _checked(result: Any, x: CreditInputs, part: Any) -> Tensor:
    """A tensor of one value per rollout or per token, all finite."""
    component = component_of(part)
    name = f"{component.kind} {component.name!r}" if component else repr(part)
    if not isinstance(result, Tensor) or result.dim() != 1 or len(result) not in (len(x.rewards), len(x.loss_mask)):
        given = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise RunError(
            f"{name} returned {given}; expected a tensor [{len(x.rewards)}] (rollouts) or [{len(x.loss_mask)}] (tokens)"
        )
    if not bool(result.isfinite().all()):
        raise RunError(f"{name} returned {int((~result.isfinite()).sum())} values that are not finite")
    return result


def _numpy(values: Tensor) -> np.ndarray:
    return values.detach().float().numpy()


def apply_filters(groups: Sequence[Group], filters: Sequence[Callable[[Group], bool | Group]]) -> list[Group]:
    """The groups, or parts of groups, that all filters let through.

    A filter sees valid rollouts alone: one that failed says nothing of its group.
    """
    kept = []
    for group in groups:
        left: Group | None = _valid(group)
        for each in filters:
            answer = each(left) if left is not None and len(left) else False
            left = answer if isinstance(answer, Group) else (left if answer else None)
        if left is not None and len(left):
            kept.append(left)
    return kept


def _valid(group: Group) -> Group:
    pairs = [(r, s) for r, s in zip(group.rollouts, group.scores, strict=True) if s.valid]
    return Group(group.task, tuple(r for r, _ in pairs), tuple(s for _, s in pairs))
