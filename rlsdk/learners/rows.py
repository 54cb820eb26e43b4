"""Divide rollouts over ranks and micro-batches, and lay them out as input rows of a transformers model.

Both divisions cut the same stable, longest-first order: however a batch is split, its concatenated parts have that
order. Rows are right-padded, packed, or after shared prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs
import numpy as np

from rlsdk.errors import LearnerError
from rlsdk.exact import padded_sequence

if TYPE_CHECKING:
    import torch

    from rlsdk.contracts import TrainBatch
    from rlsdk.types import Image

RowStyle = Literal["padded", "packed", "shared", "tree"]


@attrs.frozen(eq=False)
class Prompts:
    """Prompts shared by several rows.

    Attributes:
        input_ids: Right-padded tokens, int64 `[prompts, width]`.
        lengths: Length of each prompt, int64 `[prompts]`.
        of_row: Prompt of each row, int64 `[rows]`.
        padded: True if any prompt is shorter than the width.
    """

    input_ids: torch.Tensor
    lengths: torch.Tensor
    of_row: torch.Tensor
    padded: bool

    def to(self, device: torch.device | str) -> Prompts:
        """Copy the prompts to another device."""
        return Prompts(self.input_ids.to(device), self.lengths.to(device), self.of_row.to(device), self.padded)


@attrs.frozen(eq=False)
class TokenRows:
    """Inputs of one forward pass.

    Attributes:
        input_ids: Tokens, int64 `[rows, width]`.
        position_ids: Positions, restarting at each rollout, int64 `[rows, width]`; None if each row is one rollout.
        states: Index of the state that predicts each response token, in the flattened rows, int64 `[t]`; shared
            prompts, if any, are flattened before the rows.
        targets: Response tokens, int64 `[t]`.
        prompts: Shared prompts that the rows continue; None if each row contains its own prompt.
        routing: Experts chosen by each token, int16 `[tokens, layers, k]`, for the flattened shared prompts and rows;
            -1 leaves a choice to the model's router. None leaves all of them to the router.
        kept: Indices into `targets` of the results to return, int64; None for all.
        image_mask: True for image placeholder tokens, bool `[rows, width]`; None if there are no images.
        images: Images of each row; its placeholder tokens may cover only the first of them.
        ends: Column at which each token's descendants end in its row, int64 `[rows, width]`: a token attends to earlier
            tokens whose end lies after it. None if rows are not trees.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor | None
    states: torch.Tensor
    targets: torch.Tensor
    prompts: Prompts | None = None
    routing: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    image_mask: torch.Tensor | None = None
    images: tuple[tuple[Image, ...], ...] = ()
    ends: torch.Tensor | None = None

    def to(self, device: torch.device | str) -> TokenRows:
        """Copy the rows to another device."""
        moved = {
            field.name: value.to(device)
            for field in attrs.fields(TokenRows)
            if hasattr(value := getattr(self, field.name), "to")
        }
        return attrs.evolve(self, **moved)


def tree_mask(ends: torch.Tensor) -> torch.Tensor:
    """Return the mask of tree rows, in which each token attends to its ancestors and itself.

    Args:
        ends: As in `TokenRows`, int64 `[rows, width]`.

    Returns:
        bool `[rows, width, width]`.
    """
    import torch

    at = torch.arange(ends.shape[1], device=ends.device)
    return (at <= at[:, None]) & (at[:, None] < ends[:, None])


def read_lengths(batch: TrainBatch) -> np.ndarray:
    """Return how many tokens of each rollout the model reads, int64 `[n]`: all before the last response token."""
    return np.asarray(batch.starts + batch.responses - 1)


