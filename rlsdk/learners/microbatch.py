"""Split rollouts over ranks by tokens, then into micro-batches within a token budget.

Both cut the same stable, longest-first order: however a batch is split, its concatenated parts have that order.
"""

from __future__ import annotations

import numpy as np


def canonical(lengths: np.ndarray, pairs: np.ndarray | None = None) -> np.ndarray:
    """Order in which a batch is cut: longest first, equal lengths in their given order, pairs side by side.

    Args:
        lengths: Tokens of each rollout, int64 `[n]`.
        pairs: Label of the pair that each rollout belongs to, int64 `[n]`.

    Returns:
        int64 `[n]`, a permutation of the rollouts.
    """
    if pairs is None:
        return np.asarray(np.argsort(-lengths, kind="stable"))
    _, first, inverse = np.unique(pairs, return_index=True, return_inverse=True)
    longest = np.zeros(len(first), np.int64)
    np.maximum.at(longest, inverse, lengths)
    return np.asarray(np.lexsort((np.arange(len(lengths)), first[inverse], -longest[inverse])))


def split(lengths: np.ndarray, world: int, pairs: np.ndarray | None = None) -> list[np.ndarray]:
    """Distribute rollouts over ranks, balanced by tokens; a pair stays on one rank.

    Args:
        lengths: int64 `[n]`, tokens of each rollout.
        world: Number of ranks.
        pairs: int64 `[n]`, any label of the pair that each rollout belongs to.

    Returns:
        For each rank its rollouts, int64; a rank may get none. Each rank's tokens differ from its fair share by at most
        the tokens of one rollout (or pair).
    """
    order = canonical(lengths, pairs)
    if world == 1:
        return [order]
    ends = np.cumsum(lengths[order])
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.searchsorted(ends, total * np.arange(1, world) / world, side="left") + 1
    if pairs is not None:
        labels = pairs[order]  # each cut moves forward to the start of the next pair
        bounds = np.append(_unit_starts(labels), len(labels))
        cuts = bounds[np.searchsorted(bounds, np.minimum(cuts, len(labels)), side="left")]
    return np.split(order, np.minimum(cuts, len(order)))


def plan(
    lengths: np.ndarray, max_tokens: int, *, packed: bool = False, pairs: np.ndarray | None = None
) -> list[np.ndarray]:
    """Cut a rank's rollouts into micro-batches.

    Args:
        lengths: int64 `[n]`, tokens of each rollout.
        max_tokens: Token budget of a micro-batch, padding included; a longer rollout (or pair) gets its own.
        packed: Concatenate rollouts in one row (no padding); otherwise each has a row as wide as the longest.
        pairs: int64 `[n]`, any label of the pair that each rollout belongs to.

    Returns:
        Rollout indices of each micro-batch, int64; concatenated, they are the canonical order.
    """
    order = canonical(lengths, pairs)
    sorted_lengths = lengths[order]
    units = _unit_starts(pairs[order]) if pairs is not None else np.arange(len(order))
    bounds = np.append(units, len(order))
    cuts: list[int] = []
    begin = 0
    while begin < len(order):
        end = _fill(sorted_lengths, bounds, begin, max_tokens, packed)
        cuts.append(end)
        begin = end
    return np.split(order, cuts[:-1]) if cuts else []


def _fill(lengths: np.ndarray, bounds: np.ndarray, begin: int, max_tokens: int, packed: bool) -> int:
    """Return the end of a micro-batch starting at `begin`: the last unit end within the budget, or the first."""
    ends = bounds[np.searchsorted(bounds, begin, side="right") :]
    if packed:
        cost = np.cumsum(lengths[begin:])[ends - begin - 1]
    else:
        cost = np.maximum.accumulate(lengths[begin:])[ends - begin - 1] * (ends - begin)
    within = int(np.searchsorted(cost, max_tokens, side="right"))
    return int(ends[max(within - 1, 0)])


def _unit_starts(labels: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.append(True, labels[1:] != labels[:-1])) if len(labels) else np.empty(0, np.int64)
