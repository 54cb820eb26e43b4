"""From groups to packed arrays: the batch that the learner computes on, and the inputs of credit assignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from rlsdk.batch import CreditInputs
from rlsdk.contracts import TrainBatch
from rlsdk.errors import RunError
from rlsdk.types import Group, Rollout, Score


@attrs.frozen(eq=False)
class Packed:
    """Valid rollouts of a step, packed.

    Attributes:
        batch: For the learner.
        rollouts: The rollouts, in the order of the batch.
        scores: Their scores.
        groups: int64 `[n]`, dense index of each rollout's group.
        sampled: How many of the rollouts the policy sampled; behind them come the experts', each a group of its own.
        baselines: float32 `[n]`, reward of the greedy answer to the task; None where nobody reads it.
    """

    batch: TrainBatch
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]
    groups: np.ndarray
    sampled: int
    baselines: np.ndarray | None = None

    @property
    def sampled_tokens(self) -> int:
        """Response tokens of the rollouts that the policy sampled."""
        return int(self.batch.responses[: self.sampled].sum())

    def without_experts(self) -> Packed:
        """The rollouts that the policy sampled: what credit is assigned to."""
        count = self.sampled
        batch = self.batch.select(np.arange(count))
        return attrs.evolve(
            self,
            batch=batch,
            rollouts=self.rollouts[:count],
            scores=self.scores[:count],
            groups=self.groups[:count],
            baselines=None if self.baselines is None else self.baselines[:count],
        )


def pack(
    groups: Sequence[Group], experts: Sequence[Group] = (), baselines: Mapping[int, float] | None = None
) -> Packed | None:
    """Pack the valid rollouts that sampled anything; None if there are none.

    Invalid rollouts end here: they reach neither a baseline nor a loss.

    Args:
        groups: What the policy sampled.
        experts: What experts wrote.
        baselines: Task, by identity -> reward of its greedy answer; a group without one has no baseline and stays out.
    """
    if baselines is not None:
        groups = [group for group in groups if id(group.task) in baselines]
    kept = [
        (g, rollout, score)
        for g, group in enumerate([*groups, *experts])
        for rollout, score in zip(group.rollouts, group.scores, strict=True)
        if score.valid and rollout.loss_mask.any()
    ]
    sampled = sum(g < len(groups) for g, _, _ in kept)
    if not sampled:
        return None
    index, rollouts, scores = (tuple(part) for part in zip(*kept, strict=True))
    lengths = np.array([len(r.token_ids) for r in rollouts], np.int64)
    mask = np.concatenate([r.loss_mask for r in rollouts])
    starts, responses = spans(mask, lengths)
    inside = _inside(lengths, starts, responses)
    batch = TrainBatch(
        token_ids=np.concatenate([r.token_ids for r in rollouts]),
        lengths=lengths,
        starts=starts,
        responses=responses,
        loss_mask=mask[inside],
        tokens={
            "behaviour_logprobs": np.concatenate([r.logprobs for r in rollouts])[inside],
            "policy_versions": np.concatenate([r.policy_versions for r in rollouts])[inside],
        },
    )
    dense = np.unique(np.array(index), return_inverse=True)[1].astype(np.int64)
    greedy = None
    if baselines is not None:
        greedy = np.zeros(len(rollouts), np.float32)
        greedy[:sampled] = [baselines[id(groups[g].task)] for g in index[:sampled]]
    return Packed(batch, rollouts, scores, dense, sampled, greedy)


def spans(mask: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each rollout's response begins, and its length: from the first sampled token to the last.

    Args:
        mask: bool `[T]`, True where sampled; at least one per rollout.
        lengths: int64 `[n]`, tokens of each rollout.
    """
    offsets = np.cumsum(lengths) - lengths
    where = np.flatnonzero(mask)
    owner = np.searchsorted(offsets, where, side="right") - 1
    first = where[np.searchsorted(owner, np.arange(len(lengths)), side="left")]
    last = where[np.searchsorted(owner, np.arange(len(lengths)), side="right") - 1]
    return first - offsets, last - first + 1


def _inside(lengths: np.ndarray, starts: np.ndarray, responses: np.ndarray) -> np.ndarray:
    begin = np.cumsum(lengths) - lengths + starts
    shift = begin - (np.cumsum(responses) - responses)
    inside: np.ndarray = np.arange(int(responses.sum())) + np.repeat(shift, responses)
    return inside


