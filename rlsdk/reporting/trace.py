"""Trace of a run for https://ui.perfetto.dev and chrome://tracing, with one lane per process."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlsdk.runlog.spans import Span

PHASES = ("produce", "logprobs", "credit", "update", "sync")
"""Phases of a step in order, named as in `time/…`."""
COUNTERS = ("rollouts/tokens", "rollouts/length", "time/tokens_per_second", "engines/alive", "reward/mean")
"""Metrics drawn as counters."""
STEPS, DRIVER = "steps", "driver"
_ORDER = (STEPS, DRIVER, "engine", "learner", "")
"""Prefixes of lane names, in drawing order."""


def chrome_trace(lines: Iterable[Mapping[str, Any]], name: str, spans: Sequence[Span] = ()) -> dict[str, Any]:
    """Return the trace of a run: one lane for the steps, one for the driver, and one per actor.

    If the run recorded spans, all times are wall-clock times. Engines and workers count as busy while they have
    requests, learner ranks from a call until its answer; counters show an engine's requests and tokens.
    Without spans, as in runs of an earlier rlsdk, steps follow each other without gaps and show the driver's phases.

    Args:
        lines: Lines of its `metrics.jsonl`.
        name: Name of the run.
        spans: Spans of its `spans.jsonl`.
    """
    drawn = all_spans(lines, spans)
    begun = min((each.begin for each in drawn), default=0.0)
    actors = sorted({each.actor for each in drawn} | {STEPS}, key=_place)
    lanes = {actor: i for i, actor in enumerate(actors)}
    events = [_said("process_name", name)]
    for actor, lane in lanes.items():
        events += [
            _said("thread_name", actor, lane),
            {**_said("thread_sort_index", "", lane), "args": {"sort_index": lane}},
        ]
    for each in drawn:
        times = {"ts": _micro(each.begin - begun), "dur": _micro(each.end - each.begin)}
        place = {"ph": "X", "pid": 0, "tid": lanes[each.actor]}
        events.append({**place, "name": each.name, **times, "args": dict(each.counts)})
    for each in drawn:
        events += _counters(each, begun)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def all_spans(lines: Iterable[Mapping[str, Any]], spans: Sequence[Span] = ()) -> list[Span]:
    """Return the spans of a run plus one per step, in order of start time; see `chrome_trace`."""
    found = [*spans, *_steps_of(lines, spans)] if spans else _phases(lines)
    return sorted(found, key=lambda each: (each.begin, -each.end, each.actor != STEPS))


def _place(actor: str) -> tuple[int, list[Any]]:
    """Return a sort key for lanes: kind of actor, then number."""
    kind = next(i for i, begin in enumerate(_ORDER) if actor.startswith(begin))
    return kind, [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", actor)]


def _steps_of(lines: Iterable[Mapping[str, Any]], spans: Sequence[Span]) -> list[Span]:
    """Return a span per step: it starts with the driver's `take` and lasts `time/step`.

    If a resumed run repeated a step, `metrics.jsonl` has the second one, so steps are matched from the end.
    """
    begins = [each.begin for each in spans if each.actor == DRIVER and each.name == "take"]
    rows = [line for line in lines if line.get("time/step")]
    pairs = zip(reversed(rows), reversed(begins), strict=False)
    return [_step(line, begin) for line, begin in reversed(list(pairs))]


def _step(line: Mapping[str, Any], begin: float) -> Span:
    counts = {name: float(line[name]) for name in COUNTERS if line.get(name) is not None}
    return Span(STEPS, f"step {line['step']}", begin, begin + float(line["time/step"]), counts)


def _phases(lines: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Return the spans of steps and their phases, one after another, from the metrics alone."""
    found, now = [], 0.0
    for line in lines:
        if not line.get("time/step"):
            continue
        begin = now
        for phase in PHASES:
            if spent := float(line.get(f"time/{phase}") or 0.0):
                found.append(Span(DRIVER, phase, begin, begin + spent, {"step": float(line["step"])}))
                begin += spent
        step = _step(line, now)
        now = max(step.end, begin)
        found.append(Span(step.actor, step.name, step.begin, now, step.counts))
    return found


def _said(what: str, name: str, lane: int = 0) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": lane, "name": what, "args": {"name": name}}


def _counters(each: Span, begun: float) -> list[dict[str, Any]]:
    """Return counter events: the metrics of a step, or the requests and tokens per second of a busy actor."""
    if each.actor == STEPS:
        return [_counter(name, each.begin - begun, value) for name, value in each.counts.items()]
    begin, end, counts = each.begin - begun, each.end - begun, each.counts
    found = []
    if "tokens" in counts:
        name = f"{each.actor}: tokens/s"
        found += [_counter(name, begin, counts["tokens"] / max(end - begin, 1e-6)), _counter(name, end, 0)]
    if "requests" in counts:
        name, waiting = f"{each.actor}: requests", counts.get("waiting", 0)
        found += [_counter(name, begin, counts["requests"] + waiting), _counter(name, end, waiting)]
    return found


def _counter(name: str, seconds: float, value: float) -> dict[str, Any]:
    return {"ph": "C", "pid": 0, "name": name, "ts": _micro(seconds), "args": {"value": value}}


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 3)
