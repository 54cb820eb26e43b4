"""Every built-in component meets the requirements of its kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import rlsdk
from rlsdk.testing.conformance import Check, checks

# Isolation is the machine's business; no sample response holds code that would run.
CORE, BROKEN = checks(rlsdk.Plugins(), "core", options={"code_tests": {"isolation": "none"}})
NEED_OPTIONS = {
    *("jsonl", "parquet", "hub", "foreign", "regex", "length_penalty", "judge", "tools", "environment", "gymnasium"),
    *("reward_model", "environments", "agent", "annotation", "annotations"),
}
NEED_TASKS = {"code_tests", "demonstration", "chosen_rejected"}
NEED_GPUS = {"nccl", "cuda_ipc"}


def label(check: Check) -> str:
    return f"{check.subject.component.kind}-{check.subject.component.name}"


def test_all_kinds_can_be_imported():
    assert BROKEN == {}
    assert len(CORE) > 80


@pytest.mark.parametrize("check", CORE, ids=label)
def test_it_conforms(check):
    for finding in check.findings():
        assert finding.fault is None, str(finding.fault)
        if finding.outcome == "skipped":
            named = check.subject.component.name in NEED_OPTIONS | NEED_TASKS | NEED_GPUS
            assert "random numbers" in finding.reason or named


LEAN = """
import sys
sys.modules.update(dict.fromkeys(("ray", "vllm", "deepspeed", "transformers", "tokenizers", "safetensors", "psutil")))
import rlsdk
from rlsdk.testing import check_plugin
for kind in ("engine", "learner", "tracker", "reward", "policy_loss"):
    report = check_plugin(rlsdk.Plugins(), "core", kind=kind)
    print(kind, report.conforms, report.counts()["passed"] > 3)
"""


def test_nothing_beyond_the_base_install_is_needed():
    """With the train extra's packages hidden, engines and learners are checked by their marks and signatures."""
    ran = subprocess.run([sys.executable, "-c", LEAN], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert [line.split()[1:] for line in ran.stdout.splitlines()] == [["True", "True"]] * 5


@pytest.mark.parametrize("name", ["jsonl", "parquet"])
def test_files_of_tasks_conform(name, tmp_path: Path):
    rows = [{"prompt": f"{i}?", "answer": str(i)} for i in range(20)]
    path = tmp_path / f"tasks.{name}"
    if name == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    (check,), _ = checks(rlsdk.Plugins(), "core", kind="tasks", component=name, options={name: {"path": str(path)}})
    assert {f.outcome for f in check.findings()} == {"passed"}


def test_a_reward_of_another_trainer_conforms(tmp_path: Path):
    path = tmp_path / "theirs.py"
    path.write_text("def lengths(completions, **kwargs):\n    return [min(len(c), 9) / 9 for c in completions]\n")
    options = {"foreign": {"path": f"{path}:lengths"}}
    (check,), _ = checks(rlsdk.Plugins(), "core", kind="reward", component="foreign", options=options)
    assert {f.outcome for f in check.findings()} == {"passed"}
