"""Order of `forward_backward` and `optimizer_step`: calls out of order are refused before they reach a rank."""

from __future__ import annotations

import math
from typing import Any

import attrs

from rlsdk.contracts import GivesPrimitives, Roles, SetsLearningRate
from rlsdk.errors import LearnerError


@attrs.define
class OpenSteps:
    """Optimiser steps that `forward_backward` has started and `optimizer_step` has not taken yet.

    A failing rank ends the learner. A call in the wrong order must not: in a notebook it can be corrected and repeated.
    So it is refused here, before any rank is called.

    Attributes:
        name: Name of the learner.
        learner: The learner, as resolved in the driver.
        roles: Models that it holds.
        complete: Role -> True once the last batch of its optimiser step has been added.
    """

    name: str
    learner: Any
    roles: Roles
    complete: dict[str, bool] = attrs.field(factory=dict)

    def add(self, role: str, *, last: bool) -> None:
        """Record a call of `forward_backward`.

        Raises:
            LearnerError: The learner does not support it, or `optimizer_step` is due.
        """
        if not isinstance(self.learner, GivesPrimitives):
            raise LearnerError(
                f"forward_backward: the learner {self.name!r} has only update; a custom loop needs a learner with "
                "the methods of rlsdk.contracts.GivesPrimitives, such as deepspeed"
            )
        self._check_role("forward_backward", role)
        if self.complete.get(role):
            raise LearnerError(
                f"forward_backward: the last batch of the {role}'s optimiser step was added; call "
                f"optimizer_step({role!r}) first, or give last=False with all batches but the last"
            )
        self.complete[role] = last

    def take(self, role: str) -> None:
        """Record a call of `optimizer_step`.

        Raises:
            LearnerError: No gradient was computed, or only part of it.
        """
        self._check_role("optimizer_step", role)
        if role not in self.complete:
            raise LearnerError(f"optimizer_step: the {role} has no gradient; call forward_backward first")
        if not self.complete[role]:
            raise LearnerError(
                f"optimizer_step: the {role}'s last batch is missing; call forward_backward with last=True for it"
            )
        del self.complete[role]

    def check_none(self, what: str) -> None:
        """Refuse an action that would lose an accumulated gradient.

        Args:
            what: Method that is called.

        Raises:
            LearnerError: An optimiser step was started and not taken.
        """
        if self.complete:
            raise LearnerError(
                f"{what}: the gradient of {' and '.join(self.complete)} would be lost; call optimizer_step first"
            )

    def check_rate(self, lr: float, role: str) -> None:
        """Check a call of `set_learning_rate`.

        Raises:
            LearnerError: The learner does not support it, or the learning rate is negative or not finite.
        """
        if not isinstance(self.learner, SetsLearningRate):
            raise LearnerError(
                f"set_learning_rate: the learner {self.name!r} has no such method (rlsdk.contracts.SetsLearningRate); "
                "deepspeed has one"
            )
        self._check_role("set_learning_rate", role)
        if not (math.isfinite(lr) and lr >= 0):
            raise LearnerError(f"set_learning_rate: got {lr!r} for the {role}; expected a finite number of at least 0")

    def _check_role(self, what: str, role: str) -> None:
        trained = [name for name in ("actor", "critic") if getattr(self.roles, name) is not None]
        if role not in trained:
            raise LearnerError(f"{what}: got role {role!r}; this learner trains {' and '.join(trained) or 'nothing'}")
