"""Metrics of a training step: rollouts, rewards, staleness, time and memory."""

from __future__ import annotations

import reprlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import attrs
import numpy as np

from rlsdk.config.schema import PlacementSection
from rlsdk.engines.actor import STEP
from rlsdk.errors import RunError
from rlsdk.evaluation.evaluation import by_source, is_correct, measured, scored_trajectories, trajectory_means
from rlsdk.isolation.watching import stage
from rlsdk.rollout.step_batch import StepBatch, routing_metrics
from rlsdk.trainer.summary import EQUAL, NONZERO
from rlsdk.types import Group, Rollout, Score

TO_OLD = ("actor/ratio", "actor/ratio_max", "actor/kl_to_old", "actor/kl_to_behaviour")
"""Metrics that compare the policy with the one before the update, and with the one that the engine sampled from."""


def as_numbers(metrics: Mapping[str, Any], giver: str) -> dict[str, float | None]:
    """Return metrics as plain numbers; NumPy scalars and one-element tensors are converted.

    Args:
        metrics: Name -> number, or None if unavailable.
        giver: Origin of the metrics, for the error message.

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
    """Return the trainer's metrics of a step together with those that its learner reported.

    Args:
        metrics: The trainer's own metrics.
        reported: The learner's.
        giver: Origin of the learner's, for the error message.

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


