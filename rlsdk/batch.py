"""Packed tensors that the algorithms read: `CreditInputs` for advantages, `LossInputs` for losses.

Two axes and no padding: `n` rollouts, and `t` tokens, the responses of all rollouts one after another. A response
runs from the first sampled token to the last; tool results and observations between them belong to it, with `loss_mask`
false.

An optional field that was not given is absent: reading it raises `MissingFieldError`, which names it. The trainer gives
exactly what a component declared with `needs`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, Self, get_args

import attrs
import torch
from torch import Tensor

from rlsdk.errors import MissingFieldError, ValueFault

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
EPSILON = 1e-6
"""Beside a standard deviation (GRPO, arXiv:2402.03300, is silent; this is what its users run)."""


def _optional() -> Any:
    return attrs.field(default=None, kw_only=True)


class _Packed:
    """What both inputs share: absent optional fields, copies with changes, packing."""

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(type(self)):  # type: ignore[arg-type]
            if field.kw_only and not field.name.startswith("_") and getattr(self, field.name) is None:
                object.__delattr__(self, field.name)
        self._check()

    def _check(self) -> None:
        raise AssertionError  # every subclass checks its shapes

    def __getattr__(self, name: str) -> Any:
        if name in {f.name for f in attrs.fields(type(self))}:  # type: ignore[arg-type]
            raise MissingFieldError(
                f"{type(self).__name__}.{name} was not computed. A component that reads it declares it, "
                f"needs=({name!r},); built by hand, give {name}=…"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        given = (f"{k.lstrip('_')}={_shape(v)}" for k, v in vars(self).items() if v is not None)
        return f"{type(self).__name__}({', '.join(given)})"

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed; None takes an optional field away."""
        held = {k.lstrip("_"): v for k, v in vars(self).items()}
        return type(self)(**{**held, **changes})

    def to(self, device: torch.device | str) -> Self:
        """A copy with every tensor on `device`."""
        moved = {k.lstrip("_"): v.to(device) if isinstance(v, Tensor) else v for k, v in vars(self).items()}
        return type(self)(**moved)

    def _expect(self, axis: str, size: int, *names: str) -> None:
        for name in names:
            value = vars(self).get(name)
            if isinstance(value, Tensor) and tuple(value.shape) != (size,):
                raise ValueFault(
                    f"{type(self).__name__}.{name} has shape {tuple(value.shape)}; expected ({size},), "
                    f"one value per {axis}"
                )


def _shape(value: Any) -> Any:
    return list(value.shape) if isinstance(value, Tensor) else value


@attrs.frozen(slots=False, eq=False, repr=False)
class Credit:
    """What an advantage may return: advantages and the returns that a critic learns, `[t]` each."""

    advantages: Tensor
    returns: Tensor


