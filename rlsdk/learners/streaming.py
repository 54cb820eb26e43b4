"""Weights on their way from the ranks of a learner to engines: as one object, or in a stream."""

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
    """Calls of all ranks by which weights leave the learner.

    Attributes:
        actors: Actor handles, by rank.
        wait: Waits for the answers of all ranks to a call, which it names if one of them fails.
        transfer: Weight transfer to the engines; None for Ray's object store.
        version: Version of the actor's weights: training steps done.
        lock: Held while all ranks are called: some calls are collective, so all ranks need them in one order.
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
        """Return an `ObjectRef` of the weights that a learner's method gives, which are there by then."""
        stored = self.transfer is not None and not self.streams
        with self.lock:
            self.version = version
            refs = self._pairs("offer", method, version, 0) if stored else self._pairs("weights", method, version)
        self.wait(f"weights of version {version}", [done for done, _ in refs])
        return refs[0][1]

    def stream(self, method: str, engines: int, token_ids: np.ndarray, version: int | None) -> WeightStream:
        """Begin to send the weights; see `StreamsToEngines.stream`. Returns once the ranks have come to it.

        Whatever else is asked of the ranks, nothing comes between the weights and their logprobs.
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
        """Have each rank answer with two objects, the first of which says that the second is there.

        An engine that is given the result of a call that failed seems to have failed itself.
        """
        return [getattr(actor, method).options(num_returns=2).remote(*arguments) for actor in self.actors]
