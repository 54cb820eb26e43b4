"""A plugin of rlsdk in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import attrs
import rlsdk
from rlsdk.contracts import ActorSpec, Learner, LossSpec, Roles, TrainBatch, Weights
from rlsdk.limits import NonNegative

if TYPE_CHECKING:
    import numpy as np


@rlsdk.learner("my_learner")
@attrs.define(kw_only=True)
class MyLearner:
    """A learner that passes everything on to another: the place to begin from, method by method.

    Attributes:
        lr: Learning rate.
        inner: Name of the learner that does the work.
    """

    lr: NonNegative = 1e-3
    inner: str = "deepspeed"
    _learner: Learner = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._learner = cast(Learner, rlsdk.load("learner", self.inner, lr=self.lr))

    def environment(self, place: ActorSpec) -> Mapping[str, str]:
        """Environment variables that must stand before the actor's process imports anything."""
        return self._learner.environment(place)

    def start(self, roles: Roles, loss: LossSpec, place: ActorSpec, total_updates: int) -> None:
        """Load the models; `total_updates` is the length of the learning-rate schedule."""
        self._learner.start(roles, loss, place, total_updates)

    def logprobs(
        self,
        batch: TrainBatch,
        role: Literal["actor", "reference"] = "actor",
        fields: Sequence[str] = ("logprobs",),
    ) -> dict[str, np.ndarray]:
        """Return float32 `[t]` for each field, without a gradient."""
        return self._learner.logprobs(batch, role, fields)

    def values(self, batch: TrainBatch) -> np.ndarray:
        """Return the critic's values, float32 `[t]`."""
        return self._learner.values(batch)

    def update(self, minibatches: Sequence[tuple[TrainBatch, int, int]], step: int) -> dict[str, float]:
        """Take an optimiser step for each (share of this rank, trained tokens, rollouts of all ranks)."""
        return self._learner.update(minibatches, step)

    def weights(self, version: int) -> Weights | None:
        """Return all tensors of the actor on rank 0, None elsewhere."""
        return self._learner.weights(version)

    def canary(self, token_ids: np.ndarray) -> np.ndarray:
        """Return float32 `[k - 1]` at temperature 1: rlsdk compares them with the engines'."""
        return self._learner.canary(token_ids)

    def save(self, folder: Path) -> None:
        """Write everything that `load` needs."""
        self._learner.save(folder)

    def load(self, folder: Path) -> None:
        """Continue from a folder that `save` wrote."""
        self._learner.load(folder)

    def export(self, folder: Path) -> None:
        """Write a folder that `transformers.from_pretrained` opens."""
        self._learner.export(folder)

    def stop(self) -> None:
        """Free everything."""
        self._learner.stop()
