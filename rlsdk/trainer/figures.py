"""What a step's groups say about themselves: lengths, rewards, each source's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlsdk.engines.actor import STEP
from rlsdk.trainer.evaluation import by_source, is_correct, measured
from rlsdk.types import Group


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Lengths of a step's rollouts, how they ended, and the means of what their workflows measured."""
    rollouts = [r for g in groups for r in g.rollouts]
    lengths = np.array([np.count_nonzero(r.loss_mask) for r in rollouts])
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


def raw_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Reward and accuracy before filters: means over the valid scores of all groups that were made."""
    found = reward_metrics(groups, scored=True)
    return {f"raw/{name.removesuffix('/mean')}": found[name] for name in ("reward/mean", "accuracy/mean") if found}


def source_metrics(groups: Sequence[Group], *, scored: bool) -> dict[str, float]:
    """What workflows measured, rewards and accuracy of each source, if there are several: `source/NAME/…`."""
    return {
        f"source/{source}/{name}": value
        for source, (own,) in by_source(groups).items()
        for name, value in {**rollout_metrics(own), **reward_metrics(own, scored=scored)}.items()
    }


def staleness_metrics(versions: np.ndarray, step: int, *, spread: bool) -> dict[str, float]:
    """How many steps old the weights were that sampled the trained tokens.

    Args:
        versions: int64 `[k]`, of the trained tokens, at least one.
        step: Steps that are done.
        spread: Also the mean, and the share of tokens of each age, `staleness/share_N`.
    """
    ages, counts = np.unique(step - versions, return_counts=True)
    metrics = {"staleness/max": float(ages.max())}
    if spread:
        metrics["staleness/mean"] = float(ages @ counts / counts.sum())
        metrics |= {
            f"staleness/share_{age}": float(count / counts.sum()) for age, count in zip(ages, counts, strict=True)
        }
    return metrics


def decode_rates(
    seconds: float, steps: float, running: float, running_squared: float, running_seconds: float
) -> dict[str, float]:
    """Seconds of a decode step, and what each running continuation adds, by least squares; nothing where all are alike.

    Args:
        seconds: Of all decode steps.
        steps: How many.
        running: Continuations, summed over the steps.
        running_squared: Their squares.
        running_seconds: Their products with the seconds of their step.
    """
    spread = running_squared - running**2 / max(steps, 1)
    if steps < 2 or spread <= 1e-6 * running_squared:
        return {}
    each = max(0.0, (running_seconds - running * seconds / steps) / spread)
    fixed = (seconds - each * running) / steps
    if fixed < 0:
        each, fixed = running_seconds / running_squared, 0.0
    return {"engine/step_seconds": fixed, "engine/sequence_seconds": each}


def time_metrics(
    phases: Mapping[str, float], wall: float, spent: Mapping[str, float], *, generated: float, ahead: bool
) -> dict[str, float]:
    """Where the time of a step went.

    Args:
        phases: Seconds of each; `take` is the waiting for rollouts, part of `produce`, and `learn` what overlaps.
        wall: Seconds of the step.
        spent: Seconds inside the engines and the learner, tokens and decode steps, in this step.
        generated: Seconds inside the engines while the learner worked.
        ahead: Whether rollouts run ahead of training.
    """
    shown = {name: seconds for name, seconds in phases.items() if name not in ("take", "learn")}
    metrics = {
        "time/step": wall,
        **{f"time/{name}": seconds for name, seconds in shown.items()},
        "time/engine_inside": spent["engine"],
        "time/learner_inside": spent["learner"],
        "time/outside_share": max(0.0, 1 - (spent["engine"] + spent["learner"]) / wall),
    }
    if spent["steps"] > 0:
        metrics |= {
            "time/engines_idle": float(np.clip(1 - spent["engines"] / wall, 0, 1)),
            "engine/steps": spent["steps"],
            **decode_rates(*(spent[f"all_{name}"] for name in STEP)),
        }
    if ahead:
        metrics["time/wait_for_rollouts"] = phases["take"]
        if "learn" in phases:
            metrics["time/overlap"] = min(1.0, generated / max(phases["learn"], 1e-9))
    return metrics
