"""`LossInputs`, the inputs of policy losses and corrections, and the reduction of per-token losses to one number."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self, get_args

import attrs
import torch
from torch import Tensor

from rlsdk.batch.arithmetic import Packed, optional, pack, pad, places, size, total, wide
from rlsdk.errors import ValueFault
from rlsdk.fields import names

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)


@attrs.frozen(slots=False, eq=False, repr=False)
class LossInputs(Packed):
    """Inputs of policy losses and corrections; tensors are `[t]` unless stated otherwise.

    Attributes:
        logprobs: float, log-probabilities under the policy being trained; carries the gradient.
        old_logprobs: float, log-probabilities under the policy before this batch's first update.
        advantages: float.
        loss_mask: bool, True where the token is trained on.
        segments: int64, dense index of the token's rollout, ascending.
        behaviour_logprobs: float, log-probabilities reported by the engine; default: `old_logprobs`.
        ref_logprobs: float, log-probabilities under the reference policy.
        entropy: float, entropy of the policy being trained, in nats; carries the gradient.
        values: float, the critic's values before the update.
        groups: int64 `[n]`, dense index of the group; a group is never split.
        pairs: int64 `[n]`, dense index of the pair; a pair is never split.
        preferred: bool `[n]`, the better one of its pair; for a loss that reads no pairs, an answer that is right: its
            reward is at least the algorithm's `passing`.
        expert: bool `[n]`, True if an expert wrote the rollout.
        step: Index of the update within this batch, from 0.
        of_steps: Number of updates on this batch.
        train_step: Number of training steps before this one; the first is 0.
        train_steps: Number of training steps of the run.
        update: Number of optimiser steps since training began, over all batches.
        offset: Position in `whole` at which this part's tokens start.
        aggregate: Mode in which the core reduces the per-token losses to one number.
    """

    logprobs: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    segments: Tensor
    behaviour_logprobs: Tensor = optional()
    ref_logprobs: Tensor = optional()
    entropy: Tensor = optional()
    values: Tensor = optional()
    groups: Tensor = optional()
    pairs: Tensor = optional()
    preferred: Tensor = optional()
    expert: Tensor = optional()
    step: int = attrs.field(default=0, kw_only=True)
    of_steps: int = attrs.field(default=1, kw_only=True)
    train_step: int = attrs.field(default=0, kw_only=True)
    train_steps: int = attrs.field(default=1, kw_only=True)
    update: int = attrs.field(default=0, kw_only=True)
    offset: int = attrs.field(default=0, kw_only=True)
    aggregate: str = attrs.field(default="token-mean", kw_only=True)
    _whole: LossInputs | None = optional()
    _generator: torch.Generator | None = optional()
    _width: int | None = optional()
    _rows: int | None = optional()

    CLOCK: ClassVar[tuple[str, ...]] = names("loss", axis="clock")
    ALWAYS: ClassVar[frozenset[str]] = frozenset(names("loss", access="always"))

    def _check(self) -> None:
        self._expect("token", self.logprobs.shape[0], *names("loss", axis="token"))
        if "behaviour_logprobs" not in vars(self):
            object.__setattr__(self, "behaviour_logprobs", self.old_logprobs)

    @classmethod
    def from_padded(
        cls,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        lengths: Tensor | None = None,
        **optional: Any,
    ) -> Self:
        """Build the inputs from padded tensors `[n, L]`.

        Args:
            logprobs: float `[n, L]`.
            old_logprobs: float `[n, L]`.
            advantages: float `[n, L]` or `[n]`.
            mask: bool `[n, L]`, True where the token is trained on.
            lengths: int `[n]`; default: up to the last True of each row.
            **optional: The optional fields, `[n, L]` in place of `[t]`.
        """
        mask = mask.bool()
        inside, lengths = places(mask, lengths)
        plane = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(mask)
        packed = pack(optional, inside)
        segments = torch.repeat_interleave(torch.arange(len(lengths), device=mask.device), lengths)
        rows, width = mask.shape
        packed |= {"rows": rows, "width": width}
        return cls(logprobs[inside], old_logprobs[inside], plane[inside], mask[inside], segments, **packed)

    @property
    def rollouts(self) -> int:
        """Number of rollouts that the tokens belong to."""
        if self._rows is not None:
            return self._rows
        return size(self.segments)

    @property
    def whole(self) -> LossInputs:
        """Detached inputs of the whole optimiser batch over all ranks (for losses with `whole_batch=True`)."""
        return self._whole if self._whole is not None else self.detach()

    @property
    def edits(self) -> dict[str, int]:
        """Number of in-place changes of each tensor so far, by name, including tensors of `whole`."""
        whole = {} if self._whole is None else self._whole.edits
        return {**super().edits, **{f"whole.{name}": count for name, count in whole.items()}}

    @property
    def generator(self) -> torch.Generator:
        """Random generator that depends only on seed and step, however the batch is split.

        Each access returns a fresh copy, since every micro-batch must draw the same numbers.
        """
        if self._generator is None:
            return torch.Generator().manual_seed(self.step)
        copy = torch.Generator(self._generator.device)
        copy.set_state(self._generator.get_state())
        return copy

    def detach(self) -> Self:
        """Return a copy without a graph."""
        held: dict[str, Any] = {k.lstrip("_"): v for k, v in vars(self).items()}
        held |= {k: v.detach() for k, v in held.items() if isinstance(v, Tensor)}
        return self._rebuilt(held)

    def to_padded(self, values_t: Tensor) -> Tensor:
        """`[t]` -> `[n, L]`, zeros beyond each length."""
        return pad(values_t, torch.bincount(self.segments, minlength=self.rollouts), self._width)

    def sequence_sum(self, values_t: Tensor) -> Tensor:
        """`[t]` -> `[t]`: sum over the trained tokens of the rollout, on each of its tokens."""
        return self.rollout_sum(values_t)[self.segments]

    def sequence_mean(self, values_t: Tensor) -> Tensor:
        """`[t]` -> `[t]`: mean over the rollout's trained tokens, on each of its tokens; 0 if there are none."""
        return self.rollout_mean(values_t)[self.segments]

    def rollout_sum(self, values_t: Tensor) -> Tensor:
        """`[t]` -> `[n]`: sum over the rollout's trained tokens."""
        return total(torch.where(self.loss_mask, values_t, 0), self.segments, self.rollouts)

    def rollout_mean(self, values_t: Tensor) -> Tensor:
        """`[t]` -> `[n]`: mean over the rollout's trained tokens; 0 if there are none."""
        count = self.rollout_sum(torch.ones_like(wide(values_t.detach())))
        return self.rollout_sum(values_t) / count.clamp(min=1)


