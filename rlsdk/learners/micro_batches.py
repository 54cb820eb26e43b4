"""Passes of a rank over its rollouts, one micro-batch at a time, synchronised with the other ranks.

If memory runs out, the micro-batch is halved once and the same gradient recomputed from the start.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import attrs
import numpy as np

from rlsdk.contracts import Model, TrainBatch
from rlsdk.errors import LearnerError, first_line
from rlsdk.learners.ranks import Ranks
from rlsdk.learners.rows import RowStyle, TokenRows, empty_rows, plan, read_lengths, to_exact_row, to_rows
from rlsdk.learners.trained import PhaseTimer
from rlsdk.learners.tree import plan_trees, tree_rows
from rlsdk.preflight import size_text

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
T = TypeVar("T")
REMEDIES = (
    "lower %s, set learner.gradient_checkpointing=true, or divide the model among more ranks (learner.zero_stage, "
    "placement.learners)"
)


@attrs.frozen(eq=False)
class MicroBatch:
    """Rollouts of one forward pass.

    Attributes:
        rollouts: int64, their indices in the batch.
        trees: int64, tree of each rollout; None if rows are not trees.
    """

    rollouts: np.ndarray
    trees: np.ndarray | None = None


class SharedRows(Protocol):
    """Ranks that run each micro-batch together, taking turns: in each turn, all run the micro-batch of one rank.

    Also used for a single rank whose models need special handling: see `rlsdk.learners.packing`.
    """

    @property
    def rank(self) -> int:
        """Rank of this process within the group."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        ...

    @property
    def slices(self) -> int:
        """Number of slices that the tokens of a micro-batch are split into; 1 if each rank reads all tokens."""
        ...

    def adopt(self, model: Any, path: str) -> None:
        """Prepare a transformers model before it is sharded.

        Args:
            model: The model, changed in place.
            path: Its folder or hub id, for messages.

        Raises:
            LearnerError: The ranks cannot run it together.
        """
        ...

    def turns(self, rows: TokenRows) -> list[TokenRows]:
        """Return the rows of all ranks of the group, by rank; equal on every rank."""
        ...

    def __call__(self, model: Callable[..., Any], rows: TokenRows, *args: Any) -> Any:
        """Run a model that returns `[t]`, or a tuple of `[t]` and None, on rows that all ranks of the group hold.

        Results are equal on all ranks; the gradient from each rank's use of them reaches the model once.
        """
        ...