def to_rows(batch: TrainBatch, style: Literal["padded", "packed", "shared"]) -> TokenRows:
    """Lay out rollouts in any style but `tree`, for which see `rlsdk.learners.tree`.

    Padding is on the right, where causal attention keeps it out of every state that is used.

    Args:
        batch: At least one rollout.
        style: `padded` gives each rollout a row, `packed` puts all of them into one row, `shared` reads equal prompts
            once and gives each response a row. Rollouts with images require `padded`.

    Raises:
        LearnerError: There are images and the style is not `padded`.
    """
    import torch

    if style != "padded" and batch.images:
        raise LearnerError(f"rollouts with images need one row each; set learner.rows=padded (it is {style})")
    offsets = np.cumsum(batch.lengths) - batch.lengths
    targets = torch.from_numpy(batch.token_ids[ranges(offsets + batch.starts, batch.responses)])
    if style == "shared":
        return _rows_after_prompts(batch, offsets, targets)
    reads = read_lengths(batch)
    tokens = batch.token_ids[ranges(offsets, reads)]
    within = ranges(np.zeros_like(reads), reads)
    if style == "packed":
        row_begins = np.cumsum(reads) - reads
        input_ids, position_ids = torch.from_numpy(tokens[None]), torch.from_numpy(within[None])
    else:
        row_begins = np.arange(len(reads)) * int(reads.max())
        input_ids, position_ids = torch.from_numpy(padded(tokens, reads)), None
    states = ranges(row_begins + batch.starts - 1, batch.responses)
    routing = routing_of(batch, input_ids.numel(), ranges(row_begins, reads), ranges(offsets, reads))
    seen = None
    if "image_mask" in batch.context:
        seen = torch.from_numpy(padded(batch.context["image_mask"][ranges(offsets, reads)], reads)).bool()
    return TokenRows(
        input_ids,
        position_ids,
        torch.from_numpy(states),
        targets,
        routing=routing,
        image_mask=seen,
        images=batch.images,
    )


def routing_of(batch: TrainBatch, count: int, places: np.ndarray, tokens: np.ndarray) -> torch.Tensor | None:
    """Scatter the experts chosen by the batch's `tokens` to their `places` among `count` positions of the rows."""
    import torch

    chosen = batch.context.get("routed_experts")
    if chosen is None:
        return None
    routing = np.full((count, *chosen.shape[1:]), -1, np.int16)
    routing[places] = chosen[tokens]
    return torch.from_numpy(routing)


def to_exact_row(batch: TrainBatch, width: int) -> TokenRows:
    """Lay out one rollout as `rlsdk.exact` requires: padded to `width`, with all positions computed and few kept.

    Args:
        batch: One rollout.
        width: `model.max_length`.
    """
    import torch

    input_ids, targets = padded_sequence(batch.token_ids, width)
    first = int(batch.starts[0]) - 1
    kept = torch.arange(first, first + int(batch.responses[0]))
    return TokenRows(input_ids, None, torch.arange(width), targets, kept=kept)


def _rows_after_prompts(batch: TrainBatch, offsets: np.ndarray, targets: torch.Tensor) -> TokenRows:
    import torch

    numbers: dict[bytes, int] = {}
    begins = zip(offsets.tolist(), (offsets + batch.starts).tolist(), strict=True)
    of_row = np.array([numbers.setdefault(batch.token_ids[a:b].tobytes(), len(numbers)) for a, b in begins])
    first = np.unique(of_row, return_index=True)[1]
    lengths = batch.starts[first]
    prompt_ids = padded(batch.token_ids[ranges(offsets[first], lengths)], lengths)
    # The last token of a response is never read. A row without any other token holds padding, so that it exists.
    reads = batch.responses - 1
    input_ids = padded(batch.token_ids[ranges(offsets + batch.starts, reads)], reads)
    width = input_ids.shape[1]
    positions = batch.starts[:, None] + np.arange(width)
    # The last state of the prompt predicts the first response token; states of the row predict the others.
    states = ranges(prompt_ids.size + np.arange(len(reads)) * width - 1, batch.responses)
    firsts = np.cumsum(batch.responses) - batch.responses
    some = batch.responses > 0
    states[firsts[some]] = (of_row * prompt_ids.shape[1] + batch.starts - 1)[some]
    shorter = bool((lengths < prompt_ids.shape[1]).any())
    prompts = Prompts(torch.from_numpy(prompt_ids), torch.from_numpy(lengths), torch.from_numpy(of_row), shorter)
    rows, places = torch.from_numpy(input_ids), torch.from_numpy(positions)
    of_prompts = ranges(np.arange(len(first)) * prompt_ids.shape[1], lengths)
    of_rows = ranges(prompt_ids.size + np.arange(len(reads)) * width, reads)
    routing = routing_of(
        batch,
        prompt_ids.size + input_ids.size,
        np.concatenate([of_prompts, of_rows]),
        np.concatenate([ranges(offsets[first], lengths), ranges(offsets + batch.starts, reads)]),
    )
    return TokenRows(rows, places, torch.from_numpy(states), targets, prompts, routing)


