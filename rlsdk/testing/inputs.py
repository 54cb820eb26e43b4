"""Small batches for checking components, equal in all processes.

All numbers are multiples of 1/8: exact in bfloat16 and float32, and readable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from rlsdk.batch import CreditInputs, LossInputs
from rlsdk.fields import WHOLE_GROUPS, names
from rlsdk.testing.findings import Case

RAGGED = (3, 1, 4, 2, 5, 2)
"""Lengths of six rollouts, 17 tokens in total, so that no shape is right by accident."""
STEEP = 30.0
"""Log-ratio in nats beyond that of any real token; its sum over a rollout overflows in float32."""


class _Draw:
    """Random multiples of 1/8."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, count: int, low: float, high: float) -> Tensor:
        eighths = torch.randint(int(8 * low), int(8 * high) + 1, (count,), generator=self._generator)
        return eighths.float() / 8

    def mask(self, lengths: Sequence[int], gaps: bool) -> Tensor:
        """Return True for tokens that count; with `gaps`, every rollout of at least three tokens has a gap inside."""
        mask = torch.ones(sum(lengths), dtype=torch.bool)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        for start, length in zip(starts.tolist(), lengths, strict=False):
            if gaps and length > 2:
                mask[start + 1 : start + 1 + (length - 1) // 2] = False
        return mask


def credit(
    lengths: Sequence[int],
    groups: Sequence[int],
    rewards: Sequence[float],
    *,
    gaps: bool = False,
    token_rewards: bool = False,
    seed: int = 0,
) -> CreditInputs:
    """Create a batch for advantages and shaping, with all optional fields.

    Args:
        lengths: Number of response tokens of each rollout.
        groups: Dense index of each rollout's group.
        rewards: Reward of each rollout.
        gaps: Leave some tokens between sampled ones unsampled.
        token_rewards: Split each reward between the first and the last token.
        seed: Random seed of the numbers.
    """
    draw, n, t = _Draw(seed), len(lengths), sum(lengths)
    within = [list(groups[:i]).count(group) for i, group in enumerate(groups)]
    trajectories = [1_000 * group + place // 2 for group, place in zip(groups, within, strict=True)]
    logprobs = draw(t, -3, -1 / 8)
    x = CreditInputs(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(groups, dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int64),
        draw.mask(lengths, gaps),
        values=draw(t, -1, 1),
        logprobs=logprobs,
        ref_logprobs=logprobs + draw(t, -0.5, 0.5),
        entropy=draw(t, 0.125, 2),
        probs_squared_sum=draw(t, 0.25, 1),
        baseline_rewards=draw(n, 0, 1),
        sources=torch.arange(n) % 2 if n > 1 else torch.zeros(n, dtype=torch.int64),
        trajectories=torch.unique(torch.tensor(trajectories, dtype=torch.int64), return_inverse=True)[1],
        steps=torch.tensor([place % 2 for place in within], dtype=torch.int64),
        states=torch.unique(draw(n, 0, 1 / 8), return_inverse=True)[1],
        reward_parts={"first": draw(n, 0, 1), "second": draw(n, -1, 0)},
        reward_weights={"first": 1.0, "second": 0.5},
        train_step=2,
        train_steps=8,
    )
    if not token_rewards:
        return x
    ends, some = x.lengths.cumsum(0), x.lengths > 0
    firsts, lasts, half = (ends - x.lengths)[some], ends[some] - 1, x.rewards[some] / 2
    return x.replace(token_rewards=torch.zeros(t).index_add(0, firsts, half).index_add(0, lasts, half))


def losses(
    lengths: Sequence[int], *, gaps: bool = False, steep: float = 0.0, on_policy: bool = False, seed: int = 0
) -> LossInputs:
    """Create a batch for losses, corrections and KL estimators, with all optional fields; rollouts 0 and 1 are a pair.

    Args:
        lengths: Number of response tokens of each rollout; an even number of rollouts.
        gaps: Leave some tokens between trained ones untrained.
        steep: Absolute log-ratio between all policies, in nats; 0 for various moderate ones.
        on_policy: Use the same logprobs for all policies, as in the first update of a batch.
        seed: Random seed of the numbers.
    """
    draw, n, t = _Draw(seed), len(lengths), sum(lengths)
    segments = torch.repeat_interleave(torch.arange(n), torch.tensor(lengths, dtype=torch.int64))
    old = draw(t, -3, -1)
    policies: list[Tensor] = [draw(t, -0.5, 0.5) for _ in range(3)]
    if on_policy:
        policies = [torch.zeros(t) for _ in range(3)]
    if steep:
        signs = torch.where(segments % 4 < 2, 1.0, -1.0)  # both directions for advantages of both signs
        old = -1 - steep * (signs > 0)
        policies = [steep * signs, -steep * signs, steep * signs.flip(0)]
    logprobs, behaviour, ref = (old + shift for shift in policies)
    advantages = draw(t, 0.25, 2) * torch.where(segments % 2 == 0, 1.0, -1.0)
    return LossInputs(
        logprobs,
        old,
        advantages,
        draw.mask(lengths, gaps),
        segments,
        behaviour_logprobs=behaviour,
        ref_logprobs=ref,
        entropy=draw(t, 0.125, 2),
        values=draw(t, -1, 1),
        groups=torch.arange(n) // 2,
        pairs=torch.arange(n) // 2,
        preferred=torch.arange(n) % 2 == 0,
        expert=torch.arange(n) % 3 == 0,
        train_step=2,
        train_steps=8,
        update=2,
        rows=n,
    )


GROUPS = (0, 0, 0, 1, 1, 1)
REWARDS = (0.5, 0.0, 1.0, 0.25, 2.0, -1.0)


def ordinary_credit() -> list[Case[CreditInputs]]:
    """Return ordinary batches: two groups of three rollouts of different lengths; with gaps; with token rewards."""
    return [
        Case("two groups of three", credit(RAGGED, GROUPS, REWARDS)),
        Case("gaps in the loss mask", credit(RAGGED, GROUPS, REWARDS, gaps=True, seed=1)),
        Case("rewards on single tokens", credit(RAGGED, GROUPS, REWARDS, token_rewards=True, seed=2)),
    ]


def singleton_credit() -> list[Case[CreditInputs]]:
    """Return groups reduced to one member."""
    return [
        Case("three groups of one rollout", credit((3, 1, 4), (0, 1, 2), (0.5, 0.0, 1.0))),
        Case("one rollout of one token", credit((1,), (0,), (1.0,))),
    ]


def equal_credit() -> list[Case[CreditInputs]]:
    """Return batches with equal rewards within groups; the mean of several 0.1 is inexact in floats."""
    return [
        Case("equal rewards in each group", credit(RAGGED, GROUPS, (0.1, 0.1, 0.1, 1.0, 1.0, 1.0))),
        Case("equal rewards everywhere", credit(RAGGED, GROUPS, (0.0,) * 6, gaps=True)),
        Case("equal rewards on tokens", credit(RAGGED, GROUPS, (1.0,) * 6, token_rewards=True)),
    ]


def empty_credit() -> list[Case[CreditInputs]]:
    """Return batches with nothing to learn: rollouts truncated before the first token, or no rollouts."""
    unsampled = credit(RAGGED, GROUPS, REWARDS)
    return [
        Case("no token was sampled", unsampled.replace(loss_mask=torch.zeros_like(unsampled.loss_mask))),
        Case("every response is empty", credit((0, 0, 0, 0), (0, 0, 1, 1), (0.5, 0.0, 1.0, 0.25))),
        Case("some responses are empty", credit((3, 0, 2, 0), (0, 0, 1, 1), (0.5, 0.0, 1.0, 0.25))),
        Case("no rollout is left: all were invalid", select(unsampled, [])),
    ]


def extreme_credit() -> list[Case[CreditInputs]]:
    """Return rewards and logprobs as extreme as those of a learned reward or a collapsed policy."""
    large = credit(RAGGED, GROUPS, (1e6, -1e6, 1e6, 1e-6, 0.0, -1e-6))
    unlikely = credit(RAGGED, GROUPS, REWARDS)
    far = torch.where(torch.arange(len(unlikely.logprobs)) % 2 == 0, -1 - STEEP, -1.0)
    return [
        Case("rewards of a million together with rewards of a millionth", large),
        Case("unlikely tokens", unlikely.replace(logprobs=far, ref_logprobs=far.flip(0))),
    ]


def ordinary_losses() -> list[Case[LossInputs]]:
    """Return ordinary batches: three pairs of rollouts of different lengths; with gaps."""
    return [
        Case("three pairs of rollouts", losses(RAGGED)),
        Case("gaps in the loss mask", losses(RAGGED, gaps=True, seed=1)),
    ]


def on_policy_losses() -> list[Case[LossInputs]]:
    """Return the first update of a batch, where all ratios are 1."""
    return [Case("the first update, all policies equal", losses(RAGGED, on_policy=True))]


def singleton_losses() -> list[Case[LossInputs]]:
    """Return batches with the fewest possible tokens."""
    return [Case("one pair of rollouts of one token", losses((1, 1))), Case("a single pair", losses((3, 1)))]


def equal_losses() -> list[Case[LossInputs]]:
    """Return batches whose advantages are all zero, as for groups of equal rewards."""
    return [Case("all advantages are zero", (x := losses(RAGGED)).replace(advantages=torch.zeros_like(x.advantages)))]


def empty_losses() -> list[Case[LossInputs]]:
    """Return micro-batches with nothing to train, as on ranks that have fewer rollouts than others."""
    untrained = losses(RAGGED)
    return [
        Case("no token is trained on", untrained.replace(loss_mask=torch.zeros_like(untrained.loss_mask))),
        Case("some rollouts are empty", losses((3, 0, 0, 2))),
        Case("every rollout is empty", losses((0, 0))),
        Case("no rollout at all", select(untrained, [])),
    ]


def extreme_losses() -> list[Case[LossInputs]]:
    """Return ratios whose product over a rollout overflows."""
    return [Case(f"log-ratios of ±{STEEP:g}", losses((6, 6, 6, 6), steep=STEEP))]


def soiled(x: Any) -> Any:
    """Return the batch with different numbers at tokens outside `loss_mask`, where the learner computes values, too."""
    changed: dict[str, Tensor] = {}
    for name, number in (
        ("logprobs", -7.0),
        ("old_logprobs", -0.25),
        ("behaviour_logprobs", 0.0),
        ("ref_logprobs", -5.0),
        ("advantages", 40.0),
        ("values", 30.0),
        ("entropy", 9.0),
        ("probs_squared_sum", 0.125),
    ):
        if hasattr(x, name):
            changed[name] = torch.where(x.loss_mask, getattr(x, name), number)
    return x.replace(**changed)


X = TypeVar("X", bound=CreditInputs | LossInputs)
_LABELS = ("groups", "sources", "trajectories", "states", "pairs")
"""Dense indices of rollouts, renumbered if rollouts are missing."""
PER_ROLLOUT = frozenset((*names("credit", axis="rollout"), *names("loss", axis="rollout")))


def lengths_of(x: CreditInputs | LossInputs) -> Tensor:
    """Return the number of tokens of each rollout, int64 `[n]`."""
    return x.lengths if isinstance(x, CreditInputs) else torch.bincount(x.segments, minlength=x.rollouts)


def places(x: CreditInputs | LossInputs, rows: Sequence[int], lengths: Sequence[int] | None = None) -> Tensor:
    """Return the positions of the tokens of the rollouts `rows`, in that order; the first `lengths` of each, or all."""
    full = lengths_of(x)
    starts = full.cumsum(0) - full
    wanted = full[list(rows)].tolist() if lengths is None else lengths
    spans = [torch.arange(int(starts[row]), int(starts[row]) + n) for row, n in zip(rows, wanted, strict=True)]
    return torch.cat([*spans, torch.zeros(0, dtype=torch.int64)]).long()


def select(x: X, rows: Sequence[int], lengths: Sequence[int] | None = None) -> X:
    """Return the rollouts `rows` as a batch, in that order; the first `lengths` tokens of each, or all."""
    tokens, index = places(x, rows, lengths), torch.tensor(rows, dtype=torch.int64)
    fields: dict[str, Any] = dict(x.clock)
    for name, value in vars(x).items():
        if isinstance(value, dict):
            fields[name] = {key: part[index] if isinstance(part, Tensor) else part for key, part in value.items()}
        elif isinstance(value, Tensor) and name not in ("segments", "lengths"):
            part = value[index] if name in PER_ROLLOUT else value[tokens]
            fields[name] = torch.unique(part, return_inverse=True)[1] if name in _LABELS else part
    kept = lengths_of(x)[index] if lengths is None else torch.tensor(lengths, dtype=torch.int64)
    extra = {name: fields.pop(name) for name in x.extra}
    if isinstance(x, CreditInputs):
        return type(x)(**fields, lengths=kept).with_extra(**extra)
    segments = torch.repeat_interleave(torch.arange(len(rows)), kept)
    return type(x)(**fields, segments=segments, rows=len(rows)).with_extra(**extra)


def units(x: CreditInputs | LossInputs) -> list[list[int]]:
    """Return rows that must not be split: groups that the component reads, otherwise single rollouts."""
    labels = next((getattr(x, name) for name in WHOLE_GROUPS if hasattr(x, name)), torch.arange(len(lengths_of(x))))
    return [torch.nonzero(labels == label)[:, 0].tolist() for label in labels.unique()]


def smaller(x: X) -> Iterator[X]:
    """Yield the batch without one of its units, or with one rollout shortened by a token."""
    held = units(x)
    for left_out in range(len(held) if len(held) > 1 else 0):
        yield select(x, [row for i, unit in enumerate(held) if i != left_out for row in unit])
    lengths = lengths_of(x).tolist()
    for row, length in enumerate(lengths):
        if length > 1:
            yield select(x, range(len(lengths)), [length - 1 if i == row else n for i, n in enumerate(lengths)])


def to_dtype(x: X, dtype: torch.dtype) -> X:
    """Convert all floats of the batch to `dtype`."""
    changed: dict[str, Any] = {}
    changed |= {k: v.to(dtype) for k, v in vars(x).items() if isinstance(v, Tensor) and v.is_floating_point()}
    parts = vars(x).get("reward_parts")
    if parts is not None:
        changed["reward_parts"] = {name: part.to(dtype) for name, part in parts.items()}
    return cast("X", x.replace(**changed))


def copied(x: X) -> X:
    """Return the batch with copied tensors, so that in-place changes by a component have no effect elsewhere."""
    changed = {k: v.clone() for k, v in vars(x).items() if isinstance(v, Tensor) and not v.requires_grad}
    return cast("X", x.replace(**changed))
