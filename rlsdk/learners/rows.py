"""Rollouts as the rows that a transformers model reads: padded on the right, or packed one after another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs
import numpy as np

if TYPE_CHECKING:
    import torch

    from rlsdk.contracts import TrainBatch

RowStyle = Literal["padded", "packed"]


@attrs.frozen(eq=False)
class Rows:
    """What one forward pass reads.

    Attributes:
        input_ids: int64 `[rows, width]`.
        position_ids: int64 `[rows, width]`, starting anew at each rollout; None where each row is one rollout.
        states: int64 `[t]`, where, in the flattened rows, the state lies in which each response token was chosen.
        targets: int64 `[t]`, the response tokens.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor | None
    states: torch.Tensor
    targets: torch.Tensor

    def to(self, device: torch.device | str) -> Rows:
        """The same on another device."""
        positions = None if self.position_ids is None else self.position_ids.to(device)
        return Rows(self.input_ids.to(device), positions, self.states.to(device), self.targets.to(device))


def read_lengths(batch: TrainBatch) -> np.ndarray:
    """int64 `[n]`: tokens of each rollout that the model reads: all before the last response token."""
    return np.asarray(batch.starts + batch.responses - 1)


def to_rows(batch: TrainBatch, style: RowStyle) -> Rows:
    """Lay out rollouts.

    Padding stands on the right, where causal attention keeps it out of every state that is used, so no mask is needed.

    Args:
        batch: At least one rollout.
        style: `padded` gives each rollout a row, `packed` puts all of them into one.
    """
    import torch

    reads = read_lengths(batch)
    count, width = len(reads), int(reads.max())
    offsets = np.cumsum(batch.lengths) - batch.lengths
    within = np.arange(int(reads.sum())) - np.repeat(np.cumsum(reads) - reads, reads)
    tokens = batch.token_ids[np.repeat(offsets, reads) + within]
    if style == "packed":
        row_begins = np.cumsum(reads) - reads
        input_ids, position_ids = tokens[None], torch.from_numpy(within[None])
    else:
        row_begins = np.arange(count) * width
        input_ids, position_ids = np.zeros((count, width), np.int64), None
        input_ids.reshape(-1)[np.repeat(row_begins, reads) + within] = tokens
    responses = batch.responses
    step = np.arange(int(responses.sum())) - np.repeat(np.cumsum(responses) - responses, responses)
    states = np.repeat(row_begins + batch.starts - 1, responses) + step
    targets = batch.token_ids[np.repeat(offsets + batch.starts, responses) + step]
    return Rows(torch.from_numpy(input_ids), position_ids, torch.from_numpy(states), torch.from_numpy(targets))


def empty_rows() -> Rows:
    """One token, one target: what a rank without rollouts runs to keep collectives in step; its loss weighs nothing."""
    import torch

    zero = torch.zeros(1, dtype=torch.int64)
    return Rows(zero[None], None, zero, zero)