def credit_inputs(packed: Packed, computed: dict[str, np.ndarray], needs: frozenset[str]) -> CreditInputs:
    """What shaping and advantage read: the basics, and of the optional fields those in `needs`.

    Args:
        packed: The rollouts of a step.
        computed: Per-token fields that the learner computed: values, logprobs, ref_logprobs, entropy, ….
        needs: What the parts declared.
    """
    batch = packed.batch
    optional: dict[str, Any] = {k: torch.from_numpy(np.array(v)) for k, v in computed.items() if k in needs}
    token_rewards = _token_rewards(packed)
    if token_rewards is not None:
        optional["token_rewards"] = token_rewards
    if "sources" in needs:
        optional["sources"] = _dense([r.task.source for r in packed.rollouts])
    if "trajectories" in needs:
        labels = (r.trajectory or f"\0{i}" for i, r in enumerate(packed.rollouts))  # without a label: one of its own
        optional["trajectories"] = _dense([f"{g}\0{label}" for g, label in zip(packed.groups, labels, strict=True)])
    if "steps" in needs:
        optional["steps"] = torch.tensor([r.step for r in packed.rollouts])
    if "states" in needs:
        optional["states"] = _dense([r.state for r in packed.rollouts])
    if packed.baselines is not None:
        optional["baseline_rewards"] = torch.from_numpy(packed.baselines)
    if "reward_parts" in needs:
        optional["reward_parts"] = _reward_parts(packed.scores)
    return CreditInputs(
        torch.tensor([s.value for s in packed.scores], dtype=torch.float32),
        torch.from_numpy(packed.groups),
        torch.from_numpy(batch.responses),
        torch.from_numpy(batch.loss_mask),
        **optional,
    )


def _dense(labels: Sequence[str]) -> torch.Tensor:
    return torch.from_numpy(np.unique(np.array(labels), return_inverse=True)[1].astype(np.int64))


def _reward_parts(scores: Sequence[Score]) -> dict[str, torch.Tensor]:
    names = sorted({name for s in scores for name in s.metrics if name.startswith("reward/")})
    return {n.removeprefix("reward/"): torch.tensor([float(s.metrics.get(n, 0.0)) for s in scores]) for n in names}


def _token_rewards(packed: Packed) -> torch.Tensor | None:
    """Token rewards, float `[t]`, where any score gives them; the others' sit on their last sampled token."""
    if all(s.token_rewards is None for s in packed.scores):
        return None
    batch = packed.batch
    rewards = np.zeros(int(batch.responses.sum()), np.float32)
    offsets = np.cumsum(batch.responses) - batch.responses
    for i, score in enumerate(packed.scores):
        pairs = (
            ((batch.starts[i] + batch.responses[i] - 1, score.value),)
            if score.token_rewards is None
            else score.token_rewards
        )
        mask = batch.loss_mask[offsets[i] : offsets[i] + batch.responses[i]]
        sampled = np.flatnonzero(mask)
        for position, value in pairs:  # a reward on a token that was not sampled belongs to the sampled one before it
            before = np.searchsorted(sampled, position - batch.starts[i], side="right") - 1
            rewards[offsets[i] + sampled[max(before, 0)]] += value
    return torch.from_numpy(rewards)


def labels(packed: Packed, needs: frozenset[str]) -> dict[str, np.ndarray]:
    """What losses on preferences and on experts' answers read, `[n]` each: of these, those in `needs`.

    `pairs` is the group; `preferred` is True for a reward above the mean of its group (alone: of the batch); `expert`
    is True for what an expert wrote.

    Raises:
        RunError: A group is no pair, or none of a pair is better than the other.
    """
    found: dict[str, np.ndarray] = {}
    rewards = np.array([s.value for s in packed.scores])
    size = np.bincount(packed.groups)
    if "preferred" in needs:
        means = np.bincount(packed.groups, rewards) / size
        found["preferred"] = rewards > np.where(size > 1, means, rewards.mean())[packed.groups]
    if "pairs" in needs:
        found["pairs"] = packed.groups
        better = np.bincount(packed.groups, found.get("preferred", np.ones(len(rewards)) / 2))
        if wrong := np.flatnonzero((size != 2) | (better != 1)).tolist():
            at = next(i for i, group in enumerate(packed.groups) if group == wrong[0])
            raise RunError(
                f"the policy loss learns from pairs of a better and a worse rollout, but task "
                f"{packed.rollouts[at].task.id!r} has {size[wrong[0]]} rollouts, {better[wrong[0]]:g} of them better; "
                "add the filter 'best_worst'"
            )
    if "expert" in needs:
        found["expert"] = np.arange(len(packed.rollouts)) >= packed.sampled
    return found


def minibatches(
    packed: Packed, count: int, passes: int, seed: Sequence[int], *, whole_groups: bool = False
) -> list[np.ndarray]:
    """Rollout indices of each optimiser step: groups shuffled, split into `count` parts, anew in each pass.

    Args:
        packed: The rollouts of a step.
        count: Parts of each pass, of like size; `whole_groups` may leave fewer.
        passes: How often each rollout is trained on.
        seed: Of the order.
        whole_groups: Whether a group must stay in one part (pairs).
    """
    generator = np.random.default_rng(list(seed))
    found: list[np.ndarray] = []
    for _ in range(passes):
        order = generator.permutation(int(packed.groups.max()) + 1)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        rollouts = np.argsort(rank[packed.groups], kind="stable")
        if whole_groups:
            ends = np.cumsum(np.bincount(rank[packed.groups]))
            cuts = [int(part[-1]) for part in np.array_split(ends, count) if len(part)][:-1]
            found += np.split(rollouts, cuts)
        else:
            found += [part for part in np.array_split(rollouts, count) if len(part)]
    return found
