"""vLLM's executor for tensor parallelism; if one of its processes dies, the engine dies."""

from __future__ import annotations

import logging
import os
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

log = logging.getLogger(__name__)


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
