"""`rlsdk trace`."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.argument("run", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Output file.  [default: RUN/trace.json]",
)
@click.option(
    "--otlp",
    metavar="URL",
    help="Send the spans to an OpenTelemetry collector instead, such as http://localhost:4318 (extra `otel`).",
)
def trace(run: Path, out: Path | None, otlp: str | None) -> None:
    """Export the timings of the run in the folder RUN as a Chrome trace for Perfetto (https://ui.perfetto.dev).

    The trace has one lane for steps and one per process (driver, engines, learner ranks, environment workers), and
    counters of requests, tokens and rewards. The command also works while the run trains.
    """
    from rlsdk.errors import ArgumentError
    from rlsdk.reporting.trace import all_spans, chrome_trace
    from rlsdk.runlog.folder import why_no_run, write_output
    from rlsdk.runlog.metrics import METRICS, SPANS, read_metrics, read_spans

    if not (run / METRICS).is_file():
        raise ArgumentError([why_no_run(run, METRICS)])
    lines, spans = read_metrics(run), read_spans(run)
    if otlp is not None:
        from rlsdk.reporting.trace import export_spans, otlp_exporter

        if out is not None:
            raise ArgumentError(["--out: --otlp sends the spans and writes no file; give only one of them"])
        if not spans:
            raise ArgumentError([f"{run} has no {SPANS}: it recorded no times of day, which OpenTelemetry needs"])
        click.echo(f"{export_spans(all_spans(lines, spans), run.name, otlp_exporter(otlp))} spans sent")
        return
    path = out or run / "trace.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, json.dumps(chrome_trace(lines, run.name, spans)))
    click.echo(path)
