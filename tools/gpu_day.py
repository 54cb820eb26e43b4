"""Run tests, memory measurements, timings and curves on one borrowed GPU, in thirty minutes.

    python tools/gpu_day.py --dry-run            # print the plan, on any machine
    python tools/gpu_day.py --out gpu-day        # all steps that have not succeeded yet
    python tools/gpu_day.py --only tests,sync    # these steps, even if they have succeeded

Each step has a time limit, and one that fails does not stop the next. The folder gets a log for each step, `steps.json`
and `tables.md`. See docs/gpu_day.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from rlsdk.preflight import gpu_count

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "examples" / "countdown_gpu_day.yaml"
MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
TRL_PYTHON = ROOT / ".venv-trl" / "bin" / "python"
GRACE_SECONDS = 20
"""Seconds between SIGTERM and SIGKILL for a step that exceeds its time limit."""
LAST = 10
"""Number of last steps of a curve over which the final reward is averaged."""


@attrs.frozen
class Step:
    """One step of the plan.

    Attributes:
        name: Name of its log and row.
        about: Description for the table.
        command: Command line.
        seconds: Time limit.
    """

    name: str
    about: str
    command: tuple[str, ...]
    seconds: int


def plan(out: Path, model: str) -> list[Step]:
    """Return the steps in order, the cheapest and most likely to fail first.

    Args:
        out: Folder of the results.
        model: Model of the trainings, by path or hub id.
    """
    rlsdk = (sys.executable, "-m", "rlsdk.cli")
    ours = (str(CONFIG), f"model.path={model}", f"out={out}")
    train = (*rlsdk, "train", *ours, "--overwrite")
    trl = (str(TRL_PYTHON), str(ROOT / "tools" / "gpu_day_trl.py"), "--model", model)
    return [
        Step("doctor", "versions, driver, devices", (*rlsdk, "doctor", "--json"), 30),
        Step("explain", "memory that is expected, and who gets the GPU", (*rlsdk, "explain", *ours, "--full"), 60),
        Step(
            "tests",
            "`pytest -m gpu tests/gpu`",
            (sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rs", str(ROOT / "tests" / "gpu")),
            300,
        ),
        Step(
            "attention",
            "packed rollouts: a call for each, and one for all",
            (sys.executable, str(ROOT / "tools" / "gpu_attention.py"), "--out", str(out / "attention.json")),
            60,
        ),
        Step("sync", "ten steps: times by phase, weight sync, peak memory", (*train, "name=sync", "steps=10"), 240),
        Step(
            "apart",
            "ten steps with seeds of requests and in-flight weight updates",
            (*train, "name=apart", "steps=10", "sampling.seeds=request", "learner.gradient_checkpointing=true"),
            180,
        ),
        Step("ours", "a curve of rlsdk", (*train, "name=ours"), 450),
        Step("tasks", "the same tasks as JSON", (sys.executable, __file__, "--tasks", str(out / "tasks.json")), 30),
        Step(
            "trl",
            "a curve of TRL with vLLM on the same tasks, reward and sizes",
            (*trl, "--tasks", str(out / "tasks.json"), "--curve", str(out / "trl.jsonl")),
            450,
        ),
    ]


def write_tasks(path: Path) -> None:
    """Write the training tasks of the configuration as JSON, for TRL."""
    from rlsdk.config import check
    from rlsdk.trainer.assembly import train_tasks

    [tasks] = train_tasks(check(CONFIG, (), ()))
    chosen = [tasks[i] for i in range(min(len(tasks), 20_000))]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([{"prompt": task.prompt, "answer": task.answer} for task in chosen]))


def run(step: Step, out: Path) -> dict[str, Any]:
    """Run a step within its time limit; return its row of `steps.json`."""
    began, peak, over = time.monotonic(), {"memory.used": 0, "pid": 0}, threading.Event()
    sampler = threading.Thread(target=_sample_gpu, args=(peak, over), daemon=True)
    sampler.start()
    timed_out = False
    with (out / f"{step.name}.log").open("w") as log:
        try:
            process = subprocess.Popen(step.command, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
            try:
                code: int | None = process.wait(step.seconds)
            except subprocess.TimeoutExpired:
                timed_out, code = True, _end(process)
        except OSError as error:  # TRL's environment may be missing
            log.write(f"{error}\n")
            code = None
    over.set()
    sampler.join()
    status = "time limit" if timed_out else "ok" if code == 0 else "failed"
    seconds = round(time.monotonic() - began, 1)
    used = {"peak_gpu_mib": peak["memory.used"], "gpu_processes": peak["pid"]}
    return {"name": step.name, "status": status, "code": code, "seconds": seconds, **used}


def _end(process: subprocess.Popen[Any]) -> int:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def _sample_gpu(peak: dict[str, int], over: threading.Event) -> None:
    """Record the GPU's peak memory in MiB and its peak number of processes until a step is over."""
    while not over.wait(0.5):
        try:
            peak["memory.used"] = max(peak["memory.used"], *map(int, _asked("gpu", "memory.used")))
            # Each process takes some 500 MB, used or not; of rlsdk, an engine and a rank of the learner may be there.
            peak["pid"] = max(peak["pid"], len(_asked("compute-apps", "pid")))
        except (OSError, subprocess.SubprocessError):
            return


def _asked(what: str, column: str) -> list[str]:
    query = ["nvidia-smi", f"--query-{what}={column}", "--format=csv,noheader,nounits"]
    return subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split()


