"""Export a run's spans to an OpenTelemetry collector, once, from the run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from rlsdk.errors import EnvironmentFault, RunError
from rlsdk.reporting.trace import STEPS
from rlsdk.runlog.spans import Span

_AT_ONCE = 512
"""Number of spans per request."""


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
