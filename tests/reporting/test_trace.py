"""A run's trace in Perfetto's format: a lane for each process, spans within their step, counters."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlsdk.cli import root
from rlsdk.errors import RunError
from rlsdk.reporting.trace import all_spans
from rlsdk.runlog.metrics import SPANS, read_spans

STEP = {"time/step": 2.0, "time/produce": 1.0, "time/logprobs": 0.25, "time/update": 0.5, "rollouts/tokens": 100.0}
DAY = 1_700_000_000.0
RECORDED = [
    ["driver", "take", 0.0, 1.0, {}],
    ["engine 10", "generate", 0.0, 0.75, {"requests": 2, "tokens": 30, "waiting": 1}],
    ["engine 2", "generate", 0.25, 0.75, {"requests": 4, "tokens": 50, "waiting": 0}],
    ["driver", "update", 1.0, 1.75, {}],
    ["learner rank 0", "update", 1.0, 1.5, {}],
    ["learner rank 1", "update", 1.0, 1.75, {}],
    ["driver", "evaluation", 2.0, 2.5, {}],
    ["driver", "take", 2.5, 3.5, {}],
]


def write(folder: Path, spans: list[Any]) -> None:
    lines = [{"step": 0, "eval/greedy": 0.5}, {"step": 1, **STEP}, {"step": 2, **STEP}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if spans:
        moved = [[actor, name, DAY + begin, DAY + end, counts] for actor, name, begin, end, counts in spans]
        (folder / SPANS).write_text("".join(json.dumps(each) + "\n" for each in moved) + '["driver", "torn", 1')


def traced(folder: Path) -> list[dict[str, Any]]:
    out = folder / "out.json"
    ran = CliRunner().invoke(root, ["trace", str(folder), "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    return json.loads(out.read_text())["traceEvents"]


def test_each_process_has_a_lane_and_times_are_those_of_the_clock(tmp_path: Path) -> None:
    write(tmp_path, RECORDED)
    events = traced(tmp_path)
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(lanes.values()) == ["steps", "driver", "engine 2", "engine 10", "learner rank 0", "learner rank 1"]
    spans = [(lanes[e["tid"]], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]
    assert ("steps", "step 1", 0.0, 2.0) in spans and ("steps", "step 2", 2.5, 2.0) in spans
    assert ("driver", "evaluation", 2.0, 0.5) in spans
    assert ("learner rank 1", "update", 1.0, 0.75) in spans
    assert len(spans) == len(RECORDED) + 2


def test_requests_and_tokens_of_engines_are_counters(tmp_path: Path) -> None:
    write(tmp_path, RECORDED)
    counters: dict[str, list[tuple[float, float]]] = {}
    for event in traced(tmp_path):
        if event["ph"] == "C":
            counters.setdefault(event["name"], []).append((event["ts"] / 1e6, event["args"]["value"]))
    assert counters["engine 10: tokens/s"] == [(0.0, 40.0), (0.75, 0)]
    assert counters["engine 2: requests"] == [(0.25, 4.0), (0.75, 0.0)]
    assert counters["engine 10: requests"] == [(0.0, 3.0), (0.75, 1.0)]
    assert counters["rollouts/tokens"] == [(0.0, 100.0), (2.5, 100.0)]


def test_a_run_without_recorded_times_shows_its_steps_one_after_the_other(tmp_path: Path) -> None:
    write(tmp_path, [])
    events = traced(tmp_path)
    spans = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]
    assert spans == [
        ("step 1", 0.0, 2.0), ("produce", 0.0, 1.0), ("logprobs", 1.0, 0.25), ("update", 1.25, 0.5),
        ("step 2", 2.0, 2.0), ("produce", 2.0, 1.0), ("logprobs", 3.0, 0.25), ("update", 3.25, 0.5),
    ]  # fmt: skip
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"steps", "driver"}
    assert [(e["ts"] / 1e6, e["args"]["value"]) for e in events if e["ph"] == "C"] == [(0.0, 100.0), (2.0, 100.0)]


def test_a_step_that_a_resumed_run_did_again_is_drawn_where_it_was_done_again(tmp_path: Path) -> None:
    write(tmp_path, [["driver", "take", -9.0, -8.0, {}], *RECORDED])
    steps = [
        each for each in all_spans([{"step": n, **STEP} for n in (1, 2)], read_spans(tmp_path)) if each.actor == "steps"
    ]
    assert [(each.name, each.begin - DAY) for each in steps] == [("step 1", 0.0), ("step 2", 2.5)]


def test_a_folder_without_metrics_is_not_a_run(tmp_path: Path) -> None:
    assert CliRunner().invoke(root, ["trace", str(tmp_path)]).exit_code == 2


def test_spans_are_exported_below_their_step(tmp_path: Path) -> None:
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs the extra otel", exc_type=ImportError
    )
    from rlsdk.reporting.trace import export_spans

    write(tmp_path, RECORDED)
    exporter = memory.InMemorySpanExporter()
    drawn = all_spans([{"step": n, **STEP} for n in (1, 2)], read_spans(tmp_path))
    assert export_spans(drawn, "mine", exporter) == len(RECORDED) + 3
    found = exporter.get_finished_spans()
    ids = {span.context.span_id: span.name for span in found}
    above = {
        (span.attributes.get("rlsdk.actor"), span.name): ids.get(span.parent and span.parent.span_id) for span in found
    }
    assert above[None, "run mine"] is None
    assert above["steps", "step 1"] == above["driver", "evaluation"] == "run mine"
    assert above["engine 2", "generate"] == above["learner rank 1", "update"] == "step 1"
    engine = next(span for span in found if span.attributes.get("rlsdk.actor") == "engine 10")
    assert (engine.attributes["rlsdk.tokens"], engine.attributes["rlsdk.requests"]) == (30.0, 2.0)
    assert engine.start_time == int(DAY) * 10**9
    assert (engine.end_time - engine.start_time) / 1e9 == 0.75
    assert {span.resource.attributes["rlsdk.run"] for span in found} == {"mine"}
    assert len({span.context.trace_id for span in found}) == 1


def test_a_collector_that_is_not_there_is_not_said_to_reject_spans(tmp_path: Path) -> None:
    export = pytest.importorskip("opentelemetry.sdk.trace.export", reason="needs the extra otel", exc_type=ImportError)
    from rlsdk.reporting.trace import export_spans

    class Unreachable(export.SpanExporter):
        def export(self, spans: object) -> object:
            return export.SpanExportResult.FAILURE

    write(tmp_path, RECORDED)
    with pytest.raises(RunError, match=r"accepted 0 of \d+ spans; .* could not be reached or rejected"):
        export_spans(all_spans([{"step": 1, **STEP}], read_spans(tmp_path)), "mine", Unreachable())


def test_the_command_sends_them_to_a_collector(tmp_path: Path) -> None:
    service = pytest.importorskip(
        "opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason="needs the extra otel", exc_type=ImportError
    )
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel", exc_type=ImportError)
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    write(tmp_path, RECORDED)
    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        ran = CliRunner().invoke(root, ["trace", str(tmp_path), "--otlp", f"http://127.0.0.1:{server.server_port}"])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert ran.exit_code == 0 and ran.output == f"{len(RECORDED) + 3} spans sent\n"
    [(path, content)] = got
    assert path == "/v1/traces"
    request = service.ExportTraceServiceRequest.FromString(content)
    names = [span.name for part in request.resource_spans for scope in part.scope_spans for span in scope.spans]
    assert sorted(names) == sorted([*(each[1] for each in RECORDED), "step 1", "step 2", f"run {tmp_path.name}"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--otlp", "localhost:4318"], "expected an address such as http://localhost:4318"),
        (["--otlp", "http://localhost:4318", "--out", "x.json"], "give only one of them"),
    ],
)
def test_a_wrong_address_is_refused(tmp_path: Path, arguments: list[str], message: str) -> None:
    write(tmp_path, RECORDED)
    ran = CliRunner().invoke(root, ["trace", str(tmp_path), *arguments])
    assert ran.exit_code and message in ran.output
