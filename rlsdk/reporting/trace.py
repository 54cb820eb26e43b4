"""The steps of a run as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

LANES = {"produce": "engines", "logprobs": "learner", "credit": "driver", "update": "learner", "sync": "weights"}
"""Phase of a step -> the lane that it is drawn in, in the order of a step."""
COUNTERS = ("rollouts/tokens", "rollouts/length", "time/tokens_per_second", "engines/alive", "reward/mean")
"""Metrics that are drawn as counters."""


def chrome_trace(lines: Iterable[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return the trace of a run: a lane for the steps, and one each for engines, learner, driver and weights.

    Times are those of the steps alone, one after the other: evaluations and checkpoints between them are left out, as
    `metrics.jsonl` does not say when they took place. Phases begin when the one before has ended; where rollouts run
    ahead, `produce` is the wait for them.

    Args:
        lines: Lines of its `metrics.jsonl`.
        name: Name of the run.
    """
    lanes = {lane: i for i, lane in enumerate(("steps", *dict.fromkeys(LANES.values())))}
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}]
    events += [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": lane}} for lane, tid in lanes.items()
    ]
    now = 0.0
    for line in lines:
        seconds = line.get("time/step")
        if not seconds:
            continue
        begin = now
        for phase, lane in LANES.items():
            spent = line.get(f"time/{phase}") or 0.0
            if spent:
                events.append(_span(phase, lanes[lane], begin, spent, {"step": line["step"]}))
                begin += spent
        shown = {k: line[k] for k in COUNTERS if line.get(k) is not None}
        events.append(_span(f"step {line['step']}", 0, now, max(seconds, begin - now), shown))
        events += [
            {"ph": "C", "pid": 0, "name": counter, "ts": 1e6 * now, "args": {"value": value}}
            for counter, value in shown.items()
        ]
        now += max(seconds, begin - now)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _span(name: str, lane: int, begin: float, seconds: float, shown: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 0,
        "tid": lane,
        "name": name,
        "ts": 1e6 * begin,
        "dur": 1e6 * seconds,
        "args": dict(shown),
    }
