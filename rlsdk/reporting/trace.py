"""Trace of a run: a file for https://ui.perfetto.dev and chrome://tracing, or spans for an OpenTelemetry collector."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rlsdk.errors import EnvironmentFault, RunError
from rlsdk.runlog.metrics import Span

PHASES = ("produce", "logprobs", "credit", "update", "sync")
"""Phases of a step in order, named as in `time/…`."""
COUNTERS = ("rollouts/tokens", "rollouts/length", "time/tokens_per_second", "engines/alive", "reward/mean")
"""Metrics drawn as counters."""
STEPS, DRIVER = "steps", "driver"
_ORDER = (STEPS, DRIVER, "engine", "learner", "")
"""Prefixes of lane names, in drawing order."""
_AT_ONCE = 512
"""Number of spans per request."""


def chrome_trace(lines: Iterable[Mapping[str, Any]], name: str, spans: Sequence[Span] = ()) -> dict[str, Any]:
    """Return the trace of a run: one lane for the steps, one for the driver, and one per actor.

    If the run recorded spans, all times are wall-clock times. Engines and workers count as busy while they have
    requests, learner ranks from a call until its answer; counters show an engine's requests and tokens.
    Without spans, as in runs of an earlier rlsdk, steps follow each other without gaps and show the driver's phases.
    """
    drawn = all_spans(lines, spans)
    begun = min((each.begin for each in drawn), default=0.0)
    actors = sorted({each.actor for each in drawn} | {STEPS}, key=_place)
    lanes = {actor: i for i, actor in enumerate(actors)}
    events = [_metadata("process_name", name)]
    for actor, lane in lanes.items():
        events += [
            _metadata("thread_name", actor, lane),
            {**_metadata("thread_sort_index", "", lane), "args": {"sort_index": lane}},
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


def _metadata(what: str, name: str, lane: int = 0) -> dict[str, Any]:
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


def export_spans(spans: Sequence[Span], name: str, exporter: Any) -> int:
    """Send the spans of a run as one trace: spans within a step become its children, all others the run's.

    Args:
        spans: Spans in order of start time, including the steps'; see `reporting.trace.all_spans`.
        name: Name of the run.
        exporter: Exporter of OpenTelemetry's SDK.

    Returns:
        Number of spans sent.

    Raises:
        RunError: The exporter could not send all spans.
    """
    from opentelemetry.sdk.trace.export import SpanExportResult

    made = _built(spans, name)
    for first in range(0, len(made), _AT_ONCE):
        if exporter.export(made[first : first + _AT_ONCE]) is not SpanExportResult.SUCCESS:
            why = "the log lines above say whether it could not be reached or rejected the others"
            raise RunError(f"the collector accepted {first} of {len(made)} spans; {why}")
    return len(made)


def _built(spans: Sequence[Span], name: str) -> Sequence[Any]:
    """Return the spans as SDK objects, with the run's own span last."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace import set_span_in_context

    kept = InMemorySpanExporter()
    resource = Resource.create({"service.name": "rlsdk", "rlsdk.run": name})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("rlsdk")
    begin, end = min(each.begin for each in spans), max(each.end for each in spans)
    run = tracer.start_span(f"run {name}", start_time=_nano(begin))
    step, step_ends = run, begin
    for each in spans:
        is_step = each.actor == STEPS
        parent = step if not is_step and each.end <= step_ends else run
        about = {"rlsdk.actor": each.actor, **{f"rlsdk.{key}": value for key, value in each.counts.items()}}
        context = set_span_in_context(parent)
        span = tracer.start_span(each.name, context=context, start_time=_nano(each.begin), attributes=about)
        span.end(end_time=_nano(each.end))
        if is_step:
            step, step_ends = span, each.end
    run.end(end_time=_nano(end))
    finished: Sequence[Any] = kept.get_finished_spans()
    return finished


def _nano(seconds: float) -> int:
    return round(1e6 * seconds) * 1000


def otlp_exporter(url: str) -> Any:
    """Return an exporter for a collector.

    Args:
        url: Address of the collector; without a path, `/v1/traces` is added.

    Raises:
        EnvironmentFault: The extra `otel` is not installed, or the address is not valid.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise EnvironmentFault(f"--otlp: expected an address such as http://localhost:4318; got {url!r}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        raise EnvironmentFault(f"--otlp needs OpenTelemetry: pip install 'rlsdk[otel]' ({error})") from error
    return OTLPSpanExporter(endpoint=url if parts.path.strip("/") else url.rstrip("/") + "/v1/traces")
