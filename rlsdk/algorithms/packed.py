"""Vectorised arithmetic on packed tensors: sums along each rollout, means over sampled tokens, ratios of losses.

Estimators along tokens compute a batch in parts that fit into the cache: allocating memory costs more than the
arithmetic on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

import attrs
import torch
from torch import Tensor

from rlsdk.batch import CreditInputs, LossInputs, wide
from rlsdk.batch.arithmetic import WHITEN_EPSILON
from rlsdk.contracts import RunFacts
from rlsdk.fields import names
from rlsdk.limits import at_least

DualClip = Annotated[float, at_least(1)]
"""Bound of ratios for negative advantages; below 1 it would clip the loss of unchanged tokens."""
Metrics = dict[str, Tensor]
"""Name -> detached scalar, a mean over the trained tokens, or one value per rollout, pair or token of one origin."""
Level = Literal["token", "mean", "sum", "max"]
"""A value of each token, or one of its rollout."""
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
        return values_s.new_zeros(self.total).scatter_(0, self.index, values_s)

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

    def returns(self, x: CreditInputs) -> Tensor:
        """Return the sum of the rewards from each sampled token to the end of its rollout, `[s]`."""
        if hasattr(x, "token_rewards"):
            return Segments.of(self.counts).to_go(self.take(x.token_rewards))
        return self.per_token(wide(x.rewards))


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
        return self.joined(self.sums(self.in_blocks(values), factor, forwards=False))

    def in_blocks(self, values: Tensor) -> Tensor:
        """Split each segment into blocks, `[s]` -> `[b, width]`, with zeros behind its end."""
        size = int(self.blocks.sum()) * self.width
        padded = values if self.slots is None else values.new_zeros(size).scatter_(0, self.slots, values)
        return padded.view(-1, self.width)

    def joined(self, blocks: Tensor) -> Tensor:
        """Join the blocks of all segments, `[b, width]` -> `[s]`."""
        return blocks.view(-1) if self.slots is None else blocks.view(-1).index_select(0, self.slots)

    def sums(self, blocks: Tensor, factor: float = 1.0, *, forwards: bool) -> Tensor:
        """Sum along each segment, `[b, width]`: `y_t = v_t + factor · y_{t-1}` forwards, else `+ factor · y_{t+1}`.

        Forwards, they continue in the padding behind a segment's end.
        """
        if self.above is None:
            return blocks
        width = self.width
        # Column `t` of the triangle weights the tokens from `t` on, or up to `t`, by `factor^(distance)`.
        steps = torch.arange(width, device=blocks.device)
        distance = steps - steps[:, None] if forwards else steps[:, None] - steps
        triangle = torch.where(distance >= 0, torch.pow(factor, distance.clamp(min=0).double()), 0).to(blocks.dtype)
        blocks = blocks @ triangle
        # Then add the sums of the neighbouring block; a segment's outermost block has no neighbour.
        above = self.above
        edges = above.in_blocks(blocks[:, -1 if forwards else 0].contiguous())
        neighbour = above.joined(above.sums(edges, factor**width, forwards=forwards))
        neighbour = torch.roll(neighbour, 1 if forwards else -1)
        some = self.blocks[self.blocks > 0]
        neighbour[some.cumsum(0) - (some if forwards else 1)] = 0
        powers = torch.arange(1, width + 1) if forwards else torch.arange(width, 0, -1)
        return blocks.addmm_(neighbour[:, None], factor ** powers.to(blocks)[None])


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return a detached scalar for metrics: the mean of `values` `[t]` where `mask` is True; 0 if it never is."""
    kept = torch.where(mask, values.detach(), 0)
    return kept.sum() / mask.sum().clamp(min=1)


PART_TOKENS = 2**18
"""Approximate tokens per part, up to whole rollouts or groups: 1 MiB per float32 tensor."""
_PER_TOKEN = frozenset(names("credit", axis="token"))


