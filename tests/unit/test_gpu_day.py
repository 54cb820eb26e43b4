"""The plan for a machine with a GPU, as far as it can be tested without one."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from rlsdk.cli import root
from rlsdk.config import check

TOOLS = Path(__file__).resolve().parents[2] / "tools"
DAY: dict[str, Any] = runpy.run_path(str(TOOLS / "gpu_day.py"))
ATTENTION: dict[str, Any] = runpy.run_path(str(TOOLS / "gpu_attention.py"))
TRL: dict[str, Any] = runpy.run_path(str(TOOLS / "gpu_day_trl.py"))


def understood(command: tuple[str, ...]) -> str:
    """Parse a command line with the real parser; returns which one it was."""
    python, first, *rest = command
    if first == str(TOOLS / "gpu_day_trl.py"):
        assert Path(python).parent.parent.name == ".venv-trl"
        TRL["parser"]().parse_args(rest)
        return "trl"
    assert python == sys.executable
    if first == str(TOOLS / "gpu_attention.py"):
        ATTENTION["parser"]().parse_args(rest)
        return "attention"
    if first == str(TOOLS / "gpu_day.py"):
        DAY["parser"]().parse_args(rest)
        return "gpu_day"
    assert first == "-m"
    if rest[0] == "pytest":
        assert rest[1:3] == ["-m", "gpu"] and Path(rest[-1]).is_dir()
        return "pytest"
    assert rest.pop(0) == "rlsdk.cli"
    name = rest.pop(0)
    found = root.get_command(click.Context(root), name)
    assert found is not None
    given = found.make_context(name, rest).params
    if "config" in given:
        check(given["config"], given["settings"], ())
    return name


def test_every_command_of_the_plan_is_understood(tmp_path: Path) -> None:
    steps = DAY["plan"](tmp_path, str(tmp_path / "model"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert [understood(step.command) for step in steps] == [
        *("doctor", "explain", "pytest", "attention", "train", "train", "train", "gpu_day", "trl")
    ]


def test_the_limits_of_all_steps_are_within_half_an_hour(tmp_path: Path) -> None:
    assert sum(step.seconds for step in DAY["plan"](tmp_path, "m")) <= 30 * 60


def test_a_dry_run_prints_each_command_and_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert DAY["main"](["--dry-run", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "tests (at most 300 s): `pytest -m gpu tests/gpu`" in said and "--tasks" in said
    assert not (tmp_path / "out").exists()


def test_without_a_gpu_it_says_so_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DAY["main"].__globals__, "gpu_count", lambda: 0)
    assert DAY["main"](["--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().out.startswith("gpu-day: this machine has no GPU that torch can use")


def test_an_unknown_step_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert DAY["main"](["--only", "test"]) == 2
    assert "unknown steps: test; known: doctor, explain, tests" in capsys.readouterr().out


def test_failures_and_limits_do_not_stop_the_next_step_and_only_what_is_missing_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Step = DAY["Step"]
    counted = f"open({str(tmp_path / 'count')!r}, 'a').write('x')"
    steps = [
        Step("fails", "", (sys.executable, "-c", "raise SystemExit(3)"), 60),
        Step("hangs", "", (sys.executable, "-c", "import time; time.sleep(600)"), 1),
        Step("lacks", "", (str(tmp_path / "no-python"), "-c", ""), 60),
        Step("works", "", (sys.executable, "-c", counted), 60),
    ]
    main, out = DAY["main"], tmp_path / "out"
    monkeypatch.setitem(main.__globals__, "gpu_count", lambda: 1)
    monkeypatch.setitem(main.__globals__, "plan", lambda *_: steps)
    assert main(["--out", str(out)]) == 1
    rows = json.loads((out / "steps.json").read_text())
    assert [row["status"] for row in rows.values()] == ["failed", "time limit", "failed", "ok"]
    assert rows["fails"]["code"] == 3
    steps[0], steps[1] = (Step(step.name, "", steps[3].command, 60) for step in steps[:2])
    assert main(["--out", str(out), "--only", "fails"]) == 1
    assert main(["--out", str(out)]) == 1  # one still has no program
    assert (tmp_path / "count").read_text() == "xxx"  # works once, fails and hangs once each
    assert "| hangs |  | ok |" in (out / "tables.md").read_text()


def test_tables_take_figures_from_runs_and_leave_out_half_lines(tmp_path: Path) -> None:
    (tmp_path / "sync").mkdir()
    lines = [{"time/sync": seconds, "time/step": 9.0} for seconds in (100.0, 1.0, 3.0, 2.0)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "sync" / "metrics.jsonl").write_text(f'{text}{{"time/sy')
    rewards = [{"reward": 0.1 * i, "seconds": float(i)} for i in range(1, 21)]
    (tmp_path / "trl.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rewards))
    page = DAY["tables"](tmp_path, DAY["plan"](tmp_path, "m"), {})
    assert "| sync | sync | 2.000 |" in page  # without the first step
    assert "| TRL + vLLM | 20 | 10.50 | 0.550 | 1.550 |" in page
    assert "| ours | a curve of rlsdk | not run |" in page


def test_tables_say_which_gpu_tests_were_skipped(tmp_path: Path) -> None:
    told = ["SKIPPED [2] tests/gpu/test_sleep.py:7: needs two GPUs", "12 passed, 2 skipped in 41.02s"]
    (tmp_path / "tests.log").write_text("\n".join(["..ss", *told]))
    assert "\n".join(["```", *told, "```"]) in DAY["tables"](tmp_path, DAY["plan"](tmp_path, "model"), {})


def test_attention_is_timed_and_its_table_is_written(tmp_path: Path) -> None:
    small = ["--device", "cpu", "--tokens", "300", "--rounds", "1"]
    ATTENTION["main"](["--out", str(tmp_path / "attention.json"), *small])
    rows = json.loads((tmp_path / "attention.json").read_text())
    assert [(row["rollouts"], row["tokens"], row["dtype"]) for row in rows[:3]] == [
        (2, 128, "bfloat16"),
        (2, 128, "float32"),
        (1, 512, "bfloat16"),
    ]
    assert all(row["separate_ms"] > 0 for row in rows)
    rows[0] |= {"separate_ms": 1.5, "together_ms": 0.5, "difference": 0.0078125, "MiB": 12.0}
    (tmp_path / "attention.json").write_text(json.dumps(rows))
    page = DAY["tables"](tmp_path, DAY["plan"](tmp_path, "m"), {})
    assert "| 2 | 128 | bfloat16 | 1.50 | 12 | 0.50 | 7.8e-03 |" in page


def test_one_call_for_all_rollouts_gives_what_a_call_for_each_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen(
        query: Any, key: Any, value: Any, begins: Any, _: Any, *longest: int, window_size: Any, enable_gqa: bool
    ) -> Any:
        """Compute what torch documents, `[tokens, heads, size]`, since its kernel needs a GPU."""
        assert window_size == (-1, 0) and longest == (7, 7)  # causal
        found = []
        for one in zip(*(torch.tensor_split(each, begins[1:-1].long()) for each in (query, key, value)), strict=True):
            heads = [each.transpose(0, 1) for each in one]
            out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=enable_gqa)
            found.append(out.transpose(0, 1))
        return torch.cat(found)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    given = [torch.randn(1, heads, 12, 8) for heads in (4, 2, 2)]
    one, other = (ATTENTION[name]((7, 1, 4), "cpu")(*given) for name in ("separately", "together"))
    torch.testing.assert_close(one, other)


def test_memory_and_processes_of_the_gpu_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\ncase $1 in *compute-apps*) echo 7; echo 9;; *) echo 4123;; esac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    step = DAY["Step"]("waits", "", (sys.executable, "-c", "import time; time.sleep(3)"), 60)
    row = DAY["run"](step, tmp_path)
    assert (row["peak_gpu_mib"], row["gpu_processes"]) == (4123, 2)
    assert "| 4123 MiB | 2 |" in DAY["tables"](tmp_path, [step], {"waits": row})


def test_make_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    root_folder = TOOLS.parent
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    ran = subprocess.run(["make", "gpu-day"], cwd=root_folder, env=path, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert ran.stdout.startswith("gpu-day: nvidia-smi finds no GPU on this machine")
