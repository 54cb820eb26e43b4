"""Inputs of credit assignment and losses for a packed training step, and its split into minibatches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from rlsdk.batch import CreditInputs
from rlsdk.contracts.tasks import label_of
from rlsdk.errors import RunError
from rlsdk.fields import FORWARD
from rlsdk.plurals import counted
from rlsdk.rollout.step_batch import StepBatch


def credit_inputs(
    batch: StepBatch, needs: frozenset[str], *, train_step: int = 0, train_steps: int = 1
) -> CreditInputs:
    """Return the inputs of shaping and advantage: the required fields, and the optional ones in `needs`.

    Args:
        batch: Rollouts of a step.
        needs: Fields that the components declared.
        train_step: Number of completed training steps.
        train_steps: Number of training steps of the run.
    """
    found = {k: torch.from_numpy(np.array(v)) for k, v in batch.fields.items() if k in needs}
    optional: dict[str, Any] = {name: value for name, value in found.items() if name in FORWARD}
    token_rewards = _token_rewards(batch)
    if token_rewards is not None:
        optional["token_rewards"] = token_rewards
    if "sources" in needs:
        optional["sources"] = _dense([r.task.source for r in batch.rollouts])
    if "trajectories" in needs:
        labels = _own(r.trajectory for r in batch.rollouts)
        optional["trajectories"] = _dense([f"{g}\0{label}" for g, label in zip(batch.groups, labels, strict=True)])
    if "steps" in needs:
        optional["steps"] = torch.tensor([r.step for r in batch.rollouts])
    if "states" in needs:
        optional["states"] = _dense(_own(r.state for r in batch.rollouts))
    if any(s.shared for s in batch.scores):
        optional["shared_scores"] = torch.tensor([s.shared for s in batch.scores])
    if batch.baselines is not None:
        optional["baseline_rewards"] = torch.from_numpy(batch.baselines)
    if "reward_parts" in needs:
        names = sorted({name for s in batch.scores for name in s.metrics if name.startswith("reward/")})
        optional["reward_parts"] = {
            name.removeprefix("reward/"): torch.tensor([float(s.metrics.get(name, 0.0)) for s in batch.scores])
            for name in names
        }
    return CreditInputs(
        torch.tensor([s.value for s in batch.scores], dtype=torch.float32),
        torch.from_numpy(batch.groups),
        torch.from_numpy(batch.arrays.responses),
        torch.from_numpy(batch.arrays.loss_mask),
        train_step=train_step,
        train_steps=train_steps,
        **optional,
    ).with_extra(**{name: value for name, value in found.items() if name not in FORWARD})


def _own(labels: Iterable[str]) -> list[str]:
    """Give each unlabelled rollout a unique label, so that it shares a trajectory or state with no other."""
    return [label or f"\0{i}" for i, label in enumerate(labels)]


def _dense(labels: Sequence[str]) -> torch.Tensor:
    return torch.from_numpy(np.unique(np.array(labels), return_inverse=True)[1].astype(np.int64))


def _token_rewards(batch: StepBatch) -> torch.Tensor | None:
    """Token rewards, float `[t]`, if any score has them; other scores are placed on the last sampled token."""
    if all(s.token_rewards is None for s in batch.scores):
        return None
    arrays = batch.arrays
    rewards = np.zeros(int(arrays.responses.sum()), np.float32)
    offsets = np.cumsum(arrays.responses) - arrays.responses
    for i, score in enumerate(batch.scores):
        pairs = (
            ((arrays.starts[i] + arrays.responses[i] - 1, score.value),)
            if score.token_rewards is None
            else score.token_rewards
        )
        mask = arrays.loss_mask[offsets[i] : offsets[i] + arrays.responses[i]]
        sampled = np.flatnonzero(mask)
        for position, value in pairs:  # a reward on a token that was not sampled belongs to the sampled one before it
            before = np.searchsorted(sampled, position - arrays.starts[i], side="right") - 1
            rewards[offsets[i] + sampled[max(before, 0)]] += value
    return torch.from_numpy(rewards)


def labels(
    batch: StepBatch, needs: frozenset[str], *, passing: float = 1.0, rewarded: bool = True
) -> dict[str, np.ndarray]:
    """Return the labels in `needs` that preference losses and imitation losses read, `[n]` each.

    `pairs` is the group; `expert` is True for an expert's answer. If a loss reads `pairs`, `preferred` is True for the
    better one of each pair. Otherwise it is True for each right answer.

    Args:
        batch: Rollouts of a step.
        needs: Fields that the components declared.
        passing: Minimum reward of a right answer.
        rewarded: True if the run has a reward.

    Raises:
        RunError: A group is not a pair, or its two rewards are equal.
        DataError: A demonstration has no label that says whether it is right.
    """
    found: dict[str, np.ndarray] = {}
    if "pairs" in needs:
        found = {"pairs": batch.groups, "preferred": _better(batch)}
    elif "preferred" in needs:
        found["preferred"] = _right(batch, passing, rewarded)
    if "expert" in needs:
        found["expert"] = np.arange(len(batch.rollouts)) >= batch.sampled
    return {name: values for name, values in found.items() if name in needs}


def _better(batch: StepBatch) -> np.ndarray:
    """Bool `[n]`: True for the rollout with the greater reward in each pair."""
    rewards, size = np.array([s.value for s in batch.scores]), np.bincount(batch.groups)
    least = np.full(len(size), np.inf)
    np.minimum.at(least, batch.groups, rewards)
    better: np.ndarray = rewards > least[batch.groups]  # not above the mean, which may round up to the greater one
    count = np.bincount(batch.groups, better)
    if wrong := np.flatnonzero((size != 2) | (count != 1)).tolist():
        at = next(i for i, group in enumerate(batch.groups) if group == wrong[0])
        raise RunError(
            f"the policy loss learns from pairs of a better and a worse rollout, but task "
            f"{batch.rollouts[at].task.id!r} has {counted(size[wrong[0]].item(), 'rollout')}, {count[wrong[0]]:g} of "
            "them better; add the filter 'best_worst'"
        )
    return better


def _right(batch: StepBatch, passing: float, rewarded: bool) -> np.ndarray:
    """Bool `[n]`: True for a right rollout, judged by its reward or, for a demonstration, by its task's label."""
    right = np.array([score.value >= passing for score in batch.scores])
    for i, rollout in enumerate(batch.rollouts):
        if (rollout.policy_versions[rollout.loss_mask] >= 0).any():
            continue  # sampled: the task's label does not apply to this answer
        labelled = isinstance(rollout.task.metadata.get("label"), bool)
        if labelled or i >= batch.sampled or not rewarded:
            right[i] = label_of(rollout.task)
    return right


def minibatches(
    batch: StepBatch, count: int, passes: int, seed: Sequence[int], *, whole_groups: bool = False
) -> list[np.ndarray]:
    """Return the rollout indices of each optimiser step; each pass shuffles the groups and splits them.

    Args:
        batch: Rollouts of a step.
        count: Number of parts of similar size in each pass; `whole_groups` may yield fewer.
        passes: Number of passes over the rollouts.
        seed: Seed of the order.
        whole_groups: True to keep each group in one part (pairs).
    """
    generator = np.random.default_rng(list(seed))
    found: list[np.ndarray] = []
    for _ in range(passes):
        order = generator.permutation(int(batch.groups.max()) + 1)
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        rollouts = np.argsort(rank[batch.groups], kind="stable")
        if whole_groups:
            ends = np.cumsum(np.bincount(rank[batch.groups]))
            cuts = [int(part[-1]) for part in np.array_split(ends, count) if len(part)][:-1]
            found += np.split(rollouts, cuts)
        else:
            found += [part for part in np.array_split(rollouts, count) if len(part)]
    return found
