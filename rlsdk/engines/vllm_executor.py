"""vLLM's executor of a model that several processes divide: where one of them dies, the engine dies."""

from __future__ import annotations

import logging
import os
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

log = logging.getLogger(__name__)


class TensorParallelExecutor(MultiprocExecutor):
    """Executor that ends this process with the first of its workers, so that the engine is replaced as a whole.

    vLLM's own ends the other workers, and answers every call from then on with an error.
    """

    is_failed: bool

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        """Call a method in all workers."""
        self._require_workers()
        return super().collective_rpc(*args, **kwargs)

    def shutdown(self) -> None:
        """End all workers; vLLM calls this when one has died, before any call that waits for it fails."""
        self._require_workers()
        super().shutdown()

    def _require_workers(self) -> None:
        if self.is_failed:
            log.error("this engine ends, since one of the processes that divide its model has died")
            logging.shutdown()
            os._exit(1)
