"""Engine and learner must give the same logprobs to the same tokens under the same weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlsdk.errors import CanaryError

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
"""Nats. float32 agrees to 5e-5 on small models; 16-bit kernels differ by rounding of activations."""
_SHOWS = 0.1
"""Share of the tolerance by which the learner must have moved for every engine to show it."""


class Canary:
    """Compares logprobs of fixed tokens after every weight sync."""

    def __init__(self, token_ids: np.ndarray, tolerance: float) -> None:
        """Make one.

        Args:
            token_ids: int64 `[k]`.
            tolerance: Largest gap in nats.
        """
        self.token_ids = token_ids
        self._tolerance = tolerance
        self._before: tuple[np.ndarray, list[np.ndarray]] | None = None
        self._moved = False

    def check(self, version: int, learner: np.ndarray, engines: list[np.ndarray], *, updated: bool) -> float:
        """Compare.

        Args:
            version: Of the weights.
            learner: float32 `[k - 1]`.
            engines: The same from each engine.
            updated: Whether the learner made an update that changed its weights since the last check.

        Returns:
            The largest gap, in nats.

        Raises:
            CanaryError: A gap over the tolerance, or an engine's logprobs that did not change at all with the first
                update, or with a later one that moved the learner's by a tenth of the tolerance or more.
        """
        gaps = np.stack([np.abs(e - learner) for e in engines])
        worst = float(np.nan_to_num(gaps, nan=np.inf).max())
        if worst > self._tolerance:
            engine, position = np.unravel_index(int(np.nan_to_num(gaps, nan=np.inf).argmax()), gaps.shape)
            off = np.flatnonzero(gaps[engine] > self._tolerance)
            pair = f"{engines[engine][position]:.6f} against {learner[position]:.6f}"
            raise CanaryError(
                f"weights version {version}: engine {engine} and the learner disagree on {len(off)} of {gaps.shape[1]} "
                f"fixed tokens, most at position {position + 1}: {pair} "
                f"(gap {worst:.2g}, tolerance {self._tolerance:g}); positions {', '.join(map(str, off[:8] + 1))}"
            )
        if updated and self._before is not None:
            self._expect_change(version, learner, engines, *self._before)
            self._moved = True
        self._before = learner, engines
        return worst

    def _expect_change(
        self, version: int, learner: np.ndarray, engines: list[np.ndarray], own: np.ndarray, theirs: list[np.ndarray]
    ) -> None:
        """A sync without effect would stay below the tolerance for many small steps."""
        moved = float(np.abs(learner - own).max())
        # Later on, a step may be too small to show in 16 bits.
        if self._moved and moved < _SHOWS * self._tolerance:
            return
        for rank, (before, after) in enumerate(zip(theirs, engines, strict=True)):
            if np.array_equal(before, after):
                raise CanaryError(
                    f"weights version {version}: the logprobs of engine {rank} did not change with the update, which "
                    f"moved the learner's by up to {moved:.2g}; the sync has no effect"
                )


def describe_checksums(sent: Mapping[str, str], received: Mapping[str, str]) -> str:
    """The tensors whose checksums differ between sender and receiver, for the error message."""
    names = sorted({*sent, *received})
    lines = [
        f"  {n}: sent {sent.get(n, '-')}, received {received.get(n, '-')}"
        for n in names
        if sent.get(n) != received.get(n)
    ]
    same = len(names) - len(lines)
    return "\n".join(
        [f"checksums of {len(names)} tensors as sent and received: {same} equal, {len(lines)} different", *lines]
    )
