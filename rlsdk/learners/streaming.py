"""Send weights from learner ranks to engines, as one object or as a stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from rlsdk.contracts import StreamsWeights, WeightStream
from rlsdk.plugins import ComponentRef, Plugins


@attrs.define(eq=False)
class WeightCalls:
    """Call all learner ranks to export weights.

    Attributes:
        actors: Actor handles, by rank.
        wait: Waits for all ranks to answer a call; takes the call's name for error messages, and the references.
        transfer: Weight transfer to the engines; None for Ray's object store.
        version: Weight version: number of completed training steps.
        lock: Held while all ranks are called. Some calls are collective, so every rank must get them in the same order.
    """

    actors: Sequence[Any]
    wait: Callable[[str, Sequence[Any]], list[Any]]
    transfer: ComponentRef | None = None
    version: int = 0
    lock: threading.RLock = attrs.field(init=False, factory=threading.RLock)

    @cached_property
    def streams(self) -> bool:
        """True if the transfer never holds all weights at once."""
        return self.transfer is not None and isinstance(Plugins().resolve(self.transfer), StreamsWeights)

    def whole(self, method: str, version: int) -> Any:
        """Wait until a learner's method has exported all weights, and return their `ObjectRef`."""
        stored = self.transfer is not None and not self.streams
        with self.lock:
            self.version = version
            refs = self._pairs("offer", method, version, 0) if stored else self._pairs("weights", method, version)
        self.wait(f"weights of version {version}", [done for done, _ in refs])
        return refs[0][1]

    def stream(self, method: str, engines: int, token_ids: np.ndarray, version: int | None) -> WeightStream:
        """Start sending the weights; see `StreamsToEngines.stream`. Returns once every rank is ready to send.

        The lock keeps other calls from running between the export of the weights and the canary's logprobs.
        """
        with self.lock:
            self.version = version = self.version if version is None else version
            offers = self._pairs("offer", method, version, engines)
            sent = [actor.send.remote(version) for actor in self.actors]
            seen = [actor.call.remote("canary", token_ids) for actor in self.actors]
        what = f"weights of version {version}"
        self.wait(what, [done for done, _ in offers])

        def finish() -> tuple[str, np.ndarray]:
            faults = [fault for fault in self.wait(what, sent) if fault]
            return "; ".join(faults), np.asarray(self.wait("canary", seen)[0])

        return WeightStream(version, offers[0][1], finish)

    def _pairs(self, method: str, *arguments: Any) -> list[Any]:
        """Call each rank for two objects: a "done" marker and the value.

        An error of a rank is raised while waiting for its marker. Otherwise, an engine that is passed the value
        would raise it and be taken for the process that failed.
        """
        return [getattr(actor, method).options(num_returns=2).remote(*arguments) for actor in self.actors]
