"""Recovery from out-of-memory errors: halve the micro-batch once and recompute the same gradient from the start."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

from rlsdk.errors import LearnerError
from rlsdk.learners.passes import MicroBatchRunner
from rlsdk.preflight import size_text

log = logging.getLogger(__name__)
T = TypeVar("T")
REMEDIES = (
    "lower learner.micro_batch_tokens, set learner.gradient_checkpointing=true, or divide the model among more ranks "
    "(learner.zero_stage, placement.learners)"
)


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

    Args:
        passes: Runner of the micro-batches.
        what: Name of the work, for messages.
        run: Callable that runs all micro-batches.
        again: Callable that undoes `run` and repeats everything with the smaller micro-batches.
        why_not: Reason why the work cannot be repeated; empty if it can.

    Raises:
        LearnerError: Memory ran out after the micro-batch was already halved, or the work cannot be repeated.
    """
    try:
        return run()
    except Exception as error:
        if not is_shortage(error):
            raise
        said = next(iter(str(error).splitlines()), "") or type(error).__name__
    # Retry outside the handler: inside it, the exception keeps the frames alive, and they hold the activations.
    if passes.halved:
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
    return (
        f"out of memory in {what}, with micro-batches of {passes.budget} tokens{used} ({said})"
        f"{f'; {why_not}' if why_not else ''}: {REMEDIES}"
    )
