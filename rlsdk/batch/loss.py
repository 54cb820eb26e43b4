"""`LossInputs`: what policy losses and corrections read."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import attrs
import torch
from torch import Tensor

from rlsdk.batch.arithmetic import pack, pad, places, size, total, wide
from rlsdk.batch.packed import Packed, optional


@attrs.frozen(slots=False, eq=False, repr=False)
class LossInputs(Packed):
    """What policy losses and corrections read: all `[t]` unless said.

    Attributes:
        logprobs: float, of the policy that learns; carries the gradient.
        old_logprobs: float, of the policy before this batch's first update.
        advantages: float.
        loss_mask: bool, True where the token is trained on.
        segments: int64, dense index of the token's rollout, ascending.
        behaviour_logprobs: float, as the engine sampled them; left out, `old_logprobs`.
        ref_logprobs: float, of the reference policy.
        entropy: float, of the policy that learns, in nats; carries the gradient.
        values: float, the critic's before the update.
        pairs: int64 `[n]`, dense index of the pair; a pair is never split.
        preferred: bool `[n]`, the better one of its pair.
        expert: bool `[n]`, written by an expert and not by the policy.
        step: Which update of this batch, from 0.
        of_steps: How many updates of this batch there are.
        offset: Where this part's tokens begin in `whole`.
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
    pairs: Tensor = optional()
    preferred: Tensor = optional()
    expert: Tensor = optional()
    step: int = attrs.field(default=0, kw_only=True)
    of_steps: int = attrs.field(default=1, kw_only=True)
    offset: int = attrs.field(default=0, kw_only=True)
    _whole: LossInputs | None = optional()
    _generator: torch.Generator | None = optional()
    _width: int | None = optional()
    _rows: int | None = optional()

    ALWAYS: ClassVar[frozenset[str]] = frozenset({"behaviour_logprobs", "step", "of_steps", "offset"})

    def _check(self) -> None:
        if "behaviour_logprobs" not in vars(self):
            object.__setattr__(self, "behaviour_logprobs", self.old_logprobs)
        t = self.logprobs.shape[0]
        self._expect("token", t, "old_logprobs", "advantages", "loss_mask", "segments")
        self._expect("token", t, "behaviour_logprobs", "ref_logprobs", "entropy", "values")

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
        """From planes `[n, L]`.

        Args:
            logprobs: float `[n, L]`.
            old_logprobs: float `[n, L]`.
            advantages: float `[n, L]` or `[n]`.
            mask: bool `[n, L]`, True where the token is trained on.
            lengths: int `[n]`; left out, they run to the last True of each row.
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
        """How many rollouts the tokens belong to."""
        if self._rows is not None:
            return self._rows
        return size(self.segments)

    @property
    def whole(self) -> LossInputs:
        """Detached inputs of the whole optimiser batch over all ranks (for losses with `whole_batch=True`)."""
        return self._whole if self._whole is not None else self.detach()

    @property
    def generator(self) -> torch.Generator:
        """Source of random choices, the same for a seed and a step wherever the batch is split.

        A fresh copy at every reading: each micro-batch must draw the same numbers.
        """
        if self._generator is None:
            return torch.Generator().manual_seed(self.step)
        copy = torch.Generator(self._generator.device)
        copy.set_state(self._generator.get_state())
        return copy

    def detach(self) -> Self:
        """A copy without a graph."""
        held: dict[str, Any] = {k.lstrip("_"): v for k, v in vars(self).items()}
        held |= {k: v.detach() for k, v in held.items() if isinstance(v, Tensor)}
        return type(self)(**held)

    def to_padded(self, values_t: Tensor) -> Tensor:
        """`[t]` -> `[n, L]`, zeros beyond each length."""
        return pad(values_t, torch.bincount(self.segments, minlength=self.rollouts), self._width)

    def sequence_sum(self, values_t: Tensor) -> Tensor:
        """`[t]` -> `[t]`: sum over the trained tokens of the rollout, on each of its tokens."""
        return total(torch.where(self.loss_mask, values_t, 0), self.segments, self.rollouts)[self.segments]

    def sequence_mean(self, values_t: Tensor) -> Tensor:
        """`[t]` -> `[t]`: mean over the rollout's trained tokens, on each of its tokens; 0 where there are none."""
        count = self.sequence_sum(torch.ones_like(wide(values_t.detach())))
        return self.sequence_sum(values_t) / count.clamp(min=1)