def in_parts(
    estimate: Callable[[CreditInputs], tuple[Tensor, ...]], x: CreditInputs, *, together: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Apply `estimate` to consecutive parts of whole rollouts and concatenate the results.

    Args:
        estimate: Returns tensors `[t]`; a rollout's values depend only on itself and the rollouts `together` with it.
        x: The batch.
        together: int64 `[n]`; rollouts with equal numbers share a part. If omitted, rollouts are independent.

    Returns:
        Tensors `[t]`.
    """
    cuts = _cuts(x, together)
    if len(cuts) < 2:
        return estimate(x)
    ends = x.lengths.cumsum(0)[torch.tensor(cuts, device=x.lengths.device) - 1].tolist()
    found: list[Tensor] = []
    row = token = 0
    for next_row, next_token in zip(cuts, ends, strict=True):
        here = slice(token, next_token)
        results = estimate(_part(x, slice(row, next_row), here))
        found = found or [result.new_empty(len(x.loss_mask)) for result in results]
        for whole, result in zip(found, results, strict=True):
            whole[here] = result
        row, token = next_row, next_token
    return tuple(found)


def whiten_sampled(values: Tensor, loss_mask: Tensor) -> Tensor:
    """Normalise sampled tokens to mean 0 and (unbiased) variance 1, in place, in float64; a single one becomes 0.

    Args:
        values: float `[t]`, zero where nothing was sampled.
        loss_mask: bool `[t]`, True where the policy sampled the token.

    Returns:
        `values`, still zero where nothing was sampled.
    """
    count = loss_mask.sum()
    if not count:
        return values
    everything = int(count) == len(values)
    sampled = values if everything else values[loss_mask]
    # Rounding may put the mean beyond all values; if all are equal, use exactly their value, so that they become 0.
    mean = (values.sum(dtype=torch.float64) / count).to(values.dtype).clamp(sampled.min(), sampled.max())
    squares = values.new_zeros((), dtype=torch.float64)
    for part, mask in zip(torch.split(values, PART_TOKENS), torch.split(loss_mask, PART_TOKENS), strict=True):
        part.sub_(mean)
        if not everything:
            part.mul_(mask)
        squares += part.square().sum(dtype=torch.float64)
    return values.mul_(torch.rsqrt(squares / (count - 1).clamp(min=1) + WHITEN_EPSILON).to(values.dtype))


def _cuts(x: CreditInputs, together: Tensor | None) -> list[int]:
    """Return the exclusive end of each part, in rollouts; the last is the number of rollouts."""
    rollouts = len(x.lengths)
    if len(x.loss_mask) <= PART_TOKENS:
        return [rollouts]
    may_end = torch.ones(rollouts, dtype=torch.bool, device=x.lengths.device)
    if together is not None:
        step = torch.diff(together)
        if bool((step < 0).any()):
            return [rollouts]
        may_end[:-1] = step > 0
    places = may_end.nonzero()[:, 0]
    number = x.lengths.cumsum(0)[places] // PART_TOKENS
    last = torch.diff(number, append=number[-1:] + 1) > 0
    return (places[last] + 1).tolist()


def _part(x: CreditInputs, rows: slice, tokens: slice) -> CreditInputs:
    changes = {
        name: value[tokens if name in _PER_TOKEN or name in x.extra else rows]
        for name, value in vars(x).items()
        if isinstance(value, Tensor)
    }
    return x.replace(**changes)


def trained(x: LossInputs, values_t: Tensor) -> Tensor:
    """Return `values_t` in at least float32, zero where a token is not trained on.

    Inputs of losses are zeroed *before* anything is computed: otherwise a NaN at an untrained token would reach the
    gradient, as 0 · NaN, even if the loss is masked afterwards.
    """
    return torch.where(x.loss_mask, wide(values_t), 0)


def log_ratio(x: LossInputs, to: Tensor | None = None) -> Tensor:
    """Return `log π - log π_old`, or to other logprobs `[t]`, with the gradient of π only; not clamped."""
    base = x.old_logprobs if to is None else to
    return trained(x, wide(x.logprobs) - wide(base).detach())


def credit(x: LossInputs) -> Tensor:
    """Return the advantages `[t]` as constants, zero where a token is not trained on."""
    return trained(x, x.advantages.detach())


def clipped_surrogate(advantages: Tensor, ratio: Tensor, low: float, high: float) -> Tensor:
    """Compute PPO's loss, `max(-A·r, -A·clip(r, 1 - low, 1 + high))` (arXiv:1707.06347, eq. 7)."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))


def dual_clipped(loss: Tensor, advantages: Tensor, bound: float | None) -> Tensor:
    """Cap the ratio in the loss of tokens with negative advantage at `bound` (arXiv:1912.09729).

    PPO's clip leaves that side open: without a bound, one token that became far likelier dominates the batch.
    """
    return loss if bound is None else torch.where(advantages < 0, torch.minimum(loss, -advantages * bound), loss)


def clip_shares(x: LossInputs, below: Tensor, above: Tensor) -> Metrics:
    """Return the metrics of a clip: the shares of trained tokens that it concerns at either bound, and at both.

    Args:
        x: The batch.
        below: bool `[t]`, True for tokens clipped at the lower bound.
        above: bool `[t]`, True for tokens clipped at the upper bound.
    """
    low, high = (masked_mean(clipped.float(), x.loss_mask) for clipped in (below, above))
    return {"clip_share": low + high, "clip_share_low": low, "clip_share_high": high}


def removed_gradients(x: LossInputs, ratio: Tensor, low: float, high: float) -> Metrics:
    """Return the shares of trained tokens whose gradient PPO's clip removes; see `clip_shares`."""
    ratio, advantages = ratio.detach(), credit(x)
    return clip_shares(x, (ratio < 1 - low) & (advantages < 0), (ratio > 1 + high) & (advantages > 0))


def at_level(x: LossInputs, values: Tensor, level: Level) -> Tensor:
    """Return each token's value, or the mean, sum or maximum over the trained tokens of its rollout, `[t]`.

    Args:
        x: The batch.
        values: Float `[t]`, zero where a token is not trained on.
        level: What to return.
    """
    if level == "mean":
        return x.sequence_mean(values)
    if level == "sum":
        return x.sequence_sum(values)
    if level == "max":
        trained_on = torch.where(x.loss_mask, values, -torch.inf)
        largest = trained_on.new_full((x.rollouts,), -torch.inf).scatter_reduce(0, x.segments, trained_on, "amax")
        return largest[x.segments]
    return values


def in_order(low: str, high: str) -> Callable[[RunFacts, Mapping[str, Any]], Iterator[tuple[str, str]]]:
    """Return a check that refuses empty ranges.

    Args:
        low: Name of the option for the lower end.
        high: Name of the option for the upper end.
    """

    def check(run: RunFacts, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        if options[low] > options[high]:
            yield low, f"{options[low]:g} is above {high}={options[high]:g}: no number is within these bounds"

    return check