@attrs.define
class MicroBatchRunner:
    """Run a model over rollouts in micro-batches.

    Attributes:
        ranks: The learner's ranks; all run the same number of micro-batches, since ZeRO communicates in each.
        clock: Timer for passes without gradient.
        style: Row layout.
        budget: Token budget of a micro-batch per rank that runs it, padding included.
        width: Hidden size of the policy.
        sequences: Ranks that share each rollout, or the special handling of one rank; None to run models unchanged.
        exact_width: `model.max_length` if logprobs are exact, with one rollout per micro-batch; otherwise None.
        halved: True once the budget was halved because memory ran out.
    """

    ranks: Ranks
    clock: PhaseTimer
    style: RowStyle
    budget: int
    width: int
    sequences: SharedRows | None = None
    exact_width: int | None = None
    halved: bool = False

    def adopt(self, module: Any, model: Model) -> None:
        """Prepare a policy or a critic for `run`.

        Raises:
            LearnerError: Ranks cannot share its rollouts.
        """
        if self.sequences is not None:
            self.sequences.adopt(module.model, model.path)

    @property
    def shared_by(self) -> int:
        """Number of ranks that run each micro-batch together."""
        return 1 if self.sequences is None else self.sequences.size

    def run(self, model: Callable[..., Any], rows: TokenRows, *args: Any) -> Any:
        """Run the model over the rows; with `sequences`, the result is the same on all ranks that share them."""
        return model(rows, *args) if self.sequences is None else self.sequences(model, rows, *args)

    def halve(self) -> None:
        """Halve the token budget of micro-batches from now on."""
        self.budget, self.halved = max(1, self.budget // 2), True

    def plan(self, batch: TrainBatch) -> list[MicroBatch]:
        """Return this rank's micro-batches; none without rollouts."""
        if self.exact_width is not None:
            return [MicroBatch(part) for part in plan(read_lengths(batch), 1)]
        if self.style == "tree":
            return [MicroBatch(*part) for part in plan_trees(batch, self.budget, self.width)]
        packed = self.style == "packed"
        budget = self.budget * (1 if self.sequences is None else self.sequences.slices)
        parts = plan(read_lengths(batch), budget, packed=packed, groups=batch.whole_groups)
        return [MicroBatch(part) for part in parts]

    def micro_batches(
        self, batch: TrainBatch, parts: Sequence[MicroBatch], count: int
    ) -> Iterator[tuple[TrainBatch | None, TokenRows]]:
        """Yield the rows of `count * shared_by` passes, with the rollouts that they compute.

        If a rank has no more micro-batches, or it is another rank's turn, the rollouts are None, and results of these
        rows must have weight zero.
        """
        for i in range(count):
            part = batch.select(parts[i].rollouts) if i < len(parts) else None
            rows = empty_rows(self.style) if part is None else self._rows(part, parts[i].trees)
            if self.sequences is None:
                yield part, rows.to(self.ranks.device)
                continue
            for turn, each in enumerate(self.sequences.turns(rows)):
                yield part if turn == self.sequences.rank else None, each.to(self.ranks.device)

    def _rows(self, batch: TrainBatch, trees: np.ndarray | None = None) -> TokenRows:
        if self.exact_width is not None:
            return to_exact_row(batch, self.exact_width)
        if trees is not None:
            return tree_rows(batch, trees)
        return to_rows(batch, "padded" if self.style == "tree" else self.style)

    def forward(
        self, run: Callable[[TokenRows], Mapping[str, Tensor]], batch: TrainBatch, fields: Sequence[str]
    ) -> dict[str, np.ndarray]:
        """Return results per response token without a graph, float32 `[t]` each, in batch order.

        Args:
            run: Returns `[t]` for each of `fields`.
            batch: This rank's rollouts.
            fields: Names of the results.
        """
        import torch

        columns = {name: np.zeros(int(batch.responses.sum()), np.float32) for name in fields}
        parts = self.plan(batch)
        count = self.ranks.all_reduce_max([len(parts)])[0]
        upcoming = iter(parts)
        with self.clock("forward_seconds"), torch.no_grad():
            for part, rows in self.micro_batches(batch, parts, count):
                results = run(rows)
                if part is None:
                    continue
                positions = batch.response_positions(next(upcoming).rollouts)
                for name, result in results.items():
                    columns[name][positions] = result.float().cpu().numpy()
        return columns

    def canary(self, model: Callable[..., Any], token_ids: np.ndarray) -> np.ndarray:
        """Return logprobs at temperature 1, float32 `[k - 1]`, of each token of `[k]` given those before it."""
        import torch

        length = np.array([len(token_ids)], np.int64)
        batch = TrainBatch(
            token_ids=np.array(token_ids, np.int64),
            lengths=length,
            starts=np.ones(1, np.int64),
            responses=length - 1,
            loss_mask=np.ones(len(token_ids) - 1, bool),
        )
        with torch.no_grad():
            rows = to_rows(batch, "padded") if self.exact_width is None else to_exact_row(batch, self.exact_width)
            logprobs = self.run(model, rows.to(self.ranks.device), 1.0, "none")[0]
        return np.asarray(logprobs.float().cpu().numpy())


def is_shortage(error: BaseException) -> bool:
    """Return True if an exception reports that GPU or main memory ran out."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def with_less(
    passes: MicroBatchRunner, what: str, run: Callable[[], T], *, again: Callable[[], T], why_not: str = ""
) -> T:
    """Run passes; if memory runs out, halve the micro-batch and retry once.

    Exact passes are not retried: each is of one rollout, whatever the budget.

    Args:
        passes: Runner of the micro-batches.
        what: Name of the work, for messages.
        run: Callable that runs all micro-batches.
        again: Callable that undoes `run` and repeats everything with the smaller micro-batches.
        why_not: Reason why the work cannot be repeated; empty if it can.

    Raises:
        LearnerError: Memory ran out after the micro-batch was already halved, or the work cannot be repeated, or its
            passes are exact.
    """
    try:
        return run()
    except Exception as error:
        if not is_shortage(error):
            raise
        said = first_line(error)
    # Retry outside the handler: inside it, the exception keeps the frames alive, and they hold the activations.
    if passes.exact_width is not None:
        why_not = "model.exact runs each rollout alone, padded to model.max_length"
    elif passes.halved:
        why_not = "the micro-batch was already halved"
    if why_not:
        raise LearnerError(_out_of_memory(passes, what, said, why_not))
    passes.halve()
    gc.collect()
    if passes.ranks.device == "cuda":
        import torch

        torch.cuda.empty_cache()
    log.warning(
        "out of memory in %s (%s): the micro-batch is halved to %d tokens and the step recomputed, with the same "
        "gradient. Set learner.micro_batch_tokens=%d",
        what,
        said,
        passes.budget,
        passes.budget,
    )
    return with_less(passes, what, again, again=again)


def _out_of_memory(passes: MicroBatchRunner, what: str, said: str, why_not: str) -> str:
    used = ""
    if passes.ranks.device == "cuda":
        import torch

        used = f"; {size_text(torch.cuda.max_memory_allocated())} of the GPU were in use"
    tokens, option = passes.budget, "learner.micro_batch_tokens"
    if passes.exact_width is not None:
        tokens, option = passes.exact_width, "model.max_length"
    return (
        f"out of memory in {what}, with micro-batches of {tokens} tokens{used} ({said}); {why_not}: {REMEDIES % option}"
    )