@attrs.frozen(slots=False, eq=False, repr=False)
class CreditInputs(_Packed):
    """What shaping and advantages read.

    Attributes:
        rewards: float `[n]`.
        groups: int64 `[n]`, dense index of the group (the rollouts that share a baseline).
        lengths: int64 `[n]`, response tokens of each rollout; they add up to `t`.
        loss_mask: bool `[t]`, True where the policy sampled the token.
        token_rewards: float `[t]`; where given, they replace `rewards`, which equal their sums.
        values: float `[t]`, the critic's.
        logprobs: float `[t]`, of the policy before the update.
        ref_logprobs: float `[t]`, of the reference policy.
        entropy: float `[t]`, in nats.
        probs_squared_sum: float `[t]`, sum over the vocabulary of squared probabilities.
        baseline_rewards: float `[n]`, reward of the greedy answer (ReMax).
        sources: int64 `[n]`, dense index of the data source.
        trajectories: int64 `[n]`, dense index of the trajectory.
        steps: int64 `[n]`, position within the trajectory.
        states: int64 `[n]`, equal where the environment's states are equal.
        reward_parts: name of a part of the reward -> float `[n]`.
    """

    rewards: Tensor
    groups: Tensor
    lengths: Tensor
    loss_mask: Tensor
    token_rewards: Tensor = _optional()
    values: Tensor = _optional()
    logprobs: Tensor = _optional()
    ref_logprobs: Tensor = _optional()
    entropy: Tensor = _optional()
    probs_squared_sum: Tensor = _optional()
    baseline_rewards: Tensor = _optional()
    sources: Tensor = _optional()
    trajectories: Tensor = _optional()
    steps: Tensor = _optional()
    states: Tensor = _optional()
    reward_parts: dict[str, Tensor] = _optional()
    _width: int | None = _optional()

    def _check(self) -> None:
        n, t = self.rewards.shape[0], self.loss_mask.shape[0]
        labels = ("groups", "sources", "trajectories", "steps", "states")
        self._expect("rollout", n, "lengths", "baseline_rewards", *labels)
        self._expect("token", t, "token_rewards", "values", "logprobs", "ref_logprobs", "entropy", "probs_squared_sum")
        if int(self.lengths.sum()) != t:
            raise ValueFault(
                f"CreditInputs.lengths add up to {int(self.lengths.sum())}; expected {t}, the tokens of loss_mask"
            )

    @classmethod
    def from_padded(
        cls, rewards: Tensor, mask: Tensor, groups: Tensor, *, lengths: Tensor | None = None, **optional: Any
    ) -> Self:
        """From planes `[n, L]`.

        Args:
            rewards: float `[n]`.
            mask: bool `[n, L]`, True where the policy sampled the token.
            groups: `[n]`, any labels; equal labels share a baseline.
            lengths: int `[n]`; left out, they run to the last True of each row.
            **optional: The optional fields, `[n, L]` in place of `[t]`.
        """
        mask = mask.bool()
        inside, lengths = _inside(mask, lengths)
        packed = _pack(optional, inside)
        dense = torch.unique(groups, return_inverse=True)[1]
        return cls(rewards, dense, lengths, mask[inside], width=mask.shape[1], **packed)

    @property
    def segments(self) -> Tensor:
        """int64 `[t]`: the rollout of each token."""
        return torch.repeat_interleave(torch.arange(len(self.lengths), device=self.lengths.device), self.lengths)

    @property
    def outcomes(self) -> Tensor:
        """What each rollout earned, `[n]`: the sums of `token_rewards` where there are any (they replace `rewards`)."""
        if not hasattr(self, "token_rewards"):
            return self.rewards
        sums = self.sequence_sum(self.token_rewards).to(self.rewards.dtype)
        # Rewards that say the same up to rounding stay as they are: equal rewards must remain exactly equal.
        return torch.where(torch.isclose(sums, self.rewards), self.rewards, sums)

    def only(self, needs: Iterable[str]) -> Self:
        """A copy with the optional fields `needs` and, where given, `token_rewards`; reading another is an error."""
        keep = {"token_rewards", *needs}
        fields = attrs.fields(type(self))
        return self.replace(**{f.name: None for f in fields if f.kw_only and f.name[0] != "_" and f.name not in keep})

    def to_padded(self, values_t: Tensor) -> Tensor:
        """`[t]` -> `[n, L]`, zeros beyond each length."""
        return _pad(values_t, self.lengths, self._width)

    def per_token(self, values_n: Tensor) -> Tensor:
        """`[n]` -> `[t]`: each rollout's value on all its tokens."""
        return torch.repeat_interleave(values_n, self.lengths)

    def sequence_sum(self, values_t: Tensor) -> Tensor:
        """`[t]` -> `[n]`: sum over the sampled tokens of each rollout."""
        return _sum(torch.where(self.loss_mask, values_t, 0), self.segments, len(self.lengths))

    def group_size(self) -> Tensor:
        """int64 `[n]`: how many rollouts share the baseline."""
        return torch.bincount(self.groups)[self.groups]

    def group_sum(self, values_n: Tensor) -> Tensor:
        """`[n]` -> `[n]`: sum over the group, on each of its members."""
        return _sum(values_n, self.groups, _size(self.groups))[self.groups]

    def group_mean(self, values_n: Tensor) -> Tensor:
        """`[n]` -> `[n]`: mean over the group, on each of its members; of equal values exactly that value.

        Summing what exceeds the least value keeps the digits that a common offset would cost.
        """
        least = self.group_min(values_n)
        return least + self.group_sum(values_n - least) / self.group_size()

    def group_min(self, values_n: Tensor) -> Tensor:
        """`[n]` -> `[n]`: least value in the group, on each of its members."""
        return -self.group_max(-values_n)

    def group_max(self, values_n: Tensor) -> Tensor:
        """`[n]` -> `[n]`: greatest value in the group, on each of its members."""
        empty = values_n.new_zeros(_size(self.groups))
        return empty.scatter_reduce(0, self.groups, values_n, "amax", include_self=False)[self.groups]

    def group_std(self, values_n: Tensor) -> Tensor:
        """`[n]` -> `[n]`: unbiased standard deviation over the group; 0 for a single member.

        In two passes: the one-pass formula loses all digits where the spread is small beside the mean.
        """
        squares = self.group_sum((values_n - self.group_mean(values_n)) ** 2)
        return (squares / (self.group_size() - 1).clamp(min=1)).sqrt()