def tables(out: Path, steps: Sequence[Step], rows: dict[str, dict[str, Any]]) -> str:
    """Return the tables of all steps run so far, in Markdown."""
    lines = ["# GPU day", "", "| step | what | status | seconds | peak GPU memory | processes |"]
    lines += ["|---|---|---|---|---|---|"]
    for step in steps:
        row = {"status": "not run", "seconds": "", **rows.get(step.name, {})}
        memory = f"{row['peak_gpu_mib']} MiB" if row.get("peak_gpu_mib") else ""
        used = f"{memory} | {row.get('gpu_processes') or ''}"
        lines.append(f"| {step.name} | {step.about} | {row['status']} | {row['seconds']} | {used} |")
    log = (out / "tests.log").read_text().splitlines() if (out / "tests.log").exists() else []
    if found := [line for line in log if line.startswith("SKIPPED") or " passed" in line or " failed" in line]:
        lines += ["", "## GPU tests, and why some were skipped", "", "```", *found, "```"]
    lines += _attention(out / "attention.json")
    lines += ["", "## Times by phase", "", "| run | phase | median seconds of a step |", "|---|---|---|"]
    for name in ("sync", "apart", "ours"):
        for phase, seconds in sorted(_phases(_read(out / name / "metrics.jsonl")).items()):
            lines.append(f"| {name} | {phase} | {seconds:.3f} |")
    curves = {
        "rlsdk": _curve(_read(out / "ours" / "metrics.jsonl"), "raw/reward", "time/step"),
        "TRL + vLLM": _curve(_read(out / "trl.jsonl"), "reward", "seconds"),
    }
    lines += ["", "## Countdown at 0.5B", ""]
    lines += ["| trainer | steps | seconds a step (median) | reward, first steps | reward, last steps |"]
    lines += ["|---|---|---|---|---|"]
    for name, (rewards, seconds) in curves.items():
        if rewards:
            first, last = statistics.fmean(rewards[:LAST]), statistics.fmean(rewards[-LAST:])
            lines.append(f"| {name} | {len(rewards)} | {statistics.median(seconds):.2f} | {first:.3f} | {last:.3f} |")
    return "\n".join(lines) + "\n"


def _attention(path: Path) -> list[str]:
    """Return the table of `gpu_attention.py`, if it has run."""
    if not path.is_file():
        return []
    lines = ["", "## Attention over packed rollouts, forward and backward", ""]
    lines += ["| rollouts | tokens | dtype | a call for each, ms | MiB | one call for all, ms | difference |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in json.loads(path.read_text()):
        one = f"{row['together_ms']:.2f} | {row['difference']:.1e}" if "together_ms" in row else " | "
        each = f"{row['separate_ms']:.2f} | {row['MiB']:.0f}"
        lines.append(f"| {row['rollouts']} | {row['tokens']} | {row['dtype']} | {each} | {one} |")
    return lines


def _read(path: Path) -> list[dict[str, Any]]:
    """Read the complete lines of a JSON-lines file; a step that was killed may have left an incomplete one."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def _phases(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median seconds of each phase, without the first step."""
    phases = ("step", "produce", "logprobs", "update", "sync")
    found = {phase: [line[f"time/{phase}"] for line in lines[1:] if line.get(f"time/{phase}")] for phase in phases}
    return {phase: statistics.median(values) for phase, values in found.items() if values}


def _curve(lines: Sequence[dict[str, Any]], reward: str, seconds: str) -> tuple[list[float], list[float]]:
    kept = [line for line in lines if line.get(reward) is not None and line.get(seconds)]
    return [line[reward] for line in kept], [line[seconds] for line in kept]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--out", type=Path, default=Path("gpu-day"), help="folder of the results")
    found.add_argument("--model", default=MODEL, help="model of the trainings, by path or hub id")
    found.add_argument("--only", default="", help="names of steps, separated by commas")
    found.add_argument("--dry-run", action="store_true", help="print the plan and run nothing")
    found.add_argument("--tasks", type=Path, help=argparse.SUPPRESS)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the plan; return the exit status."""
    given = parser().parse_args(arguments)
    if given.tasks is not None:
        write_tasks(given.tasks)
        return 0
    out = given.out.resolve()
    steps, only = plan(out, given.model), set(filter(None, given.only.split(",")))
    if unknown := only - {step.name for step in steps}:
        print(f"unknown steps: {', '.join(sorted(unknown))}; known: {', '.join(s.name for s in steps)}")
        return 2
    if given.dry_run:
        for step in steps:
            print(f"{step.name} (at most {step.seconds} s): {step.about}\n  {shlex.join(step.command)}")
        return 0
    if not gpu_count():
        print("gpu-day: this machine has no GPU that torch can use; `--dry-run` shows the plan without one")
        return 2
    out.mkdir(parents=True, exist_ok=True)
    record = out / "steps.json"
    rows: dict[str, dict[str, Any]] = json.loads(record.read_text()) if record.is_file() else {}
    for step in steps:
        if step.name not in only if only else rows.get(step.name, {}).get("status") == "ok":
            continue
        print(f"{step.name}, at most {step.seconds} s: {step.about}", flush=True)
        rows[step.name] = run(step, out)
        print(f"  {rows[step.name]['status']} after {rows[step.name]['seconds']} s", flush=True)
        record.write_text(json.dumps(rows, indent=1))
        (out / "tables.md").write_text(tables(out, steps, rows))
    print(f"tables: {out / 'tables.md'}")
    return 0 if all(rows.get(step.name, {}).get("status") == "ok" for step in steps) else 1


if __name__ == "__main__":
    sys.exit(main())
