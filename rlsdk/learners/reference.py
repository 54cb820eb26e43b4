"""A reference model that follows the policy: its moves, its float32 weights, and its part of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlsdk.errors import CheckpointError
from rlsdk.learners.statefile import read_state, write_state

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "reference"
"""Folder in a learner's checkpoint that holds a reference model that moves."""


class MovingReference:
    """A reference model that moves towards the policy.

    Paper: TR-DPO, arXiv:2404.09656 (soft update; with a `mix` of 1, hard update).
    Formula: `reference = mix · policy + (1 - mix) · reference`.

    Moves are computed in float32, from the weights that the policy's optimiser steps change. A reference model in 16
    bits has float32 weights as well, since rounding would swallow small moves; with a `mix` of 1 it needs none, because
    it becomes a copy of the policy. A learner with its own sharding may subclass it.

    Attributes:
        weights: This rank's tensors of the model, by parameter name; moves change them in place.
        masters: Tensors that moves are computed in, by parameter name; those of `weights` if they are precise enough.
        mix: Share of the policy's weights in a move.
        sharded: True if each rank holds its own part of the model; otherwise all ranks hold all of it.
    """

    def __init__(self, weights: Mapping[str, Tensor], mix: float, *, sharded: bool) -> None:
        import torch

        self.weights, self.mix, self.sharded = dict(weights), mix, sharded
        precise = {name: mix == 1 or tensor.dtype == torch.float32 for name, tensor in weights.items()}
        self.masters = {name: t if precise[name] else t.detach().float() for name, t in weights.items()}

    def move(self, policy: Iterable[tuple[str, Tensor]]) -> None:
        """Move towards the policy.

        Args:
            policy: What `TrainedModule.masters` yields: tensors that are shaped and sharded as in `masters`.
        """
        import torch

        with torch.no_grad():
            for name, tensor in policy:
                master = self.local(self.masters[name])
                target = self.local(tensor).to(master.device, master.dtype)
                if self.mix == 1:
                    master.copy_(target)
                else:
                    master.lerp_(target, self.mix)
                self.changed(name)

    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a tensor: the tensor itself, not a view or copy."""
        return tensor

    def changed(self, name: str) -> None:
        """Make passes read a tensor of `masters` that has changed."""
        weight, master = self.weights[name], self.masters[name]
        if weight is not master:
            self.local(weight).copy_(self.local(master))

    def copies(self) -> Iterator[Tensor]:
        """Yield this rank's float32 weights that passes do not read."""
        for name, master in self.masters.items():
            if master is not self.weights[name]:
                yield self.local(master)

    def save(self, folder: Path, rank: int) -> None:
        """Write the weights; a collective.

        Args:
            folder: Folder that all ranks see.
            rank: Rank of this process.
        """
        if self.sharded or rank == 0:
            write_state(self._file(folder, rank), self.masters)

    def load(self, folder: Path, rank: int) -> None:
        """Restore what `save` wrote; a collective.

        Args:
            folder: Folder that all ranks see.
            rank: Rank of this process.

        Raises:
            CheckpointError: The weights do not fit.
        """
        import torch

        saved = read_state(self._file(folder, rank))
        try:
            with torch.no_grad():
                for name, master in self.masters.items():
                    master.copy_(saved[name])
                    self.changed(name)
        except (KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"the checkpoint's reference model in {folder} does not fit this one: {type(error).__name__}: {error}"
            ) from error

    def _file(self, folder: Path, rank: int) -> Path:
        return folder / f"weights-{rank if self.sharded else 0}.safetensors"
