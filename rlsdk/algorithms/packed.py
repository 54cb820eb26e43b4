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


def sums_to_go(values: Tensor, lengths: Tensor, factor: float) -> Tensor:
    """Compute `y_t = v_t + factor · y_{t+1}` within each segment.

    Each block of tokens is summed by a product with a triangular matrix of powers of `factor`; the block sums follow
    the same recursion, 64 times shorter. Nothing is divided by a power of `factor`, which could underflow.

    Args:
        values: float `[s]`.
        lengths: int64, lengths of the segments; their sum is `s`.
        factor: Between 0 and 1.

    Returns:
        float `[s]`.
    """
    longest = int(lengths.max()) if len(lengths) else 0
    if longest <= 1:
        return values
    width = min(_BLOCK, longest)
    blocks = (lengths + width - 1) // width
    slots = _slots(lengths, blocks, width)
    rows = int(blocks.sum())
    plane = values if slots is None else values.new_zeros(rows * width).index_copy_(0, slots, values)
    # Column `t` of the triangle weights the tokens from `t` on by `factor^(distance)`.
    steps = torch.arange(width, device=values.device)
    distance = steps[:, None] - steps
    triangle = torch.where(distance >= 0, torch.pow(factor, distance.clamp(min=0).double()), 0).to(values.dtype)
    plane = plane.view(rows, width) @ triangle
    # Then add the sums of the next block in the same segment; a segment's last block has none.
    following = torch.roll(sums_to_go(plane[:, 0].contiguous(), blocks, factor**width), -1)
    following[blocks.cumsum(0)[blocks > 0] - 1] = 0
    plane.addmm_(following[:, None], factor ** torch.arange(width, 0, -1).to(values)[None])
    return plane.view(-1) if slots is None else plane.view(-1).index_select(0, slots)


def _slots(lengths: Tensor, blocks: Tensor, width: int) -> Tensor | None:
    """Return each token's position after padding every segment to whole blocks; None if none needs padding."""
    padding = blocks * width - lengths
    if not bool(padding.any()):
        return None
    before = padding.cumsum(0) - padding
    return torch.repeat_interleave(before, lengths).add_(torch.arange(int(lengths.sum()), device=lengths.device))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return a detached scalar for metrics: the mean of `values` `[t]` where `mask` is True; 0 if it never is."""
    kept = torch.where(mask, values.detach(), 0)
    return kept.sum() / mask.sum().clamp(min=1)
