"""Passes of a rank over its rollouts, micro-batch by micro-batch, in step with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from rlsdk.contracts import Model, TrainBatch
from rlsdk.learners.microbatch import plan
from rlsdk.learners.ranks import Ranks
from rlsdk.learners.rows import Rows, RowStyle, empty_rows, read_lengths, to_rows
from rlsdk.learners.zero import Clock

if TYPE_CHECKING:
    from torch import Tensor

    from rlsdk.learners.ulysses import Sequences


@attrs.frozen
class Passes:
    """How rollouts go through a model.

    Attributes:
        ranks: All of them run the same number of micro-batches: ZeRO gathers and reduces in each.
        clock: Takes the time of passes without a gradient.
        style: Of the rows.
        budget: Tokens of a micro-batch on each rank that runs it, padding included.
        sequences: The ranks that share each rollout; None where each has its own.
    """

    ranks: Ranks
    clock: Clock
    style: RowStyle
    budget: int
    sequences: Sequences | None = None

    @classmethod
    def of(cls, ranks: Ranks, clock: Clock, style: RowStyle, budget: int, *, sequence_parallel: int) -> Passes:
        """Passes in which so many ranks share each rollout; a collective where that is more than one."""
        if sequence_parallel == 1:
            return cls(ranks, clock, style, budget)
        from rlsdk.learners.ulysses import Sequences

        return cls(ranks, clock, style, budget, Sequences.join(ranks, sequence_parallel))

    def adopt(self, module: Any, model: Model) -> None:
        """Prepare a policy or a critic for `run`.

        Raises:
            LearnerError: Ranks cannot share its rollouts.
        """
        if self.sequences is not None:
            self.sequences.adopt(module.model, model.path)

    @property
    def shared_by(self) -> int:
        """How many ranks run a micro-batch: as many passes make up for one micro-batch of each."""
        return 1 if self.sequences is None else self.sequences.size

    def run(self, model: Callable[..., Any], rows: Rows, *args: Any) -> Any:
        """What the model gives for the rows; with `sequences` the same on all ranks that share them."""
        return model(rows, *args) if self.sequences is None else self.sequences(model, rows, *args)

    def plan(self, batch: TrainBatch) -> list[np.ndarray]:
        """Rollouts (int64) of each of this rank's micro-batches; none for no rollouts."""
        packed, pairs = self.style == "packed", batch.rollouts.get("pairs")
        return plan(read_lengths(batch), self.budget * self.shared_by, packed=packed, pairs=pairs)

    def micro_batches(
        self, batch: TrainBatch, parts: Sequence[np.ndarray], count: int
    ) -> Iterator[tuple[TrainBatch | None, Rows]]:
        """The rows of `count * shared_by` passes, and the rollouts whose results they give.

        Where a rank has no more micro-batches, or it is another rank's turn, the rollouts are None: results of these
        rows must weigh nothing.
        """
        for i in range(count):
            part = batch.select(parts[i]) if i < len(parts) else None
            rows = empty_rows(self.style) if part is None else to_rows(part, self.style)
            if self.sequences is None:
                yield part, rows.to(self.ranks.device)
                continue
            for turn, each in enumerate(self.sequences.turns(rows)):
                yield part if turn == self.sequences.rank else None, each.to(self.ranks.device)

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
        left = iter(parts)
        with self.clock("forward_seconds"), torch.no_grad():
            for part, rows in self.micro_batches(batch, parts, count):
                results = run(rows)
                if part is None:
                    continue
                positions = batch.response_positions(next(left))
                for name, result in results.items():
                    found[name][positions] = result.float().cpu().numpy()
        return found
