"""Properties of diagnoses: silent without a reason, never raising, and functions of only the history."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rlsdk.contracts import Finding, History
from rlsdk.testing.findings import Case, Violated
from rlsdk.testing.properties.base import holds
from rlsdk.testing.subject import Subject

METRICS = (
    *(
        "reward/mean",
        "reward/std",
        "reward/format",
        "accuracy/mean",
        "groups/dead",
        "groups/trained",
        "raw/groups_dead",
    ),
    *("rollouts/length", "rollouts/truncated", "rollouts/repetition", "rollouts/entropy", "rollouts/invalid"),
    *("actor/entropy", "actor/clip_share", "actor/kl_to_old", "actor/kl_to_behaviour", "actor/ref_kl", "actor/loss"),
    *("actor/gap", "actor/gap_generation", "actor/grad_norm", "actor/ratio_max", "canary/gap", "staleness/max"),
    *("time/step", "time/produce", "time/update", "time/logprobs", "time/engines_idle", "time/wait_for_rollouts"),
    *("eval/sampled", "eval/greedy", "source/a/share", "source/b/share", "source/a/reward/mean"),
    *("source/a/accuracy/mean", "source/b/accuracy/mean", "engines/alive", "engines/wanted"),
)
"""Metric names in the suite's histories: those of a run that diagnoses read."""
STEPS = 60


def _run(draw: Any) -> History:
    """Return a history with metrics from `draw(name, step)`, which returns None if the step has no value."""
    return History.of({"step": step, **{name: draw(name, step) for name in METRICS}} for step in range(1, STEPS + 1))


def histories() -> Iterator[tuple[str, History]]:
    """Yield various histories, each with a title."""
    random = np.random.default_rng(0)
    yield "no step", History()
    yield "one step", History.of([{"step": 1, **dict.fromkeys(METRICS, 0.5)}])
    yield "unknown metrics", History.of({"step": i, "other/metric": 1.0} for i in range(STEPS))
    yield "all metrics 0", _run(lambda name, step: 0.0)
    yield "metrics that rise", _run(lambda name, step: step / STEPS)
    yield "metrics that fall", _run(lambda name, step: 1.0 - step / STEPS)
    yield "metrics that explode", _run(lambda name, step: 1.2**step)
    yield "random metrics", _run(lambda name, step: float(random.random()))
    yield "metrics that come and go", _run(lambda name, step: float(random.random()) if random.random() < 0.3 else None)
    yield "metrics that end", _run(lambda name, step: 0.9 if step < STEPS // 2 or name == "time/step" else None)
    yield "negative metrics", _run(lambda name, step: -float(random.random()))


def _histories(_: Subject) -> Iterator[Case[History]]:
    return (Case(title, history) for title, history in histories())


def _found(subject: Subject, history: History) -> Any:
    return subject.call(subject.make(), history)


@holds(
    "finds-or-is-silent",
    "diagnosis",
    inputs=_histories,
    remedy="return a `rlsdk.contracts.Finding` with one sentence on the observation and one on what to do, or None; a "
    "metric may be missing, short, zero, or without a value in the last step",
)
def finds_or_is_silent(subject: Subject, history: Any) -> None:
    """For any metrics, it returns a finding with a message and advice, or None."""
    found = _found(subject, history)
    if found is None:
        return
    if not isinstance(found, Finding):
        raise Violated("form", "a Finding, or None", f"{type(found).__name__} {found!r}"[:200])
    if not found.message.strip() or not found.advice.strip():
        raise Violated("form", "a message and advice", repr(found))
    if found.level not in ("info", "warning", "critical"):
        raise Violated("form", "the level info, warning or critical", repr(found.level))


@holds(
    "silent-at-first",
    "diagnosis",
    inputs=lambda _: (Case(title, history) for title, history in histories() if history.step < 2),
    remedy="compare several steps, and return None until there are enough",
    after=("finds-or-is-silent",),
)
def silent_at_first(subject: Subject, history: Any) -> None:
    """It finds nothing before the second step, when it is unknown what is usual in the run."""
    found = _found(subject, history)
    if found is not None:
        raise Violated("value", "None", repr(found))


@holds(
    "same-history-same-finding",
    "diagnosis",
    inputs=_histories,
    remedy="compute only from the history: no clock, no random numbers, no state between calls",
    after=("finds-or-is-silent",),
)
def same_history_same_finding(subject: Subject, history: Any) -> None:
    """The same history gives the same finding, regardless of earlier calls."""
    made = subject.make()
    first = subject.call(made, history)
    for _, other in histories():
        subject.call(made, other)
    again = subject.call(made, history)
    if first != again:
        raise Violated("value", repr(first), repr(again))
