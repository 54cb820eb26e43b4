"""Vectorised arithmetic on packed tensors: sums along each rollout, means over sampled tokens."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from rlsdk.batch import CreditInputs, wide

_BLOCK = 64  # tokens summed by one matrix product; wider blocks cost more arithmetic, narrower ones more passes


@attrs.frozen(eq=False)
class SampledTokens:
    """The sampled tokens only, without the tool results and observations between them.

    Attributes:
        index: int64 `[s]`, positions among the `t` tokens; None if all tokens were sampled.
        counts: int64 `[n]`, sampled tokens of each rollout; their sum is `s`.
        total: `t`.
    """

    index: Tensor | None
    counts: Tensor
    total: int

    @classmethod
    def of(cls, x: CreditInputs) -> SampledTokens:
        """Return the sampled tokens of `x`."""
        total = len(x.loss_mask)
        if bool(x.loss_mask.all()):
            return cls(None, x.lengths, total)
        index = x.loss_mask.nonzero()[:, 0]
        ends = torch.searchsorted(index, x.lengths.cumsum(0))
        return cls(index, torch.diff(ends, prepend=ends.new_zeros(1)), total)

    @property
    def ends(self) -> Tensor:
        """Exclusive end of each rollout, counted in sampled tokens, int64 `[n]`."""
        return self.counts.cumsum(0)

    def take(self, values_t: Tensor) -> Tensor:
        """Select the sampled tokens, `[t]` -> `[s]`, in at least float32."""
        return wide(values_t if self.index is None else values_t.index_select(0, self.index))

    def put(self, values_s: Tensor) -> Tensor:
        """Scatter to all tokens, `[s]` -> `[t]`, zero where nothing was sampled."""
        if self.index is None:
            return values_s
        return values_s.new_zeros(self.total).index_copy_(0, self.index, values_s)

    def per_token(self, values_n: Tensor) -> Tensor:
        """Repeat each rollout's value on its sampled tokens, `[n]` -> `[s]`."""
        return torch.repeat_interleave(values_n, self.counts)

    def next(self, values_s: Tensor) -> Tensor:
        """Return the value of the rollout's next sampled token, zero at its last, `[s]` -> `[s]`."""
        following = torch.roll(values_s, -1)
        following[self.ends[self.counts > 0] - 1] = 0
        return following

    def rewards(self, x: CreditInputs) -> Tensor:
        """Return rewards `[s]`: `token_rewards` or, without them, the reward on the rollout's last sampled token."""
        if hasattr(x, "token_rewards"):
            return self.take(x.token_rewards)
        some = self.counts > 0
        rewards = wide(x.rewards)
        return rewards.new_zeros(int(self.counts.sum())).index_copy_(0, self.ends[some] - 1, rewards[some])


@attrs.frozen(eq=False)
class Segments:
    """Consecutive segments of a packed axis, for sums along them.

    Each block of tokens is summed by a product with a triangular matrix of powers of the factor; the block sums follow
    the same recursion, 64 times shorter. Nothing is divided by a power of the factor, which could underflow.

    Attributes:
        blocks: int64 `[k]`, blocks in each segment.
        width: Tokens of a block.
        slots: int64 `[s]`, each token's position after every segment is padded to whole blocks; None without padding.
        above: Segments of block sums; None if no segment has more than one token.
    """

    blocks: Tensor
    width: int
    slots: Tensor | None
    above: Segments | None

    @classmethod
    def of(cls, lengths: Tensor) -> Segments:
        """Return segments of these lengths, int64 `[k]`."""
        longest = int(lengths.max()) if len(lengths) else 0
        if longest <= 1:
            return cls(lengths, 1, None, None)
        width = min(_BLOCK, longest)
        blocks = (lengths + width - 1) // width
        padding = blocks * width - lengths
        slots = None
        if bool(padding.any()):
            before = padding.cumsum(0) - padding
            slots = torch.repeat_interleave(before, lengths)
            slots.add_(torch.arange(len(slots), device=lengths.device))
        return cls(blocks, width, slots, cls.of(blocks))

    def to_go(self, values: Tensor, factor: float = 1.0) -> Tensor:
        """Compute `y_t = v_t + factor · y_{t+1}` within each segment, `[s]`; the factor is between 0 and 1."""
        return self._sums(values, factor, forwards=False)

    def so_far(self, values: Tensor, factor: float = 1.0) -> Tensor:
        """Compute `y_t = v_t + factor · y_{t-1}` within each segment, `[s]`; the factor is between 0 and 1."""
        return self._sums(values, factor, forwards=True)

    def _sums(self, values: Tensor, factor: float, *, forwards: bool) -> Tensor:
        if self.above is None:
            return values
        rows, width = int(self.blocks.sum()), self.width
        plane = values if self.slots is None else values.new_zeros(rows * width).index_copy_(0, self.slots, values)
        # Column `t` of the triangle weights the tokens from `t` on, or up to `t`, by `factor^(distance)`.
        steps = torch.arange(width, device=values.device)
        distance = steps - steps[:, None] if forwards else steps[:, None] - steps
        triangle = torch.where(distance >= 0, torch.pow(factor, distance.clamp(min=0).double()), 0).to(values.dtype)
        plane = plane.view(rows, width) @ triangle
        # Then add the sums of the neighbouring block; a segment's outermost block has no neighbour.
        neighbour = self.above._sums(plane[:, -1 if forwards else 0].contiguous(), factor**width, forwards=forwards)
        neighbour = torch.roll(neighbour, 1 if forwards else -1)
        some = self.blocks[self.blocks > 0]
        neighbour[some.cumsum(0) - (some if forwards else 1)] = 0
        powers = torch.arange(1, width + 1) if forwards else torch.arange(width, 0, -1)
        plane.addmm_(neighbour[:, None], factor ** powers.to(values)[None])
        return plane.view(-1) if self.slots is None else plane.view(-1).index_select(0, self.slots)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return a detached scalar for metrics: the mean of `values` `[t]` where `mask` is True; 0 if it never is."""
    kept = torch.where(mask, values.detach(), 0)
    return kept.sum() / mask.sum().clamp(min=1)
