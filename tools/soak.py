"""Kill, stop and terminate parts of a run at random moments, again and again, and report the outcome.

    python tools/soak.py                                            # three hundred times
    python tools/soak.py --kills 9                                  # fewer
    python tools/soak.py --engine vllm                              # another engine
    python tools/soak.py --engine vllm --tensor-parallel 2 --engines 1

Two trainings of the small model run in parallel in `runs/soak`, with rollouts ahead of the learner. Killing an engine,
one of its processes or an environment worker, or stopping any process for some seconds, must not end a run. Killing a
learner rank or the driver, or terminating the driver, ends the run, and `--resume` continues it. After each signal the
task counts are checked; the first fault ends the soak with status 1. Each engine has its section in `docs/soak.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import psutil
import yaml
from curves import ROOT, git

PAGE = ROOT / "docs" / "soak.md"
LAB = Path(__file__).with_name("soak_lab.py")
BATCH = 4
KINDS = {
    "engine": "EngineActor",
    "starting engine": "EngineActor",
    "tensor-parallel process": "Worker_TP",
    "environment worker": "EnvWorkerActor",
    "learner rank": "LearnerActor",
    "driver": "",
}
"""Kind of process -> part of its title: the class of its Ray actor, or vLLM's name for it; the driver has none."""
DEEDS = (
    *((kind, "SIGKILL") for kind in KINDS),
    *((kind, "SIGSTOP") for kind in KINDS if kind != "starting engine"),
    ("engine", "SIGTERM"),
    ("tensor-parallel process", "SIGTERM"),
    ("driver", "SIGTERM"),
)
"""Kinds of process, and the signal sent to each; SIGSTOP is followed by SIGCONT.

A starting engine is the replacement of one that was killed before.
"""
ENDS = {("learner rank", "SIGKILL"): 1, ("driver", "SIGKILL"): -signal.SIGKILL, ("driver", "SIGTERM"): 130}
"""(process, signal) that ends the run -> exit status of the driver."""
LONGEST_STOP = 5.0
"""Maximum seconds between SIGSTOP and SIGCONT."""
LONGEST_START = 8.0
"""Maximum seconds from the first sight of a starting engine to its end."""
MOST_SECONDS = 6.0
"""Maximum seconds from the first step after a signal to the next signal; a step takes about a second."""
PATIENCE = 600.0
"""Seconds to wait for a step; on a busy machine, a start takes minutes."""
CONFIG: dict[str, Any] = {
    "name": "run",
    "plugins": [str(LAB)],
    "tasks": {
        "train": {
            "use": "environments",
            "form": "text",
            "groups": 1_000_000,
            "rounds": 1,
            "environments": {"digits": "soak_lab/digits"},
        },
        "eval": {
            "use": "environments",
            "form": "text",
            "groups": 8,
            "rounds": 1,
            "environments": {"exam": "soak_lab/digits"},
        },
    },
    "workflow": "environment",
    "max_prompt_tokens": 16,
    "algorithm": {
        "use": "grpo",
        "kl_coef": 0.0,
        "correction": "tis",
        "filters": ["soak_lab/noted"],
        "shaping": ["soak_lab/counted"],
    },
    "sampling": {"max_tokens": 8},
    "steps": 100_000,
    "batch_size": BATCH,
    "group_size": 4,
    "rollout": {"max_staleness": 2},
    "learner": {"use": "deepspeed", "lr": 1.0e-5},
    "placement": {"learners": 2, "engine_threads": 1, "learner_threads": 1, "engine_restarts": 1000},
    "checkpoint": {"every": 3, "export": "never"},
    "eval": {"every": 4, "before": False, "after": False},
}
HEAD = """# Soak: killed at random moments

`make soak` trains the small model (`examples/models/countdown-nano`) with several engines, one environment worker and
two learner ranks, with rollouts up to two batches ahead and an evaluation every four steps, and repeatedly sends a
signal to one of these processes at a random moment. An engine or worker that dies is replaced, and the run continues;
a *starting engine* is the replacement of one that was killed a moment before. A tensor-parallel engine is replaced when
one of its processes dies. If a learner rank or the driver dies, the run ends and is resumed from its last checkpoint.
On SIGTERM the driver saves its step and exits. SIGSTOP is followed by SIGCONT up to five seconds later, and the run
continues. The rollout store has no separate process: it dies with the driver.

After each signal the soak checks that the run continues or can be resumed, that no process and no shared memory is left
behind, that each drawn task has ended or is still in progress, and that in the history of the surviving checkpoint the
learner got each task in exactly one step (as recorded by a plugin of the soak). *Seconds lost* is the time from the
signal until the run was one step further than before; for a resumed run this includes its start and the steps since the
checkpoint.
"""


