"""Properties of rewards, filters and diagnoses."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlsdk.contracts import Finding, History, Series, batch_of
from rlsdk.contracts.metric_names import NAMED_METRICS, unknown_metric
from rlsdk.errors import DataError
from rlsdk.scoring.outcome import as_score
from rlsdk.testing import samples
from rlsdk.testing.findings import Case, NotApplicable, Violated, shape, time_limit
from rlsdk.testing.subject import Subject, holds
from rlsdk.types import Group, Rollout, Score, Task

SECONDS = 10.0
"""Time limit in seconds for any single response; training scores thousands."""
METRICS = (
    *NAMED_METRICS,
    *("reward/format", "source/a/share", "source/b/share", "source/a/reward/mean", "actor/gap_generation"),
    *("source/a/accuracy/mean", "source/b/accuracy/mean"),
)
"""Metric names in the suite's histories."""
STEPS = 60


def score(subject: Subject, rollouts: Sequence[Rollout]) -> list[Score]:
    """Return scores of rollouts, from sync or async functions of one or many rollouts.

    Raises:
        Violated: The reward raised, or returned something other than scores.
    """
    made = subject.make()
    if subject.component.batch:
        answers = _answer(subject, made, list(rollouts))
        answers = answers.tolist() if hasattr(answers, "tolist") else answers
        if not isinstance(answers, Sequence) or len(answers) != len(rollouts):
            got = f"{len(answers)} scores" if isinstance(answers, Sequence) else shape(answers)
            raise Violated("form", f"a list of {len(rollouts)} scores, in the order of the rollouts", got)
    else:
        answers = [_answer(subject, made, each) for each in rollouts]
    return [_score(answer) for answer in answers]


def _answer(subject: Subject, made: Callable[..., Any], argument: Any) -> Any:
    with time_limit(SECONDS):
        return subject.call(made, argument)


def _score(answer: Any) -> Score:
    score = as_score(answer)
    if not score.valid and not isinstance(answer, Score):
        raise Violated("form", "a finite number, or a Score", f"{shape(answer)} ({score.reason})")
    return score


def scorable(subject: Subject) -> tuple[Task, str]:
    """Return the first sample task that the reward can score; and why not, if it gave no task a valid score.

    Raises:
        NotApplicable: The reward rejects the answers of all tasks.
        Violated: The reward raises on all tasks for other reasons.
    """
    failed: list[Violated] = []
    unscored: tuple[Task, str] | None = None
    for task in (*subject.tasks, *samples.TASKS):
        try:
            found = score(subject, [samples.rollout(task, response) for response in samples.RESPONSES])
        except Violated as error:
            if error.sort == "late":  # the other tasks would take as long
                raise
            failed.append(error)
        else:
            if any(each.valid for each in found):
                return task, ""
            unscored = unscored or (task, found[0].reason)
    if unscored:
        return unscored
    others = [error for error in failed if not isinstance(error.__cause__, DataError)]
    if len(others) == len(failed):
        raise others[0]
    raise NotApplicable(f"no sample task suits it ({failed[0].got}); {_GIVE_ONE}")


_GIVE_ONE = """give one: --task '{"prompt": …, "answer": …}'"""


def _responses(subject: Subject) -> list[Case[Any]]:
    task, _ = scorable(subject)
    return [Case("a response", samples.rollout(task, response)) for response in samples.RESPONSES]


@holds(
    "scores",
    "reward",
    inputs=lambda _: [Case("the suite's first task", samples.rollout(samples.TASKS[0], samples.RESPONSES[0]))],
    remedy="return a finite number or rlsdk.Score(value); raise rlsdk.errors.DataError for a task that cannot be "
    "scored, and give one that can with --task",
)
def scores(subject: Subject, _: Rollout) -> None:
    """It returns a finite number or a Score for a response to a task that it can score."""
    task, why = scorable(subject)
    if why and task in subject.tasks:
        raise Violated("value", f"a valid score of one of {len(samples.RESPONSES)} responses to task {task.id!r}", why)
    if why:
        raise NotApplicable(f"no response to a sample task got a valid score ({why}); {_GIVE_ONE}")


