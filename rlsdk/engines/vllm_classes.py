"""Classes that vLLM loads by name in place of its own: a scheduler, and an executor for tensor parallelism."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.request import RequestStatus

log = logging.getLogger(__name__)


class DecodeScheduler(Scheduler):
    """vLLM scheduler that skips needless block allocations and can schedule one prompt before all others.

    All but one in `block_size` decode steps of a sequence write into a block that it already has, yet vLLM runs its
    whole allocation in each. This takes a tenth of the time of a small model with hundreds of sequences, also on a
    GPU, where it runs between two kernels. Only for plain full attention: sliding windows free blocks while decoding.
    """

    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create the scheduler with the arguments vLLM passes."""
        super().__init__(*args, **kwargs)
        manager = self.kv_cache_manager
        groups = manager.coordinator.single_type_managers
        if len(groups) == 1 and type(groups[0]) is FullAttentionManager and not self.num_lookahead_tokens:
            nothing, size = manager.empty_kv_cache_blocks, groups[0].block_size
            manager.allocate_slots = sparing(manager.allocate_slots, nothing, size)

    @contextmanager
    def before_others(self, name: str, count: int) -> Iterator[None]:
        """Prefill a waiting prompt in its own step, unless other requests are running and share the step anyway."""
        if self.running:
            yield
            return
        request = self.requests[name]
        self.waiting.remove_request(request)
        self.waiting.prepend_request(request)
        most = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = min(count, most)
        try:
            yield
        finally:
            self.max_num_scheduled_tokens = most


def sparing(allocate: Callable[..., Any], nothing: Any, size: int) -> Callable[..., Any]:
    """Return an `allocate_slots` that returns `nothing` if a running request has a slot for its next token.

    Args:
        allocate: vLLM's `allocate_slots`.
        nothing: vLLM's value for no new blocks.
        size: Block size in tokens. vLLM handles the first token, which needs a block, and the last, which may cache it.
    """

    def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        place = request.num_computed_tokens % size
        if num_new_tokens == 1 and 0 < place < size - 1 and request.status == RequestStatus.RUNNING:
            return nothing
        return allocate(request, num_new_tokens, *args, **kwargs)

    return allocate_slots


class TensorParallelExecutor(MultiprocExecutor):
    """Executor that ends this process when one of its workers dies, so that the engine is replaced as a whole.

    vLLM's own executor ends the other workers, and all later calls raise an error.
    """

    is_failed: bool

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        """Call a method in all workers."""
        self._require_workers()
        return super().collective_rpc(*args, **kwargs)

    def shutdown(self) -> None:
        """End all workers; vLLM calls this after a worker has died, before pending calls to it fail."""
        self._require_workers()
        super().shutdown()

    def _require_workers(self) -> None:
        if self.is_failed:
            log.error("this engine ends, since one of its tensor-parallel processes has died")
            logging.shutdown()
            os._exit(1)
