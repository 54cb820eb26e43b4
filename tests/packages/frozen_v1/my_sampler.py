"""A plugin of rlsdk in one file."""

from __future__ import annotations

import attrs
import numpy as np
import rlsdk
from rlsdk.limits import Share


@rlsdk.sampler("my_sampler")
@attrs.define(kw_only=True)
class MySampler:
    """Draws each task until the mean reward of one of its groups reaches a threshold, then the next one.

    Attributes:
        enough: Mean reward at which a task is left.
    """

    enough: Share = 0.75
    _done: set[int] = attrs.field(init=False, factory=set)

    def draw(self, available: np.ndarray, random: np.random.Generator) -> int:
        """Return the first available task that is not done, or any if all are."""
        left = [index for index in available if index not in self._done]
        return int(left[0] if left else random.choice(available))

    def note(self, index: int, group: rlsdk.Group) -> None:
        """Note how the policy did on a task; scores may be invalid."""
        values = [score.value for score in group.scores if score.valid]
        if values and np.mean(values) >= self.enough:
            self._done.add(index)

    def state(self) -> list[int]:
        """Return the tasks that are done, for checkpoints."""
        return sorted(self._done)

    def restore(self, state: list[int]) -> None:
        """Restore from `state()`."""
        self._done = set(state)
