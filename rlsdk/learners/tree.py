"""Arrange rollouts as token trees, so that every common prefix is computed only once.

A row holds a tree, with its tokens in depth-first order. A token attends to the path from the root to itself, so its
state is the same as in each rollout that contains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from rlsdk.errors import LearnerError
from rlsdk.learners.rows import TokenRows, padded, plan, ranges, read_lengths, routing_of

if TYPE_CHECKING:
    from rlsdk.contracts import TrainBatch

PAIRS_PER_WIDTH = 3
"""Attention of `PAIRS_PER_WIDTH * width` token pairs costs as much as all other work for one token; measured."""


@attrs.frozen(eq=False)
class TokenTree:
    """Prefix tree of sequences: one node for each distinct prefix, in depth-first order.

    Attributes:
        depths: Tokens before each node on the path from the root, int64 `[nodes]`.
        ends: End of each node's descendants: those of node `i` are `i + 1, …, ends[i] - 1`; int64 `[nodes]`.
        paths: Nodes of each sequence's tokens, int64.
    """

    depths: np.ndarray
    ends: np.ndarray
    paths: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray]) -> TokenTree:
        """Build the tree of sequences of token ids (int64)."""
        paths = [np.empty(0, np.int64)] * len(sequences)
        depths = np.empty(sum(map(len, sequences)), np.int64)
        ends = np.empty_like(depths)
        count, last, above = 0, np.empty(0, np.int64), np.empty(0, np.int64)
        for i in _walk(sequences):
            sequence = sequences[i]
            common = _common(last, sequence)
            ends[above[common:]] = count  # no later node descends from these
            new = np.arange(count, count + len(sequence) - common)
            depths[new] = np.arange(common, len(sequence))
            paths[i] = above = np.concatenate([above[:common], new])
            count, last = count + len(new), sequence
        ends[above] = count
        return cls(depths[:count], ends[:count], tuple(paths))

    def __len__(self) -> int:
        return len(self.depths)


def trees(batch: TrainBatch, max_tokens: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Assign rollouts to trees: a rollout joins its neighbour's tree if that is less work than a separate tree.

    Work is counted in tokens, plus attention between token pairs of a row as measured by `PAIRS_PER_WIDTH`. If the loss
    needs whole groups, each group is a tree.

    Args:
        batch: Rollouts.
        max_tokens: Maximum tokens of a tree with more than one rollout.
        width: Hidden size of the model.

    Returns:
        The tree of each rollout, int64 `[n]`, and the tokens of each tree, int64 `[trees]`.
    """
    sequences = _sequences(batch)
    if batch.whole_groups is not None:
        _, labels = np.unique(batch.whole_groups, return_inverse=True)
        count = int(labels.max(initial=-1)) + 1  # a rank may have no rollout
        members = [[sequences[i] for i in np.flatnonzero(labels == tree)] for tree in range(count)]
        return np.asarray(labels), np.array([len(TokenTree.of(each)) for each in members], np.int64)
    labels, last = np.empty(len(sequences), np.int64), np.empty(0, np.int64)
    sizes: list[int] = []
    for i in _walk(sequences):
        length, common = len(sequences[i]), _common(last, sequences[i])
        new, size = length - common, sizes[-1] if sizes else 0
        saved = common * width * PAIRS_PER_WIDTH + length**2 - new**2 - 2 * size * new
        if common and saved >= 0 and size + new <= max_tokens:
            sizes[-1] += new
        else:
            sizes.append(length)
        labels[i], last = len(sizes) - 1, sequences[i]
    return labels, np.array(sizes, np.int64)


def plan_trees(batch: TrainBatch, max_tokens: int, width: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Cut a rank's rollouts into micro-batches of whole trees within a token budget.

    Args:
        batch: Rollouts.
        max_tokens: Token budget, padding included; a larger tree gets its own micro-batch.
        width: Hidden size of the model.

    Returns:
        For each micro-batch, its rollouts and the tree of each; int64.
    """
    labels, sizes = trees(batch, max_tokens, width)
    by_tree = np.split(np.argsort(labels, kind="stable"), np.cumsum(np.bincount(labels))[:-1])
    parts = [np.concatenate([by_tree[tree] for tree in part]) for part in plan(sizes, max_tokens)]
    return [(part, labels[part]) for part in parts]


def tree_rows(batch: TrainBatch, labels: np.ndarray) -> TokenRows:
    """Lay out rollouts as rows of one tree each.

    Args:
        batch: At least one rollout.
        labels: The tree of each rollout, int64 `[n]`.

    Raises:
        LearnerError: There are images.
    """
    import torch

    if batch.images:
        raise LearnerError("rollouts with images need one row each; set learner.rows=padded (it is tree)")
    sequences, offsets = _sequences(batch), np.cumsum(batch.lengths) - batch.lengths
    groups = [np.flatnonzero(labels == tree) for tree in np.unique(labels)]
    grown = [TokenTree.of([sequences[i] for i in group]) for group in groups]
    lengths = np.array([len(tree) for tree in grown], np.int64)
    width = max(int(lengths.max()), 1)
    states = [np.empty(0, np.int64)] * len(sequences)
    sources = np.empty(int(lengths.sum()), np.int64)
    begins = np.cumsum(lengths) - lengths
    for row, (group, tree) in enumerate(zip(groups, grown, strict=True)):
        for i, path in zip(group[::-1], tree.paths[::-1], strict=True):
            sources[begins[row] + path] = np.arange(len(path)) + offsets[i]
            states[i] = row * width + path[batch.starts[i] - 1 : batch.starts[i] - 1 + batch.responses[i]]
    places = ranges(np.arange(len(groups)) * width, lengths)
    targets = batch.token_ids[ranges(offsets + batch.starts, batch.responses)]
    ends = np.tile(np.arange(1, width + 1), (len(groups), 1))  # padding attends only to itself
    ends.reshape(-1)[places] = np.concatenate([tree.ends for tree in grown])
    return TokenRows(
        torch.from_numpy(padded(batch.token_ids[sources], lengths)),
        torch.from_numpy(padded(np.concatenate([tree.depths for tree in grown]), lengths)),
        torch.from_numpy(np.concatenate(states)),
        torch.from_numpy(targets),
        routing=routing_of(batch, len(groups) * width, places, sources),
        ends=torch.from_numpy(ends),
    )


def _sequences(batch: TrainBatch) -> list[np.ndarray]:
    """Return the tokens of each rollout that the model reads."""
    offsets = np.cumsum(batch.lengths) - batch.lengths
    reads = np.maximum(read_lengths(batch), 0)
    return [batch.token_ids[begin : begin + count] for begin, count in zip(offsets, reads, strict=True)]


def _walk(sequences: Sequence[np.ndarray]) -> list[int]:
    """Return an order that puts sequences with common prefixes side by side; equal batches have the same order."""
    return sorted(range(len(sequences)), key=lambda i: sequences[i].tobytes())


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Return the length of the common prefix."""
    least = min(len(first), len(second))
    different = np.flatnonzero(first[:least] != second[:least])
    return int(different[0]) if len(different) else least
