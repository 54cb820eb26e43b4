"""How rewards join, and what they may take."""

from __future__ import annotations

import attrs

from rlsdk.errors import ValueFault
from rlsdk.types import Score, Task


@attrs.frozen
class Rule:
    """How one part of a reward joins the others.

    Attributes:
        name: It is logged under it.
        weight: Of its value in the sum.
        gate: Where its value is below this, the parts behind it are not scored and count as 0.
        multiply: Its value is a factor of the sum, in place of a summand.
        range: (low, high) of its values, mapped to 0 and 1 before they are weighted; what lies beyond is clipped.
        sources: Of tasks that it is for; none: of all.
    """

    name: str = ""
    weight: float = 1.0
    gate: float | None = None
    multiply: bool = False
    range: tuple[float, float] | None = None
    sources: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.range is not None and self.range[0] == self.range[1]:
            raise ValueFault(f"range: two different values, (low, high); got {self.range}")
        if self.multiply and self.weight != 1.0:
            raise ValueFault(f"weight: a factor has none (multiply is true); got {self.weight:g}")

    def applies(self, task: Task) -> bool:
        """Whether the part is for a task."""
        return not self.sources or task.source in self.sources

    def shuts(self, score: Score) -> bool:
        """Whether a score of this part keeps the parts behind it from being scored."""
        return self.gate is not None and score.valid and score.value < self.gate

    def mapped(self, value: float) -> float:
        """A value as it is weighted."""
        if self.range is None:
            return value
        low, high = self.range
        return min(max((value - low) / (high - low), 0.0), 1.0)


@attrs.frozen(kw_only=True)
class ScoringLimits:
    """What rewards may take.

    Attributes:
        workers: Processes of the pool that rewards run in; 0: one for each core.
        timeout: Seconds of wall clock for one call; a reward with a `timeout` of its own gets a second more than that
            where it is longer.
        memory: MiB of address space that a process of the pool may take beyond what it begins with (Linux).
    """

    workers: int = 0
    timeout: float = 10.0
    memory: int = 2048
