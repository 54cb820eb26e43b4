"""A module in training, however it is sharded: optimiser steps, learning rate, checkpoints, and offloaded tensors."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from rlsdk.errors import LearnerError, first_line
from rlsdk.preflight import size_text

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
Wanted = Callable[[str], bool]
"""Select tensors of a model by their `state_dict` names."""


@attrs.frozen(kw_only=True)
class LearningRate:
    """Learning rate of a module over its training.

    Attributes:
        peak: Peak learning rate.
        factor: Share of the peak after a number of optimiser steps; see `LearnerOptions.rate_factor`.
    """

    peak: float
    factor: Callable[[int], float]


class TrainedModule(ABC):
    """A module whose optimiser steps follow the exact gradient of the global loss; every rank holds one.

    A learner with its own sharding subclasses it; `TransformersLearner` does the rest.

    Attributes:
        role: Role of the module: actor or critic.
        updates: Number of completed optimiser steps; the schedule depends only on it.
        skipped: Number of steps skipped since the last completed one.
        peak_lr: Peak learning rate set during training, which overrides the options; None if it was not set.
    """

    def __init__(self, rate: LearningRate, *, role: str, skip_limit: int) -> None:
        """Create a module without completed steps.

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
        """The `torch.nn.Module`, with the attributes that it had before sharding."""

    @abstractmethod
    def __call__(self, *args: Any) -> Any:
        """Run the module, with a graph or without."""

    @abstractmethod
    def backward(self, losses: Iterator[Tensor], count: int, clock: PhaseTimer, *, last: bool) -> None:
        """Accumulate the gradient of losses for the optimiser step.

        Args:
            losses: This rank's parts of the loss, one per micro-batch; the parts of all ranks add up to the loss.
            count: Number of parts, equal on every rank.
            clock: Phase timer.
            last: True if `step` comes next.
        """

    @property
    @abstractmethod
    def repeat_fault(self) -> str:
        """Return why the gradient of an optimiser step cannot be dropped and recomputed; empty if it can."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Drop the gradient of the optimiser step and the leftovers of an interrupted backward pass."""

    @abstractmethod
    def follow(self) -> float:
        """Take an optimiser step along the gradient with learning rate `lr`, and drop the gradient.

        If the gradient is not finite on at least one rank, no weight changes on any rank.

        Returns:
            Norm of the whole gradient before clipping, equal on all ranks; not finite or negative if no step was taken.
        """

    @abstractmethod
    def save(self, folder: Path, rank: int, state: Mapping[str, Any], *, frozen: bool) -> None:
        """Write this rank's part of a checkpoint for `read`, without pickles; a collective.

        Args:
            folder: Folder that all ranks see.
            rank: Rank of this process.
            state: Additional state as plain JSON, equal on all ranks.
            frozen: True to include parameters that are not trained.
        """

    @abstractmethod
    def read(self, folder: Path, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a checkpoint from `save` without executing or changing anything.

        Args:
            folder: Folder that all ranks see.
            rank: Rank of this process.

        Returns:
            Model state and optimiser state, for `restore`.

        Raises:
            CheckpointError: A file is missing or has different content.
        """

    @abstractmethod
    def restore(self, model: Mapping[str, Any], saved: dict[str, Any], rank: int, *, strict: bool) -> dict[str, Any]:
        """Restore from the result of `read`; a collective.

        Args:
            model: Model state.
            saved: Optimiser state.
            rank: Rank of this process.
            strict: True to reject a model that lacks a parameter.

        Returns:
            The `state` that was passed to `save`.

        Raises:
            CheckpointError: The states do not fit.
        """

    @abstractmethod
    def full_tensors(self, *, keep: bool, wanted: Wanted | None = None, host: bool = True) -> dict[str, Tensor]:
        """Return unsharded tensors of `module.model` by `state_dict` name, in the model's dtype; a collective.

        Args:
            keep: True to return the tensors on this rank; otherwise it only takes part in the collective.
            wanted: Filter by name; by default, all tensors.
            host: True to move tensors that are gathered to host memory.
        """

    def masters(self) -> Iterable[tuple[str, Tensor]]:
        """Yield this rank's parts of the weights by parameter name, in the precision of optimiser steps; a collective.

        Only a reference model that follows the policy needs it (`TransformersLearner.moving_reference`).
        """
        raise NotImplementedError

    def update_tensors(self) -> Iterable[Tensor]:
        """Return tensors on the device that only optimiser steps use, such as the moments; by default, none."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Free resources other than memory."""

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        peak = self._rate.peak if self.peak_lr is None else self.peak_lr
        return peak * self._rate.factor(self.updates)

    @property
    def progress(self) -> dict[str, Any]:
        """Counters for a checkpoint as plain JSON; `set_progress` restores them."""
        return {"updates": self.updates, "skipped": self.skipped, "peak_lr": self.peak_lr}

    def set_progress(self, state: Mapping[str, Any]) -> None:
        """Restore the counters of a checkpoint.

        Raises:
            KeyError: A counter is missing.
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
                f"); learner.skip_limit allows {limit}. They changed no weights. Look for losses, advantages or "
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


class PhaseTimer:
    """Accumulate seconds by name.

    Attributes:
        event: Makes an event of the GPU's queue, such as `torch.cuda.Event`, if a phase only queues its work there; the
            host waits for it no earlier than `seconds` is read. None if nothing is queued.
    """

    def __init__(self) -> None:
        self.event: Callable[[], Any] | None = None
        self._seconds = {"forward_seconds": 0.0, "update_seconds": 0.0}
        self._queued: list[tuple[str, Any, Any]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Return a context whose duration is added to `name`."""
        if self.event is not None:
            begin, end = self.event(), self.event()
            begin.record()
            yield
            end.record()
            self._queued.append((name, begin, end))
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds so far, by name."""
        while self._queued:
            name, begin, end = self._queued.pop()
            end.synchronize()
            self._seconds[name] += begin.elapsed_time(end) / 1000
        return self._seconds


class OffloadedTensors:
    """Tensors in host memory whose device memory is free; zeros, such as gradients after a step, take no memory there.

    They can be read meanwhile, for example for a checkpoint. Views of them cannot be read; after `restore`, the tensors
    have their old storage again, so views are valid again as well.
    """

    def __init__(self, tensors: Iterable[Tensor], *, pinned: bool = False) -> None:
        """Copy tensors to host memory and free their storage.

        Args:
            tensors: Tensors on one device. Those that share their storage with others, or are in a mapped file, stay
                where they are.
            pinned: Lock the host memory, to and from which a GPU copies several times as fast; torch keeps it for the
                next tensors of these sizes.
        """
        import torch

        self._held: list[tuple[Tensor, Tensor, int, bool]] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if not size or tensor.numel() * tensor.element_size() != size or not storage.resizable():
                continue
            on_device = tensor.detach()  # shares the storage, and keeps it
            empty = not on_device.any()
            if empty:  # NumPy's zeros take memory only when they are read
                zeros = torch.from_numpy(np.zeros(size, np.uint8))
                tensor.data = zeros.view(tensor.dtype).view(tensor.shape)
            else:
                tensor.data = _on_host(on_device, pinned=pinned)
            storage.resize_(0)
            self._held.append((tensor, on_device, size, empty))

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that are free."""
        return sum(size for _, _, size, _ in self._held)

    def restore(self) -> None:
        """Copy the tensors back into their storage."""
        while self._held:
            tensor, on_device, size, empty = self._held.pop()
            on_device.untyped_storage().resize_(size)
            if empty:
                on_device.zero_()
            else:
                on_device.copy_(tensor.detach())
            tensor.data = on_device


def _on_host(on_device: Tensor, *, pinned: bool) -> Tensor:
    """Return a copy in host memory, pinned if possible."""
    import torch

    if pinned:
        try:
            return torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True).copy_(on_device)
        except RuntimeError as error:
            log.warning(
                "%s of host memory cannot be pinned (%s); the learner falls asleep and wakes more slowly",
                size_text(on_device.nbytes),
                first_line(error),
            )
    return on_device.to("cpu", copy=True)
