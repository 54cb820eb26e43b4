"""A plugin of rlsdk in one file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import attrs
import rlsdk
from rlsdk.contracts import ActorSpec, Completion, Engine, Model, Request, Weights

if TYPE_CHECKING:
    import numpy as np


@rlsdk.engine("my_engine")
@attrs.define(kw_only=True)
class MyEngine:
    """An engine that passes everything on to another: the place to begin from, method by method.

    Attributes:
        inner: Name of the engine that does the work.
    """

    inner: str = "transformers"
    _engine: Engine = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._engine = cast(Engine, rlsdk.load("engine", self.inner))

    def environment(self, place: ActorSpec) -> Mapping[str, str]:
        """Environment variables that must stand before the actor's process imports anything."""
        return self._engine.environment(place)

    def start(self, model: Model, place: ActorSpec) -> None:
        """Load the model; weights of the folder are version 0."""
        self._engine.start(model, place)

    def add(self, requests: Sequence[Request]) -> None:
        """Admit requests in this order."""
        self._engine.add(requests)

    def step(self) -> list[Completion]:
        """Take one decode step, and return what finished."""
        return self._engine.step()

    @property
    def unfinished(self) -> int:
        """Continuations that still run or wait."""
        return self._engine.unfinished

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        """End requests (None: all), and return what they had sampled."""
        return self._engine.abort(ids)

    def reseed(self, seed: int) -> None:
        """Seed the generator of requests that bring no seed."""
        self._engine.reseed(seed)

    def load_weights(self, weights: Weights) -> None:
        """Replace the weights between two steps."""
        self._engine.load_weights(weights)

    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """Return float32 `[k - 1]` at temperature 1: rlsdk compares them with the learner's."""
        return self._engine.logprobs(token_ids)

    def sleep(self) -> None:
        """Free the device for a learner on the same one."""
        self._engine.sleep()

    def wake(self) -> None:
        """Take the device back."""
        self._engine.wake()

    def stop(self) -> None:
        """Free everything."""
        self._engine.stop()