def ranges(begins: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Concatenate `begin, begin + 1, …, begin + length - 1` for all pairs, int64."""
    lengths = np.maximum(lengths, 0)
    ends = np.cumsum(lengths)
    return np.asarray(np.arange(int(lengths.sum())) + np.repeat(begins - ends + lengths, lengths))


def padded(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Right-pad concatenated sequences with zeros to int64 `[rows, width]`, with a width of at least 1."""
    lengths = np.maximum(lengths, 0)
    width = max(int(lengths.max()), 1)
    plane = np.zeros((len(lengths), width), np.int64)
    plane.reshape(-1)[ranges(np.arange(len(lengths)) * width, lengths)] = tokens
    return plane


def empty_rows(style: RowStyle) -> TokenRows:
    """Build a row of one token and one target, so that a rank without rollouts joins collectives at zero weight."""
    import torch

    zero = torch.zeros(1, dtype=torch.int64)
    if style != "shared":
        return TokenRows(zero[None], None, zero, zero)
    # A prompt, too: this rank must make as many passes as the others, and its result must depend on all of them.
    return TokenRows(zero[None], zero[None] + 1, zero + 1, zero, Prompts(zero[None], zero + 1, zero, False))


def canonical(lengths: np.ndarray, groups: np.ndarray | None = None) -> np.ndarray:
    """Order in which a batch is cut: longest first, equal lengths in their given order, groups side by side.

    Args:
        lengths: Tokens of each rollout, int64 `[n]`.
        groups: Label of the group that each rollout belongs to, int64 `[n]`; None if groups may be split.

    Returns:
        int64 `[n]`, a permutation of the rollouts.
    """
    if groups is None:
        return np.asarray(np.argsort(-lengths, kind="stable"))
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    longest = np.zeros(len(first), np.int64)
    np.maximum.at(longest, inverse, lengths)
    return np.asarray(np.lexsort((np.arange(len(lengths)), first[inverse], -longest[inverse])))


def split(lengths: np.ndarray, world: int, groups: np.ndarray | None = None) -> list[np.ndarray]:
    """Distribute rollouts over ranks, balanced by tokens; a group stays on one rank.

    Args:
        lengths: int64 `[n]`, tokens of each rollout.
        world: Number of ranks.
        groups: int64 `[n]`, any label of the group that each rollout belongs to; None if groups may be split.

    Returns:
        For each rank its rollouts, int64; a rank may get none. Each rank's tokens differ from its fair share by at most
        the tokens of one rollout (or group).
    """
    order = canonical(lengths, groups)
    if world == 1:
        return [order]
    ends = np.cumsum(lengths[order])
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.searchsorted(ends, total * np.arange(1, world) / world, side="left") + 1
    if groups is not None:
        labels = groups[order]  # each cut moves forward to the start of the next group
        bounds = np.append(_unit_starts(labels), len(labels))
        cuts = bounds[np.searchsorted(bounds, np.minimum(cuts, len(labels)), side="left")]
    return np.split(order, np.minimum(cuts, len(order)))


def plan(
    lengths: np.ndarray, max_tokens: int, *, packed: bool = False, groups: np.ndarray | None = None
) -> list[np.ndarray]:
    """Cut a rank's rollouts into micro-batches.

    Args:
        lengths: int64 `[n]`, tokens of each rollout.
        max_tokens: Token budget of a micro-batch, padding included; a longer rollout (or group) gets its own.
        packed: Concatenate rollouts in one row (no padding); otherwise each has a row as wide as the longest.
        groups: int64 `[n]`, any label of the group that each rollout belongs to; None if groups may be split.

    Returns:
        Rollout indices of each micro-batch, int64; concatenated, they are the canonical order.
    """
    order = canonical(lengths, groups)
    units = _unit_starts(groups[order]) if groups is not None else np.arange(len(order))
    bounds = np.append(units, len(order))
    sorted_lengths = lengths[order]
    cuts, begin = [], 0
    while begin < len(order):
        left, ends = sorted_lengths[begin:], bounds[np.searchsorted(bounds, begin, side="right") :]
        counts = ends - begin  # rollouts of a micro-batch that ends there
        tokens = np.cumsum(left)[counts - 1] if packed else np.maximum.accumulate(left)[counts - 1] * counts
        fitting = int(np.searchsorted(tokens, max_tokens, side="right"))
        begin = int(ends[max(fitting - 1, 0)])  # the first rollout (or group) is taken even if it does not fit
        cuts.append(begin)
    return np.split(order, cuts[:-1]) if cuts else []


def _unit_starts(labels: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.append(True, labels[1:] != labels[:-1])) if len(labels) else np.empty(0, np.int64)