@holds(
    "deterministic",
    "reward",
    inputs=_responses,
    remedy="keep no state between calls (in a list of the module or a field of the class); seed randomness with the "
    "rollout's task, or say in the docstring that the score is a sample",
    after=("scores",),
)
def same_score(subject: Subject, rollout: Rollout) -> None:
    """The same response has the same score."""
    (first,), (second,) = score(subject, [rollout]), score(subject, [rollout])
    if (first.value, first.valid) != (second.value, second.valid):
        raise Violated("value", f"{first.value:g} again", f"{second.value:g}")


def _hostile(subject: Subject) -> list[Case[Any]]:
    task, _ = scorable(subject)
    return [Case(title, samples.rollout(task, response)) for title, response in samples.HOSTILE]


@holds(
    "any-text",
    "reward",
    inputs=_hostile,
    remedy="treat the model's text as data: bound its length before parsing, and never evaluate it; if it cannot be "
    "scored, return Score.invalid(reason)",
    after=("scores",),
)
def any_text(subject: Subject, rollout: Rollout) -> None:
    """Any text of the policy gets a score, finite or invalid, in limited time."""
    with time_limit(SECONDS):
        score(subject, [rollout])


def _many(subject: Subject) -> list[Case[Any]]:
    task, _ = scorable(subject)
    return [Case("responses", [samples.rollout(task, response) for response in samples.RESPONSES])]


@holds(
    "batch-order",
    "reward",
    inputs=_many,
    remedy="return one score per rollout, in the order of the rollouts; an empty list for no rollouts",
    after=("scores", "deterministic"),
    only=lambda component: bool(component.batch),
)
def batch_order(subject: Subject, rollouts: list[Rollout]) -> None:
    """Reordered rollouts get the same scores, reordered."""
    found = [each.value for each in score(subject, rollouts)]
    turned = [each.value for each in score(subject, rollouts[::-1])][::-1]
    if found != turned:
        raise Violated("value", f"{found}, as in the given order", f"{turned} from the reverse, turned back")
    score(subject, [])


@holds(
    "batch-splits",
    "reward",
    inputs=_many,
    remedy="score each rollout by itself: with batch=True, lists are split anywhere, even into single rollouts; a "
    'reward that compares rollouts needs batch="group" and is called once with all rollouts of a task',
    after=("scores", "deterministic", "batch-order"),
    only=lambda component: component.batch is True,
)
def batch_splits(subject: Subject, rollouts: list[Rollout]) -> None:
    """A rollout has the same score in any list."""
    if batch_of(subject.make()) == "group":
        return  # its options select whole groups: lists are never split
    together = [each.value for each in score(subject, rollouts)]
    for size in (1, len(rollouts) // 2 + 1):
        lists = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        found = [each.value for some in lists for each in score(subject, some)]
        if not all(map(_alike, together, found)):
            raise Violated("value", f"{together}, as in one list", f"{found} in lists of {size} at most")


def _alike(one: float, other: float) -> bool:
    """Return whether two scores differ only by rounding, which depends on a model's batch."""
    return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-6)


def keep(subject: Subject, held: Group) -> list[int]:
    """Return the rollouts of a group that a filter keeps.

    Raises:
        Violated: The filter raised, or returned neither a bool nor a part of the group.
    """
    answer = subject.call(subject.make(), held)
    if isinstance(answer, bool | np.bool_):
        return list(range(len(held))) if answer else []
    if not isinstance(answer, Group):
        raise Violated("form", "True, False or a Group", shape(answer))
    places = {id(rollout): i for i, rollout in enumerate(held.rollouts)}
    kept = [places.get(id(rollout), -1) for rollout in answer.rollouts]
    paired = all(i >= 0 and held.scores[i] is s for i, s in zip(kept, answer.scores, strict=True))
    if not paired or len(set(kept)) < len(kept):
        raise Violated("form", "rollouts of the group, each once, with their own scores", f"a group of {len(kept)}")
    return sorted(kept)


@holds(
    "keeps-a-part",
    "filter",
    inputs=lambda _: samples.ordinary_groups(),
    remedy="return True, False, or Group(group.task, rollouts, scores) with some of the group's rollouts",
)
def keeps_a_part(subject: Subject, held: Group) -> None:
    """It returns a bool, or some of the group's rollouts with their scores."""
    keep(subject, held)


