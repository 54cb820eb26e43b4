"""Metrics of a training step: rollouts, rewards, staleness; `timing` has those of time and memory."""

from __future__ import annotations

import reprlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from rlsdk.errors import RunError
from rlsdk.evaluation.evaluation import by_source, is_correct, measured, scored_trajectories, trajectory_means
from rlsdk.rollout.step_batch import StepBatch, routing_metrics
from rlsdk.trainer.summary import EQUAL, NONZERO
from rlsdk.types import Group, Rollout, Score

TO_OLD = ("actor/ratio", "actor/ratio_max", "actor/kl_to_old", "actor/kl_to_behaviour")
"""Metrics that compare the policy with the one before the update, and with the one that the engine sampled from."""


def as_numbers(metrics: Mapping[str, Any], giver: str) -> dict[str, float | None]:
    """Return metrics as plain numbers; NumPy scalars and one-element tensors are converted.

    `giver` names their origin in errors.

    Raises:
        RunError: A metric is not a number.
    """
    found: dict[str, float | None] = {}
    for name, value in metrics.items():
        try:
            number = None if value is None else float(_number(value))  # of a long integer, an OverflowError
            found[name] = value if type(value) is int else number
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            given = reprlib.repr(value)
            raise RunError(f"metric {name!r} of {giver}: expected one number, got {given}") from error
    return found


def step_line(metrics: Mapping[str, Any], giver: str) -> dict[str, float | None]:
    """Return the metrics of a step as plain numbers, as `as_numbers` does.

    Raises:
        RunError: A metric is not a number, or has the name of the step's number in `metrics.jsonl`.
    """
    if "step" in metrics:
        raise RunError(
            f"metric 'step' of {giver}: each line of metrics.jsonl has the number of the step under that name; choose "
            "another"
        )
    return as_numbers(metrics, giver)


def with_reported(metrics: Mapping[str, float], reported: Mapping[str, float], giver: str) -> dict[str, float]:
    """Return the trainer's metrics of a step together with those that its learner, the `giver`, reported.

    Raises:
        RunError: The learner reported a name of the trainer's.
    """
    # Evaluations come later, and not after each step.
    taken = (name for name in reported if name in metrics or name == "step" or name.startswith("eval/"))
    if name := next(taken, ""):
        raise RunError(
            f"metric {name!r} of {giver}: the trainer has a metric of that name itself; choose another, such as "
            f"'learner/{name.rpartition('/')[2]}'"
        )
    return {**metrics, **reported}


