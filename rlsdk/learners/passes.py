"""Passes of a rank over its rollouts, micro-batch by micro-batch, in step with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from rlsdk.contracts import TrainBatch
from rlsdk.learners.microbatch import plan
from rlsdk.learners.ranks import Ranks
from rlsdk.learners.rows import Rows, RowStyle, empty_rows, read_lengths, to_rows
from rlsdk.learners.zero import Clock

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen
class Passes:
    """How rollouts go through a model.

    Attributes:
        ranks: All of them run the same number of micro-batches: ZeRO gathers and reduces in each.
        clock: Takes the time of passes without a gradient.
        style: Of the rows.
        budget: Tokens of a micro-batch, padding included.
    """

    ranks: Ranks
    clock: Clock
    style: RowStyle
    budget: int

    def plan(self, batch: TrainBatch) -> list[np.ndarray]:
        """Rollouts (int64) of each of this rank's micro-batches; none for no rollouts."""
        packed, pairs = self.style == "packed", batch.rollouts.get("pairs")
        return plan(read_lengths(batch), self.budget, packed=packed, pairs=pairs)

    def micro_batches(
        self, batch: TrainBatch, parts: Sequence[np.ndarray], count: int
    ) -> Iterator[tuple[TrainBatch | None, Rows]]:
        """`count` micro-batches; where a rank has no more, None and rows whose results must weigh nothing."""
        for i in range(count):
            part = batch.select(parts[i]) if i < len(parts) else None
            rows = empty_rows(self.style) if part is None else to_rows(part, self.style)
            yield part, rows.to(self.ranks.device)

    def forward(
        self, run: Callable[[Rows], Mapping[str, Tensor]], batch: TrainBatch, fields: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Results per response token without a graph, float32 `[t]` each, in the order of the batch.

        Args:
            run: Gives `[t]` for each of `fields`.
            batch: This rank's rollouts.
            fields: Names of the results.
        """
        import torch

        found = {name: np.zeros(int(batch.responses.sum()), np.float32) for name in fields}
        parts = self.plan(batch)
        count = self.ranks.most([len(parts)])[0]
        with self.clock("forward_seconds"), torch.no_grad():
            for i, (part, rows) in enumerate(self.micro_batches(batch, parts, count)):
                results = run(rows)
                if part is None:
                    continue
                positions = batch.response_positions(parts[i])
                for name, result in results.items():
                    found[name][positions] = result.float().cpu().numpy()
        return found
