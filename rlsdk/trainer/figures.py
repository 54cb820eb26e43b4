"""What a step's groups say about themselves: lengths, rewards, each source's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlsdk.trainer.evaluation import by_source, is_correct, measured
from rlsdk.types import Group


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Lengths of a step's rollouts, how they ended, and the means of what their workflows measured."""
    rollouts = [r for g in groups for r in g.rollouts]
    lengths = np.array([int(r.loss_mask.sum()) for r in rollouts])
    return {
        **measured(rollouts),
        "rollouts/tokens": float(lengths.sum()),
        "rollouts/length": float(lengths.mean()),
        "rollouts/truncated": float(np.mean([r.status == "truncated" for r in rollouts])),
    }


def reward_metrics(groups: Sequence[Group], *, scored: bool) -> dict[str, float]:
    """Means over the valid scores of a step: reward, its parts, accuracy; nothing for demonstrations."""
    valid = [s for g in groups for s in g.scores if s.valid and scored]
    if not valid:
        return {}
    values = np.array([s.value for s in valid])
    metrics = {
        "reward/mean": float(values.mean()),
        "reward/std": float(values.std()),
        "accuracy/mean": float(np.mean([is_correct(s) for s in valid])),
    }
    for name in sorted({n for s in valid for n in s.metrics if n.startswith("reward/")}):
        metrics[name] = float(np.mean([s.metrics[name] for s in valid if name in s.metrics]))
    return metrics


def source_metrics(groups: Sequence[Group], *, scored: bool) -> dict[str, float]:
    """What workflows measured, rewards and accuracy of each source, if there are several: `source/NAME/…`."""
    return {
        f"source/{source}/{name}": value
        for source, (own,) in by_source(groups).items()
        for name, value in {**rollout_metrics(own), **reward_metrics(own, scored=scored)}.items()
    }
