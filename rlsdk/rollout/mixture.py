"""The mixture of task sources: the stream of each, and its share of every batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rlsdk.rollout.stream import TaskStream

log = logging.getLogger(__name__)


class Allocator:
    """Divides batches among sources by weight: largest remainders, with each source's shortfall carried over.

    After any number of batches, each source is within about one task of its share. Without the carry, weights of 0.05
    and 0.95 would never give the first source a task in batches of eight.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Create an allocator; no weight is negative, and one is positive."""
        self._weights = list(weights)
        self.carry = [0.0] * len(weights)

    def divide(self, count: int, factors: Sequence[float] | None = None) -> list[int]:
        """Divide the next `count` tasks among the sources.

        Args:
            count: Number of tasks in the batch.
            factors: Factors on the weights in this batch, at least 0; if every product is 0, they do not apply.
        """
        weights = self._weights
        if factors is not None:
            products = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
            weights = products if any(products) else weights
        total = sum(weights)
        due = [weight / total * count + carried for weight, carried in zip(weights, self.carry, strict=True)]
        parts = [max(0, int(each)) for each in due]
        by_remainder = sorted(range(len(due)), key=lambda i: (parts[i] - due[i], i))
        while sum(parts) > count:  # carried-over tasks alone can be more than a small batch
            parts[next(i for i in reversed(by_remainder) if parts[i])] -= 1
        for i in by_remainder[: count - sum(parts)]:
            parts[i] += 1
        self.carry = [each - part for each, part in zip(due, parts, strict=True)]
        return parts


@attrs.frozen(eq=False)
class Source:
    """A task stream and its share of every batch.

    Attributes:
        name: Name in the config; part of checkpoints.
        weight: Weight relative to the other sources.
        stream: Stream of its tasks.
    """

    name: str
    weight: float
    stream: TaskStream


class TaskStreams:
    """Several task streams, with the share of each in a batch."""

    def __init__(self, sources: Sequence[Source]) -> None:
        """Combine sources with distinct names."""
        self._sources = {source.name: source for source in sources}
        self._allocator = Allocator([source.weight for source in sources])

    @property
    def names(self) -> list[str]:
        """Names of the sources."""
        return list(self._sources)

    @property
    def dropped(self) -> int:
        """Number of tasks whose prompts exceeded the limit, over all sources."""
        return sum(source.stream.dropped for source in self._sources.values())

    def divide(self, count: int) -> dict[str, int]:
        """Divide the next `count` tasks among the sources, by their weights and the factors of their samplers."""
        factors = [source.stream.factor() for source in self._sources.values()]
        return dict(zip(self._sources, self._allocator.divide(count, factors), strict=True))

    def __getitem__(self, source: str) -> TaskStream:
        """Return the stream of a source."""
        return self._sources[source].stream

    def learn(self) -> None:
        """Let samplers learn from the groups noted so far."""
        for source in self._sources.values():
            source.stream.learn()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of samplers since the last call: `sampler/NAME`, or `sampler/SOURCE/NAME` of several."""
        alone = len(self._sources) == 1
        return {
            f"sampler/{name}" if alone else f"sampler/{source.name}/{name}": float(value)
            for source in self._sources.values()
            for name, value in source.stream.metrics().items()
        }

    def state(self) -> dict[str, Any]:
        """Return the position of every source, as plain JSON."""
        return {
            name: {
                "position": source.stream.position,
                "dropped": source.stream.dropped,
                "carry": carry,
                "size": len(source.stream),
                **source.stream.memory(),
            }
            for (name, source), carry in zip(self._sources.items(), self._allocator.carry, strict=True)
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore from `state()`; new sources start at the beginning."""
        for i, (name, source) in enumerate(self._sources.items()):
            then = state.get(name)
            if then is not None:
                source.stream.position, source.stream.dropped = then["position"], then["dropped"]
                source.stream.remember(then)
                self._allocator.carry[i] = then["carry"]
                now = len(source.stream)
                if (size := then.get("size", now)) != now:
                    log.warning(
                        "source %s had %d tasks at the checkpoint and has %d now: %s",
                        name,
                        size,
                        now,
                        source.stream.resized,
                    )