@attrs.frozen(slots=False, eq=False, repr=False)
class LossInputs(_Packed):
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
    behaviour_logprobs: Tensor = _optional()
    ref_logprobs: Tensor = _optional()
    entropy: Tensor = _optional()
    values: Tensor = _optional()
    pairs: Tensor = _optional()
    preferred: Tensor = _optional()
    expert: Tensor = _optional()
    step: int = attrs.field(default=0, kw_only=True)
    of_steps: int = attrs.field(default=1, kw_only=True)
    offset: int = attrs.field(default=0, kw_only=True)
    _whole: LossInputs | None = _optional()
    _generator: torch.Generator | None = _optional()
    _width: int | None = _optional()
    _rows: int | None = _optional()

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
        inside, lengths = _inside(mask, lengths)
        plane = advantages if advantages.dim() == 2 else advantages[:, None].expand_as(mask)
        packed = _pack(optional, inside)
        segments = torch.repeat_interleave(torch.arange(len(lengths), device=mask.device), lengths)
        rows, width = mask.shape
        packed |= {"rows": rows, "width": width}
        return cls(logprobs[inside], old_logprobs[inside], plane[inside], mask[inside], segments, **packed)

    @property
    def rollouts(self) -> int:
        """How many rollouts the tokens belong to."""
        if self._rows is not None:
            return self._rows
        return _size(self.segments)

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
        return _pad(values_t, torch.bincount(self.segments, minlength=self.rollouts), self._width)

    def sequence_sum(self, values_t: Tensor) -> Tensor:
        """`[t]` -> `[t]`: sum over the trained tokens of the rollout, on each of its tokens."""
        return _sum(torch.where(self.loss_mask, values_t, 0), self.segments, self.rollouts)[self.segments]

    def sequence_mean(self, values_t: Tensor) -> Tensor:
        """`[t]` -> `[t]`: mean over the rollout's trained tokens, on each of its tokens; 0 where there are none."""
        count = self.sequence_sum(torch.ones_like(wide(values_t.detach())))
        return self.sequence_sum(values_t) / count.clamp(min=1)


@attrs.frozen
class Totals:
    """Denominators of the global batch: the aggregates of its parts, each given it, add up to the whole.

    Attributes:
        tokens: Trained tokens.
        rollouts: Rollouts with at least one trained token.
    """

    tokens: int
    rollouts: int

    @classmethod
    def of(cls, loss_mask: Tensor, segments: Tensor) -> Totals:
        """Count them; `loss_mask` bool `[t]`, `segments` int64 `[t]`."""
        return cls(int(loss_mask.sum()), int(torch.count_nonzero(_sum(loss_mask.long(), segments, _size(segments)))))


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
        mode: One of the four.
        norm: The length that `seq-mean-token-sum-norm` divides by; required there.
        totals: Denominators of the global batch; left out, those of this one.

    Returns:
        A scalar; zero with a graph where nothing is trained. A rollout with no trained token does not count.

    Raises:
        ValueFault: The mode is unknown, or its `norm` is missing.
    """
    if mode not in AGGREGATIONS:
        raise ValueFault(f"aggregation {mode!r} given; expected one of {', '.join(AGGREGATIONS)}")
    if mode == "seq-mean-token-sum-norm" and (norm is None or norm <= 0):
        raise ValueFault(f"aggregation 'seq-mean-token-sum-norm' divides by norm, a length above 0; got norm={norm}")
    totals = totals or Totals.of(loss_mask, segments)
    masked = torch.where(loss_mask, wide(loss), 0)
    if mode == "token-mean":
        return masked.sum() / max(totals.tokens, 1)
    if mode == "seq-mean-token-mean":
        counts = _sum(loss_mask.to(masked.dtype), segments, _size(segments)).clamp(min=1)
        return (masked / counts[segments]).sum() / max(totals.rollouts, 1)
    scale = norm if mode == "seq-mean-token-sum-norm" and norm is not None else 1.0
    return masked.sum() / (max(totals.rollouts, 1) * scale)


def wide(values: Tensor) -> Tensor:
    """`values` in at least float32: sums of many bfloat16 numbers stand still at 256."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def _size(index: Tensor) -> int:
    return int(index.max()) + 1 if len(index) else 0


def _sum(values: Tensor, index: Tensor, size: int) -> Tensor:
    values = wide(values)
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_add(0, index, values)


def _inside(mask: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    positions = torch.arange(mask.shape[1], device=mask.device)
    if lengths is None:
        ends = torch.where(mask, positions + 1, 0)
        lengths = ends.amax(dim=1) if mask.shape[1] else ends.sum(dim=1)
    return positions < lengths[:, None], lengths


def _pack(optional: dict[str, Any], inside: Tensor) -> dict[str, Any]:
    return {k: v[inside] if isinstance(v, Tensor) and v.dim() == 2 else v for k, v in optional.items()}


def _pad(values_t: Tensor, lengths: Tensor, width: int | None) -> Tensor:
    width = (int(lengths.max()) if len(lengths) else 0) if width is None else width
    plane = values_t.new_zeros(len(lengths), width)
    plane[torch.arange(width, device=values_t.device) < lengths[:, None]] = values_t
    return plane
