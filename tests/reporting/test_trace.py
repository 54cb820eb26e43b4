"""The trace of a run is what Perfetto reads: spans within their step, one after the other in each lane."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from rlsdk.cli import root

STEP = {"time/step": 2.0, "time/produce": 1.0, "time/logprobs": 0.25, "time/update": 0.5, "rollouts/tokens": 100.0}


def test_spans_lie_within_their_step_and_counters_at_its_beginning(tmp_path: Path) -> None:
    lines = [{"step": 0, "eval/greedy": 0.5}, {"step": 1, **STEP}, {"step": 2, **STEP}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.json"
    ran = CliRunner().invoke(root, ["trace", str(tmp_path), "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    events = json.loads(out.read_text())["traceEvents"]
    spans = [(e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]
    assert spans == [
        ("produce", 0.0, 1.0), ("logprobs", 1.0, 0.25), ("update", 1.25, 0.5), ("step 1", 0.0, 2.0),
        ("produce", 2.0, 1.0), ("logprobs", 3.0, 0.25), ("update", 3.25, 0.5), ("step 2", 2.0, 2.0),
    ]  # fmt: skip
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {"steps", "engines", "learner", "driver", "weights"}
    assert [(e["ts"] / 1e6, e["args"]["value"]) for e in events if e["ph"] == "C"] == [(0.0, 100.0), (2.0, 100.0)]


def test_a_folder_without_metrics_is_no_run(tmp_path: Path) -> None:
    assert CliRunner().invoke(root, ["trace", str(tmp_path)]).exit_code == 2
