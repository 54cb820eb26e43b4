"""Diagnoses of engines and learners: which one waits for the other, and lost engines."""

from __future__ import annotations

import rlsdk
from rlsdk.contracts import Finding, History
from rlsdk.limits import Count

LEARNER = ("time/logprobs", "time/credit", "time/update", "time/sync")
"""Phases in which engines are idle unless rollouts run ahead."""


@rlsdk.diagnosis("idle_engines")
def idle_engines(
    history: History, *, window: Count = 10, share: float = 0.5, least_seconds: float = 1.0
) -> Finding | None:
    """Engines are idle for half of a step, and the learner is not the reason.

    Reads `time/engines_idle` minus the learner's share of the step: the rest is waiting for rewards, environments,
    tools, or the last long answer.

    Args:
        history: Metrics so far.
        window: Number of steps to average over.
        share: Threshold for the idle share of the step, not counting the learner's.
        least_seconds: Minimum step time; shorter steps are ignored, since a call alone costs milliseconds.
    """
    idle = history["time/engines_idle"]
    if not history.current(idle, window) or _seconds(history, window) < least_seconds:
        return None
    now = idle.last(window).mean
    ahead = len(history["time/wait_for_rollouts"]) > 0
    if ahead and _waiting(history, window) <= 0.05:
        return None  # the learner does not wait: `learner_bound`
    left = now if ahead else now - _learning(history, window)
    if left < share:
        return None
    return Finding(
        f"engines are idle for {now:.0%} of a step, {left:.0%} for reasons other than the learner",
        "run more rollouts at once (batch_size, the engine's max_num_seqs), more environments.workers or "
        "scoring.workers; use rollout.oversample with a stop rule against the last long answers, or "
        "rollout.max_staleness=1 to run ahead",
        "info",
        idle.name,
    )


@rlsdk.diagnosis("learner_bound")
def learner_bound(
    history: History, *, window: Count = 10, share: float = 0.7, least_seconds: float = 1.0
) -> Finding | None:
    """The learner is the bottleneck: more engines would not make the run faster.

    Reads the learner's phases in `time/…`; if rollouts run ahead, `time/wait_for_rollouts` as well.

    Args:
        history: Metrics so far.
        window: Number of steps to average over.
        share: Threshold for the learner's share of the step.
        least_seconds: Minimum step time; shorter steps are ignored.
    """
    update = history["time/update"]
    if not history.current(update, window) or _seconds(history, window) < least_seconds:
        return None
    now = _learning(history, window)
    if now < share or (len(history["time/wait_for_rollouts"]) and _waiting(history, window) > 0.05):
        return None
    return Finding(
        f"the learner takes {now:.0%} of a step (limit {share:.0%})",
        "give it more devices (placement.learners) and engines fewer, raise learner.micro_batch_tokens, avoid "
        "recomputation (old_logprobs=rollout, kl_coef=0), or make fewer updates per batch",
        "info",
        update.name,
    )


@rlsdk.diagnosis("engine_lost")
def engine_lost(history: History, *, window: Count = 3) -> Finding | None:
    """An engine has died and has not been restarted: the others do its work.

    Reads `engines/alive`, and `engines/wanted`, which `rlsdk engines` changes. A dead engine is restarted unless it
    dies too often.

    Args:
        history: Metrics so far.
        window: Number of steps it must be missing: a restart takes a while.
    """
    alive = history["engines/alive"]
    if not history.current(alive, window + 1):
        return None
    wanted = history["engines/wanted"].last(1)
    most, now = min([alive.values.max(), *wanted.values]), alive.last(window).values.max()
    if now >= most:
        return None
    return Finding(
        f"{most - now:.0f} of {most:.0f} engines have not run for {window} steps",
        "see its log in the run's folder (logs/) for the cause; if it ran out of memory, reduce what each engine uses",
        metric=alive.name,
    )


def _seconds(history: History, window: int) -> float:
    return history["time/step"].last(window).mean


def _learning(history: History, window: int) -> float:
    """Share of the step in which the learner works."""
    spent = [history[name].last(window).mean for name in LEARNER if len(history[name])]
    return sum(spent) / _seconds(history, window)


def _waiting(history: History, window: int) -> float:
    """Share of the step in which the learner waits for rollouts that run ahead."""
    return history["time/wait_for_rollouts"].last(window).mean / _seconds(history, window)