@holds(
    "degenerate-groups",
    "filter",
    inputs=lambda _: samples.degenerate_groups(),
    remedy="a group may have one rollout, equal rewards, or no valid score: return False to drop it",
    after=("keeps-a-part",),
)
def degenerate_groups(subject: Subject, held: Group) -> None:
    """It handles groups of one rollout, with equal rewards, or without valid scores."""
    keep(subject, held)


@holds(
    "deterministic",
    "filter",
    inputs=lambda _: samples.ordinary_groups(),
    remedy="decide only from the group; random choices make a run irreproducible",
    after=("keeps-a-part",),
)
def same_answer(subject: Subject, held: Group) -> None:
    """The same group gets the same result."""
    first, second = keep(subject, held), keep(subject, held)
    if first != second:
        raise Violated("value", f"rollouts {first} again", f"{second}")


@holds(
    "permutation",
    "filter",
    inputs=lambda _: samples.ordinary_groups(),
    remedy="choose by scores, status or text; a rollout's position in its group is meaningless",
    after=("keeps-a-part", "deterministic"),
)
def any_order(subject: Subject, held: Group) -> None:
    """The order of a group's rollouts does not affect which are kept."""
    order = list(range(len(held)))[::-1]
    found = sorted(order[i] for i in keep(subject, samples.part(held, order)))
    wanted = keep(subject, held)
    if found != wanted:
        raise Violated("value", f"rollouts {wanted} kept in any order", f"{found} in the order {order}")


@functools.cache
def histories(declared: tuple[str, ...] = ()) -> tuple[tuple[str, History], ...]:
    """Return various histories, each with a title; they also have the metrics that a diagnosis declares."""
    names, random = (*METRICS, *declared), np.random.default_rng(0)

    def run(draw: Any) -> History:
        """Return a history with metrics from `draw(name, step)`, which returns None if the step has no value."""
        return History.of({"step": step, **{name: draw(name, step) for name in names}} for step in range(1, STEPS + 1))

    return (
        ("no step", History()),
        ("one step", History.of([{"step": 1, **dict.fromkeys(names, 0.5)}])),
        ("unknown metrics", History.of({"step": i, "other/metric": 1.0} for i in range(STEPS))),
        ("all metrics 0", run(lambda name, step: 0.0)),
        ("metrics that rise", run(lambda name, step: step / STEPS)),
        ("metrics that fall", run(lambda name, step: 1.0 - step / STEPS)),
        ("metrics that explode", run(lambda name, step: 1.2**step)),
        ("random metrics", run(lambda name, step: float(random.random()))),
        (
            "metrics that come and go",
            run(lambda name, step: float(random.random()) if random.random() < 0.3 else None),
        ),
        ("metrics that end", run(lambda name, step: 0.9 if step < STEPS // 2 or name == "time/step" else None)),
        ("negative metrics", run(lambda name, step: -float(random.random()))),
    )


def _histories(subject: Subject) -> Iterator[Case[History]]:
    return (Case(title, history) for title, history in histories(subject.component.metrics))


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


class _ReadSeries(dict[str, Series]):
    """Metrics of a history that note which names are looked up."""

    def __init__(self, held: Mapping[str, Series]) -> None:
        super().__init__(held)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Series:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self.names.add(str(name))
        return super().__contains__(name)


@holds(
    "reads-known-metrics",
    "diagnosis",
    inputs=_histories,
    remedy="correct the name; docs/metrics.md lists what rlsdk logs. If one of your own components logs the metric, "
    "declare it in the mark: @rlsdk.diagnosis('NAME', metrics=('METRIC',))",
    after=("finds-or-is-silent",),
)
def reads_known_metrics(subject: Subject, history: Any) -> None:
    """It reads metrics that rlsdk logs, or that its mark declares: a misspelt one would always be empty."""
    series = _ReadSeries(history.series)
    found = _found(subject, attrs.evolve(history, series=series))
    named = {found.metric} if found is not None and found.metric else set()
    for name in sorted(series.names | named):
        near = unknown_metric(name, subject.component.metrics)
        if near is not None:
            raise Violated("value", f"a metric such as {near!r}" if near else "a known metric", repr(name))


@holds(
    "silent-at-first",
    "diagnosis",
    inputs=lambda subject: (case for case in _histories(subject) if case.value.step < 2),
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
    for _, other in histories(subject.component.metrics):
        subject.call(made, other)
    again = subject.call(made, history)
    if first != again:
        raise Violated("value", repr(first), repr(again))
