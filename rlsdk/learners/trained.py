"""A module that a learner trains, whatever divides it among ranks: its steps, learning rate and checkpoints."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from rlsdk.errors import LearnerError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
Schedule = Literal["constant", "linear", "cosine"]
Wanted = Callable[[str], bool]
"""Chooses tensors of a model by their names in its `state_dict`."""


@attrs.frozen(kw_only=True)
class LearningRate:
    """Learning rate of a module over its training.

    Attributes:
        peak: Greatest learning rate.
        factor: Share of the peak after so many optimiser steps; see `schedule`.
    """

    peak: float
    factor: Callable[[int], float]


class TrainedModule(ABC):
    """A module whose optimiser steps follow the exact gradient of the global loss; every rank holds one.

    A learner that divides models in its own way subclasses it, and `TransformersLearner` does the rest.

    Attributes:
        role: Role of the module: actor or critic.
        updates: Optimiser steps completed; the schedule depends on it alone.
        skipped: Steps skipped since the last completed one.
        peak_lr: Peak learning rate that replaces that of the options, as it was set while training; None if it was not.
    """

    def __init__(self, rate: LearningRate, *, role: str, skip_limit: int) -> None:
        """Begin with no step taken.

        Args:
            rate: Learning rate.
            role: Role of the module.
            skip_limit: Maximum number of consecutive skipped updates.
        """
        self.role, self._rate, self._skip_limit = role, rate, skip_limit
        self.updates = self.skipped = 0
        self.peak_lr: float | None = None

    @property
    @abstractmethod
    def module(self) -> Any:
        """The module, a `torch.nn.Module`, with the attributes that it had before it was divided."""

    @abstractmethod
    def __call__(self, *args: Any) -> Any:
        """Run the module, with a graph or without."""

    @abstractmethod
    def backward(self, losses: Iterator[Tensor], count: int, clock: PhaseTimer, *, last: bool) -> None:
        """Add the gradient of losses to that of the optimiser step.

        Args:
            losses: This rank's parts of the loss, one per micro-batch; those of all ranks add up to the loss.
            count: Number of parts, the same on every rank.
            clock: Timer of the phases.
            last: True if `step` comes next.
        """

    @property
    @abstractmethod
    def repeat_fault(self) -> str:
        """Say why the gradient of an optimiser step cannot be dropped and computed again; empty if it can."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Drop the gradient of the optimiser step, and what a backward pass left behind that did not end."""

    @abstractmethod
    def follow(self) -> float:
        """Take an optimiser step along the gradient at the learning rate `lr`, and drop the gradient.

        A gradient that is not finite on some rank changes no weight, on any rank.

        Returns:
            Norm of the whole gradient before clipping, the same on all ranks; not finite, or below zero, if no step
            was taken.
        """

    @abstractmethod
    def save(self, folder: Path, rank: int, state: Mapping[str, Any], *, frozen: bool) -> None:
        """Write this rank's part of what `read` reads, without pickles; a collective.

        Args:
            folder: Folder that all ranks see.
            rank: Rank of this process.
            state: More to keep, plain JSON, the same on all ranks.
            frozen: Keep parameters that are not trained, too.
        """

    @abstractmethod
    def read(self, folder: Path, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read what `save` wrote, without executing anything in it, and change nothing yet.

        Args:
            folder: Folder that all ranks see.
            rank: Rank of this process.

        Returns:
            The model's state and the optimiser's, for `restore`.

        Raises:
            CheckpointError: A file is missing, or holds something else.
        """

    @abstractmethod
    def restore(self, model: Mapping[str, Any], saved: dict[str, Any], rank: int, *, strict: bool) -> dict[str, Any]:
        """Continue from what `read` returned; a collective.

        Args:
            model: State of the model.
            saved: State of the optimiser.
            rank: Rank of this process.
            strict: Refuse a model that lacks a parameter.

        Returns:
            The `state` that `save` was given.

        Raises:
            CheckpointError: The states do not fit.
        """

    @abstractmethod
    def full_tensors(self, *, keep: bool, wanted: Wanted | None = None) -> dict[str, Tensor]:
        """Return whole tensors of `module.model` by their `state_dict` names, in the model's dtype; a collective.

        Args:
            keep: Return the tensors on this rank; otherwise it only takes part in the collective.
            wanted: Filter by name; by default, all tensors.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what the module holds beside its memory."""

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        peak = self._rate.peak if self.peak_lr is None else self.peak_lr
        return peak * self._rate.factor(self.updates)

    @property
    def progress(self) -> dict[str, Any]:
        """Counts that a checkpoint keeps, plain JSON; `set_progress` restores them."""
        return {"updates": self.updates, "skipped": self.skipped, "peak_lr": self.peak_lr}

    def set_progress(self, state: Mapping[str, Any]) -> None:
        """Continue from the counts of a checkpoint.

        Raises:
            KeyError: They are missing.
        """
        self.updates, self.skipped = int(state["updates"]), int(state.get("skipped", 0))
        self.peak_lr = state.get("peak_lr")

    def step(self) -> float | None:
        """Take one optimiser step along the gradient; all ranks skip it if the gradient is not finite.

        Returns:
            Gradient norm before clipping; None if the step was skipped, which leaves weights, optimiser state and
            schedule unchanged.

        Raises:
            LearnerError: More than `skip_limit` steps in a row were skipped.
        """
        norm = self.follow()
        if math.isfinite(norm) and norm >= 0:
            self.updates, self.skipped = self.updates + 1, 0
            return norm
        self.skipped += 1
        limit, step = self._skip_limit, self.updates + 1
        if self.skipped > limit:
            raise LearnerError(
                f"the {self.role}'s gradient was not finite in {self.skipped} updates in a row (optimiser step {step}"
                f"); learner.skip_limit allows {limit}. No weight was changed by them. Look for losses, advantages or "
                "rewards that are not finite or huge, or lower learner.lr, and resume from a checkpoint"
            )
        log.warning(
            "the %s's gradient is not finite: optimiser step %d is skipped (%d in a row, at most %d)",
            self.role,
            step,
            self.skipped,
            limit,
        )
        return None


def schedule(kind: Schedule, warmup: int, final: float, total: int) -> Callable[[int], float]:
    """Build the learning-rate factor as a function of completed optimiser steps.

    Args:
        kind: Shape after the linear warm-up: constant, or linear or cosine down to `final`.
        warmup: Number of warm-up steps.
        final: Factor at the end.
        total: Total number of steps.
    """

    def factor(done: int) -> float:
        rise = min(1.0, (done + 1) / max(warmup, 1))
        progress = min(max((done - warmup) / max(total - warmup, 1), 0.0), 1.0)
        if kind == "linear":
            return rise * (1 - (1 - final) * progress)
        if kind == "cosine":
            return rise * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
        return rise

    return factor


class PhaseTimer:
    """Adds up seconds by name."""

    def __init__(self) -> None:
        self.seconds = {"forward_seconds": 0.0, "update_seconds": 0.0}

    def __call__(self, name: str) -> _Span:
        """A context whose duration is added to `name`."""
        return _Span(self.seconds, name)


class _Span:
    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds[self._name] += time.perf_counter() - self._start
