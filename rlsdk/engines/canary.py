"""Canary: check that engine and learner give the same tokens the same logprobs under the same weights."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlsdk.contracts import Model
from rlsdk.errors import CanaryError
from rlsdk.exact import expert_count

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.05}
"""Tolerance in nats. float32 agrees to 5e-5 on small models; 16-bit kernels round activations differently."""
FLIPPED = 0.1
"""Share of tokens that may exceed the tolerance in a 16-bit mixture of experts: engine and learner may choose different
experts if two are nearly equally likely, which changes the token's logprob."""
_SHOWS = 0.1
"""Share of the tolerance that the learner must have moved by before every engine must show a change."""


def tolerance_of(model: Model, given: float | None) -> float:
    """Return the tolerance in nats for a model: 0 if it is exact, else the given one or the default of its dtype."""
    if model.exact:
        return 0.0
    return TOLERANCE[model.dtype] if given is None else given


def allowed_outliers(model: Model) -> float:
    """Return the share of tokens whose gap may exceed the tolerance for a model."""
    if model.dtype == "float32":
        return 0.0
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    return FLIPPED if expert_count(config.get_text_config()) else 0.0


class Canary:
    """Compare the logprobs of fixed tokens after every weight sync."""

    def __init__(self, token_ids: np.ndarray, tolerance: float, *, outliers: float = 0.0, rounds: bool = False) -> None:
        """Create a canary.

        Args:
            token_ids: Fixed tokens, int64 `[k]`.
            tolerance: Maximum gap in nats.
            outliers: Share of tokens whose gap may be larger.
            rounds: True if the learner's weights have 16 bits, so that rounding may cancel a small update.
        """
        self.token_ids = token_ids
        self._tolerance, self._outliers, self._rounds = tolerance, outliers, rounds
        self._before: tuple[int, np.ndarray, dict[int, np.ndarray]] | None = None
        self._moved = False

    def check(self, version: int, learner: np.ndarray, engines: Mapping[int, np.ndarray], *, updated: bool) -> float:
        """Compare the logprobs of the learner and the engines on the fixed tokens.

        Args:
            version: Version of the weights.
            learner: Logprobs from the learner, float32 `[k - 1]`.
            engines: Logprobs from each running engine, by rank, float32 `[k - 1]`.
            updated: True if the learner's weights have changed since the last check.

        Returns:
            The largest gap, in nats.

        Raises:
            CanaryError: Too many gaps exceed the tolerance, or an engine's logprobs did not change at all although the
                learner's did, with its first visible update or a later one of at least a tenth of the tolerance.
        """
        worst = max((self._compare(version, learner, rank, seen) for rank, seen in engines.items()), default=0.0)
        if updated and self._before is not None:
            _, before, engines_before = self._before
            # The first warm-up steps may be too small for 16 bits, even in the learner.
            if not (self._rounds and np.array_equal(learner, before)):
                both = sorted(engines_before.keys() & engines.keys())  # other engines joined or left in the meantime
                moved = float(np.abs(learner - before).max())
                # A sync without effect would stay below the tolerance for many small steps. Once weights are known to
                # arrive, only steps that show in 16 bits must change logprobs.
                if not self._moved or moved > _SHOWS * self._tolerance:
                    for rank in both:
                        if np.array_equal(engines_before[rank], engines[rank]):
                            raise CanaryError(
                                f"weights version {version}: the logprobs of engine {rank} did not change with the "
                                f"update, which moved the learner's by up to {moved:.2g}; the sync has no effect"
                            )
                self._moved = self._moved or bool(both)
        self._before = version, learner, dict(engines)
        return worst

    def join(self, rank: int, seen: np.ndarray, under: tuple[int, np.ndarray] | None = None) -> float:
        """Compare an engine that got its weights after the others; return its largest gap in nats.

        Args:
            rank: Rank of the engine.
            seen: The engine's logprobs, float32 `[k - 1]`.
            under: Version of its weights and the learner's logprobs under them, float32 `[k - 1]`; default: those of
                the last check.

        Raises:
            CanaryError: Too many gaps exceed the tolerance.
        """
        if self._before is None:
            return 0.0
        last, learner, engines = self._before
        version, learner = (last, learner) if under is None else under
        worst = self._compare(version, learner, rank, seen)
        if version == last:  # otherwise the next sync need not change its logprobs
            engines[rank] = seen
        return worst

    def _compare(self, version: int, learner: np.ndarray, rank: int, seen: np.ndarray) -> float:
        gaps = np.nan_to_num(np.abs(seen - learner), nan=np.inf)
        worst, off = float(gaps.max()), np.flatnonzero(gaps > self._tolerance)
        if len(off) > self._outliers * len(gaps) or worst == np.inf:
            position = int(gaps.argmax())
            pair = f"{seen[position]:.6f} against {learner[position]:.6f}"
            raise CanaryError(
                f"weights version {version}: engine {rank} and the learner disagree on {len(off)} of {len(gaps)} "
                f"fixed tokens, most at position {position + 1}: {pair} "
                f"(gap {worst:.2g}, tolerance {self._tolerance:g}); positions {', '.join(map(str, off[:8] + 1))}"
            )
        return worst


def describe_checksums(sent: Mapping[str, str], received: Mapping[str, str]) -> str:
    """Describe the tensors whose checksums differ between sender and receiver, for the error message."""
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
