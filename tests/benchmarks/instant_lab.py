"""An engine that answers at once with the same digits; everything except the model's arithmetic is real."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np

import rlsdk
from rlsdk.contracts import ActorSpec, Completion, Model, Request, Weights


@rlsdk.engine("instant")
@attrs.define(kw_only=True, eq=False)
class Instant:
    """Gives each request `max_tokens` tokens in one step.

    Attributes:
        token: The token that it writes.
    """

    token: int = 12
    waiting: list[Request] = attrs.field(init=False, factory=list)

    def environment(self, place: ActorSpec) -> dict[str, str]:
        return {}

    def start(self, model: Model, place: ActorSpec) -> None: ...

    def add(self, requests: Sequence[Request]) -> None:
        self.waiting += requests

    def step(self) -> list[Completion]:
        due, self.waiting = self.waiting, []
        return [self.completion(request, i) for request in due for i in range(request.n)]

    def completion(self, request: Request, index: int) -> Completion:
        count = request.sampling.max_tokens
        return Completion(
            request=request.id,
            index=index,
            token_ids=np.full(count, self.token),
            logprobs=np.full(count, -0.5, np.float32),
            versions=np.zeros(count, np.int64),
            finish="length",
        )

    @property
    def unfinished(self) -> int:
        return len(self.waiting)

    def abort(self, ids: Iterable[str] | None = None) -> list[Completion]:
        return []

    def reseed(self, seed: int) -> None: ...

    def load_weights(self, weights: Weights) -> None: ...

    def logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        return np.full(len(token_ids) - 1, -0.5, np.float32)

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def stop(self) -> None: ...