@attrs.frozen
class Totals:
    """Denominators of the global batch, with which the aggregates of its parts add up to the whole.

    Attributes:
        tokens: Number of trained tokens.
        rollouts: Number of rollouts with at least one trained token.
    """

    tokens: int
    rollouts: int

    def __add__(self, other: Totals) -> Totals:
        """Add the denominators of two batches that share no rollout."""
        return Totals(self.tokens + other.tokens, self.rollouts + other.rollouts)

    @classmethod
    def of(cls, loss_mask: Tensor, segments: Tensor) -> Totals:
        """Count trained tokens and rollouts; `loss_mask` bool `[t]`, `segments` int64 `[t]`."""
        return cls(int(loss_mask.sum()), int(torch.count_nonzero(total(loss_mask.long(), segments, size(segments)))))


def aggregate(
    loss: Tensor,
    loss_mask: Tensor,
    segments: Tensor,
    mode: Aggregation,
    *,
    norm: float | None = None,
    totals: Totals | None = None,
) -> Tensor:
    """Reduce a per-token loss to a scalar, with denominators of the global batch.

    | mode | value |
    |---|---|
    | `token-mean` | sum over tokens / tokens (DAPO, arXiv:2503.14476, eq. 8) |
    | `seq-mean-token-sum` | sum over tokens / rollouts |
    | `seq-mean-token-mean` | mean over rollouts of the mean over their tokens (GRPO, arXiv:2402.03300, eq. 3) |
    | `seq-mean-token-sum-norm` | sum over tokens / (rollouts × norm) (Dr. GRPO, arXiv:2503.20783) |

    Args:
        loss: float `[t]`, per token.
        loss_mask: bool `[t]`, True where the token counts.
        segments: int64 `[t]`, rollout of each token.
        mode: One of the four modes.
        norm: Length that `seq-mean-token-sum-norm` divides by; required for that mode.
        totals: Denominators of the global batch; default: those of this batch.

    Returns:
        A scalar; zero with a graph if nothing is trained. Rollouts without a trained token do not count.

    Raises:
        ValueFault: The mode is unknown, or its `norm` is missing.
    """
    if mode not in AGGREGATIONS:
        raise ValueFault(f"got aggregation {mode!r}; expected one of {', '.join(AGGREGATIONS)}")
    if mode == "seq-mean-token-sum-norm" and (norm is None or norm <= 0):
        raise ValueFault(f"aggregation 'seq-mean-token-sum-norm' divides by norm, a length above 0; got norm={norm}")
    totals = totals or Totals.of(loss_mask, segments)
    masked = torch.where(loss_mask, wide(loss), 0)
    if mode == "token-mean":
        return masked.sum() / max(totals.tokens, 1)
    if mode == "seq-mean-token-mean":
        counts = total(loss_mask.to(masked.dtype), segments, size(segments)).clamp(min=1)
        return (masked / counts[segments]).sum() / max(totals.rollouts, 1)
    scale = norm if mode == "seq-mean-token-sum-norm" and norm is not None else 1.0
    return masked.sum() / (max(totals.rollouts, 1) * scale)