class Timer:
    """Seconds per named phase of a step.

    Attributes:
        seconds: Phase name -> seconds so far.
        started: Time at which the timer was created.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.started = now()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase."""
        start = self._now()
        try:
            with stage(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - start

    @property
    def wall(self) -> float:
        """Seconds since the timer was created."""
        return self._now() - self.started


@attrs.define
class RunTimes:
    """Seconds and tokens of a run in this process, for the run summary.

    Attributes:
        seconds: Seconds outside steps: `start`, `evaluation`, `checkpoints` and, at the end, `whole`.
        phases: Seconds of each step phase.
        tokens: Number of sampled tokens.
        generating: Seconds during which engines sampled.
    """

    seconds: dict[str, float] = attrs.field(factory=dict)
    phases: dict[str, float] = attrs.field(factory=dict)
    tokens: int = 0
    generating: float = 0.0

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a phase outside the steps."""
        start = time.perf_counter()
        with stage(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def add_step(
        self, timer: Timer, wall: float, spent: Mapping[str, float], *, generated: float, sampled: float, ahead: bool
    ) -> dict[str, float]:
        """Add the times of a step and return them as metrics.

        Args:
            timer: Phases of the step.
            wall: Seconds of the step.
            spent: Seconds inside engines and learner, tokens and decode steps of this step.
            generated: Seconds inside the engines while the learner worked.
            sampled: Tokens in the step's batch, for engines that do not count tokens.
            ahead: True if rollouts run ahead of training.
        """
        tokens = spent["tokens"] or sampled
        phases = {**timer.seconds, "produce": timer.seconds.get("produce", 0.0) + timer.seconds["take"]}
        metrics = time_metrics(phases, wall, spent, generated=generated, ahead=ahead)
        for name, seconds in phases.items():
            if f"time/{name}" in metrics:
                self.phases[name] = self.phases.get(name, 0.0) + seconds
        generating = wall if ahead else phases["produce"]  # when running ahead, engines generate all the time
        self.tokens += int(tokens)
        self.generating += generating
        return {**metrics, "time/tokens_per_second": tokens / max(generating, 1e-9)}


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

    Args:
        groups: Groups of a step.
        separate: Parts of the reward that must all be equal; empty to compare the sums.
    """

    def rewards(scores: Sequence[Score]) -> list[float]:
        if separate:
            return [fmean([s.metrics.get(f"reward/{name}", 0.0) for s in scores]) for name in sorted(separate)]
        return [fmean([s.value for s in scores])]

    values = [np.array([rewards(scores) for scores in scored_trajectories([group])]) for group in groups]
    several = [each for each in values if len(each) > 1]
    return {"groups/dead": float(np.mean([np.ptp(each, axis=0).max() < EQUAL for each in several]))} if several else {}


def raw_metrics(groups: Sequence[Group], separate: Collection[str] = ()) -> dict[str, float]:
    """Return reward and accuracy before filters: means over the scored trajectories of all sampled groups.

    Args:
        groups: All sampled groups.
        separate: As in `reward_metrics`.
    """
    found = reward_metrics(groups, scored=True, separate=separate)
    names = {"reward/mean": "raw/reward", "accuracy/mean": "raw/accuracy", "groups/dead": "raw/groups_dead"}
    return {raw: found[name] for name, raw in names.items() if name in found}


def source_metrics(groups: Sequence[Group], *, scored: bool, separate: Collection[str] = ()) -> dict[str, float]:
    """Return workflow metrics, rewards and accuracy per source, if there are several: `source/NAME/…`.

    Args:
        groups: Groups of a step.
        scored: As in `reward_metrics`.
        separate: As in `reward_metrics`.
    """
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

    Args:
        batch: Rollouts of the step, as the update read them.
        step: Number of steps done before it.
        recomputed: True if the old logprobs are the learner's own.
        ahead: True if rollouts run ahead of training.
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


def decode_rates(
    seconds: float, steps: float, running: float, running_squared: float, running_seconds: float
) -> dict[str, float]:
    """Fit the seconds of a decode step, fixed and per running sequence, by least squares; empty if all loads are equal.

    Args:
        seconds: Total seconds of all decode steps.
        steps: Number of decode steps.
        running: Running sequences, summed over the steps.
        running_squared: Squared number of running sequences, summed over the steps.
        running_seconds: Running sequences times seconds, summed over the steps.
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
    """Return the time metrics of a step.

    Args:
        phases: Seconds of each phase; `produce` includes `take`, the wait for rollouts, and `learn` overlaps others.
        wall: Seconds of the step.
        spent: Seconds inside engines and learner, tokens and decode steps of this step.
        generated: Seconds inside the engines while the learner worked.
        ahead: True if rollouts run ahead of training.
    """
    shown = {name: seconds for name, seconds in phases.items() if name not in ("take", "learn")}
    metrics = {
        "time/step": wall,
        **{f"time/{name}": seconds for name, seconds in shown.items()},
        **{f"time/{name}_share": seconds / wall for name, seconds in shown.items()},
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


def device_metrics(
    placement: PlacementSection,
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    apart: int,
    tokens: float,
    wall: float,
    update: float,
) -> dict[str, float]:
    """Return how well a step used the devices: tokens per second and GPU, and the update's model FLOPs utilisation.

    Empty on a CPU, unless `peak_tflops` is set.

    Args:
        placement: Numbers of actors, and the peak of a learner rank's device, if set.
        before: Learner counters at the start of the step.
        after: Learner counters at its end; on GPUs, they have `gpu_bytes`.
        apart: Ranks of models with dedicated processes.
        tokens: Tokens of the step's rollouts, prompts included.
        wall: Seconds of the step.
        update: Seconds of the phase `update`.
    """
    found = {}
    if "gpu_bytes" in after:
        engines = placement.engines * placement.gpus_per_engine
        shared = max(engines, placement.learners) if placement.colocate else engines + placement.learners
        found["time/tokens_per_second_per_gpu"] = tokens / wall / (shared + apart)
    peak = placement.peak_tflops or after.get("peak_tflops")
    flop = after.get("update_flop", 0.0) - before.get("update_flop", 0.0)
    if peak and flop > 0 and update > 0:
        found["time/update_mfu"] = flop / (update * peak * 1e12)
    return found


def memory_metrics(*, driver: int, engine: Mapping[str, float], learner: Mapping[str, float]) -> dict[str, float]:
    """Return the peak memory of each kind of process since its start, in GiB.

    Args:
        driver: Peak host memory of this process, in bytes.
        engine: Engine counters, with `host_bytes` of the largest engine.
        learner: Rank counters, with `host_bytes` and, on GPUs, `gpu_bytes` and `gpu_held_bytes` of the largest rank.
    """
    found = {
        "memory/driver": driver,
        "memory/engine": engine.get("host_bytes"),
        "memory/learner": learner.get("host_bytes"),
        "memory/learner_gpu": learner.get("gpu_bytes"),
        "memory/learner_gpu_held": learner.get("gpu_held_bytes"),
    }
    return {name: size / 2**30 for name, size in found.items() if size}


def skipped_updates(metrics: Mapping[str, float]) -> dict[str, int]:
    """Return the number of updates per role that were skipped for a non-finite gradient; others are absent."""
    counts = {role: int(metrics.get(f"{role}/skipped_updates", 0)) for role in ("actor", "critic")}
    return {role: count for role, count in counts.items() if count}