def _number(value: Any) -> Any:
    if isinstance(value, str | bytes):  # float() would parse it
        raise TypeError
    return value.item() if hasattr(value, "item") else value


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return length and status metrics of a step's rollouts, and the means of their workflow metrics."""
    rollouts = [r for g in groups for r in g.rollouts]
    # Tokens that are too old to be trained on were sampled all the same.
    sampled = np.concatenate([r.loss_mask for r in rollouts])
    sampled |= np.concatenate([r.policy_versions for r in rollouts]) >= 0
    sizes = [len(r.loss_mask) for r in rollouts]
    owners = np.repeat(np.arange(len(rollouts)), sizes)
    lengths = np.bincount(owners[sampled], minlength=len(rollouts))
    truncated = np.array([r.status == "truncated" for r in rollouts])
    spread = rollouts[:: -(-len(rollouts) // 64)]  # an evenly spread sample, since the metric is costly
    some = [r.token_ids[r.loss_mask | (r.policy_versions >= 0)] for r in spread]
    return {
        **measured(groups),
        "rollouts/tokens": float(lengths.sum()),
        "rollouts/tokens_total": float(sum(sizes)),
        "rollouts/length": float(lengths.mean()),
        "rollouts/length_min": float(lengths.min()),
        "rollouts/length_max": float(lengths.max()),
        **({} if truncated.all() else {"rollouts/length_complete": float(lengths[~truncated].mean())}),
        **prompt_lengths(sampled, np.cumsum(sizes) - sizes),
        "rollouts/truncated": float(truncated.mean()),
        "rollouts/repetition": float(np.mean([repetition(each) for each in some])),
        **sampled_entropy(rollouts),
    }


def prompt_lengths(sampled: np.ndarray, starts: np.ndarray) -> dict[str, float]:
    """Return mean and maximum number of tokens before the first sampled one; empty if no token was sampled.

    Args:
        sampled: bool `[t]`, True for sampled tokens of the concatenated rollouts.
        starts: int64 `[n]`, index of each rollout's first token.
    """
    at = np.flatnonzero(sampled)
    owners = np.searchsorted(starts, at, side="right") - 1
    first = np.flatnonzero(np.diff(owners, prepend=-1))
    if not len(first):
        return {}
    lengths = at[first] - starts[owners[first]]
    return {"rollouts/prompt_length": float(lengths.mean()), "rollouts/prompt_length_max": float(lengths.max())}


def explained_variance(values: np.ndarray, returns: np.ndarray) -> dict[str, float]:
    """Return the share of the returns' variance that the critic's values explain; empty if all returns are equal.

    Args:
        values: Values of the trained tokens before the update, float32 `[k]`.
        returns: Their returns, float32 `[k]`.
    """
    spread = np.var(returns, dtype=np.float64)
    if not spread > 0:
        return {}
    return {"critic/explained_variance": 1.0 - float(np.var(returns - values, dtype=np.float64) / spread)}


def repetition(token_ids: np.ndarray, size: int = 8) -> float:
    """Return the share of n-grams that occurred earlier in the same rollout; 0 for a rollout of up to `size` tokens.

    Args:
        token_ids: int64 `[t]`, sampled tokens.
        size: Tokens per n-gram.
    """
    if len(token_ids) <= size:
        return 0.0
    phrases = np.lib.stride_tricks.sliding_window_view(token_ids, size)
    return 1.0 - len({phrase.tobytes() for phrase in phrases}) / len(phrases)


def sampled_entropy(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of `-logprob` over the sampled tokens, a free and unbiased estimate of the entropy.

    Empty for demonstrations, which were not sampled.
    """
    sampled = np.concatenate([r.loss_mask for r in rollouts])
    sampled &= np.concatenate([r.policy_versions for r in rollouts]) >= 0
    found = np.concatenate([r.logprobs for r in rollouts])[sampled]
    return {"rollouts/entropy": -float(found.mean(dtype=np.float64))} if len(found) else {}


def reward_metrics(groups: Sequence[Group], *, scored: bool, separate: Collection[str] = ()) -> dict[str, float]:
    """Return means over a step's scored trajectories: reward, its terms, their own metrics, accuracy.

    Args:
        groups: Groups of the step.
        scored: False for demonstrations, which have no rewards: the result is empty.
        separate: Parts of the reward that the algorithm reads one by one; empty if it reads their sum.
    """
    valid = scored_trajectories(groups) if scored else []
    if not valid:
        return {}
    values = np.array([fmean([s.value for s in scores]) for scores in valid])
    means = trajectory_means([[s.metrics for s in scores] for scores in valid])
    return {
        **{name if name.startswith("reward/") else f"score/{name}": value for name, value in means.items()},
        "reward/mean": float(values.mean()),
        "reward/std": float(values.std()),
        "reward/min": float(values.min()),
        "reward/max": float(values.max()),
        **term_spreads(valid),
        "accuracy/mean": float(np.mean([is_correct(scores[-1]) for scores in valid])),
        **dead_share(groups, separate),
    }


def term_spreads(trajectories: Sequence[Sequence[Score]]) -> dict[str, float]:
    """Return deviation, minimum and maximum of each term of a reward that has several; empty for a single one."""
    terms = sorted(
        {name for scores in trajectories for s in scores for name in s.metrics if name.startswith("reward/")}
    )
    found: dict[str, float] = {}
    for term in terms if len(terms) > 1 else ():
        held = [[s.metrics[term] for s in scores if term in s.metrics] for scores in trajectories]
        values, name = np.array([fmean(each) for each in held if each]), term.removeprefix("reward/")
        found |= {
            f"reward_std/{name}": float(values.std()),
            f"reward_min/{name}": float(values.min()),
            f"reward_max/{name}": float(values.max()),
        }
    return found


def dead_share(groups: Sequence[Group], separate: Collection[str] = ()) -> dict[str, float]:
    """Return the share of groups whose scored trajectories all got equal rewards; empty for groups of one.

    The parts of the reward in `separate`, if any, must each be equal; otherwise, the sums.
    """

    def rewards(scores: Sequence[Score]) -> list[float]:
        if separate:
            return [fmean([s.metrics.get(f"reward/{name}", 0.0) for s in scores]) for name in sorted(separate)]
        return [fmean([s.value for s in scores])]

    values = [np.array([rewards(scores) for scores in scored_trajectories([group])]) for group in groups]
    several = [each for each in values if len(each) > 1]
    return {"groups/dead": float(np.mean([np.ptp(each, axis=0).max() < EQUAL for each in several]))} if several else {}


def raw_metrics(groups: Sequence[Group], separate: Collection[str] = ()) -> dict[str, float]:
    """Return reward and accuracy before filters: means over the scored trajectories of all sampled groups."""
    found = reward_metrics(groups, scored=True, separate=separate)
    names = {"reward/mean": "raw/reward", "accuracy/mean": "raw/accuracy", "groups/dead": "raw/groups_dead"}
    return {raw: found[name] for name, raw in names.items() if name in found}


def source_metrics(groups: Sequence[Group], *, scored: bool, separate: Collection[str] = ()) -> dict[str, float]:
    """Return workflow metrics, rewards and accuracy per source, if there are several: `source/NAME/…`."""
    return {
        f"source/{source}/{name}": value
        for source, (own,) in by_source(groups).items()
        for name, value in {**rollout_metrics(own), **reward_metrics(own, scored=scored, separate=separate)}.items()
    }


def source_shares(groups: Sequence[Group]) -> dict[str, float]:
    """Return the share of each source in a step's trained groups: `source/NAME/share`.

    A step with a single source reports it, too; a source without a group in the step has no value.
    """
    counts = Counter(group.task.source for group in groups)
    return {f"source/{source}/share": count / counts.total() for source, count in counts.items() if source}


def update_metrics(batch: StepBatch, step: int, *, recomputed: bool, ahead: bool) -> dict[str, float]:
    """Return metrics of the sampled tokens that a step trained on: advantages, logprob gap, staleness, routing, critic.

    The gap is that of `recomputed` old logprobs; the share per staleness is that of a run `ahead` of training.
    """
    tokens, count = batch.arrays.tokens, batch.sampled_tokens
    trained, versions = batch.arrays.loss_mask[:count], tokens["policy_versions"][:count]
    metrics = {NONZERO: float(np.mean(tokens["advantages"][:count][trained] != 0))}
    if recomputed:
        segments = np.repeat(np.arange(batch.sampled), batch.arrays.responses[: batch.sampled])
        old, engine = tokens["old_logprobs"][:count], tokens["behaviour_logprobs"][:count]
        metrics |= gap_metrics(old, engine, trained & (versions == step), segments)
    metrics |= staleness_metrics(versions[trained], step, spread=ahead)
    metrics |= routing_metrics(batch.arrays)
    if "returns" in tokens and "values" in tokens:
        metrics |= explained_variance(tokens["values"][:count][trained], tokens["returns"][:count][trained])
    return metrics


def staleness_metrics(versions: np.ndarray, step: int, *, spread: bool) -> dict[str, float]:
    """Return the staleness in steps of the trained tokens.

    Args:
        versions: int64 `[k]`, weight versions of the trained tokens, at least one.
        step: Number of steps done.
        spread: True to add the mean and the share of tokens per staleness, `staleness/share_N`.
    """
    ages, counts = np.unique(step - versions, return_counts=True)
    metrics = {"staleness/max": float(ages.max())}
    if spread:
        metrics["staleness/mean"] = float(ages @ counts / counts.sum())
        metrics |= {
            f"staleness/share_{age}": float(count / counts.sum()) for age, count in zip(ages, counts, strict=True)
        }
    return metrics


def gap_metrics(learner: np.ndarray, engine: np.ndarray, current: np.ndarray, segments: np.ndarray) -> dict[str, float]:
    """Return the gap between learner and engine logprobs under the same weights; empty if no token qualifies.

    `actor/gap` is the maximum difference per token; `actor/gap_generation` sums it over each rollout: the mean of the
    absolute sums.

    Args:
        learner: Learner logprobs, float32 `[t]`, in nats.
        engine: Engine logprobs, float32 `[t]`, in nats.
        current: bool `[t]`, True for trained tokens that were sampled with the learner's current weights.
        segments: Rollout index of each token, int64 `[t]`.
    """
    if not current.any():
        return {}
    gap = np.where(current, learner.astype(np.float64) - engine, 0.0)
    generations = np.abs(np.bincount(segments, gap))[np.unique(segments[current])]
    return {"actor/gap": float(np.abs(gap).max()), "actor/gap_generation": float(generations.mean())}


def skipped_updates(metrics: Mapping[str, float]) -> dict[str, int]:
    """Return the number of updates per role that were skipped for a non-finite gradient; others are absent."""
    counts = {role: int(metrics.get(f"{role}/skipped_updates", 0)) for role in ("actor", "critic")}
    return {role: count for role, count in counts.items() if count}