class FaultError(Exception):
    """A check of the soak failed."""


class Soak:
    """One lineage of runs."""

    def __init__(self, folder: Path, seed: int, engine: dict[str, Any], engines: int) -> None:
        self.folder, self.draw = folder, random.Random(seed)
        self.deeds = deeds(engine)
        self.shared: set[Path] = set()
        self.rows: list[tuple[tuple[str, str], float]] = []  # deed, seconds lost
        self.again = 0
        self.process: subprocess.Popen[bytes] | None = None
        model = {"path": str(ROOT / "examples" / "models" / "countdown-nano"), "max_length": 64}
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        config = {**CONFIG, "out": str(folder), "model": model, "engine": engine}
        config["placement"] = {**CONFIG["placement"], "engines": engines}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))

    def run(self, kills: int, minutes: float) -> None:
        """Send the given number of signals, or as many as fit in the given time, then let the run finish."""
        process, until = self.start(), time.monotonic() + 60 * minutes
        left: list[tuple[str, str]] = []
        for number in range(kills):
            if time.monotonic() > until:
                break
            self.beyond(self.step(), process)
            time.sleep(self.draw.uniform(0, MOST_SECONDS))
            left = left or self.draw.sample(self.deeds, len(self.deeds))  # equally often, in random order
            deed = left.pop()
            family, start = self.family(process), time.monotonic()
            self.signal(deed, process)
            if deed in ENDS:
                self.ended(deed, process, family)
            at = self.step()
            if deed in ENDS:
                process = self.resume()
            self.beyond(at, process)
            lost = time.monotonic() - start
            self.rows.append((deed, lost))
            self.check()
            print(f"{self.folder.name}/{number + 1}. {deed[1]} of {deed[0]} at step {at}: {lost:.1f} s", flush=True)
        family = self.family(process)
        process.send_signal(signal.SIGINT)
        if process.wait(PATIENCE) != 130:
            raise FaultError(f"the last run ended with {process.returncode}: {self.console()}")
        self.gone(family)
        self.check()

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a driver; with `--resume` in the arguments, it continues the last driver's run."""
        command = [sys.executable, "-m", "rlsdk.cli", "train", str(self.folder / "config.yaml"), *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "RLSDK_SOAK_RECORD": str(self.folder / "record.txt")}
        with (self.folder / "console.log").open("a") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        return self.process

    def signal(self, deed: tuple[str, str], driver: subprocess.Popen[bytes]) -> None:
        """Send a signal to a process of a kind, and continue the process after SIGSTOP."""
        kind, name = deed
        if kind == "starting engine":
            engines = _titled(driver.pid, KINDS[kind])
            self.victim("engine", driver).kill()
            self.wait(lambda: {*_titled(driver.pid, KINDS[kind])} - {*engines}, driver)
            time.sleep(self.draw.uniform(0, LONGEST_START))
            for engine in {*_titled(driver.pid, KINDS[kind])} - {*engines}:
                engine.kill()
            return
        victim = self.victim(kind, driver)
        victim.send_signal(signal.Signals[name])
        if name == "SIGSTOP":
            time.sleep(self.draw.uniform(0, LONGEST_STOP))
            victim.resume()

    def victim(self, kind: str, driver: subprocess.Popen[bytes]) -> psutil.Process:
        """Draw a process of a kind, after the start of the first."""
        if kind == "driver":
            return psutil.Process(driver.pid)
        self.wait(lambda: _titled(driver.pid, KINDS[kind]), driver)  # an engine may be restarting
        return self.draw.choice(sorted(_titled(driver.pid, KINDS[kind]), key=lambda p: p.pid))

    def ended(self, deed: tuple[str, str], process: subprocess.Popen[bytes], family: list[psutil.Process]) -> None:
        """Check that the run ended with the expected status and left no processes."""
        status = process.wait(PATIENCE)
        named = re.search(r"learner rank \d failed", " ".join(self.console().split()))
        if status != ENDS[deed] or (deed[0] == "learner rank" and not named):
            raise FaultError(f"{deed[1]} of the {deed[0]}: status {status}, {self.console()}")
        self.gone(family)

    def family(self, driver: subprocess.Popen[bytes]) -> list[psutil.Process]:
        """Return a driver's processes, and note the shared memory that they use."""
        family = _family(driver.pid)
        self.shared.update(*map(_shared, family))
        return family

    def gone(self, family: list[psutil.Process]) -> None:
        """Check that nothing is left of a run that has ended."""
        end = time.monotonic() + 30
        while left := [_title(p) for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
            if time.monotonic() > end:
                raise FaultError(f"processes still running 30 s after the end: {left}")
            time.sleep(0.2)
        if files := [str(path) for path in sorted(self.shared) if path.exists()]:
            raise FaultError(f"shared memory left by the run: {files}")

    def resume(self) -> subprocess.Popen[bytes]:
        """Start the next driver from the last checkpoint."""
        production = self.state()["production"]
        self.again += sum(map(len, production["on_the_way"].values())) - len(production.get("kept", ()))
        marks = self.record().count("start")
        process = self.start("--resume")
        self.wait(lambda: self.record().count("start") > marks, process)
        return process

    def check(self) -> None:
        """Check that the task counts of the last checkpoint add up."""
        state = self.state()
        step, sources = state["step"], state["production"]["ended"]["sources"]
        ended = sum(each[name] for each in sources.values() for name in ("trained", "filtered", "failed"))
        drawn = sum(each["position"] - each["dropped"] for each in state["tasks"].values())
        on_the_way = [position for each in state["production"]["on_the_way"].values() for position in each]
        if ended != step * BATCH or drawn != ended + len(on_the_way) or len(set(on_the_way)) != len(on_the_way):
            raise FaultError(f"step {step}: {drawn} drawn, {ended} ended, in progress: {on_the_way}")
        tasks = [task for number, some in self.steps().items() if number <= step for task in some]
        if len(tasks) != ended or len(set(tasks)) != ended:
            raise FaultError(
                f"step {step}: {ended} ended, but the record has {len(tasks)}, {len(set(tasks))} of them once"
            )

    def state(self) -> dict[str, Any]:
        """State of the newest complete checkpoint; empty counts before the first."""
        folders = [p for p in (self.folder / "run" / "checkpoints").glob("step-*") if (p / "state.json").is_file()]
        if not folders:
            return {"step": 0, "tasks": {}, "production": {"ended": {"sources": {}}, "on_the_way": {}}}
        newest = max(folders, key=lambda p: int(p.name.removeprefix("step-")))
        found: dict[str, Any] = json.loads((newest / "state.json").read_text())
        return found

    def steps(self) -> dict[int, list[str]]:
        """Return step -> tasks that ended in it, in the surviving lineage; a repeated step counts once."""
        steps: dict[int, list[str]] = {}
        tasks: list[str] = []
        for line in self.record():
            kind, _, value = line.partition(" ")
            if kind == "task":
                tasks.append(value)
                continue
            if kind == "step":
                steps = {number: some for number, some in steps.items() if number < int(value)}
                steps[int(value)] = tasks
            tasks = []
        return steps

    def record(self) -> list[str]:
        """Return the complete lines that the plugin wrote."""
        path = self.folder / "record.txt"
        return path.read_text().rpartition("\n")[0].split("\n") if path.is_file() else []

    def step(self) -> int:
        """Return the last step that the current driver completed; 0 if none."""
        lines = self.record()
        own = lines[len(lines) - lines[::-1].index("start") :] if "start" in lines else []
        return max((int(line.removeprefix("step ")) for line in own if line.startswith("step ")), default=0)

    def console(self) -> str:
        """Return the end of the console output."""
        return (self.folder / "console.log").read_text()[-3000:]

    def beyond(self, step: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until a later step is complete."""
        self.wait(lambda: self.step() > step, process)

    def wait(self, condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
        """Wait until a condition holds, while a process runs."""
        end = time.monotonic() + PATIENCE
        while not condition():
            if process.poll() is not None:
                raise FaultError(f"the driver ended with {process.returncode}: {self.console()}")
            if time.monotonic() > end:
                raise FaultError(f"no progress for {PATIENCE:g} s: {self.console()}")
            time.sleep(0.05)


def _family(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _titled(driver: int, title: str) -> list[psutil.Process]:
    return [p for p in _family(driver)[1:] if title in _title(p)]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _shared(process: psutil.Process) -> set[Path]:
    """Return what a process has mapped or opened in /dev/shm, and is not deleted."""
    try:
        paths = [each.path for each in process.memory_maps()]
        paths += [os.readlink(each) for each in Path(f"/proc/{process.pid}/fd").iterdir()]
    except (psutil.Error, OSError):  # it has exited
        return set()
    return {Path(*Path(path).parts[:4]) for path in paths if path.startswith("/dev/shm/") and Path(path).exists()}


def deeds(engine: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the deeds that are possible with an engine."""
    parallel = engine.get("tensor_parallel_size", 1) > 1
    return [deed for deed in DEEDS if parallel or deed[0] != "tensor-parallel process"]


def lines(soaks: list[Soak], seed: int) -> Iterator[str]:
    """Yield the lines of the page's tables."""
    rows = [row for soak in soaks for row in soak.rows]
    yield "| signal | to | times | the run | seconds lost, median | most |"
    yield "| --- | --- | ---: | --- | ---: | ---: |"
    for deed in soaks[0].deeds:
        seconds = [lost for done, lost in rows if done == deed]
        spent = f"{statistics.median(seconds):.0f} | {max(seconds):.0f}" if seconds else "- | -"
        yield f"| {deed[1]} | {deed[0]} | {len(seconds)} | {'was resumed' if deed in ENDS else 'continued'} | {spent} |"
    yield ""
    yield "| steps | tasks issued | trained | filtered | failed | returned | sampled again after a resume |"
    yield "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    summaries = [json.loads((soak.folder / "run" / "summary.json").read_text()) for soak in soaks]
    counts = [sum(each["steps"] for each in summaries)]
    ends = ("issued", "trained", "filtered", "failed", "returned")
    counts += [sum(each["tasks"][name] for each in summaries) for name in ends]
    counts.append(sum(soak.again for soak in soaks))
    yield f"| {' | '.join(f'{count:,}' for count in counts)} |"
    yield ""
    commit = git("describe", "--always", "--dirty")
    runs = f"{len(soaks)} parallel runs" if len(soaks) > 1 else "one run"
    yield f"{len(rows)} signals to {runs}, seed {seed}, commit `{commit}`, {datetime.date.today()}."


def write_page(title: str, text: Iterator[str]) -> None:
    """Write a section of the page, and keep the others.

    Args:
        title: Title of the section.
        text: Lines of the section.
    """
    _, *sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    found = {name: body.strip() for name, _, body in (section.partition("\n") for section in sections)}
    found[title] = "\n".join(text)
    body = "".join(f"\n## {name}\n\n{section}\n" for name, section in found.items())
    PAGE.write_text(HEAD + body, encoding="utf-8")


def main() -> int:
    """Soak, then write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=240.0, help="send no further signals after this many minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "soak")
    parser.add_argument("--trainings", type=int, default=2, help="number of parallel runs")
    parser.add_argument("--engine", default="transformers", help="name of the engine; default: %(default)s")
    parser.add_argument("--engines", type=int, default=2, help="number of engines of a run; default: %(default)s")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="processes of an engine; default: %(default)s")
    asked = parser.parse_args()
    engine: dict[str, Any] = {"use": asked.engine}
    if asked.tensor_parallel > 1:
        engine["tensor_parallel_size"] = asked.tensor_parallel
    folders = [asked.folder.resolve() / str(i) for i in range(asked.trainings)]
    soaks = [Soak(folder, asked.seed + i, engine, asked.engines) for i, folder in enumerate(folders)]
    shares = [len(range(i, asked.kills, asked.trainings)) for i in range(asked.trainings)]
    with ThreadPoolExecutor() as pool:
        ends = [pool.submit(soak.run, n, asked.minutes) for soak, n in zip(soaks, shares, strict=True)]
        wait(ends, return_when=FIRST_EXCEPTION)
        faults = [end.exception() for end in ends if end.done() and end.exception()]
        for soak in soaks if faults else ():
            if soak.process and soak.process.poll() is None:
                soak.process.kill()  # its child processes end with it
    for fault in faults:
        print(f"after {sum(len(soak.rows) for soak in soaks)} signals: {fault}", file=sys.stderr)
    if faults:
        return 1
    title = f"{asked.engines} engines" if asked.engines > 1 else "one engine"
    title = f"Engine `{asked.engine}`: {title}"
    if asked.tensor_parallel > 1:
        title += f" of {asked.tensor_parallel} tensor-parallel processes"
    write_page(title, lines(soaks, asked.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
